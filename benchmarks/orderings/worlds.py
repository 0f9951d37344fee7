"""Where orderings are compared: a machine in virtual time, or the live engine on this one; loads and SLOs follow from it.

One rule for both. Chat is 80% of the requests, with the lengths of Azure's conversation trace; batch 20%, prompts of 2,000
and answers of 200 tokens on average, lognormal. Both are Poisson and tenants of their own. Capacity is what the engine
makes of this mix, first come first served, while requests come much faster. The step then is t on average; chat's SLO is
TPOT 1.5 t, to two digits, and TTFT ten times that, batch's an E2E of 40 times chat's TTFT. The knobs stand.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from autotune.engines import Engine
from autotune.measure.evaluate import EvaluationError, evaluate
from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival, Source, Workload, parse_workload
from benchmarks.controller.hardware import H200
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.ordering import Ordering
from runtime.slo import SLO, RequestClass

MIX = "chat=poisson:lengths=azure-conv@0.8+batch=poisson:prompt=2000~1,output=200~1@0.2"
REJECTING = AdmissionPolicy(late="reject", queue_timeout="ttft", order=None)
"""Early rejection, in the engine's own order."""
LIMITS = KnobLimits()
TPOT_FACTOR, TTFT_FACTOR, E2E_FACTOR = 1.5, 10, 40
_NOISE = 0.05  # of simulated step times
_SATURATED = 0.02  # of the steps may be limited by demand where an engine is said to be full
_DOUBLINGS = 8
_SEED = 7  # of the requests that capacity is measured with
_SHORT = {"default": SLO(e2e_ms=1.0)}  # nobody waits for what is left of them

Start = Callable[[Ordering | str, bool, Mapping[str, SLO], int], AbstractContextManager[Engine]]
"""(ordering, whether late requests are rejected, SLOs, seed of the machine's noise) -> an engine."""


@dataclass(frozen=True)
class ByClass:
    """``source``, each class a tenant."""

    source: Source

    @property
    def rate(self) -> float:
        return self.source.rate

    @property
    def finite(self) -> bool:
        return self.source.finite

    def at_rate(self, rate: float) -> ByClass:
        return ByClass(self.source.at_rate(rate))

    def generate(self, seed: tuple[int, ...]) -> Iterator[Arrival]:
        return (arrival._replace(tenant=arrival.request_class) for arrival in self.source.generate(seed))


class World(NamedTuple):
    """``workload`` at any rate; ``vocab_size``: of the prompts' tokens. To measure its capacity: requests/s to begin with
    (``guess``), and seconds of a full engine (``full_s``), behind half as many in which it fills."""

    name: str
    start: Start
    workload: Workload
    vocab_size: int
    guess: float
    full_s: float


class Load(NamedTuple):
    """What follows from a world: requests/s that it completes at most, and the SLO of each class."""

    capacity: float
    slos: Mapping[str, SLO]


def workload(scale: float = 1.0) -> Workload:
    made = parse_workload(MIX)
    return replace(made, source=ByClass(made.source)).scaled(length=scale)


def simulated() -> World:
    """8B on an H200, a roofline; steps scatter by 5%."""
    knobs = Knobs(128, 0, 2048, 2048)

    @contextmanager
    def start(ordering: Ordering | str, reject: bool, slos: Mapping[str, SLO], seed: int) -> Iterator[Engine]:
        yield SimulatedEngine(
            H200.cost(), kv_tokens=H200.kv_tokens, limits=LIMITS, knobs=knobs, max_queue=10**9, prefix_cache=False,
            noise=_NOISE, seed=seed, **_options(ordering, reject, slos),
        )  # fmt: skip

    return World(f"8B on an H200, in virtual time; {_words(knobs)}", start, workload(), 2, 40.0, 60.0)


@contextmanager
def live(preset: str) -> Iterator[World]:
    """``preset`` with random weights on one CPU thread: who sends the requests needs a core too. Lengths are a sixteenth."""
    import torch

    from runtime.llm.engine import Engine as LiveEngine
    from runtime.torch_backend.loading import load_model

    torch.set_num_threads(1)
    loaded = load_model(preset, device="cpu")
    knobs = Knobs(32, 0, 256, 256)

    @contextmanager
    def start(ordering: Ordering | str, reject: bool, slos: Mapping[str, SLO], seed: int) -> Iterator[Engine]:
        del seed  # the machine has noise of its own
        engine = LiveEngine(
            loaded, kv_tokens=65_536, limits=LIMITS, knobs=knobs, max_queue=10**6, prefix_cache=False, threads=1,
            **_options(ordering, reject, slos),
        )  # fmt: skip
        try:
            yield engine
        finally:
            engine.close(drain=False)

    name = f"{preset} on one CPU thread of this machine, lengths × 1/16; {_words(knobs)}"
    yield World(name, start, workload(1 / 16), loaded.vocab_size, 40.0, 5.0)


def _words(knobs: Knobs) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in knobs.as_dict().items())


def _options(ordering: Ordering | str, reject: bool, slos: Mapping[str, SLO]) -> dict[str, Any]:
    classes = [RequestClass(name, slo) for name, slo in slos.items() if name != "default"]
    return {
        "ordering": ordering, "admission": REJECTING if reject else False, "slo": slos["default"], "classes": classes,
    }  # fmt: skip


def load_of(world: World, stop: Callable[[], bool]) -> Load:
    """By the rule of the module. Raises :class:`~autotune.measure.evaluate.EvaluationError` where the engine cannot be filled."""
    rate = world.guess
    outputs = statistics.fmean(a.output_tokens for a in world.workload.arrivals(_SEED, limit=4000))
    for _ in range(_DOUBLINGS):
        with world.start("fcfs", False, _SHORT, _SEED) as engine:
            found = evaluate(
                engine, None, world.workload.at_rate(rate), _SHORT["default"], vocab_size=world.vocab_size, seed=_SEED,
                duration=world.full_s, warmup=world.full_s / 2, stop=stop,
            )  # fmt: skip
        if found.steps.limited_by.get("demand", 0.0) <= _SATURATED:
            tpot = float(f"{TPOT_FACTOR * found.steps.mean_ms:.2g}")
            chat, batch = SLO(ttft_ms=TTFT_FACTOR * tpot, tpot_ms=tpot), SLO(e2e_ms=E2E_FACTOR * TTFT_FACTOR * tpot)
            return Load(found.throughput / outputs, {"chat": chat, "batch": batch, "default": chat})
        rate *= 2
    raise EvaluationError(f"the engine is not full at {rate / 2:g} requests/s")
