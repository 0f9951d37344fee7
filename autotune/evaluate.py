"""Measures one setting: engine, knobs, workload, SLO and seed in, a :class:`Score` out.

The one function behind the sweep, the bench and the command line. The load is open-loop; a latency counts from the time a
request was due, not from when it was sent. The measuring window: requests that arrive during the warm-up are served but
left out; arrivals stop at the end of the window; then the engine drains until the last deadline has passed. What is
still unfinished is cancelled and counts as a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autotune.score import Score, deadline, score
from autotune.workload import Arrival, Workload, prompt_ids, replay
from autotune.workload.replay import ReplayReport
from runtime.clock import Clock, MonotonicClock
from runtime.errors import AutotuneError, RejectedError
from runtime.knobs import KnobLimits, Knobs
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.request import SamplingParams
from runtime.slo import SLO
from runtime.tunable import Listener, SchedulerView

MAX_DRAIN_S = 30.0
"""Longest drain when the SLO gives no deadline (a bare ``ttft=`` or ``tpot=``)."""

_SETTLE_S = 10.0  # how long a cancelled request may take to come back before the engine counts as hung
_POLL_S = 0.02


class EvaluationError(AutotuneError):
    """A setting could not be measured; the message says why. Never turned into a bad score."""


class Interrupted(EvaluationError):
    """``stop`` said so before the measurement was complete."""


class Handle(Protocol):
    def cancel(self) -> object: ...


class Served(Protocol):
    """What measuring needs of an engine; :class:`runtime.Engine` has it."""

    @property
    def limits(self) -> KnobLimits: ...
    @property
    def effective_limits(self) -> KnobLimits: ...
    @property
    def knobs(self) -> Knobs: ...
    @property
    def epoch(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    def set_knobs(self, knobs: Knobs) -> int: ...
    def subscribe(self, listener: Listener) -> Callable[[], None]: ...
    def view(self) -> SchedulerView: ...
    def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        request_class: str = "default",
        request_id: str | None = None,
    ) -> Handle: ...


@dataclass
class Recorder:
    """Keeps every record of one measurement; called on the engine's thread."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: dict[str, RequestRecord] = field(default_factory=dict)
    changed: threading.Event = field(default_factory=threading.Event)

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_request(self, record: RequestRecord) -> None:
        self.requests[record.id] = record
        self.changed.set()


def evaluate(
    engine: Served,
    setting: Knobs | None,
    workload: Workload,
    slo: SLO,
    *,
    vocab_size: int,
    seed: int,
    duration: float,
    warmup: float = 0.0,
    prompt_seed: int | None = None,
    label: str = "run",
    stop: Callable[[], bool] | None = None,
    clock: Clock | None = None,
    keep: Callable[[Sequence[RequestRecord]], None] | None = None,
) -> Score:
    """Serve ``workload`` for ``warmup + duration`` seconds under ``setting`` (None: as the knobs stand) and score it.

    ``seed`` fixes the arrivals and their lengths; ``prompt_seed`` (``seed`` unless given) the token ids, so that two
    measurements may have the same load and yet share no cached prefix. ``clock`` must be the engine's. ``keep`` is given the
    records behind the score, in the order of their arrivals (which are when they were due). Raises
    :class:`EvaluationError` when the engine is not idle, a request fails, or the engine's limits shrink below the setting;
    :class:`Interrupted` when ``stop`` returns true. The engine is left idle either way, its knobs at ``setting``.
    """
    clock = clock or MonotonicClock()
    begun = clock.now()
    arrivals = list(workload.arrivals(seed, duration=warmup + duration))
    prompts = [prompt_ids(a, vocab_size, seed if prompt_seed is None else prompt_seed) for a in arrivals]
    settle(engine, clock)
    epoch = engine.set_knobs(setting) if setting is not None else engine.epoch
    knobs = engine.knobs
    recorder = Recorder()
    unsubscribe = engine.subscribe(recorder)
    try:
        sent = _Sender(engine, prompts, label)
        report = replay(arrivals, sent, clock, threading.Event().wait, start=clock.now() + 0.02, stop=stop)
        sent.drain(recorder, report, arrivals, slo, clock, stop)
    finally:
        unsubscribe()
    if engine.effective_limits.clamp(knobs) != knobs:
        raise EvaluationError(f"out of memory: the engine's limits fell to {engine.effective_limits.as_dict()}")
    records = [
        sent.record(index, arrival, report, recorder)
        for index, arrival in enumerate(arrivals)
        if arrival.time >= warmup
    ]
    for record in records:
        if record.reason is FinishReason.ERROR:
            raise EvaluationError(f"request {record.id} failed: {record.cause or 'no cause given'}")
    if keep is not None:
        keep(records)
    start = report.start + warmup
    every = [sent.record(i, a, report, recorder) for i, a in enumerate(arrivals) if a.time < warmup] + records
    tokens = sum(start <= t < start + duration for r in every for t in r.token_times)
    return score(
        records,
        slo,
        setting=knobs,
        epoch=epoch,
        seed=seed,
        rate=workload.rate,
        start=start,
        duration=duration,
        tokens=tokens,
        steps=[s for s in recorder.steps if start <= s.start < start + duration],
        report=report,
        wall_s=clock.now() - begun,
    )


def settle(engine: Served, clock: Clock, *, patience: float = _SETTLE_S) -> None:
    """Wait until nothing runs or waits in ``engine``. Raises :class:`EvaluationError` if it does not come to rest."""
    give_up = clock.now() + patience
    pause = threading.Event()
    while (view := engine.view()).running or view.waiting:
        if clock.now() > give_up:
            raise EvaluationError(f"the engine did not come to rest: {view.running} running, {view.waiting} waiting")
        pause.wait(_POLL_S)


class _Sender:
    """Submits requests, keeps their handles, and ends what the drain leaves."""

    def __init__(self, engine: Served, prompts: Sequence[list[int]], label: str) -> None:
        self._engine = engine
        self._prompts = prompts
        self._label = label
        self._handles: dict[str, Handle] = {}
        self._rejected: dict[str, str] = {}
        self._next = 0

    def __call__(self, arrival: Arrival, due: float) -> None:
        name, prompt = self._name(self._next), self._prompts[self._next]
        self._next += 1
        params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
        try:
            self._handles[name] = self._engine.submit(
                prompt, params, tenant=arrival.tenant, request_class=arrival.request_class, request_id=name
            )
        except RejectedError as error:  # a reject is a miss, not a failure of the measurement
            self._rejected[name] = str(error)

    def _name(self, index: int) -> str:
        return f"{self._label}-{index}"

    def drain(
        self,
        recorder: Recorder,
        report: ReplayReport,
        arrivals: Sequence[Arrival],
        slo: SLO,
        clock: Clock,
        stop: Callable[[], bool] | None,
    ) -> None:
        """Wait until all have ended or the last deadline has passed; cancel the rest and wait for those to come back."""
        last = max((a.time + deadline(slo, a.output_tokens) for a in arrivals[: report.sent]), default=0.0)
        end = report.start + min(last, (arrivals[-1].time if arrivals else 0.0) + MAX_DRAIN_S)
        stopped = report.stopped or self._await(recorder, end, clock, stop)
        for name, handle in self._handles.items():
            if name not in recorder.requests:
                handle.cancel()
        self._await(recorder, clock.now() + _SETTLE_S, clock, None)
        missing = self._handles.keys() - recorder.requests.keys()
        if stopped:
            raise Interrupted("interrupted")
        if missing:
            raise EvaluationError(f"{len(missing)} requests never ended, although cancelled; the engine hangs")

    def _await(self, recorder: Recorder, end: float, clock: Clock, stop: Callable[[], bool] | None) -> bool:
        while self._handles.keys() - recorder.requests.keys() and clock.now() < end:
            if stop is not None and stop():
                return True
            recorder.changed.wait(_POLL_S)
            recorder.changed.clear()
        return stop is not None and stop()

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
            record = record._replace(reason=FinishReason.TIMEOUT, cause="unfinished when the last deadline had passed")
        return record._replace(arrival=due)
