"""How many KV blocks fit: on a device that tells what its memory holds, what is left beside weights, the largest step and graphs.

Nothing is guessed from shapes. An executor with a pool of a few blocks runs the largest step that the ceilings allow, sampled
plainly and then with penalties and log-probabilities, and the device says what that took at its peak. Two more executors record
the largest graph, and the largest two: what the second adds is taken for each further one. One more records all steps with
prompts. Then all of that is let go, and the pool gets what is free, less step and graphs. It is allocated once, when the engine's
own executor is made. Where a device does not tell (a CPU shares its memory with whatever else runs there), the pool takes a share
of what is free (:func:`~runtime.torch_backend.kv_pool.default_kv_blocks`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from runtime.errors import ModelError
from runtime.knobs import KnobLimits
from runtime.llm.plan import Chunk, DecodeSet, StepPlan
from runtime.records import LimitedBy
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend.backends import Backend, backend_for
from runtime.torch_backend.contract import Loaded
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.kv_pool import default_kv_blocks
from runtime.torch_backend.memory import DeviceMemory

log = logging.getLogger(__name__)

MARGIN: Final = 0.03
"""Share of what is left that a pool of our choice leaves free: for what the allocator loses between blocks of unlike sizes, and
so that a pool once chosen fits again, when a little less is free."""

_BLOCKS: Final = 64
_SAMPLED: Final = SamplingParams(temperature=1.0, top_p=0.9, ignore_eos=True)
_PENALISED: Final = replace(_SAMPLED, repetition_penalty=1.1, logprobs=1)
"""Which has kernels of its own, and takes copies of all logits in float32."""


def pool_blocks(
    loaded: Loaded, limits: KnobLimits, block_size: int, kv_tokens: int | None = None, backend: Backend | None = None
) -> int:
    """How many blocks the pool of an engine with these ceilings gets: those of ``kv_tokens``, or as many as fit.

    ``backend``: None takes the one for the model's device. Raises ``ValueError`` where ``kv_tokens`` do not fit, or no block
    does, :class:`ModelError` where not even a step of one token does.
    """
    backend = backend or backend_for(loaded.device)
    if backend.memory is None:
        return default_kv_blocks(loaded, block_size) if kv_tokens is None else kv_tokens // block_size
    memory = backend.memory(loaded.device)
    step, graphs = _taken(loaded, limits, block_size, backend, memory)
    free, block = memory.free(), loaded.kv_bytes_per_token * block_size
    spare = max(0, free - step - graphs - 2 * block)  # blocks that are nobody's: padding, dummies
    beside = (
        f"{free / 2**30:.3g} GiB of {loaded.device} are free beside the weights of {loaded.name}, of which a step of "
        f"{limits.max_batch_size} sequences and {limits.token_budget} tokens takes {step / 2**30:.3g} GiB and its graphs "
        f"{graphs / 2**30:.3g} GiB"
    )
    if spare < block:
        raise ValueError(
            f"limits.token_budget is {limits.token_budget} and limits.max_batch_size {limits.max_batch_size}; {beside}; "
            f"no KV block of {block_size} tokens is left, lower them"
        )
    if kv_tokens is not None:
        if kv_tokens // block_size > spare // block:
            needed = kv_tokens * loaded.kv_bytes_per_token
            raise ValueError(
                f"kv_tokens is {kv_tokens}; that KV pool takes {needed / 2**30:.3g} GiB, and {beside}; it must be at most "
                f"{spare // block * block_size}"
            )
        return kv_tokens // block_size
    return int(min(max(1, int(spare * (1 - MARGIN)) // block), 4096 * -(-loaded.max_model_len // block_size)))


def largest_step(
    limits: KnobLimits, max_model_len: int, block_size: int, blocks: int, params: SamplingParams = _SAMPLED
) -> StepPlan:
    """A step of as many tokens as ``limits`` allow, in chunks as long as they allow, beside so many decodes that as many
    sequences sample as may; the first of these with ``max_model_len`` tokens of context, all others with two. ``params``: of all.

    Sequences share the first ``blocks`` blocks, over and over: what they compute is worth nothing, and takes what it would.
    """
    budget = limits.token_budget
    longest = min(limits.chunk_size, max_model_len, budget)
    prompts = min(limits.max_batch_size, -(-budget // longest))
    decodes = DecodeSet()
    for at in range(min(limits.max_batch_size, budget) - prompts):
        context = 2 if at else max(2, max_model_len)
        sequence = _sequence(f"decode-{at}", 1, context, block_size, blocks, params)
        sequence.output.append(0)
        sequence.joined, sequence.computed = 0, context - 1
        decodes.members[sequence] = None
    decodes.version, left, chunks = 1, budget - len(decodes), list[Chunk]()
    while left > 0 and len(chunks) < prompts:
        count = min(longest, left)
        chunks.append(Chunk(_sequence(f"prompt-{left}", count, count, block_size, blocks, params), 0, count, True))
        left -= count
    return _plan(decodes, chunks)


def _sequence(name: str, prompt: int, tokens: int, block_size: int, blocks: int, params: SamplingParams) -> Sequence:
    sequence = Sequence(Request(f"largest-step-{name}", (0,) * prompt, params, 1, 0.0))
    sequence.blocks = [at % blocks for at in range(-(-tokens // block_size))]
    return sequence


def _taken(
    loaded: Loaded, limits: KnobLimits, block_size: int, backend: Backend, memory: DeviceMemory
) -> tuple[int, int]:
    """Bytes that the largest step takes at its peak, however it is sampled, and that all graphs hold."""
    most = limits.max_batch_size

    def made(backend: Backend, tokens: int | None = None) -> TorchExecutor:
        return TorchExecutor(
            loaded, kv_blocks=_BLOCKS, block_size=block_size, backend=backend, max_batch_size=most, token_budget=tokens
        )

    executor = made(backend._replace(record=None))
    step = max(_peak(executor, limits, loaded, block_size, memory, params) for params in (_SAMPLED, _PENALISED))
    for plan in mixed_steps(
        limits, loaded.max_model_len, block_size, _BLOCKS
    ):  # so that no request waits for a compiler
        result = executor.execute(plan, 0.0, 0.0)
        for sequence, error in result.failed[:1]:
            log.warning(
                "a step of %s that has kernels compiled fails in %s: %s", loaded.name, sequence.request.id, error
            )
    held = [memory.free()]
    del executor  # before there is another
    sizes = backend.ladder(most)
    for few in (sizes[-1:], sizes[-2:]) if backend.record is not None else ():
        executor = made(backend._replace(ladder=partial(_these, few)))
        if executor.graphs.decodes:  # else it cannot be recorded, and has said so
            held.append(memory.free())
        del executor
    if len(held) < 3:
        return step, 0
    without, one, two = held
    row = 8 * -(-loaded.max_model_len // block_size)  # of a block table, which a pool of few blocks keeps short
    graphs = max(0, without - one) + (len(sizes) - 1) * max(0, one - two) + most * row
    executor = made(backend._replace(ladder=partial(_these, sizes[:1])), limits.token_budget)
    if executor.graphs.prompts:
        graphs += max(0, without - memory.free()) + executor.graphs.sequences * row
    return step, graphs


def mixed_steps(limits: KnobLimits, max_model_len: int, block_size: int, blocks: int) -> Iterator[StepPlan]:
    """Steps that between them hold prompts of every size for which kernels are compiled apart, few of them and many, each beside
    a decode with ``max_model_len`` tokens of context; blocks as in :func:`largest_step`."""
    for count, chunks in (
        (1, 1),
        (2, 1),
        (4, 1),
        (8, 1),
        (16, 1),
        (28, 1),
        (60, 1),
        (200, 1),
        (1, 20),
        (2, 20),
        (4, 20),
        (8, 20),
        (16, 20),
    ):
        if count > min(limits.chunk_size, max_model_len) or 1 + chunks > limits.max_batch_size:
            continue
        if 1 + count * chunks > limits.token_budget:
            continue
        context = max(2, max_model_len)
        decode = _sequence("decode", 1, context, block_size, blocks, SamplingParams(max_tokens=1))
        decode.output.append(0)
        decode.joined, decode.computed = 0, context - 1
        decodes = DecodeSet()
        decodes.members[decode], decodes.version = None, 1
        yield _plan(decodes, [
            Chunk(_sequence(f"prompt-{n}", count, count, block_size, blocks, SamplingParams(max_tokens=1)), 0, count, True)
            for n in range(chunks)
        ])  # fmt: skip


def _plan(decodes: DecodeSet, chunks: list[Chunk]) -> StepPlan:
    return StepPlan(
        step=0, n_decode=len(decodes), decode_context=sum(s.computed + 1 for s in decodes), chunks=tuple(chunks),
        decodes=decodes, version=1, repeat=1, wake_at=float("inf"), epoch=0,
        budget_used=len(decodes) + sum(chunk.count for chunk in chunks), limited_by=LimitedBy.BUDGET, preemptions=0,
    )  # fmt: skip


def _these(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """A ladder of these sizes alone."""
    return sizes


def _peak(
    executor: TorchExecutor,
    limits: KnobLimits,
    loaded: Loaded,
    block_size: int,
    memory: DeviceMemory,
    params: SamplingParams,
) -> int:
    """Bytes that the largest step which fits takes beyond what is held around it."""
    while True:
        plan = largest_step(limits, loaded.max_model_len, block_size, _BLOCKS, params)
        result = executor.execute(plan, 0.0, 0.0)  # which compiles kernels, and has libraries take their workspaces
        if not result.oom:
            break
        if limits.token_budget == 1:
            raise ModelError(
                f"model {loaded.name}: a step of one token does not fit beside its weights on {loaded.device}"
            )
        log.warning(
            "a step of %d tokens%s does not fit beside the weights of %s; ceilings will be lowered as steps run out of memory",
            limits.token_budget, " with log-probabilities and penalties" if params.logprobs else "", loaded.name,
        )  # fmt: skip
        limits = replace(
            limits, token_budget=limits.token_budget // 2, max_batch_size=max(1, limits.max_batch_size // 2)
        )
    for sequence, error in result.failed[:1]:
        log.warning("the largest step of %s fails in %s: %s", loaded.name, sequence.request.id, error)
    return memory.peak(lambda: executor.execute(plan, 0.0, 0.0))
