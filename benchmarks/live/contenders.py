"""Who takes part beside the fixed settings. Every controller starts cold, from vLLM's defaults, in every turn."""

from __future__ import annotations

from autotune import control
from autotune.bench.contenders import Contender, short
from autotune.control.controllers.registry import CONTROLLERS
from autotune.control.loop import Control
from autotune.engines import Engine
from autotune.engines.defaults import VLLM_DEFAULTS
from benchmarks.controller.contenders import KnobsOnly
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO


def ours(limits: KnobLimits) -> Contender:
    """The predictive controller with all it has: knobs, budgets of single steps, early rejection, deadline order."""
    return Contender("control", limits.clamp(VLLM_DEFAULTS), control=True, attach=_full)


def ours_knobs_only(limits: KnobLimits) -> Contender:
    """The same turning knobs and nothing else."""
    return Contender("knobs only", limits.clamp(VLLM_DEFAULTS), control=True, attach=_knobs_only)


def admitted(knobs: Knobs) -> Contender:
    """A fixed setting with our early rejection and deadline order, and nothing else of ours."""
    return Contender(f"{short(knobs)} with admission", knobs, control=True, attach=_admitted)


def _full(engine: Engine, slo: SLO) -> Control:
    return control(engine, slo=slo, admission=True)


def _knobs_only(engine: Engine, slo: SLO) -> Control:
    made = CONTROLLERS["predictive"](slo, engine.knobs, engine.facts.kv_tokens, engine.facts.block_size)
    return control(engine, slo=slo, controller=KnobsOnly(made))


def _admitted(engine: Engine, slo: SLO) -> Control:
    return control(engine, slo=slo, controller="static", admission=True)
