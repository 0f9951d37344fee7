"""Does this model compute the same in a packed batch as on its own? Asked of every model when it is loaded.

Neither a model's type nor what it declares tells: some never call a registered attention function, some call it and yet
mix the tokens of a batch elsewhere. So it is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import torch

from runtime.errors import ModelError, UnsupportedModelError
from runtime.llm.plan import Chunk, DecodeSet, StepPlan
from runtime.records import LimitedBy
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend.attention import PackedModel
from runtime.torch_backend.checks import SUPPORTED, summary
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.loading import LoadedModel
from runtime.torch_backend.memory import is_out_of_memory

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Most relative error (L2, of a row of logits) between packed and plain; beyond what the plain model differs from itself."""

_MOST_CHANGE = 0.25
"""Of what 8 bits change: a model to which they do more is judged as if it were that, and may fail for it."""
_BLOCK = 4
_LENGTHS = (23, 10, 3)  # prompts that end inside a block and at different steps, so that each step mixes lengths
_DECODES = 3
_STEPS: tuple[tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]], ...] = (
    # sequences that decode, then chunks (sequence, start, tokens): every kind beside every other, across block edges
    ((), ((0, 0, 5),)),
    ((), ((0, 5, 8), (2, 0, 3))),
    ((2,), ((0, 13, 10), (1, 0, 6))),
    ((2, 0), ((1, 6, 4),)),
    ((2, 0, 1), ()),
    ((0, 1), ()),
    ((1,), ()),
)
_READ_BACK = 5
"""From this step on decode rows come as if from another scheduler, so that what the steps before wrote is read back."""


class _Row(NamedTuple):
    """Where a row of logits belongs: ``kind`` of work, which text, position of the token fed."""

    kind: str
    text: int
    position: int


def self_test(loaded: LoadedModel) -> None:
    """Compare packed steps of mixed lengths with the model's own forward, over keys and values in 8 bits where the KV pool has
    those; cheap (7 packed, 4 or 5 plain forwards of ≤ 26 tokens).

    Raises :class:`UnsupportedModelError` naming the architecture and what failed: the attention hook was not called once
    in each layer, the forward raised, or the logits differ. :class:`ModelError` if memory ran out.
    """
    context = loaded.max_model_len
    if context < max(_LENGTHS) + _DECODES:
        raise UnsupportedModelError(
            f"model {loaded.architecture}: a context of {context} tokens is too short to test it; "
            f"at least {max(_LENGTHS) + _DECODES} are needed"
        )
    texts = _texts(loaded)
    errors: dict[str, list[float]] = {}
    executor: TorchExecutor | None = None
    try:
        plain, slack = _plain(loaded, texts)  # first: the executor may lay out the weights anew
        executor = TorchExecutor(loaded, kv_blocks=_pool_blocks(), block_size=_BLOCK)
        for row, logits in _packed(executor, texts):
            if executor.hook_calls != loaded.layers:
                raise _not_hooked(loaded, executor.hook_calls)
            found = relative_error(logits, plain[row.text][row.position])
            errors.setdefault(row.kind, []).append(found)
    except Exception as error:  # whatever a model that was not made for this raises
        if is_out_of_memory(error):
            raise ModelError(f"model {loaded.name}: out of memory in its self-test: {summary(error)}") from error
        if isinstance(error, UnsupportedModelError) and str(error).startswith("model "):
            raise
        if executor is None:
            raise UnsupportedModelError(
                f"model {loaded.architecture}: its own forward fails: {summary(error)}; {SUPPORTED}"
            ) from error
        if not executor.pool.layers:  # its own attention ran, without the mask that ours does not need
            raise _not_hooked(loaded, 0) from error
        raise UnsupportedModelError(
            f"model {loaded.architecture}: its forward fails in a packed batch: {summary(error)}; {SUPPORTED}"
        ) from error
    allowed = TOLERANCE[loaded.dtype] + slack
    for kind, found_errors in errors.items():
        # In half precision a mixture of experts may route one token elsewhere by a rounding: judge the typical row there.
        worst = max(found_errors) if loaded.dtype == torch.float32 else median(found_errors)
        if not worst <= allowed:
            raise UnsupportedModelError(
                f"model {loaded.architecture}: packed logits differ from the model's own "
                f"({kind}: relative error {worst:.2g}, allowed {allowed:.2g}); {SUPPORTED}"
            )


def _not_hooked(loaded: LoadedModel, calls: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"model {loaded.architecture}: its attention cannot be hooked "
        f"({calls} of {loaded.layers} layers called ours); {SUPPORTED}"
    )


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected − its mean‖ of one row of logits: a shift of all logits says nothing."""
    spread = (expected - expected.mean()).norm()
    return float((found - expected).norm() / spread.clamp(min=1e-9))


def _texts(loaded: LoadedModel) -> list[list[int]]:
    """Random token ids: each prompt, and the tokens it is then made to "generate"."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(loaded.vocab_size, (length + _DECODES,), generator=generator).tolist() for length in _LENGTHS]


def _plain(loaded: LoadedModel, texts: list[list[int]]) -> tuple[list[torch.Tensor], float]:
    """Logits [tokens, vocab] of each text by the model alone, attention eager, and by how much more than the tolerance others may
    differ: four times what it differs from itself on a shorter text; and where the KV pool has 8 bits, whose roundings are in
    these logits, what these change. A last bit more or less takes a number to its neighbour in 8 bits: in half precision many, in
    float32 a few."""
    fp8 = loaded.kv_cache_dtype == "fp8"

    def run(text: list[int]) -> torch.Tensor:
        ids = torch.tensor([text], device=loaded.device)
        logits: torch.Tensor = loaded.model(input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    model = PackedModel(loaded.model)
    with torch.inference_mode(), model.eager(fp8):
        plain = [run(text) for text in texts]
        slack = 4 * relative_error(run(texts[0][:-1])[-1], plain[0][-2])
    if fp8:
        with torch.inference_mode(), model.eager():
            change = median(map(relative_error, plain[0], run(texts[0])))
        log.info("model %s: a KV pool of 8 bits changes its logits by %.2g", loaded.name, change)
        slack += min(change, _MOST_CHANGE) * (0.25 if loaded.dtype == torch.float32 else 1.0)
    return plain, slack


def _packed(executor: TorchExecutor, texts: list[list[int]]) -> Iterable[tuple[_Row, torch.Tensor]]:
    """Every row that the steps of ``_STEPS`` yield, with its logits [vocab]."""
    sequences = [_sequence(at, text) for at, text in enumerate(texts)]
    decodes = DecodeSet()
    for step, (decoding, parts) in enumerate(_STEPS):
        if step == _READ_BACK:
            members, decodes = decodes.members, DecodeSet()
            decodes.members.update(members)
        rows: dict[Sequence, _Row] = {}
        for at in decoding:
            sequence = sequences[at]
            if sequence not in decodes.members:
                decodes.members[sequence] = None
                sequence.joined, sequence.computed = step, _LENGTHS[at]
            position = _LENGTHS[at] + step - sequence.joined
            rows[sequence] = _Row("decode" if step < _READ_BACK else "decode, read back", at, position)
            sequence.output.append(texts[at][position])
        for at in set(range(len(texts))) - set(decoding):
            decodes.members.pop(sequences[at], None)
        decodes.version += 1
        chunks = tuple(Chunk(sequences[at], start, tokens, True) for at, start, tokens in parts)
        for at, start, tokens in parts:
            rows[sequences[at]] = _Row("later chunk" if start else "first chunk", at, start + tokens - 1)
        logits, owners = executor.logits(_plan(step, decodes, chunks))
        if len(owners) != len(rows) or len(logits) != len(rows):
            raise UnsupportedModelError(f"{len(logits)} rows of logits came out where {len(rows)} were requested")
        yield from ((rows[owner], row) for owner, row in zip(owners, logits.float(), strict=True))


def _plan(step: int, decodes: DecodeSet, chunks: tuple[Chunk, ...]) -> StepPlan:
    return StepPlan(
        step=step,
        n_decode=len(decodes),
        decode_context=sum(s.computed + step - s.joined + 1 for s in decodes),
        chunks=chunks,
        decodes=decodes,
        version=decodes.version,
        repeat=1,
        wake_at=float("inf"),
        epoch=0,
        budget_used=len(decodes) + sum(chunk.count for chunk in chunks),
        limited_by=LimitedBy.DEMAND,
        preemptions=0,
    )


def _blocks_each() -> int:
    return -(-(max(_LENGTHS) + _DECODES) // _BLOCK)


def _pool_blocks() -> int:
    return _blocks_each() * len(_LENGTHS)


def _sequence(at: int, text: list[int]) -> Sequence:
    """A sequence that holds every third block of the pool, in falling order: neither contiguous nor sorted."""
    prompt = tuple(text[: _LENGTHS[at]])
    sequence = Sequence(Request(f"self-test-{at}", prompt, SamplingParams(), _DECODES + 1, 0.0))
    sequence.blocks = list(range(at, _pool_blocks(), len(_LENGTHS)))[::-1]
    return sequence
