"""Who takes part, in four groups: fixed settings, other tools' algorithms, ours turning knobs only, and ours with all it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from autotune import control
from autotune.control.controllers.protocol import Budgeted, Controller
from autotune.control.controllers.registry import CONTROLLERS
from autotune.control.loop import Control
from autotune.simulate import SimulatedEngine
from benchmarks.controller.run import Driver
from benchmarks.controller.scenarios import COLD
from runtime.knobs import Knobs
from runtime.slo import SLO
from runtime.tunable import SchedulerView

GROUPS = ("fixed", "rivals", "knobs", "full")


class Contender(NamedTuple):
    """``driver`` makes what takes part in one run, from the fixed knobs of each phase if it has any."""

    name: str
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


def _fixed(name: str, about: str, knobs: Knobs, *, reject: bool = False) -> Contender:
    return Contender(name, "fixed", about, lambda schedule: Driver(schedule or (knobs,), reject=reject))


def _controlled(name: str, group: str, about: str) -> Contender:
    def attach(engine: SimulatedEngine, slo: SLO) -> Control:
        if group == "full":
            return control(engine, slo=slo, controller=name, admission=True)
        if group == "rivals":
            return control(engine, slo=slo, controller=name)
        made = CONTROLLERS[name.removesuffix("-knobs")](slo, engine.knobs, engine.kv_tokens, engine.block_size)
        return control(engine, slo=slo, controller=KnobsOnly(made))

    return Contender(name, group, about, lambda schedule: Driver(attach=attach))


STATIC, STATIC_REJECT = "static", "static-reject"
RIVALS = tuple(name for name in CONTROLLERS if name not in ("predictive", "static"))

CONTENDERS = {
    contender.name: contender
    for contender in (
        _fixed("vllm-1024", "vLLM's defaults for a large GPU: 1024 sequences, 8192 tokens", COLD),
        _fixed("vllm-512", "512 sequences, 2048 tokens", Knobs(512, 0, 2048, 2048)),
        _fixed(STATIC, "any fixed setting: the oracle's own", COLD),
        _fixed(STATIC_REJECT, "the same with early rejection", COLD, reject=True),
        *(_controlled(name, "rivals", f"the {name} controller") for name in RIVALS),
        _controlled("predictive-knobs", "knobs", "the predictive controller, turning knobs only"),
        _controlled("predictive", "full", "the same with budgets for steps, early rejection and deadline order"),
    )
}
REPORTED = tuple(name for name in CONTENDERS if name not in (STATIC, STATIC_REJECT))
