"""Live vLLM as a rig of the sweep: what a measurement is, and whose time it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.engines import Engine, Handle
from autotune.measure.evaluate import Interrupted, Recorder, evaluate, wait_until_idle
from autotune.measure.score import Score
from autotune.profile import ModelFacts
from autotune.workload import Arrival, Workload, prompt_ids, replay
from benchmarks.live.machine import Machine
from benchmarks.sweep.cases import Grid
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord
from runtime.request import SamplingParams
from runtime.slo import SLO

PROMPT_SEEDS = 1_000_003
_POLL_S = 0.05


@dataclass(frozen=True)
class Case:
    """The load and the SLO that every search is asked about; ``window_s``, ``warmup_s``: of a measurement."""

    workload: Workload
    slo: SLO
    grid: Grid
    window_s: float
    warmup_s: float

    def load(self, rate: float | None = None) -> Workload:
        return self.workload if rate is None else self.workload.at_rate(rate)


class LiveRig:
    """``machine`` for one search. Time that passes is counted; a restart is counted too, and not waited for.

    Every measurement has prompts of its own. Raises :class:`Interrupted` on ``stop``.
    """

    _measured = 0  # by all rigs

    def __init__(self, machine: Machine, case: Case, stop: Callable[[], bool]) -> None:
        self.case = case
        self._machine, self._stop = machine, stop
        self._begun, self._rested = machine.clock.now(), 0.0

    @property
    def engine(self) -> Engine:
        return self._machine.engine

    @property
    def limits(self) -> KnobLimits:
        return self._machine.engine.limits

    @property
    def facts(self) -> ModelFacts:
        return self._machine.facts

    @property
    def spent_s(self) -> float:
        return self._machine.clock.now() - self._begun + self._rested

    def rest(self, seconds: float) -> None:
        self._rested += seconds

    def measure(self, knobs: Knobs, seed: int, *, part: float = 1.0) -> Score:
        case, machine = self.case, self._machine
        return evaluate(
            machine.engine, machine.engine.limits.clamp(knobs), case.workload, case.slo, vocab_size=machine.facts.vocab_size,
            seed=seed, prompt_seed=self._prompts(), duration=case.window_s * part, warmup=case.warmup_s, stop=self._stop,
        )  # fmt: skip

    def serve(self, knobs: Knobs, arrivals: Sequence[Arrival], seed: int) -> tuple[list[RequestRecord], float]:
        engine, clock, recorder, prompts = self._machine.engine, self._machine.clock, Recorder(), self._prompts()
        wait_until_idle(engine)
        engine.set_knobs(engine.limits.clamp(knobs))
        kept: list[Handle] = []

        def submit(arrival: Arrival, due: float) -> None:
            params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
            prompt = prompt_ids(arrival, self.facts.vocab_size, prompts)
            kept.append(engine.submit(prompt, params, request_id=f"bench-{seed}-{len(kept)}"))

        unsubscribe = engine.subscribe(recorder)
        try:
            report = replay(arrivals, submit, clock, threading.Event().wait, stop=self._stop)
            while len(recorder.requests) < len(kept) and not self._stop():
                recorder.changed.wait(_POLL_S)
                recorder.changed.clear()
        finally:
            unsubscribe()
            for handle in kept:
                handle.cancel()
        if self._stop():
            raise Interrupted("interrupted")
        return list(recorder.requests.values()), clock.now() - report.start

    def _prompts(self) -> int:
        LiveRig._measured += 1
        return PROMPT_SEEDS + LiveRig._measured
