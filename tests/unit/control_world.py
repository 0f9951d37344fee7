"""A controllable engine in virtual time: the real core and scheduler on hardware given by a formula."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from math import inf

from runtime.knobs import KnobLimits, Knobs
from runtime.llm.core import EngineCore
from runtime.llm.plan import StepPlan, StepResult
from runtime.llm.scheduler import Scheduler
from runtime.records import RequestRecord
from runtime.request import Request, SamplingParams, Sequence
from runtime.slo import SLO
from runtime.step_model import StepFeatures
from runtime.tunable import Lease, LeaseHolder, Listener, SchedulerView, StepPolicy

Hardware = Callable[[StepFeatures], float]
VLLM = Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=8192, chunk_size=8192)


def h200(step: StepFeatures) -> float:
    """An 8B model in bfloat16, memory and compute overlapped."""
    tokens = step.decodes + step.prefill_tokens
    memory = (15e9 + 131072 * (step.decode_context + step.prefill_context)) / 3.84e12
    compute = (16e9 * tokens + 524288 * (step.decode_context + step.prefill_attention)) / 643e12
    return 0.75e-3 + max(memory, compute)


def slow_cpu(step: StepFeatures) -> float:
    """A small model on two cores, everything added up."""
    tokens = step.decodes + step.prefill_tokens
    return 6e-3 + 2.5e-4 * tokens + 4e-8 * (step.decode_context + step.prefill_context) + 2e-8 * step.prefill_attention


class FormulaExecutor:
    def __init__(self, hardware: Hardware, noise: float = 0.0, seed: int = 0) -> None:
        self.hardware = hardware
        self.noise = noise
        self.dice = random.Random(seed)

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        n, context, pairs = 0, 0, 0
        for chunk in plan.chunks:
            n += chunk.count
            context += chunk.start + chunk.count
            pairs += chunk.count * chunk.start + chunk.count * (chunk.count + 1) // 2
        seconds = self.hardware(StepFeatures(plan.n_decode, plan.decode_context, n, context, pairs))
        return StepResult(ends=(now + seconds * max(0.3, self.dice.gauss(1, self.noise)),))

    def release(self, sequence: Sequence) -> None:
        pass


class SimulatedEngine:
    """Has what :func:`autotune.control` asks of an engine. ``run`` serves (arrival, prompt, output) triples."""

    def __init__(
        self,
        hardware: Hardware,
        *,
        knobs: Knobs = VLLM,
        limits: KnobLimits | None = None,
        kv_tokens: int = 760_000,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.block_size = 16
        self.kv_tokens = kv_tokens
        self.scheduler = Scheduler(kv_blocks=kv_tokens // 16)
        self.executor = FormulaExecutor(hardware, noise, seed)
        self.core = EngineCore(self.scheduler, self.executor, knobs=knobs, limits=limits)
        self.now = 0.0
        self.records: list[RequestRecord] = []
        self.listeners: list[Listener] = []
        self._slos: dict[str, SLO] = {}
        self._leases = LeaseHolder()
        self._number = 0

    @property
    def limits(self) -> KnobLimits:
        return self.core.limits

    @property
    def effective_limits(self) -> KnobLimits:
        return self.core.effective_limits

    @property
    def knobs(self) -> Knobs:
        return self.core.knobs

    @property
    def epoch(self) -> int:
        return self.core.epoch

    @property
    def slos(self) -> Mapping[str, SLO]:
        return self._slos

    def set_slo(self, slo: SLO) -> None:
        self._slos["default"] = self.scheduler.slack.slos["default"] = slo

    def set_knobs(self, knobs: Knobs, *, lease: Lease | None = None) -> int:
        self._leases.check(lease)
        return self.core.set_knobs(knobs)

    def acquire(self, owner: str) -> Lease:
        return self._leases.acquire(owner)

    def set_step_policy(self, policy: StepPolicy | None, *, lease: Lease | None = None) -> None:
        self._leases.check(lease)
        self.core.policy = policy

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener) if listener in self.listeners else None

    def view(self) -> SchedulerView:
        return self.core.view(self.now)

    def run(self, arrivals: Iterable[tuple[float, int, int]]) -> list[RequestRecord]:
        """Serve until all have ended; returns their records."""
        before = len(self.records)
        for arrival, prompt, output in arrivals:
            self._run_until(arrival)
            self._number += 1
            params = SamplingParams(max_tokens=output)
            self.core.add(Request(f"r{self._number}", (), params, output, arrival, prompt_len=prompt))
        self._run_until(inf)
        return self.records[before:]

    def _run_until(self, until: float) -> None:
        while self.now < until:
            outcome = self.core.step(self.now, until)
            for _, record in outcome.finished:
                self.records.append(record)
                for listener in list(self.listeners):
                    listener.on_request(record)
            if outcome.record is None:
                if outcome.wake_at == inf and until == inf:
                    return
                self.now = max(self.now, min(outcome.wake_at, until))
                continue
            self.now = outcome.end
            for listener in list(self.listeners):
                listener.on_step(outcome.record)


def poisson(
    rate: float, seconds: float, prompt: float, output: float, *, seed: int, start: float = 0.0
) -> list[tuple[float, int, int]]:
    """Poisson arrivals with log-normal lengths (σ = 0.8) of the given means."""
    dice = random.Random(seed)
    now, made = start, []
    while (now := now + dice.expovariate(rate)) < start + seconds:
        lengths = [max(1, round(mean * dice.lognormvariate(-0.32, 0.8))) for mean in (prompt, output)]
        made.append((now, min(lengths[0], 16000), min(lengths[1], 2000)))
    return made
