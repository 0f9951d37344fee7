"""The questions of :mod:`benchmarks.sweep`: twelve machines, what they serve under which SLO, and how a setting is measured.

Every contender measures with the same function on the same kind of machine: :func:`autotune.measure.evaluate.evaluate` on a
:class:`~autotune.simulate.SimulatedEngine` whose step times come from :mod:`benchmarks.sweep.hardware` (formulas) or from
:mod:`benchmarks.gpu_truth` (measured kernels of real GPUs), with noise. What it costs is virtual time: the seconds a real machine
would have been busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from autotune.measure.evaluate import evaluate, recorded
from autotune.measure.score import Score
from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival, Workload, parse_workload
from benchmarks.gpu_truth import Truth, load
from benchmarks.gpu_truth.engine import simulated_engine
from benchmarks.sweep import hardware
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord
from runtime.slo import SLO
from runtime.step_model import StepModel

NOISE = 0.03
"""Deviation of each step's time."""

REQUESTS = 500
"""Requests in the window of a measurement, about."""

LIMITS = KnobLimits(max_batch_size=512, max_wait_ms=100, token_budget=8192, chunk_size=8192)
VOCABULARY = 32000
_DRIFTS = 1.5  # windows that a machine that drifts stays at a speed


@dataclass(frozen=True)
class Grid:
    """Values somebody would try on a machine: every batch × budget × chunk (or the whole budget)."""

    batches: tuple[int, ...]
    budgets: tuple[int, ...]
    chunks: tuple[int, ...]

    def cells(self) -> list[Knobs]:
        """Every cell, none twice."""
        return [
            Knobs(max_batch_size=batch, max_wait_ms=0, token_budget=budget, chunk_size=chunk)
            for batch in self.batches
            for budget in self.budgets
            for chunk in sorted({min(c, budget) for c in (*self.chunks, budget)})
        ]


GPU_GRID = Grid((8, 16, 32, 64, 128, 256, 512), (256, 512, 1024, 2048, 4096, 8192), (256, 1024))
"""98 cells."""

CPU_GRID = Grid((2, 4, 8, 16, 32, 64, 128), (32, 64, 128, 256, 512, 1024), (32, 128))
"""98 cells where a small CPU's settings lie."""


@dataclass(frozen=True)
class Case:
    """A machine (``truth``, made from a seed, with a pool of ``kv_tokens``), its load at ``rate`` requests/s, and the SLO.

    ``drift``: deviation of its speed, which changes every one and a half windows; 0: it does not.
    """

    name: str
    about: str
    truth: Callable[[int], StepModel]
    kv_tokens: int
    workload: str
    slo_text: str
    rate: float
    warmup_s: float
    grid: Grid = GPU_GRID
    drift: float = 0.0

    @property
    def window_s(self) -> float:
        return round(max(8.0, REQUESTS / self.rate), 1)

    @property
    def slo(self) -> SLO:
        return SLO.parse(self.slo_text)

    def load(self, rate: float | None = None) -> Workload:
        return parse_workload(self.workload).at_rate(rate or self.rate)


class Machine:
    """One contender's machine. ``spent_s``: virtual seconds it was busy or restarting."""

    def __init__(self, case: Case, seed: int, *, noise: float = NOISE, windows: int = 1) -> None:
        self.case = case
        truth = case.truth(seed)
        make: Callable[..., SimulatedEngine] = SimulatedEngine
        if isinstance(truth, Truth):
            make = partial(simulated_engine, prefix_cache=True)  # it is asked by the very chunks of a step
        drifting = hardware.Drifting(truth, case.drift, _DRIFTS * case.window_s, seed)
        model: Any = drifting if case.drift else truth
        self.engine = make(model, kv_tokens=case.kv_tokens, limits=LIMITS, slo=case.slo, noise=noise, seed=seed)
        drifting.clock = self.engine.clock
        self._windows = windows
        self.limits = LIMITS

    @property
    def spent_s(self) -> float:
        return self.engine.clock.now()

    def rest(self, seconds: float) -> None:
        """Let time pass in which nothing is measured: a restart, a pause."""
        self.engine.wait(seconds)

    def measure(self, knobs: Knobs, seed: int, *, part: float = 1.0) -> Score:
        """The case's load under ``knobs``, in ``part`` of the window; equal seeds, equal requests."""
        case = self.case
        return evaluate(
            self.engine,
            knobs,
            case.load(),
            case.slo,
            vocab_size=VOCABULARY,
            seed=seed,
            duration=case.window_s * self._windows * part,
            warmup=case.warmup_s,
        )

    def serve(self, knobs: Knobs, arrivals: Sequence[Arrival], seed: int) -> tuple[list[RequestRecord], float]:
        """``arrivals`` under ``knobs`` to the end: records, and seconds from the first arrival to the last token."""
        engine = self.engine
        engine.set_knobs(LIMITS.clamp(knobs))
        with recorded(engine) as recorder:
            begun = engine.clock.now()
            engine.serve(arrivals, label=f"bench-{seed}", prompt_seed=seed)
            engine.run()
        return list(recorder.requests.values()), engine.clock.now() - begun


@contextmanager
def timed(machine: Machine) -> Iterator[list[float]]:
    """Collects the virtual seconds of a block."""
    begun, found = machine.spent_s, [0.0]
    yield found
    found[0] = machine.spent_s - begun


_measured = cache(load)

# Rates lie where the best cell of the grid meets some 90 to 97% of its SLOs in the long run: below, all settings look alike;
# above, none can be called good. They were found beforehand, from the truth; every contender gets the same one.
# Lengths carry an explicit scale, which keeps `autotune profile` from choosing one.
CASES = (
    Case(
        "chat-additive",
        "8B on H200, nothing overlaps, small batches read slowly; chat",
        lambda seed: hardware.Additive(hardware.LLAMA_8B_H200),
        760_000,
        "poisson:lengths=azure-conv,length=0.9",
        "ttft=500ms,tpot=30ms",
        18.4,
        8.0,
    ),
    Case(
        "code-experts",
        "30B mixture of experts on H200, fullest expert sets the pace, no graphs with prompts; code completion",
        lambda seed: hardware.Experts(hardware.MOE_30B_H200),
        600_000,
        "poisson:lengths=azure-code,length=0.9",
        "ttft=500ms,tpot=30ms",
        19.4,
        6.0,
    ),
    Case(
        "strict-stalls",
        "8B on H200, one step in 400 takes ten times as long; chat under a strict SLO",
        lambda seed: hardware.Stalling(hardware.LLAMA_8B_H200, seed=seed),
        760_000,
        "poisson:lengths=azure-conv,length=0.9",
        "ttft=250ms,tpot=15ms",
        19.4,
        8.0,
    ),
    Case(
        "bursts-tiles",
        "8B on A100-40, whole tiles and waves, padded decode graphs; shorter chat in bursts",
        lambda seed: hardware.Tiled(hardware.LLAMA_8B_A100),
        150_000,
        "gamma:cv=1.5,lengths=azure-conv,length=1/2",
        "ttft=1s,tpot=60ms",
        11.6,
        15.0,
    ),
    Case(
        "reason-throttled",
        "8B on H200 whose clock falls in dense steps, partial overlap; long answers",
        lambda seed: hardware.Throttled(hardware.LLAMA_8B_H200),
        760_000,
        "poisson:prompt=1292~1,output=1200~0.7,cap_output=1200,length=1/2",
        "ttft=2s,tpot=25ms",
        21.6,
        20.0,
    ),
    Case(
        "small-host",
        "0.6B on H200, the host prepares steps more slowly than the device runs them; chat in bursts",
        lambda seed: hardware.HostBound(hardware.QWEN_06B_H200),
        900_000,
        "gamma:cv=2.5,lengths=azure-conv,length=0.9",
        "ttft=300ms,tpot=12ms",
        128.0,
        4.0,
    ),
    Case(
        "long-tensor",
        "70B on four H100, all-reduces that change protocol; long prompts",
        lambda seed: hardware.TensorParallel(hardware.LLAMA_70B_4H100),
        400_000,
        "poisson:prompt=12000~1.2,output=680~0.6,cap_prompt=30000,cap_output=1000,length=1/2",
        "ttft=8s,tpot=80ms",
        1.27,
        60.0,
    ),
    Case(
        "tiny-cpu",
        "57M on two CPU cores, poor below 16 rows, slow past its cache, a fixed cost for prompts; short chat",
        lambda seed: hardware.Cpu(),
        32_000,
        "poisson:prompt=528~1,output=128~0.6,cap_prompt=1024,cap_output=256,length=1/2",
        "ttft=800ms,tpot=20ms",
        12.7,
        6.0,
        CPU_GRID,
    ),
    Case(
        "a100-code",
        "8B on A100-80, measured kernels; code completion",
        lambda seed: _measured("a100-llama3-8b"),
        400_000,
        "poisson:lengths=azure-code,length=0.9",
        "ttft=2s,tpot=60ms",
        5.2,
        15.0,
    ),
    Case(
        "h100-mixtral",
        "8x7B mixture of experts on two H100, measured kernels and all-reduces; chat in bursts",
        lambda seed: _measured("h100-mixtral-8x7b-tp2"),
        380_000,
        "gamma:cv=1.5,lengths=azure-conv,length=0.9",
        "ttft=1s,tpot=50ms",
        17.9,
        10.0,
    ),
    Case(
        "h200-fp8-reason",
        "8B in FP8 on H200, measured kernels, products slower at some sizes than at larger ones; long answers",
        lambda seed: _measured("h200-llama3-8b-fp8"),
        900_000,
        "poisson:prompt=1292~1,output=1200~0.7,cap_output=1200,length=1/2",
        "ttft=1s,tpot=20ms",
        25.8,
        20.0,
    ),
    Case(
        "rtx4090-chat",
        "8B on RTX 4090, steps measured inside vLLM, a small KV pool; shorter chat",
        lambda seed: _measured("rtx4090-llama3-8b"),
        41_408,
        "poisson:lengths=azure-conv,length=1/2",
        "ttft=1s,tpot=60ms",
        9.0,
        15.0,
    ),
)
