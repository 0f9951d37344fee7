"""Measures one setting: engine, knobs, workload, SLO and seed in, a :class:`Score` out.

The one function behind the sweep, the bench and the command line. The load is open-loop; a latency counts from the time a
request was due, not from when it was sent. The measuring window: requests that arrive during the warm-up are served but
left out; arrivals stop at the end of the window; then the engine drains until the last deadline has passed
(:func:`last_deadline`). What is still unfinished is cancelled and counts as a miss.

An engine that lives in virtual time is measured in it: the same function, the same window, the same score, no sleep.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache

from autotune.engines import EndedForReason, Engine, Handle, VirtualEngine, virtual, waiting
from autotune.measure.frozen_heap import frozen_heap
from autotune.measure.score import Score, deadline, score
from autotune.workload import Arrival, Workload, prompt_ids, replay
from autotune.workload.replay import ReplayReport
from runtime.clock import Clock
from runtime.errors import AutotuneError, EngineClosedError, RejectedError
from runtime.knobs import Knobs
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.request import SamplingParams
from runtime.slo import SLO, RequestClass, slo_for, slos_of

__all__ = ["EvaluationError", "Interrupted", "Recorder", "evaluate", "last_deadline", "recorded", "wait_until_idle"]

QUEUED_S, TOKEN_S = 30.0, 0.1
"""What a request may take that its SLO gives no deadline (a bare ``ttft=`` or ``tpot=``): to its first token, and for each other
one where the SLO bounds neither, s."""

_IDLE_PATIENCE_S = 10.0  # how long a cancelled request may take to come back before the engine counts as hung
_POLL_S = 0.02
_LATE = "unfinished when the last deadline had passed"
_KEPT_REQUESTS = 5000
"""In a load that is kept for the next measurement, at most; 2 MB."""


class EvaluationError(AutotuneError):
    """A setting could not be measured; the message says why. Never turned into a bad score."""


class Interrupted(EvaluationError):
    """``stop`` said so before the measurement was complete."""


@dataclass
class Recorder:
    """Keeps every record of one measurement; called on the engine's thread."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    changed: threading.Event = field(default_factory=threading.Event)

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        self.steps += record.split(ends)

    def on_request(self, record: RequestRecord) -> None:
        self.requests[record.id] = record
        self.changed.set()


@contextmanager
def recorded(engine: Engine) -> Iterator[Recorder]:
    """Every record of ``engine`` until the block ends."""
    recorder = Recorder()
    unsubscribe = engine.subscribe(recorder)
    try:
        yield recorder
    finally:
        unsubscribe()


class _Ceilings:
    """The limits in force at any time of a run, lest they fall and rise again unseen."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seen = [engine.effective_limits]

    def on_step(self, record: StepRecord) -> None:
        if (limits := self._engine.effective_limits) is not self.seen[-1]:
            self.seen.append(limits)

    def on_request(self, record: RequestRecord) -> None:
        pass


def evaluate(
    engine: Engine,
    setting: Knobs | None,
    workload: Workload,
    slo: SLO | Mapping[str, SLO],
    *,
    vocab_size: int,
    seed: int,
    duration: float,
    warmup: float = 0.0,
    prompt_seed: int | None = None,
    label: str = "run",
    stop: Callable[[], bool] | None = None,
    keep: Callable[[Sequence[RequestRecord]], None] | None = None,
    classes: Sequence[RequestClass] = (),
) -> Score:
    """Serve ``workload`` on ``engine`` under ``setting`` (None: as the knobs stand) and score it.

    Requests arrive for ``warmup + duration`` seconds on the engine's clock; those of the first ``warmup`` are served and left
    out of the score. ``slo``: one for all requests, or one for each class (an engine's ``slos``), with ``default`` for
    classes not named; ``classes``: those with an SLO and a weight of their own, beside one for all others. ``seed`` fixes the
    arrivals and their lengths; ``prompt_seed`` (``seed`` unless given) the token ids, of which there are ``vocab_size``, so
    that two measurements may have the same load and yet share no cached prefix. ``label`` begins the id of each request.
    ``keep`` is given the records behind the score, in the order of their arrivals (which are when they were due).

    Raises :class:`EvaluationError` when the engine is not idle, a request fails, or its limits were below the setting at any
    time; :class:`EngineClosedError` when it closes; :class:`Interrupted` when ``stop`` returns true; ``ValueError`` where a class
    has no SLO, before anything is sent. The engine is left idle, its knobs at ``setting``.
    """
    slo = slos_of(slo, classes)
    clock, simulated = engine.clock, virtual(engine)
    begun = clock.now()
    arrivals = offered(workload, seed, warmup + duration)
    for name in {arrival.request_class for arrival in arrivals}:
        slo_for(slo, name)
    prompt_seed = seed if prompt_seed is None else prompt_seed
    sent: _Sender = (
        _Sender(engine, arrivals, label, vocab_size, prompt_seed)
        if simulated is None
        else _VirtualSender(simulated, arrivals, label, prompt_seed)
    )
    wait_until_idle(engine)
    epoch = engine.set_knobs(setting) if setting is not None else engine.epoch
    # what is wanted: memory may allow less by now
    knobs = engine.knobs if setting is None else engine.limits.clamp(setting)
    recorder = Recorder()
    unsubscribe = engine.subscribe(recorder)
    ceilings = _Ceilings(engine)
    unwatch = engine.subscribe(ceilings) if simulated is None else lambda: None  # a simulated engine has memory enough
    missing = 0
    try:
        with frozen_heap() if simulated is None else nullcontext():
            done = False
            try:
                report = sent.replay(clock, stop)
                end = report.start + last_deadline(arrivals[: report.sent], slo)
                done = not report.stopped and sent.drain(recorder, end, clock, stop)
            finally:
                missing = sent.end_rest(recorder, clock, late=done)
        if not done or _says(stop):
            raise Interrupted("interrupted")
        if missing:
            raise EvaluationError(f"{missing} requests never ended, although cancelled; the engine hangs")
    finally:
        unsubscribe()
        unwatch()
    for limits in (*ceilings.seen, engine.effective_limits):
        if limits.clamp(knobs) != knobs:
            raise EvaluationError(f"out of memory: the engine's limits fell to {limits.as_dict()}")
    every = [sent.record(index, arrival, report, recorder) for index, arrival in enumerate(arrivals)]
    records = [record for record, arrival in zip(every, arrivals, strict=True) if arrival.time >= warmup]
    for record in every:
        if record.reason is FinishReason.ERROR:
            raise EvaluationError(f"request {record.id} failed: {record.cause or 'no cause given'}")
    if keep is not None:
        keep(records)
    start = report.start + warmup
    tokens: Counter[str] = Counter()
    for r in every:
        tokens[r.request_class] += bisect_left(r.token_times, start + duration) - bisect_left(r.token_times, start)
    return score(
        records,
        slo,
        setting=knobs,
        epoch=epoch,
        seed=seed,
        rate=workload.rate,
        start=start,
        duration=duration,
        tokens=tokens.total(),
        steps=[s for s in recorder.steps if start <= s.start < start + duration],
        report=report,
        wall_s=clock.now() - begun,
        weights={one.name: one.weight for one in classes},
        tokens_by_class=tokens,
    )


def offered(workload: Workload, seed: int, duration: float) -> Sequence[Arrival]:
    """The requests of so many seconds. Those of a short load are kept: settings are compared under the same ones."""
    if isinstance(workload, Workload) and not workload.finite and workload.rate * duration <= _KEPT_REQUESTS:
        with suppress(TypeError):  # a source of somebody else's that has no hash
            return _offered(workload, seed, duration)
    return tuple(workload.arrivals(seed, duration=duration))


@lru_cache(maxsize=16)
def _offered(workload: Workload, seed: int, duration: float) -> Sequence[Arrival]:
    return tuple(workload.arrivals(seed, duration=duration))


def wait_until_idle(engine: Engine) -> None:
    """Wait until nothing runs or waits in ``engine``. Raises :class:`EvaluationError` if it does not come to rest."""
    clock, pause = engine.clock, waiting(engine)
    give_up = clock.now() + _IDLE_PATIENCE_S
    while (view := engine.view()).running or view.waiting:
        if clock.now() > give_up:
            raise EvaluationError(f"the engine did not come to rest: {view.running} running, {view.waiting} waiting")
        pause(_POLL_S)


def last_deadline(sent: Sequence[Arrival], slo: SLO | Mapping[str, SLO]) -> float:
    """When the last of ``sent`` has missed its SLO, s from the start. One whose SLO gives no deadline has :data:`QUEUED_S` to its
    first token and :data:`TOKEN_S` for each other, or its targets where these are longer."""
    return max((a.time + _allowed(slo_for(slo, a.request_class), a.output_tokens) for a in sent), default=0.0)


def _allowed(slo: SLO, output_tokens: int) -> float:
    """Seconds that a request may take."""
    seconds = deadline(slo, output_tokens)
    if seconds < math.inf:
        return seconds
    first, gap = (slo.ttft_ms or 0.0) / 1e3, max(slo.tpot_ms or 0.0, slo.itl_ms or 0.0) / 1e3
    return max(QUEUED_S, first) + max(TOKEN_S, gap) * (output_tokens - 1)


def _says(stop: Callable[[], bool] | None) -> bool:
    return stop is not None and stop()


class _Sender:
    """Submits requests, keeps their handles, and ends what the drain leaves."""

    def __init__(
        self, engine: Engine, arrivals: Sequence[Arrival], label: str, vocab_size: int, prompt_seed: int
    ) -> None:
        self._engine = engine
        self._arrivals = arrivals
        self._vocab_size, self._prompt_seed = vocab_size, prompt_seed
        self._label = label
        self._handles: dict[str, Handle] = {}
        self._rejected: dict[str, str] = {}
        self._next = 0

    def replay(self, clock: Clock, stop: Callable[[], bool] | None) -> ReplayReport:
        return replay(self._arrivals, self, clock, threading.Event().wait, start=clock.now() + 0.02, stop=stop)

    def __call__(self, arrival: Arrival, due: float) -> None:
        name, prompt = self._name(self._next), prompt_ids(arrival, self._vocab_size, self._prompt_seed)
        self._next += 1
        params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
        try:
            self._handles[name] = self._engine.submit(
                prompt, params, tenant=arrival.tenant, request_class=arrival.request_class, request_id=name
            )
        except ValueError as error:
            raise EvaluationError(f"request {self._next} of the workload is refused: {error}") from error
        except RejectedError as error:  # a reject is a miss, not a failure of the measurement
            if error.reason == "closed":
                raise EngineClosedError(f"the engine closed while it was measured: {error}") from None
            self._rejected[name] = str(error)

    def _name(self, index: int) -> str:
        return f"{self._label}-{index}"

    def drain(self, recorder: Recorder, end: float, clock: Clock, stop: Callable[[], bool] | None) -> bool:
        """Wait until all have ended, or for ``end``. False when ``stop`` says so first."""
        while self._handles.keys() - recorder.requests.keys() and clock.now() < end:
            if _says(stop):
                return False
            recorder.changed.wait(_POLL_S)
            recorder.changed.clear()
        return True

    def end_rest(self, recorder: Recorder, clock: Clock, *, late: bool) -> int:
        """End the rest, and wait for those to come back. How many do not. ``late``: their deadlines have passed."""
        for name, handle in self._handles.items():
            if name in recorder.requests:
                continue
            if late and isinstance(handle, EndedForReason):  # whoever else listens hears of a miss, too
                handle.end_for(FinishReason.TIMEOUT, _LATE)
            else:
                handle.cancel()
        self.drain(recorder, clock.now() + _IDLE_PATIENCE_S, clock, None)
        return len(self._handles.keys() - recorder.requests.keys())

    def record(self, index: int, arrival: Arrival, report: ReplayReport, recorder: Recorder) -> RequestRecord:
        """The record of one request, its arrival set to when it was due; ours if the engine never saw it."""
        name, due = self._name(index), report.start + arrival.time
        record = recorder.requests.get(name)
        if record is None:
            return RequestRecord(
                id=name, arrival=due, scheduled=None, finished=due, token_times=(), prompt_tokens=arrival.prompt_tokens,
                output_tokens=0, cached_tokens=0, preemptions=0, reason=FinishReason.REJECTED,
                request_class=arrival.request_class, tenant=arrival.tenant, priority=0, epoch_first=-1, epoch_last=-1,
                cause=self._rejected.get(name, "not sent"),
            )  # fmt: skip
        if record.reason is FinishReason.CANCELLED:  # by our own drain: a miss, and no wish of the client's
            record = record._replace(reason=FinishReason.TIMEOUT, cause=_LATE)
        return record._replace(arrival=due)


class _VirtualSender(_Sender):
    """The same in virtual time, where prompts need no tokens."""

    def __init__(self, engine: VirtualEngine, arrivals: Sequence[Arrival], label: str, prompt_seed: int) -> None:
        super().__init__(engine, arrivals, label, 0, prompt_seed)
        self._simulated = engine

    def replay(self, clock: Clock, stop: Callable[[], bool] | None) -> ReplayReport:
        return self._simulated.serve(self._arrivals, label=self._label, prompt_seed=self._prompt_seed, stop=stop)

    def drain(self, recorder: Recorder, end: float, clock: Clock, stop: Callable[[], bool] | None) -> bool:
        return self._simulated.run(end, stop=stop)

    def end_rest(self, recorder: Recorder, clock: Clock, *, late: bool) -> int:
        if late:
            self._simulated.cancel_all(FinishReason.TIMEOUT, _LATE)
        else:
            self._simulated.cancel_all()
        return 0
