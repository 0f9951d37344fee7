"""One step of the engine: schedule, execute, update. No thread and no clock of its own.

The live engine, the simulator and the tests drive this same class. Time comes in as an argument and comes back from the
executor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sized
from collections.abc import Sequence as Seq
from functools import partial
from math import inf
from typing import NamedTuple, Protocol, cast

from runtime.errors import DeviceError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import Admission, AdmissionPolicy
from runtime.llm.plan import Executor, OverlappingExecutor, StepPlan, StepResult
from runtime.llm.prefill_rate import RateSource
from runtime.llm.scheduler import Finished, Scheduler
from runtime.llm.slack import SlackTracker
from runtime.ordering import ordering_of
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.request import Request, Sequence
from runtime.shared.ceilings import MemoryCeilings, StepLoad
from runtime.shared.expiries import Expiries
from runtime.shared.settings import Settings
from runtime.step_model import StepFeatures
from runtime.tunable import SchedulerView

log = logging.getLogger(__name__)


class Output(Protocol):
    """Receives sampled tokens between execute and update, and says which sequences stop with them.

    It appends them to the sequences' ``output``, those of one sequence up to the one it stops with.
    """

    def process(self, result: StepResult) -> Seq[tuple[Sequence, FinishReason]]: ...


class StepOutcome(NamedTuple):
    """What a call of :meth:`EngineCore.step` did.

    ``record`` and ``result`` are None when there was nothing to run before ``wake_at`` (inf: only an arrival can give it
    work). ``finished`` holds every request that ended, timeouts included. ``end`` is the time after the step.
    """

    record: StepRecord | None
    result: StepResult | None
    finished: Seq[Finished]
    wake_at: float
    end: float


class _Flight(NamedTuple):
    """A step that the device has been given at ``start``. ``rows``: what decoded then. ``error``: what launching it raised, which
    is told when the step is collected: what the step before it did comes first."""

    plan: StepPlan
    rows: tuple[Sequence, ...]
    start: float
    error: Exception | None


class Adjustable(Protocol):
    """The part of a core that a controller turns."""

    @property
    def settings(self) -> Settings: ...
    @property
    def slack(self) -> SlackTracker:
        """Has the SLO of each request class."""
        ...

    @property
    def admission(self) -> AdmissionPolicy | None: ...
    def set_admission(
        self,
        policy: AdmissionPolicy | None,
        *,
        weights: Mapping[str, float] | None = None,
        source: RateSource | None = None,
    ) -> None: ...
    def retarget(self) -> None:
        """SLOs have changed: what waits goes by those of now."""
        ...

    def view(self, now: float) -> SchedulerView: ...


class Core(Adjustable, Protocol):
    """What an engine's thread runs: :class:`EngineCore`, or what another engine has in its place."""

    @property
    def waiting(self) -> Sized:
        """Requests that wait."""
        ...

    @property
    def has_work(self) -> bool: ...
    @property
    def next_expiry(self) -> float: ...
    def add(self, request: Request, now: float | None = None) -> Sequence: ...
    def finish(self, sequence: Sequence, reason: FinishReason, now: float, cause: str = "") -> RequestRecord | None: ...
    def step(self, now: float, until: float = inf) -> StepOutcome: ...


class EngineCore:
    """The engine without its thread. ``settings`` may be changed from any thread, everything else from one."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        knobs: Knobs | None = None,
        limits: KnobLimits | None = None,
        output: Output | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.settings = Settings(knobs, limits or KnobLimits())
        self.memory = MemoryCeilings(self.settings.limits)
        self._output = output
        self._expiries: Expiries[Sequence] = Expiries(_ended)
        self._unordered: list[tuple[Sequence, Exception]] = []  # an ordering raised for them: they are to end
        self._overlapping: OverlappingExecutor | None = None
        if getattr(executor, "overlaps", False):
            self._overlapping = cast(OverlappingExecutor, executor)
        self._flight: _Flight | None = None
        self._behind: _Flight | None = None  # while a step is planned that begins when this one has ended
        self._last_end = -inf
        self._idled = True  # since the last step: there was nothing to run
        self.undelivered: list[Finished] = []
        """What has ended in the latest step, which may raise."""

    @property
    def waiting(self) -> Sized:
        return self.scheduler.waiting

    @property
    def slack(self) -> SlackTracker:
        return self.scheduler.slack

    @property
    def has_work(self) -> bool:
        # the end of those rejected is to be said
        return self.scheduler.has_work or self._flight is not None or bool(self.scheduler.rejected)

    @property
    def next_expiry(self) -> float:
        """When the next live request times out, altogether or in the queue; inf if none does."""
        admission = self.scheduler.admission
        expiry = self._expiries.next
        return expiry if admission is None else min(expiry, admission.next_timeout)

    @property
    def admission(self) -> AdmissionPolicy | None:
        """What is done about requests that come too late."""
        return None if self.scheduler.admission is None else self.scheduler.admission.policy

    def set_admission(
        self,
        policy: AdmissionPolicy | None,
        *,
        weights: Mapping[str, float] | None = None,
        source: RateSource | None = None,
    ) -> None:
        """End or relegate what comes too late from now on, by ``policy``; None accepts everything, in the ordering of before."""
        scheduler = self.scheduler
        order = None if policy is None else policy.order
        wanted = scheduler.waiting.own if order is None else ordering_of(order, scheduler.slack.slos)
        behind = scheduler.waiting.relegated_tokens or any(s.relegated is not None for s in scheduler.prefills)
        if wanted is not scheduler.waiting.ordering or behind:
            self._unordered += scheduler.reorder(wanted)
        if policy is None:
            scheduler.admission = None
            return
        scheduler.admission = made = Admission(policy, scheduler.slack, weights=weights, source=source)
        for sequence in scheduler.waiting:
            made.queued(sequence)

    def retarget(self) -> None:
        """SLOs have changed: what waits goes by those of now, where its deadlines differ."""
        if self.slack.deadlines_changed():
            self._unordered += self.scheduler.retarget()

    def add(self, request: Request, now: float | None = None) -> Sequence:
        """Queue ``request``, ``now`` (its arrival, unless given). Raises ``ValueError`` if it can never run, RejectedError if
        it would come too late."""
        sequence = self.scheduler.add(request, now)
        if request.expires is not None:
            self._expiries.add(sequence, request.expires)
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason, now: float, cause: str = "") -> RequestRecord | None:
        """End ``sequence`` from outside a step, whatever its state. None if it has already ended."""
        record = self.scheduler.finish(sequence, reason, now, cause)
        if record is not None:
            self.executor.release(sequence)
            self._idled |= not self.has_work
        return record

    def view(self, now: float) -> SchedulerView:
        """For step policies and controllers; costs no more with more sequences while the slack follows them."""
        scheduler = self.scheduler
        waiting, decodes, slack = scheduler.waiting, scheduler.decodes, scheduler.slack
        if not slack.following:  # nobody asks in every step: followed for this look alone
            slack = scheduler.followed(SlackTracker(slack.slos))
        oldest = waiting.oldest()
        in_progress = tuple([(s.computed, s.target - s.computed) for s in scheduler.begun()])
        behind = self._behind
        last_end = now if behind is not None or self._last_end == -inf else self._last_end  # of decodes' latest tokens
        token_deadlines = slack.token_deadlines(now, decodes.step, last_end)
        decode_slack = min([left for _, left in token_deadlines]) if token_deadlines else inf
        fixed, pending = slack.fixed_and_pending(now)
        epoch, knobs = self.settings.current
        return SchedulerView(
            now, len(decodes.members), len(in_progress), waiting.count, waiting.tokens, sum([left for _, left in in_progress]),
            decodes.context, scheduler.free_blocks, scheduler.kv.total, inf if oldest is None else oldest.request.arrival,
            min(fixed, decode_slack), decode_slack, knobs, epoch, self.settings.effective_limits,
            slack.step_time_target, in_progress, token_deadlines, waiting.relegated_tokens,
            None if behind is None else StepFeatures.of_plan(behind.plan),
            0.0 if behind is None else max(behind.start, self._last_end), pending,
        )  # fmt: skip

    def step(self, now: float, until: float = inf) -> StepOutcome:
        """Run one step that starts at ``now``. ``until`` bounds a fast-forwarded one (next arrival or control tick), as do a
        timeout and the end of a wait window.

        Where the executor overlaps steps, the step whose outcome is returned was launched by the call before, and another one is
        in flight when it returns, if there is one to run."""
        finished: list[Finished] = []
        self.undelivered = finished
        expiry = self._expire(now, finished) if self._expiries.heap or self.scheduler.admission is not None else inf
        if self._unordered:
            self._end_unordered(now, finished)
        if self._flight is not None:
            return self._overlapped(self._flight, now, finished)
        plan = self._schedule(now, finished)
        if plan.empty:
            self._idled = True
            return StepOutcome(None, None, finished, min(plan.wake_at, expiry), now)
        if self._overlapping is not None and not plan.drafts:
            return self._overlapped(_launched(self._overlapping, plan, now), now, finished)
        scheduler = self.scheduler
        try:
            result = self.executor.execute(plan, now, min(until, expiry, plan.wake_at))
        except DeviceError:  # no step will succeed any more
            raise
        except Exception as error:  # the executor contains what it can; what it cannot fails the step, not the engine
            log.exception("a step of %d sequences failed", len(_sequences(plan)))
            result = StepResult(ends=(now,), failed=[(sequence, error) for sequence in _sequences(plan)])
        if self._output is not None:
            stopped = self._output.process(result)
            if stopped:
                if plan.drafts:
                    result = _until_stop(plan, result, {sequence for sequence, _ in stopped})
                result = result._replace(stopped=[*result.stopped, *stopped])
        ended = scheduler.update(plan, result)
        if ended:
            for sequence, _ in ended:
                self.executor.release(sequence)
            finished += ended
        record = self._record(plan, result, now)
        self._idled = not (record.running or record.waiting)
        if result.oom or self.memory.lowered:
            self._learn_memory(plan, result)
        if scheduler.admission is not None:
            scheduler.admission.observe(record)
        scheduler.waiting.stepped(record)
        self._last_end = end = result.ends[-1]
        return StepOutcome(record, result, finished, plan.wake_at, end)

    def _schedule(self, now: float, finished: list[Finished], setting: tuple[int, Knobs] | None = None) -> StepPlan:
        """Plan a step under ``setting`` (epoch and knobs), the one in force unless given."""
        settings, scheduler = self.settings, self.scheduler
        epoch, knobs = settings.current if setting is None else setting
        budget = None
        if settings.policy is not None:
            budget = self._policy_budget(now)
        elif scheduler.slack.following:
            scheduler.slack.stop()
        plan = scheduler.schedule(now, knobs, epoch, budget)
        if scheduler.rejected:
            finished += self._rejected()
        return plan

    def _overlapped(self, flight: _Flight, now: float, finished: list[Finished]) -> StepOutcome:
        """:meth:`step`, one step deep: the next step is planned and launched, then the one in ``flight`` collected.

        Who reaches max_tokens is known before; who stops otherwise, fails or has been cancelled has a row in the next step for
        nothing, whose token is dropped. Nothing is launched ahead that would preempt, or behind a step in trouble; a step that
        needs the tokens of the last one is launched as soon as they are there. Where steps may hold drafts, which are looked up
        by the last token, each is planned behind the one before, and one that does hold some is not launched but run.
        """
        scheduler, executor = self.scheduler, self._overlapping
        assert executor is not None
        unsettled = scheduler.commit(flight.plan, now)
        ahead = None if flight.error is not None else self._ahead(executor, flight, now, finished)
        late = ahead is not None and executor.needs_tokens(ahead)
        follower = None if ahead is None or late else _launched(executor, ahead, now)
        try:
            result = _of_those_alive(_collected(executor, flight, max(now, self._last_end)))
        except DeviceError:  # no step will succeed any more: whoever runs this ends the requests
            scheduler.abandon(unsettled, flight.rows)
            raise
        if self._output is not None:
            stopped = self._output.process(result)
            if stopped:
                result = result._replace(stopped=[*result.stopped, *stopped])
        if ahead is not None and late:
            follower = _launched(executor, ahead, now)
        self._flight = follower
        ended = scheduler.settle(unsettled, result)
        for sequence, _ in ended:
            self.executor.release(sequence)
        finished += ended
        start = max(flight.start, self._last_end)
        # not when the host came to look: until then it was launching the next step, whose time that is
        self._last_end = end = max(start, result.ends[-1] if result.computed_at is None else result.computed_at)
        record = self._record(flight.plan, result, start)
        running, waiting, tokens, free = unsettled.after
        record = record._replace(
            end=end, running=running, waiting=waiting, waiting_tokens=tokens, kv_free_blocks=free,
            sampled=len(result.tokens), failed=len(result.failed),
        )  # fmt: skip
        if result.oom or self.memory.lowered:
            self._learn_memory(flight.plan, result)
        if scheduler.admission is not None:
            scheduler.admission.observe(record)
        scheduler.waiting.stepped(record)
        return StepOutcome(record, result, finished, flight.plan.wake_at, result.ends[-1])

    def _ahead(
        self, executor: OverlappingExecutor, flight: _Flight, now: float, finished: list[Finished]
    ) -> StepPlan | None:
        """The plan of the step behind the one in ``flight``, if there is one and it may be made now."""
        if executor.in_trouble or self.memory.lowered or not self.scheduler.can_plan_ahead:
            return None
        setting = self.settings.current  # once: a plan with drafts must not be launched ahead, even if a knob turns now
        if self.scheduler.speculates(setting[1]):
            return None
        self._behind = flight
        try:
            plan = self._schedule(now, finished, setting)
        finally:
            self._behind = None
        return None if plan.empty else plan

    def _expire(self, now: float, finished: list[Finished]) -> float:
        """End what has timed out; returns when the next one will."""
        while (expiry := self.next_expiry) <= now:
            admission = self.scheduler.admission
            if admission is not None and admission.next_timeout == expiry:
                sequence, verdict = admission.timed_out()
                if admission.relegates(sequence, verdict):
                    self.scheduler.relegate(sequence)
                    continue
                sequence.retry_after = verdict.retry_after_s
                record = self.finish(sequence, FinishReason.REJECTED, now, verdict.reason)
            else:
                _, sequence = self._expiries.pop()
                record = self.finish(sequence, FinishReason.TIMEOUT, now, "its timeout passed")
            if record is not None:
                finished.append((sequence, record))
        return expiry

    def _rejected(self) -> list[Finished]:
        ended, self.scheduler.rejected = self.scheduler.rejected, []
        for sequence, _ in ended:
            self.executor.release(sequence)
        return ended

    def _end_unordered(self, now: float, finished: list[Finished]) -> None:
        for sequence, error in self._unordered:
            record = self.finish(sequence, FinishReason.ERROR, now, str(error))
            if record is not None:
                finished.append((sequence, record))
        self._unordered = []

    def _policy_budget(self, now: float) -> int | None:
        scheduler = self.scheduler
        if not scheduler.has_work:
            return None
        if not scheduler.slack.following:
            scheduler.followed(scheduler.slack)
        return self.settings.budget(partial(self.view, now))

    def _learn_memory(self, plan: StepPlan, result: StepResult) -> None:
        """Lower the ceilings by what ran out of memory, or raise lowered ones by what fitted; the knobs follow, up to what was
        last set. What runs above a lowered ceiling is preempted at once."""
        chunks = [chunk.count for chunk in plan.chunks]
        drafted = sum([draft.count for draft in plan.drafts])
        load = StepLoad(
            plan.n_decode + len(plan.drafts) + len(chunks),
            plan.n_decode + drafted + sum(chunks),
            max(chunks, default=0),
        )
        if result.oom:
            changed = self.memory.ran_out(load, result.oom, result.fitted)
        else:
            changed = not result.failed and self.memory.fitted(load)
        if changed:
            self.settings.limit(self.memory.effective)
        ceilings = self.settings.effective_limits
        if self._flight is None:  # else behind it: while ceilings are lowered, nothing is launched ahead
            self.scheduler.shed(min(ceilings.max_batch_size, ceilings.token_budget))

    def _record(self, plan: StepPlan, result: StepResult, now: float) -> StepRecord:
        scheduler, waiting, ends = self.scheduler, self.scheduler.waiting, result.ends
        (  # at once: one by one by their names takes ten times as long
            _, decodes, decode_context, chunks, _, _, _, _, epoch, budget_used, limited_by, preemptions, drafts,
        ) = plan  # fmt: skip
        tokens = context = attention = sampled = 0
        for _, start, count, samples, _ in chunks:
            tokens += count
            context += start + count
            attention += count * start + count * (count + 1) // 2
            sampled += samples
        failed = len(result.failed)
        if failed:
            mid_prompt = {chunk.sequence for chunk in chunks if not chunk.samples}
            sampled -= sum([sequence not in mid_prompt for sequence, _ in result.failed])
        drafted = accepted = 0
        after_idle, self._idled = self._idled, False
        if drafts:
            decodes += len(drafts)
            decode_context += sum([draft.start + draft.count for draft in drafts])
            drafted = sum([len(draft.drafted) for draft in drafts])
            accepted = sum([count for _, count in result.accepted])
        free = scheduler.free_blocks if scheduler.by_chunk else scheduler.kv.free
        return StepRecord(  # by position: names take twice as long, here and wherever a step makes a wide record
            now, ends[-1], len(ends), decodes, decode_context, len(chunks), tokens, context, attention,
            decodes + sampled + accepted, len(scheduler.prefills) + len(scheduler.decodes.members),
            waiting.count, waiting.tokens, free, preemptions, epoch, budget_used, limited_by, failed, drafted,
            accepted, after_idle,
        )  # fmt: skip


def _launched(executor: OverlappingExecutor, plan: StepPlan, now: float) -> _Flight:
    rows = plan.decode_rows()
    error: Exception | None = None
    try:
        executor.launch(plan)
    except Exception as raised:  # as when a step is collected
        error = raised
    return _Flight(plan, rows, now, error)


def _collected(executor: OverlappingExecutor, flight: _Flight, now: float) -> StepResult:
    """What the step in ``flight`` did. If the executor did not contain what went wrong, it failed as a whole, at ``now``. Raises
    DeviceError if no step will succeed any more."""
    error = flight.error
    if error is None:
        try:
            return executor.collect()
        except Exception as raised:
            error = raised
    if isinstance(error, DeviceError):
        raise error
    sequences = [*flight.rows, *(chunk.sequence for chunk in flight.plan.chunks)]
    log.error("a step of %d sequences failed", len(sequences), exc_info=error)
    return StepResult(ends=(now,), failed=[(sequence, error) for sequence in sequences])


def _of_those_alive(result: StepResult) -> StepResult:
    """``result`` without the sequences that have ended since the step was launched."""
    return result._replace(
        tokens=[token for token in result.tokens if token.sequence.state != "finished"],
        stopped=[(s, reason) for s, reason in result.stopped if s.state != "finished"],
        failed=[(s, error) for s, error in result.failed if s.state != "finished"],
    )


def _ended(sequence: Sequence) -> bool:
    return sequence.state == "finished"


def _sequences(plan: StepPlan) -> list[Sequence]:
    return [*plan.decode_rows(), *(chunk.sequence for chunk in (*plan.drafts, *plan.chunks))]


def _until_stop(plan: StepPlan, result: StepResult, stopped: set[Sequence]) -> StepResult:
    """``result`` without the tokens that sequences with drafts got behind the one they ``stopped`` with."""
    kept = {
        draft.sequence: len(draft.sequence.output) - draft.sequence.generated
        for draft in plan.drafts
        if draft.sequence in stopped
    }
    tokens, left = [], dict(kept)
    for token in result.tokens:
        if token.sequence in left:
            if not left[token.sequence]:
                continue
            left[token.sequence] -= 1
        tokens.append(token)
    accepted = [(sequence, min(count, kept.get(sequence, 1 + count) - 1)) for sequence, count in result.accepted]
    return result._replace(tokens=tokens, accepted=accepted)
