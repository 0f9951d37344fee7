"""What the executor needs to know of a loaded model; ``loading.LoadedModel`` is one."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import PreTrainedModel


class Loaded(Protocol):
    """A model ready to run: in eval mode, on its device, in its dtype."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> int: ...
