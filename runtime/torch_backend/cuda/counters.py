"""Counters that programs of one launch share: who is last adds up what the others have left."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_COUNTED = 4096
"""Counters of a launch, at most."""

_counters: dict[tuple[torch.device, int], Tensor] = {}
_recorded: list[Tensor] = []  # recordings hold their addresses


def counters_of(device: torch.device, stream: int) -> Tensor:
    """:data:`MOST_COUNTED` zeros, int32, that launches on ``stream`` share, since they run one after the other and each leaves
    zeros behind. Recordings keep those of the stream they were made on."""
    key = (device, stream)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(MOST_COUNTED, dtype=torch.int32, device=device)
    return found


def renew_counters(device: torch.device, stream: int) -> None:
    """Have launches on ``stream`` share others from now on than recordings of before, which may run on another stream."""
    found = _counters.pop((device, stream), None)
    if found is not None:
        _recorded.append(found)
