"""Whether what a prompt chunk wrote to the KV pool is finite.

Sampling looks at the logits of the rows it samples; a chunk in the middle of a prompt has none, and its blocks may be shared
with other requests before its own prompt is done.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from runtime.errors import StepFailedError
from runtime.llm.plan import Chunk
from runtime.request import Sequence
from runtime.torch_backend.attention import StepInputs


def unsound_chunks(chunks: Seq[Chunk], step: StepInputs) -> list[tuple[Sequence, BaseException]]:
    """The sequences whose chunk does not sample and left NaN or infinity in the last layer, where it ends up from any other.

    To be asked after the forward of ``step``, whose chunks are ``chunks`` in the same order.
    """
    found: list[tuple[Sequence, BaseException]] = []
    layer = next(reversed(step.pool.layers.values()), None)
    for chunk, rows in zip(chunks, step.chunks, strict=True):
        if chunk.samples or layer is None:
            continue
        slots = step.slots[rows.begin : rows.end]
        if not all(bool(x.index_select(0, slots).isfinite().all()) for x in (layer.keys, layer.values)):
            where = f"between prompt tokens {chunk.start} and {chunk.start + chunk.count - 1}"
            error = StepFailedError(f"request {chunk.sequence.request.id}: NaN (or infinite) keys or values {where}")
            found.append((chunk.sequence, error))
    return found
