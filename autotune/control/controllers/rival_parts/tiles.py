"""Whole tiles (:mod:`autotune.control.controllers.parts.tiles`) of the token budget, as a knob and of one step."""

from __future__ import annotations

from autotune.control.controllers.parts.tiles import whole_tiles
from runtime.knobs import KnobLimits, Knobs
from runtime.tunable import TILE, SchedulerView


def in_whole_tiles(wanted: Knobs, knobs: Knobs, limits: KnobLimits, most: int = TILE) -> Knobs:
    """``wanted`` with a ``token_budget`` of whole tiles of at most ``most`` tokens, unless it is that in force (``knobs``) or all
    that ``limits`` allow."""
    if wanted.token_budget in (knobs.token_budget, limits.token_budget):
        return wanted
    budget = whole_tiles(wanted.token_budget, 0, most)
    return wanted.with_(token_budget=budget, chunk_size=min(wanted.chunk_size, budget))


def step_of_whole_tiles(tokens: int, view: SchedulerView, most: int = TILE) -> int:
    """At most ``tokens`` of the step that ``view`` is planned for, in whole tiles of at most ``most`` tokens; all that the knobs
    allow, if that is fewer."""
    top = view.knobs.token_budget
    return top if tokens >= top else whole_tiles(tokens, view.decoding, most)
