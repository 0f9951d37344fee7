"""Who takes part beside the fixed settings. Every controller starts cold, from vLLM's defaults, in every turn."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from autotune.bench.contenders import Contender, short
from autotune.engines.defaults import VLLM_DEFAULTS
from benchmarks.controller.constants import Constants, constants_of
from benchmarks.controller.contenders import ALGORITHMS, LAYERS, OURS, POLICIES, RIVALS, STACK, Layer, attach
from runtime.knobs import KnobLimits, Knobs

CONTROL, KNOBS_ONLY, NO_POLICY, ADMITTED = "control", "knobs only", "defaults", "defaults with admission"
_LIVE: Mapping[str, tuple[Layer, ...]] = {
    "aimd": ("knobs", "full"), "bisection": ("knobs", "full"), "niyama": ("full", "relegate"),
}  # fmt: skip
"""The layers with which rivals take part; others do with all."""
_LENGTHS = 1 / 8
"""Of the lengths that the rivals' constants were chosen on, as a rule; 1/16 on slow machines. The fixed settings that serve best
hold 32 to 96 tokens a step here, fewer than those constants would ever allow."""
_IN_TOKENS: Mapping[str, tuple[str, ...]] = {
    "aimd": ("more", "floor"), "gradient": ("queue", "least"), "p-pas": ("cap",), "niyama": ("least",),
}  # fmt: skip
"""The constants of rivals that are tokens of a step."""
_PUBLISHED: Mapping[str, Constants] = {"niyama": {"least": 128}}
"""Those of them that nothing else was chosen for."""


def ours(limits: KnobLimits) -> Contender:
    """The predictive controller with all it has: knobs, budgets of single steps, early rejection, deadline order."""
    return Contender(CONTROL, limits.clamp(VLLM_DEFAULTS), control=True, rejects=True)


def ours_knobs_only(limits: KnobLimits) -> Contender:
    """The same turning knobs and nothing else."""
    return layer_of(OURS, "knobs", limits, KNOBS_ONLY)


def layer_of(base: str, layer: Layer, limits: KnobLimits, name: str = "") -> Contender:
    """What sets knobs in the simulated benchmark under this name, with the layers up to ``layer`` and the same constants. Only
    Niyama has no order of its own here: in deadline order, as all others (its α was tuned to 0.1 ms a token, nearly that).
    """
    made = partial(attach, ALGORITHMS[base], _fitting(base, constants_of(base, layer)), layer, POLICIES.get(layer))
    return Contender(name or f"{base} {LAYERS[layer]}", limits.clamp(VLLM_DEFAULTS), control=True, attach=made)


def _fitting(base: str, constants: Constants) -> Constants:
    """``constants`` with those that are tokens as much smaller as lengths are."""
    given = {**_PUBLISHED.get(base, {}), **constants}
    return {
        name: max(1, round(_LENGTHS * value)) if name in _IN_TOKENS.get(base, ()) else value
        for name, value in given.items()
    }


def layers(limits: KnobLimits) -> list[Contender]:
    """Everybody with one layer more at a time, but for ours with all, which takes part anyway. Of the rivals AIMD and bisection,
    the strongest with knobs alone in simulation, take part with those, too."""
    mine = [layer_of(OURS, layer, limits, KNOBS_ONLY if layer == "knobs" else "") for layer in STACK[:-1]]
    theirs = [layer_of(rival, layer, limits) for rival in RIVALS for layer in _LIVE.get(rival, ("full",))]
    return [*mine, *theirs, admitted(limits.clamp(VLLM_DEFAULTS), ADMITTED)]


def base_and_layer(name: str) -> tuple[str, Layer]:
    """Who the contender of that name is, and with which layer; a name of no layer's is with knobs alone."""
    if name in (CONTROL, KNOBS_ONLY):
        return OURS, "full" if name == CONTROL else "knobs"
    if name == ADMITTED:
        return NO_POLICY, "full"
    found = [(base, layer) for base in ALGORITHMS for layer in LAYERS if name == f"{base} {LAYERS[layer]}"]
    return found[0] if found else (name, "knobs")


def admitted(knobs: Knobs, name: str = "") -> Contender:
    """A fixed setting with our early rejection and deadline order, and nothing else of ours."""
    return Contender(name or f"{short(knobs)} with admission", knobs, control=True, controller="static", rejects=True)
