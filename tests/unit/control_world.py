"""A controllable engine in virtual time, on hardware given by a formula."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from autotune import simulate
from autotune.workload import Arrival
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.step_model import NO_GRAPHS, StepFeatures, StepGraphs
from runtime.tunable import TILE, Listener

Hardware = Callable[[StepFeatures], float]
VLLM = Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=8192, chunk_size=8192)


def h200(step: StepFeatures) -> float:
    """An 8B model in bfloat16, memory and compute overlapped."""
    tokens = step.decodes + step.drafted + step.prefill_tokens
    memory = (15e9 + 131072 * (step.decode_context + step.prefill_context)) / 3.84e12
    compute = (16e9 * tokens + 524288 * (step.decode_context + step.prefill_attention)) / 643e12
    return 0.75e-3 + max(memory, compute)


def slow_cpu(step: StepFeatures) -> float:
    """A small model on two cores, everything added up."""
    tokens = step.decodes + step.drafted + step.prefill_tokens
    return 6e-3 + 2.5e-4 * tokens + 4e-8 * (step.decode_context + step.prefill_context) + 2e-8 * step.prefill_attention


class Formula:
    """A step model made of a formula, which may change while it is in use."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware

    def predict(self, step: StepFeatures) -> float:
        return self.hardware(step)


class SimulatedEngine(simulate.SimulatedEngine):
    """The simulated engine on such hardware. ``play`` serves (arrival, prompt, output) triples."""

    def __init__(
        self,
        hardware: Hardware,
        *,
        knobs: Knobs = VLLM,
        limits: KnobLimits | None = None,
        kv_tokens: int = 760_000,
        noise: float = 0.0,
        seed: int = 0,
        graphs: StepGraphs = NO_GRAPHS,
        tile: int = TILE,
    ) -> None:
        self.formula = Formula(hardware)
        super().__init__(
            self.formula, kv_tokens=kv_tokens, knobs=knobs, limits=limits, prefix_cache=False, max_queue=10**9,
            noise=noise, seed=seed, graphs=graphs, tile=tile,
        )  # fmt: skip
        self.records: list[RequestRecord] = []
        self._number = 0
        self._listeners.subscribe(self)

    @property
    def now(self) -> float:
        return self.clock.now()

    @property
    def listeners(self) -> list[Listener]:
        """Those of others."""
        return [listener for listener in self._listeners.known if listener is not self]

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        self.records.append(record)

    def offer_now(self, offered: tuple[float, int, int]) -> None:
        """Queue a request that was due at its time."""
        due, prompt, output = offered
        self._number += 1
        arrival = Arrival(due, prompt, output, ((self._number, prompt),))
        self.offer(arrival, f"r{self._number}", due=due, shared=False)

    def play(self, arrivals: Iterable[tuple[float, int, int]]) -> list[RequestRecord]:
        """Serve until all have ended; returns their records."""
        before = len(self.records)
        for due, prompt, output in arrivals:
            self.run_until(due)
            self.offer_now((due, prompt, output))
        self.run()
        return self.records[before:]


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
