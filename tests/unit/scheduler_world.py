"""A world to drive the scheduler in: an executor that remembers which token lies in every KV slot.

It computes nothing, but it checks on every row that the slots a sequence may read hold exactly its own tokens. A block
leaked, shared wrongly, reused too early or recomputed in the wrong place shows as a wrong token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from math import inf

from runtime.knobs import KnobLimits, Knobs
from runtime.llm.core import EngineCore, StepOutcome
from runtime.llm.drafts import NgramDrafter
from runtime.llm.holdings import WORTH_WAITING
from runtime.llm.plan import StepPlan, StepResult, Token
from runtime.llm.scheduler import Scheduler
from runtime.records import FinishReason, LimitedBy, RequestRecord, StepRecord
from runtime.request import Request, SamplingParams, Sequence
from runtime.tunable import SchedulerView

BLOCK = 4


def chain(tokens: list[int], block_size: int = BLOCK) -> tuple[int, ...]:
    """Hashes of the full blocks, each of the whole prefix up to its end."""
    return tuple(hash(tuple(tokens[: (i + 1) * block_size])) for i in range(len(tokens) // block_size))


def extend_hashes(sequence: Sequence) -> None:
    sequence.hashes = list(chain([*sequence.request.prompt, *sequence.output]))


class CheckingExecutor:
    """``fail`` and ``stop`` say for each row whether it fails, or ends early. A step takes ``step_s`` seconds."""

    def __init__(self, seed: int = 0, step_s: float = 0.01) -> None:
        self.random = random.Random(seed)
        self.step_s = step_s
        self.fail: Callable[[Sequence], bool] = lambda s: False
        self.stop: Callable[[Sequence], bool] = lambda s: False
        self.slots: dict[tuple[int, int], int] = {}
        self.alive: set[Sequence] = set()
        self.released: list[Sequence] = []
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        rows = [(s, s.computed + plan.step - s.joined, 1, True) for s in plan.decode_rows()]
        rows += [(c.sequence, c.start, c.count, c.samples) for c in (*plan.drafts, *plan.chunks)]
        drafted = {draft.sequence: draft.drafted for draft in plan.drafts}
        assert len({s for s, *_ in rows}) == len(rows), "a sequence is in a step twice"
        assert plan.decode_context == sum(p + 1 for _, p, _, _ in rows[: plan.n_decode])
        tokens, failed, stopped = [], [], []
        for sequence, start, count, samples in rows:
            self.alive.add(sequence)
            known = [*sequence.request.prompt, *sequence.output, *drafted.get(sequence, ())]
            where = [(sequence.blocks[p // BLOCK], p % BLOCK) for p in range(start + count)]
            prefixes = [hash(tuple(known[: p + 1])) for p in range(start + count)]  # what KV at a position depends on
            for position in range(start, start + count):
                self.slots[where[position]] = prefixes[position]
            assert [self.slots[w] for w in where] == prefixes, f"{sequence} reads foreign KV"
            assert samples == (start + count == len(known)), sequence
            if self.fail(sequence):
                failed.append((sequence, RuntimeError("poisoned")))
                for position in range(start, start + count):
                    self.slots[where[position]] = 0
            elif samples:
                run = self.run(sequence, drafted.get(sequence, ()))
                tokens += run
                if sequence in drafted:
                    assert len(sequence.output) + len(drafted[sequence]) < sequence.request.max_tokens, (
                        "too many drafts"
                    )
        taken: list[Token] = []
        ended: set[Sequence] = set()
        for token in tokens:
            if token.sequence in ended:  # it has stopped with the token before
                continue
            taken.append(token)
            token.sequence.output.append(token.id)
            if self.stop(token.sequence):
                stopped.append((token.sequence, FinishReason.STOP))
                ended.add(token.sequence)
        count = Counter(token.sequence for token in taken)
        accepted = [(sequence, count[sequence] - 1) for sequence in drafted if sequence in count]
        self.plans.append(plan)
        return StepResult(ends=[now + self.step_s], tokens=taken, failed=failed, stopped=stopped, accepted=accepted)

    def run(self, sequence: Sequence, drafted: tuple[int, ...]) -> list[Token]:
        """Tokens as they are sampled, up to the first that was not drafted."""
        run = [Token(sequence, self.random.randrange(3))]
        for token in drafted:
            if run[-1].id != token:
                break
            run.append(Token(sequence, self.random.randrange(3)))
        return run

    def release(self, sequence: Sequence) -> None:
        assert sequence not in self.released, "released twice"
        self.released.append(sequence)
        self.alive.discard(sequence)


class Whole:
    """Asks in every step, and gives each all that the knobs allow."""

    def budget(self, view: SchedulerView) -> int:
        return view.knobs.token_budget


class World:
    """An :class:`EngineCore` on a :class:`CheckingExecutor`, with the rules of DESIGN checked after every step."""

    def __init__(
        self,
        *,
        kv_blocks: int,
        ordering: str = "priority",
        prefix: bool = True,
        seed: int = 0,
        drafts: bool = False,
        by_chunk: bool = False,
        worth_waiting: int = WORTH_WAITING,
    ) -> None:
        self.executor = CheckingExecutor(seed)
        self.drafter = NgramDrafter() if drafts else None
        self.scheduler = Scheduler(
            kv_blocks=kv_blocks, block_size=BLOCK, ordering=ordering, hasher=extend_hashes if prefix else None,
            drafter=self.drafter, by_chunk=by_chunk,
        )  # fmt: skip
        self.scheduler.holdings.worth_waiting = worth_waiting
        self.core = EngineCore(self.scheduler, self.executor, knobs=Knobs(8, 0, 16, 8), limits=KnobLimits())
        self.prefix = prefix
        self.now = 0.0
        self.live: list[Sequence] = []
        self.records: dict[str, RequestRecord] = {}
        self.steps: list[StepRecord] = []
        self.added = 0
        self.drained_sequences = 0  # what ran when the knobs were last lowered, and has not yet drained

    def add(self, prompt: list[int], max_tokens: int = 4, **fields: object) -> Sequence:
        self.added += 1
        request = Request(
            id=f"r{self.added}",
            prompt=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens),
            max_tokens=max_tokens,
            arrival=self.now,
            block_hashes=chain(prompt) if self.prefix else (),
            **fields,  # type: ignore[arg-type]
        )
        sequence = self.core.add(request)
        self.live.append(sequence)
        return sequence

    def set_knobs(self, knobs: Knobs) -> None:
        self.drained_sequences = max(self.drained_sequences, self.scheduler.running)
        self.core.settings.set_knobs(knobs)

    def cancel(self, sequence: Sequence) -> None:
        record = self.core.finish(sequence, FinishReason.CANCELLED, self.now)
        assert record is not None and self.core.finish(sequence, FinishReason.CANCELLED, self.now) is None
        self._ended(sequence, record)

    def step(self) -> StepOutcome:
        begun_before = [(s, s.preemptions) for s in self.scheduler.prefills]
        knobs = self.core.settings.knobs  # a step that runs out of memory lowers them
        outcome = self.core.step(self.now)
        for sequence, record in outcome.finished:
            self._ended(sequence, record)
        self.scheduler.check_integrity()
        if outcome.record is None:
            assert not self.scheduler.has_work or outcome.wake_at < inf, "work, but nothing to wake for it"
            assert not self.scheduler.running, "something runs, but no step"
            if self.scheduler.has_work:
                self._check_wait(outcome.wake_at)
        else:
            expired = {s for s, record in outcome.finished if record.reason is FinishReason.TIMEOUT}
            self._check_plan(self.executor.plans[-1], knobs, begun_before, expired)
            self._check_record(outcome, self.executor.plans[-1])
            self.steps.append(outcome.record)
            assert (outcome.record.limited_by is LimitedBy.WAIT) == (outcome.wake_at < inf)
            if outcome.wake_at < inf:
                self._check_wait(outcome.wake_at)
        self.now = outcome.end
        return outcome

    def _check_plan(
        self, plan: StepPlan, knobs: Knobs, begun_before: list[tuple[Sequence, int]], expired: set[Sequence]
    ) -> None:
        decodes = plan.n_decode + len(plan.drafts)
        drafted = sum(len(draft.drafted) for draft in plan.drafts)
        tokens = decodes + drafted + plan.prefill_tokens
        sequences = decodes + len(plan.chunks)
        assert all(1 <= len(draft.drafted) <= knobs.draft_tokens for draft in plan.drafts), (
            "not as many drafts as allowed"
        )
        if drafted:
            assert tokens <= plan.budget_used, "drafts beyond the budget"
        slots = min(knobs.max_batch_size, knobs.token_budget)
        assert sequences <= max(slots, self.drained_sequences), "more sequences than the knobs allow"
        assert all(c.count <= knobs.chunk_size for c in plan.chunks), "a chunk above chunk_size"
        assert all(c.count >= 1 for c in plan.chunks), "an empty chunk"
        if plan.chunks:
            assert tokens <= knobs.token_budget, "prompts planned above token_budget"
        assert tokens <= max(knobs.token_budget, self.drained_sequences), "more tokens than the knobs allow"
        kept = {s for s, preemptions in begun_before if s.preemptions == preemptions and s not in expired}
        new = {c.sequence for c in plan.chunks} - kept
        if new:
            assert decodes + len(kept) + len(new) <= slots, "admitted while the slots are full"
        self.drained_sequences = min(self.drained_sequences, self.scheduler.running)

    def _check_record(self, outcome: StepOutcome, plan: StepPlan) -> None:
        """What the record says of drafts is what was planned and came of it."""
        record, result = outcome.record, outcome.result
        assert record is not None and result is not None
        assert record.decodes == plan.n_decode + len(plan.drafts)
        assert record.drafted == sum(len(draft.drafted) for draft in plan.drafts) >= record.accepted >= 0
        if not record.failed:
            assert record.sampled == len(result.tokens)

    def _check_wait(self, wake_at: float) -> None:
        """What waits is held by the window: never a request that has run before, and none for longer than the knob says."""
        held = [s for s in self.live if s.state == "waiting"]
        assert not any(s.preemptions for s in held), "the wait window holds a preempted request"
        until = min(s.request.arrival for s in held) + self.core.settings.knobs.max_wait_ms / 1e3
        assert self.now < wake_at <= until, "held for longer than max_wait_ms"

    def _ended(self, sequence: Sequence, record: RequestRecord) -> None:
        assert record.id not in self.records, f"{record.id} ended twice"
        self.records[record.id] = record
        self.live.remove(sequence)
        assert not sequence.blocks and sequence in self.executor.released
        assert len(record.token_times) == record.output_tokens == sequence.generated
        assert list(record.token_times) == sorted(record.token_times)
        assert record.output_tokens == len(sequence.output), sequence
        if record.reason is FinishReason.LENGTH:
            assert record.output_tokens == sequence.request.max_tokens
        if record.scheduled is not None:
            assert record.arrival <= record.scheduled <= record.finished

    def drain(self) -> None:
        """Run until nothing is left; every request must get there in a bounded number of steps."""
        self.executor.fail = self.executor.stop = lambda s: False
        left = sum(s.request.prompt_len + s.request.max_tokens for s in self.live)
        for _ in range(100 + 50 * left):
            if not self.scheduler.has_work:
                break
            outcome = self.step()
            if outcome.record is None and self.scheduler.has_work:
                assert outcome.wake_at > self.now, "woken for nothing"
                self.now = outcome.wake_at
        assert not self.scheduler.has_work, f"{len(self.live)} requests never finished: {self.live[:3]}"
        assert not self.live and len(self.records) == self.added
        assert not self.executor.alive
        assert self.drafter is None or not self.drafter._places, "something of an ended request is kept"
        assert self.scheduler.kv.free == self.scheduler.kv.total
