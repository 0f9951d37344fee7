"""Steps that hold so many sequences with so much context, as plans for an executor."""

from __future__ import annotations

from typing import NamedTuple

from runtime.llm.plan import Chunk, DecodeSet, StepPlan
from runtime.records import LimitedBy
from runtime.request import Request, SamplingParams, Sequence


class Step(NamedTuple):
    """What a step holds: new tokens and context (with them) of each sequence; decodes, which have one new token, come first."""

    new: tuple[int, ...]
    context: tuple[int, ...]

    @classmethod
    def decodes(cls, *context: int) -> Step:
        return cls((1,) * len(context), context)

    def blocks(self, block_size: int, headroom: int = 0) -> int:
        """KV blocks that the sequences take, each with ``headroom`` for so many tokens more."""
        return sum(-(-(context + headroom) // block_size) for context in self.context)

    def plan(self, block_size: int, headroom: int = 0) -> StepPlan:
        """Sequences hold the pool's first blocks, in their order, and are greedy. The plan may be run any number of times, which
        writes the same slots again; or as ``plan._replace(step=n)``, its decodes n tokens further, up to ``headroom``."""
        decodes, chunks, taken = DecodeSet(), list[Chunk](), 0
        for at, (new, context) in enumerate(zip(self.new, self.context, strict=True)):
            prompt = (1,) * context if new > 1 else (1,)
            sequence = Sequence(Request(f"r{at}", prompt, SamplingParams(ignore_eos=True), 1, 0.0))
            count = -(-(context + headroom) // block_size)
            sequence.blocks = list(range(taken, taken + count))
            taken += count
            if new > 1:
                chunks.append(Chunk(sequence, context - new, new, True))
            else:
                decodes.members[sequence] = None
                sequence.joined, sequence.computed = 0, context - 1
                sequence.output.append(1)
        decodes.version = 1
        return StepPlan(
            step=0, n_decode=len(decodes), decode_context=sum(self.context[: len(decodes)]), chunks=tuple(chunks),
            decodes=decodes, version=1, repeat=1, wake_at=float("inf"), epoch=0, budget_used=sum(self.new),
            limited_by=LimitedBy.DEMAND, preemptions=0,
        )  # fmt: skip
