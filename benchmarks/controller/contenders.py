"""Who takes part: fixed settings, other tools' algorithms and ours, each with more and more of what there is to have.

A contender is something that sets knobs, its *base*, with the layers up to one of :data:`LAYERS`. A layer is the same thing for
all of them: one deadline order, and one early rejection whose prefill rate is measured where a controller names none. Steps of
all that choose a number of tokens hold whole tiles (:mod:`autotune.control.controllers.parts.tiles`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from autotune import control
from autotune.control.attach import warm_model
from autotune.control.controllers.aimd import AimdController
from autotune.control.controllers.bisection import BisectionController
from autotune.control.controllers.gradient import GradientController
from autotune.control.controllers.length_table import LengthTableController
from autotune.control.controllers.predictive import PredictiveController
from autotune.control.controllers.protocol import Budgeted, Controller
from autotune.control.controllers.registry import maker
from autotune.control.loop import Control
from autotune.engines import Engine
from autotune.simulate import SimulatedEngine
from benchmarks.attached import at_work
from benchmarks.controller.constants import Constants, constants_of
from benchmarks.controller.rivals import Niyama, PPas
from benchmarks.controller.run import FCFS, Driver
from benchmarks.controller.scenarios import COLD
from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.ordering import Hybrid
from runtime.slo import SLO
from runtime.tunable import SchedulerView

Layer = Literal["knobs", "budget", "order", "full", "relegate"]
LAYERS: Final[Mapping[Layer, str]] = {
    "knobs": "knobs",
    "budget": "+ step budgets",
    "order": "+ deadline order",
    "full": "+ early rejection",
    "relegate": "or relegation",
}
POLICIES: Final[Mapping[Layer, AdmissionPolicy]] = {
    "order": AdmissionPolicy(late=None, queue_timeout="ttft", order="deadline"),
    "full": AdmissionPolicy(late="reject", queue_timeout="ttft", order="deadline"),
    "relegate": AdmissionPolicy(late="relegate", queue_timeout="ttft", order="deadline"),
}
"""What the engine does about late requests, with these layers; below them it is first come, first served. Relegation stands
in the place of rejection."""


class Contender(NamedTuple):
    """``base`` with the layers up to ``layer``. ``driver`` makes what takes part in one run, from the fixed knobs of each phase
    if it has any. ``group``: that of its column in the tables by scenario; empty: it is in those of layers alone."""

    name: str
    base: str
    layer: Layer
    group: str
    about: str
    driver: Callable[[tuple[Knobs, ...]], Driver]


class KnobsOnly:
    """A controller whose word on knobs counts, and whose budgets of single steps do not."""

    def __init__(self, inner: Controller) -> None:
        self._inner = inner
        if isinstance(inner, Budgeted):
            inner.budgets_apply(False)

    def budgets_apply(self, applied: bool) -> None:
        """Whatever the engine can do."""

    def budget(self, view: SchedulerView) -> int:
        return view.knobs.token_budget

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Algorithm(NamedTuple):
    """Something that sets knobs or budgets. ``layers``: those it has; ``named``: the one that its bare name stands for, which
    has a column in the tables by scenario."""

    made: Callable[..., Controller]
    about: str
    layers: tuple[Layer, ...]
    named: Layer


STACK: Final[tuple[Layer, ...]] = ("knobs", "budget", "order", "full")
_NO_BUDGETS: tuple[Layer, ...] = ("knobs", "order", "full")
OURS = "predictive"
RIVALS: Final[Mapping[str, Algorithm]] = {
    "aimd": Algorithm(AimdController, "additive increase, multiplicative decrease", STACK, "budget"),
    "bisection": Algorithm(BisectionController, "a bisection of the step time", STACK, "budget"),
    "gradient": Algorithm(GradientController, "Gradient2", _NO_BUDGETS, "knobs"),
    "length_table": Algorithm(LengthTableController, "TensorRT-LLM's table of lengths", _NO_BUDGETS, "knobs"),
    "p-pas": Algorithm(PPas, "P-PAS", ("budget", "order", "full"), "budget"),
    "niyama": Algorithm(Niyama, "Niyama with its own order", ("budget", "order", "full", "relegate"), "budget"),
}
ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    **RIVALS,
    OURS: Algorithm(PredictiveController, "the predictive controller", STACK, "full"),
}


def attach(
    algorithm: Algorithm,
    constants: Constants,
    layer: Layer,
    policy: AdmissionPolicy | None,
    engine: Engine | SimulatedEngine,
    slo: SLO,
) -> AbstractContextManager[Control]:
    """Put ``algorithm`` to work; ``policy``: what ``engine`` does about late requests meanwhile, its own if None.

    Leaving it raises :class:`InputError` if it failed.
    """
    own = {name: value for name, value in constants.items() if name not in ("interval_s", "alpha")}
    make = maker(partial(algorithm.made, **own), algorithm.about)
    facts = engine.facts
    made = make(slo, engine.knobs, facts.kv_tokens, facts.block_size, warm_model(None, facts.graphs), facts.tile)
    chosen = KnobsOnly(made) if layer == "knobs" else made
    interval_s = constants.get("interval_s", 0.25)
    return at_work(control(engine, slo=slo, controller=chosen, admission=policy, interval_s=interval_s))


def driver_of(algorithm: Algorithm, layer: Layer, constants: Constants) -> Driver:
    """``algorithm`` with the layers up to ``layer``. ``constants``: arguments of its class, ``interval_s`` between two decisions,
    and ``alpha`` of its order, if it has one."""
    policy = POLICIES.get(layer)
    if algorithm.made is not Niyama or policy is None:
        return Driver(attach=partial(attach, algorithm, constants, layer, policy))
    order = {name: value for name, value in constants.items() if name == "alpha"}
    policy = replace(policy, order=None)  # the engine's own, which is this one
    return Driver(
        attach=partial(attach, algorithm, constants, layer, policy), ordering=lambda slos: Hybrid(slos, **order)
    )


def _layers(
    base: str, about: str, group: str, layers: Mapping[Layer, Callable[[tuple[Knobs, ...]], Driver]], named: Layer
) -> list[Contender]:
    """``named``: the layer that the bare name of ``base`` stands for; it is the one with a column of its own."""
    return [
        Contender(
            base if layer == named else f"{base}-{layer}", base, layer, group if layer == named else "",
            f"{about}: {LAYERS[layer]}", driver,
        )
        for layer, driver in layers.items()
    ]  # fmt: skip


def _fixed(base: str, about: str, knobs: Knobs) -> list[Contender]:
    def driver(policy: AdmissionPolicy, schedule: tuple[Knobs, ...]) -> Driver:
        return Driver(schedule or (knobs,), policy=policy)

    layers: tuple[Layer, ...] = ("knobs", "order", "full")
    drivers = {layer: partial(driver, POLICIES.get(layer, FCFS)) for layer in layers}
    return _layers(base, about, "fixed", drivers, "knobs")


def _controlled(base: str, group: str, algorithm: Algorithm) -> list[Contender]:
    def driver(layer: Layer, schedule: tuple[Knobs, ...]) -> Driver:
        return driver_of(algorithm, layer, constants_of(base, layer))

    drivers = {layer: partial(driver, layer) for layer in algorithm.layers}
    return _layers(base, algorithm.about, group, drivers, algorithm.named)


STATIC, STATIC_REJECT, STATIC_ORDER, STATIC_FULL = "static", "static-reject", "static-order", "static-full"

CONTENDERS = {
    contender.name: contender
    for contender in (
        *_fixed("vllm-1024", "vLLM's defaults for a large GPU (1024 sequences, 8192 tokens)", COLD),
        *_fixed("vllm-512", "512 sequences, 2048 tokens", Knobs(512, 0, 2048, 2048)),
        *_fixed(STATIC, "any fixed setting", COLD),
        Contender(
            STATIC_REJECT, STATIC, "full", "", "any fixed setting with early rejection, first come first served",
            lambda schedule: Driver(schedule or (COLD,), policy=AdmissionPolicy(order=None)),
        ),
        *(contender for name, rival in RIVALS.items() for contender in _controlled(name, "rivals", rival)),
        *_controlled(OURS, "full", ALGORITHMS[OURS]),
    )
}  # fmt: skip
CONTENDERS["predictive-knobs"] = CONTENDERS["predictive-knobs"]._replace(group="knobs")  # it has a column as well
REPORTED = tuple(name for name, contender in CONTENDERS.items() if contender.base != STATIC)
COLUMNS = tuple(name for name in REPORTED if CONTENDERS[name].group)
"""Those of the tables by scenario; the others are in the tables of layers alone."""
