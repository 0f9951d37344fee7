"""Who takes part: fixed settings, other tools' algorithms and ours, each with more and more of what there is to have.

A contender is something that sets knobs, its *base*, with the layers up to one of :data:`LAYERS`. A layer is the same thing for
all of them: one deadline order, and one early rejection whose prefill rate is measured where a controller names none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from autotune import control
from autotune.control.controllers.protocol import Budgeted, Controller
from autotune.control.controllers.registry import CONTROLLERS
from autotune.control.loop import Control
from autotune.simulate import SimulatedEngine
from benchmarks.controller.run import FCFS, Driver
from benchmarks.controller.scenarios import COLD
from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.slo import SLO
from runtime.tunable import SchedulerView

GROUPS = ("fixed", "rivals", "knobs", "full")

Layer = Literal["knobs", "budget", "order", "full"]
LAYERS: Final[Mapping[Layer, str]] = {
    "knobs": "knobs",
    "budget": "+ step budgets",
    "order": "+ deadline order",
    "full": "+ early rejection",
}
POLICIES: Final[Mapping[Layer, AdmissionPolicy]] = {
    "order": AdmissionPolicy(late=None, queue_timeout="ttft", order="deadline"),
    "full": AdmissionPolicy(late="reject", queue_timeout="ttft", order="deadline"),
}
"""What the engine does about late requests, with these layers; below them it is first come, first served."""


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


Make = Callable[[SimulatedEngine, SLO], Controller]


def _registered(name: str) -> Make:
    def make(engine: SimulatedEngine, slo: SLO) -> Controller:
        return CONTROLLERS[name](slo, engine.knobs, engine.kv_tokens, engine.block_size)

    return make


def _attach(make: Make, layer: Layer, engine: SimulatedEngine, slo: SLO) -> Control:
    made = make(engine, slo)
    chosen = KnobsOnly(made) if layer == "knobs" else made
    return control(engine, slo=slo, controller=chosen, admission=POLICIES.get(layer))


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


def _controlled(
    base: str, about: str, group: str, make: Make, layers: tuple[Layer, ...], named: Layer
) -> list[Contender]:
    def driver(layer: Layer, schedule: tuple[Knobs, ...]) -> Driver:
        return Driver(attach=partial(_attach, make, layer))

    return _layers(base, about, group, {layer: partial(driver, layer) for layer in layers}, named)


def _rival(name: str) -> list[Contender]:
    """The bare name stands for knobs and, where it has them, budgets for steps."""
    budgets = name in _BUDGETED
    layers: tuple[Layer, ...] = ("knobs", "budget", "order", "full") if budgets else ("knobs", "order", "full")
    return _controlled(name, f"the {name} controller", "rivals", _registered(name), layers, layers[budgets])


STATIC, STATIC_REJECT, STATIC_ORDER, STATIC_FULL = "static", "static-reject", "static-order", "static-full"
OURS = "predictive"
RIVALS = tuple(name for name in CONTROLLERS if name not in (OURS, "static"))
_BUDGETED = ("aimd", "bisection")
"""Rivals whose budget for a step is not always the knob."""

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
        *(contender for name in RIVALS for contender in _rival(name)),
        *_controlled(
            OURS, "the predictive controller", "full", _registered(OURS), ("knobs", "budget", "order", "full"), "full"
        ),
    )
}  # fmt: skip
CONTENDERS["predictive-knobs"] = CONTENDERS["predictive-knobs"]._replace(group="knobs")  # it has a column as well
REPORTED = tuple(name for name, contender in CONTENDERS.items() if contender.base != STATIC)
COLUMNS = tuple(name for name in REPORTED if CONTENDERS[name].group)
"""Those of the tables by scenario; the others are in the tables of layers alone."""
