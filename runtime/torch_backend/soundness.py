"""Whether what a prompt chunk wrote to the KV pool is finite.

Sampling looks at the logits of the rows it samples; a chunk in the middle of a prompt has none, and its blocks may be shared
with other requests before its own prompt is done.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from runtime.errors import StepFailedError
from runtime.llm.plan import Chunk
from runtime.request import Sequence
from runtime.torch_backend.attention import StepInputs
from runtime.torch_backend.inputs import PackedBatch


def sound_chunks(batch: PackedBatch, step: StepInputs) -> tuple[list[Chunk], Tensor | None]:
    """The chunks of ``batch`` that do not sample, and ``[chunks]`` bool on the device: whether what each wrote is finite in the
    last layer, where NaN and infinity end up from any other. To be asked after the forward of ``step``; None: there are none.
    """
    layer = next(reversed(step.pool.layers.values()), None)
    chunks: list[Chunk] = []
    flags: list[Tensor] = []
    if layer is not None:
        for chunk, (begin, end) in zip(batch.chunks, batch.spans(), strict=True):
            if not chunk.samples:
                chunks.append(chunk)
                flags.append(layer.finite(step.slots[begin:end]))
    return chunks, torch.stack(flags) if flags else None


def unsound(chunks: Seq[Chunk], sound: Seq[bool]) -> list[tuple[Sequence, BaseException]]:
    """The sequences of the ``chunks`` that are not sound, and the error each of them gets."""
    found: list[tuple[Sequence, BaseException]] = []
    for chunk, good in zip(chunks, sound, strict=True):
        if not good:
            where = f"between prompt tokens {chunk.start} and {chunk.start + chunk.count - 1}"
            error = StepFailedError(f"request {chunk.sequence.request.id}: NaN (or infinite) keys or values {where}")
            found.append((chunk.sequence, error))
    return found
