"""Who takes part beside the fixed settings. Every controller starts cold, from vLLM's defaults, in every turn."""

from __future__ import annotations

from functools import partial

from autotune.bench.contenders import Contender, short
from autotune.engines.defaults import VLLM_DEFAULTS
from benchmarks.controller.constants import constants_of
from benchmarks.controller.contenders import ALGORITHMS, LAYERS, OURS, POLICIES, STACK, Layer, attach
from runtime.knobs import KnobLimits, Knobs

RIVALS = ("aimd", "bisection")
"""Those that take part live: the strongest of the products' algorithms in simulation."""


def ours(limits: KnobLimits) -> Contender:
    """The predictive controller with all it has: knobs, budgets of single steps, early rejection, deadline order."""
    return Contender("control", limits.clamp(VLLM_DEFAULTS), control=True, rejects=True)


def ours_knobs_only(limits: KnobLimits) -> Contender:
    """The same turning knobs and nothing else."""
    return layer_of(OURS, "knobs", limits, "knobs only")


def layer_of(base: str, layer: Layer, limits: KnobLimits, name: str = "") -> Contender:
    """What sets knobs in the simulated benchmark under this name, with the layers up to ``layer`` and the same constants."""
    made = partial(attach, ALGORITHMS[base], constants_of(base, layer), layer, POLICIES.get(layer))
    return Contender(name or f"{base} {LAYERS[layer]}", limits.clamp(VLLM_DEFAULTS), control=True, attach=made)


def layers(limits: KnobLimits) -> list[Contender]:
    """Everybody with one layer more at a time, but for ours with all, which takes part anyway."""
    mine = [layer_of(OURS, layer, limits, "knobs only" if layer == "knobs" else "") for layer in STACK[:-1]]
    theirs = [layer_of(rival, layer, limits) for rival in RIVALS for layer in ("knobs", "full")]
    return [*mine, *theirs, admitted(limits.clamp(VLLM_DEFAULTS), "defaults with admission")]


def admitted(knobs: Knobs, name: str = "") -> Contender:
    """A fixed setting with our early rejection and deadline order, and nothing else of ours."""
    return Contender(name or f"{short(knobs)} with admission", knobs, control=True, controller="static", rejects=True)
