"""A device whose results come one step late, and an engine core on it: what a GPU is to overlapping steps.

It computes nothing, but like :class:`tests.unit.scheduler_world.CheckingExecutor` it remembers which tokens the content of
every KV slot depends on, and checks on each row that what the row may read is its own. A row whose last token the host has
not been given is fed the one that the device has.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, NoReturn

from runtime.errors import DeviceError, StepFailedError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.core import EngineCore, StepOutcome
from runtime.llm.holdings import WORTH_WAITING
from runtime.llm.output import OutputProcessor
from runtime.llm.plan import StepPlan, StepResult, Token
from runtime.llm.scheduler import Scheduler
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.request import Request, SamplingParams, Sequence
from runtime.shared.ceilings import StepLoad
from tests.unit.scheduler_world import BLOCK, chain, extend_hashes

EOS = 0
POISON, VENOM = 7, 8
"""Prompt tokens whose requests fail at their third token and at their first."""


def next_token(prompt: tuple[int, ...], output: list[int]) -> int | None:
    """What comes behind ``output``; one in 12 is EOS. None: the row fails."""
    if (POISON in prompt and len(output) == 2) or (VENOM in prompt and not output):
        return None
    return hash((*prompt, -1, *output)) % 12


def expected(request: Request) -> tuple[list[int], FinishReason]:
    """What must come of ``request``, whatever else runs."""
    output: list[int] = []
    while len(output) < request.max_tokens:
        token = next_token(request.prompt, output)
        if token is None:
            return output, FinishReason.ERROR
        output.append(token)
        if token == EOS:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


class _Step(NamedTuple):
    plan: StepPlan
    result: StepResult
    fed: dict[Sequence, int]  # what it has sampled


class Guesses:
    """Drafts what comes next, and is wrong now and then."""

    def __init__(self) -> None:
        self.dice = random.Random(3)

    def begin_step(self) -> None:
        pass

    def draft(self, sequence: Sequence, most: int) -> Seq[int]:
        request, drafted = sequence.request, list[int]()
        if request.params.repetition_penalty != 1:
            return ()
        for _ in range(self.dice.randint(0, most)):
            token = next_token(request.prompt, [*sequence.output, *drafted])
            drafted.append(self.dice.randrange(12) if token is None or self.dice.random() < 0.2 else token)
        return drafted

    def forget(self, sequence: Sequence) -> None:
        pass


class LateExecutor:
    """``overlaps``: off, it is an executor as any other, of the same results."""

    verifies_drafts = True

    def __init__(self, overlaps: bool, step_s: float = 0.01) -> None:
        self.overlaps = overlaps
        self.in_trouble = False
        self.step_s = step_s
        self.now = 0.0  # the host's time, which comes to the end of a step when that is collected
        self.busy_until = 0.0
        self.slots: dict[tuple[int, int], int] = {}
        self.steps: deque[_Step] = deque()
        self.plans: list[StepPlan] = []
        self.fed_on_device = self.held_back = 0
        self.released: set[Sequence] = set()
        self.sampled: dict[Sequence, list[float]] = {}  # when each token was
        self.lost: set[Sequence] = set()  # a row of theirs has failed; they may be here once more, for nothing
        self.wrong: AssertionError | None = None  # what the core takes for a step that failed
        self._whole = False  # whether the step launched is run as a whole

    def needs_tokens(self, plan: StepPlan) -> bool:
        found = any(s.request.params.repetition_penalty != 1 for s in plan.decode_rows())
        self.held_back += found
        return found

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        self._whole = True
        try:
            self.launch(plan)
        finally:
            self._whole = False
        return self.collect()

    def launch(self, plan: StepPlan) -> None:
        try:
            self._launch(plan)
        except AssertionError as error:
            self.wrong = error
            raise

    def _launch(self, plan: StepPlan) -> None:
        assert len(self.steps) <= self.overlaps, "more than one step deep"
        assert not plan.drafts or (self._whole and not self.steps), "a step with drafts overlaps another"
        before = self.steps[-1] if self.steps else None
        flying = {} if before is None else before.fed
        rows = [(s, s.computed + plan.step - s.joined, 1, True) for s in plan.decode_rows()]
        rows += [(c.sequence, c.start, c.count, c.samples) for c in (*plan.drafts, *plan.chunks)]
        drafted = {draft.sequence: draft.drafted for draft in plan.drafts}
        accepted: list[tuple[Sequence, int]] = []
        assert len({s for s, *_ in rows}) == len(rows), "a sequence is in a step twice"
        end = self.busy_until = max(self.now, self.busy_until) + self.step_s
        failed: list[tuple[Sequence, BaseException]] = []
        tokens: list[Token] = []
        for sequence, start, count, samples in rows:
            assert sequence.state != "finished" and sequence not in self.released, sequence
            request = sequence.request
            known = [*request.prompt, *sequence.output, *drafted.get(sequence, ())]
            if sequence in flying:
                assert request.params.repetition_penalty == 1, "launched without the tokens that it needs"
                known.append(flying[sequence])
                self.fed_on_device += 1
            where = [(sequence.blocks[p // BLOCK], p % BLOCK) for p in range(start + count)]
            prefixes = [hash(tuple(known[: p + 1])) for p in range(start + count)]
            for position in range(start, start + count):
                self.slots[where[position]] = prefixes[position]
            if sequence not in self.lost:
                assert [self.slots[w] for w in where] == prefixes, f"{sequence} reads foreign KV"
            assert sequence in self.lost or samples == (start + count == len(known)), sequence
            if sequence in drafted:
                run = self._run(sequence, drafted[sequence])
                if run is None:
                    failed.append((sequence, StepFailedError("poisoned")))
                else:
                    tokens += [Token(sequence, token) for token in run]
                    accepted.append((sequence, len(run) - 1))
                    self.sampled.setdefault(sequence, []).extend([end] * len(run))
            elif samples:
                token = next_token(request.prompt, known[len(request.prompt) :])
                if token is None:
                    failed.append((sequence, StepFailedError("poisoned")))
                    self.lost.add(sequence)
                else:
                    tokens.append(Token(sequence, token))
                    self.sampled.setdefault(sequence, []).append(end)
        fed = {token.sequence: token.id for token in tokens} | {sequence: POISON for sequence, _ in failed}
        self.steps.append(_Step(plan, StepResult((end,), tokens, failed=failed, accepted=accepted), fed))
        self.plans.append(plan)

    @staticmethod
    def _run(sequence: Sequence, drafted: Seq[int]) -> list[int] | None:
        """Tokens up to the first that was not drafted, or that a row which fails is behind; None where the first fails."""
        run: list[int] = []
        for guess in (*drafted, None):
            token = next_token(sequence.request.prompt, [*sequence.output, *run])
            if token is None:
                return run or None
            run.append(token)
            if token != guess:
                break
        return run

    def collect(self) -> StepResult:
        result = self.steps.popleft().result
        self.now = max(self.now, result.ends[-1])
        return result

    def release(self, sequence: Sequence) -> None:
        assert sequence not in self.released, "released twice"
        self.released.add(sequence)


class FaultyExecutor(LateExecutor):
    """Step number n (from 0, as they are launched) has the fault ``faults[n]``:

    ``launch``: it raises when it is launched, and does not begin; ``collect``: it raises when it is collected, and what it wrote
    is rubbish; ``oom``: it did not fit as a whole, but its halves did. ``lost`` and ``lost late``: the device cannot be used any
    more, as launching or collecting it tells.
    """

    def __init__(self, overlaps: bool, faults: Mapping[int, str]) -> None:
        super().__init__(overlaps)
        self.faults = faults
        self.begun = 0
        self.struck: dict[Sequence, list[str]] = {}
        """Who was in steps that failed as a whole, and what these raised."""
        self._in_flight: deque[int] = deque()  # their numbers
        self._writers: dict[tuple[int, int], int] = {}  # of each slot, the step that wrote it last

    def launch(self, plan: StepPlan) -> None:
        number, self.begun = self.begun, self.begun + 1
        fault = self.faults.get(number, "")
        rows = [(s, s.computed + plan.step - s.joined, 1) for s in plan.decode_rows()]
        rows += [(c.sequence, c.start, c.count) for c in (*plan.drafts, *plan.chunks)]
        if fault == "lost":
            raise DeviceError("the device is lost")
        if fault == "launch":
            self._strike([s for s, *_ in rows], f"step {number} cannot be launched")
        super().launch(plan)
        self._in_flight.append(number)
        for sequence, start, count in rows:
            self._writers |= {(sequence.blocks[p // BLOCK], p % BLOCK): number for p in range(start, start + count)}

    def collect(self) -> StepResult:
        number = self._in_flight.popleft()
        plan, fed = self.steps[0].plan, self.steps[0].fed
        result = super().collect()
        fault = self.faults.get(number, "")
        if fault == "lost late":
            raise DeviceError("the device is lost")
        if fault == "collect":
            self.slots |= dict.fromkeys((place for place, writer in self._writers.items() if writer == number), -1)
            self._strike([*fed, *(chunk.sequence for chunk in plan.chunks)], f"step {number} cannot be collected")
        if fault == "oom":
            rows = plan.n_decode + len(plan.drafts) + len(plan.chunks)
            tokens = plan.n_decode + sum(chunk.count for chunk in (*plan.drafts, *plan.chunks))
            chunk = max((chunk.count for chunk in plan.chunks), default=0)
            half = StepLoad(-(-rows // 2), -(-tokens // 2), -(-chunk // 2))
            return result._replace(oom=[StepLoad(rows, tokens, chunk)], fitted=[half, half])
        return result

    def _strike(self, sequences: Seq[Sequence], message: str) -> NoReturn:
        for sequence in sequences:
            if sequence.state != "finished":
                self.struck.setdefault(sequence, []).append(message)
        self.lost |= self.struck.keys()
        raise RuntimeError(message)


class LateWorld:
    """An :class:`EngineCore` on a :class:`LateExecutor`. ``clock``: time goes on with the steps of the device."""

    def __init__(
        self,
        overlaps: bool,
        *,
        kv_blocks: int,
        ordering: str = "priority",
        prefix: bool = True,
        drafts: bool = False,
        faults: Mapping[int, str] | None = None,
        worth_waiting: int = WORTH_WAITING,
    ) -> None:
        self.executor = LateExecutor(overlaps) if faults is None else FaultyExecutor(overlaps, faults)
        self.scheduler = Scheduler(
            kv_blocks=kv_blocks, block_size=BLOCK, ordering=ordering, hasher=extend_hashes if prefix else None,
            drafter=Guesses() if drafts else None,
        )  # fmt: skip
        self.scheduler.holdings.worth_waiting = worth_waiting
        output = OutputProcessor((EOS,))
        self.core = EngineCore(
            self.scheduler, self.executor, knobs=Knobs(8, 0, 16, 8), limits=KnobLimits(), output=output
        )
        self.prefix = prefix
        self.sequences: dict[str, Sequence] = {}
        self.records: dict[str, RequestRecord] = {}
        self.steps: list[StepRecord] = []
        self.ran_before = 0  # sequences that ran when the knobs were last lowered

    @property
    def now(self) -> float:
        return self.executor.now

    @property
    def live(self) -> list[Sequence]:
        return [s for name, s in self.sequences.items() if name not in self.records]

    def add(self, prompt: list[int], max_tokens: int = 4, penalty: float = 1.0, **fields: object) -> Sequence:
        name = f"r{len(self.sequences)}"
        made = Request(
            id=name,
            prompt=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, repetition_penalty=penalty),
            max_tokens=max_tokens,
            arrival=self.now,
            block_hashes=chain(prompt) if self.prefix else (),
            **fields,  # type: ignore[arg-type]
        )
        self.sequences[name] = sequence = self.core.add(made, self.now)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        record = self.core.finish(sequence, FinishReason.CANCELLED, self.now)
        assert record is not None
        self._ended(sequence, record)
        self.scheduler.check_integrity()

    def set_knobs(self, knobs: Knobs) -> None:
        self.ran_before = max(self.ran_before, self.scheduler.running)
        self.core.settings.set_knobs(knobs)

    def step(self) -> StepOutcome:
        epoch, knobs = self.core.settings.current
        planned = len(self.executor.plans)
        outcome = self.core.step(self.now)
        if self.executor.wrong is not None:
            raise self.executor.wrong
        for sequence, record in outcome.finished:
            self._ended(sequence, record)
        self.scheduler.check_integrity()
        for plan in self.executor.plans[planned:]:  # a knob is in force in the first plan made after it was set
            assert plan.epoch == epoch
            assert all(1 <= chunk.count <= knobs.chunk_size for chunk in plan.chunks)
            rows = plan.n_decode + len(plan.drafts) + len(plan.chunks)
            if plan.chunks or plan.drafts:
                drafted = sum(draft.count for draft in plan.drafts)
                assert plan.n_decode + drafted + plan.prefill_tokens <= knobs.token_budget
            assert all(1 <= len(draft.drafted) <= knobs.draft_tokens for draft in plan.drafts)
            assert rows <= max(min(knobs.max_batch_size, knobs.token_budget), self.ran_before)
        if outcome.record is not None:
            if self.steps:
                assert outcome.record.start >= self.steps[-1].end, "two steps at once"
            assert outcome.record.start <= outcome.record.end
            self.steps.append(outcome.record)
        if not self.core.has_work:
            self.ran_before = 0
        return outcome

    def _ended(self, sequence: Sequence, record: RequestRecord) -> None:
        assert record.id not in self.records, f"{record.id} ended twice"
        self.records[record.id] = record
        assert not sequence.blocks and sequence in self.executor.released
        assert len(record.token_times) == record.output_tokens == sequence.generated == len(sequence.output), sequence
        assert list(record.token_times) == self.executor.sampled.get(sequence, [])[: record.output_tokens]
        if record.token_times and record.reason is not FinishReason.CANCELLED:
            assert record.token_times[-1] <= record.finished

    def drain(self) -> None:
        """Run until nothing is left, and hold what came of each request against what had to come."""
        left = sum(s.request.prompt_len + s.request.max_tokens for s in self.live)
        for _ in range(100 + 50 * left):
            if not self.core.has_work:
                break
            outcome = self.step()
            if outcome.record is None and self.core.has_work:
                self.executor.now = max(self.now, outcome.wake_at)
        assert not self.core.has_work and not self.live and not self.executor.steps
        assert self.scheduler.kv.free == self.scheduler.kv.total
        struck = self.executor.struck if isinstance(self.executor, FaultyExecutor) else {}
        for name, sequence in self.sequences.items():
            output, reason = expected(sequence.request)
            found = self.records[name].reason
            if any(message in self.records[name].cause for message in struck.get(sequence, ())):
                assert found is FinishReason.ERROR and sequence.output == output[: len(sequence.output)]
            elif found in (FinishReason.CANCELLED, FinishReason.TIMEOUT, FinishReason.REJECTED):
                assert sequence.output == output[: len(sequence.output)]
            else:
                assert (sequence.output, found) == (output, reason)
        assert sum(step.sampled for step in self.steps) == sum(len(s.output) for s in self.sequences.values())

    @property
    def wasted(self) -> int:
        """Tokens sampled for nobody: their request had ended."""
        return sum(map(len, self.executor.sampled.values())) - sum(len(s.output) for s in self.sequences.values())
