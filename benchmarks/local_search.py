"""The best fixed setting between those of a grid.

A grid of powers of two misses what lies between, and a controller may choose any number: who is compared with the best of a grid
alone is ahead by what the grid lacks. So a search in a grid ends with a local search from the best that it found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from runtime.knobs import Knobs

BUDGETS: Final = (0.75, 0.875, 1.125, 1.25, 1.5)
BATCHES: Final = (0.75, 1.25, 1.5)
KEPT: Final = 2
STEPS: Final = (BUDGETS, BATCHES, KEPT)
"""The constants that a finding depends on: shares of a token budget and of the sequences at once that are tried, and how many of
those that are better at first are judged in full."""

Judge = Callable[[Sequence[Knobs]], Sequence[float]]
"""How good each of some settings is."""


def local_search(start: Knobs, most: Knobs, at_first: Judge, in_full: Judge) -> Knobs:
    """The best setting that is found from ``start``. Those beside it are judged ``at_first``, the likeliest of those that are
    better ``in_full``, and so on from the best of these, until none is better. ``most``: bounds of the knobs."""
    best = start
    while True:
        beside = _beside(best, most)
        bar, *scores = at_first([best, *beside])
        better = sorted((-score, n) for n, score in enumerate(scores) if score > bar)
        tried = [best, *(beside[n] for _, n in better[:KEPT])]
        judged = in_full(tried)
        found = tried[max(range(len(tried)), key=lambda n: judged[n])]
        if found == best:
            return best
        best = found


def _beside(knobs: Knobs, most: Knobs) -> list[Knobs]:
    """The settings that are tried from there. A chunk that is the whole budget stays so."""
    found = []
    for share in BUDGETS:
        budget = max(1, min(round(share * knobs.token_budget), most.token_budget))
        chunk = budget if knobs.chunk_size >= knobs.token_budget else min(knobs.chunk_size, budget)
        found.append(knobs.with_(token_budget=budget, chunk_size=chunk))
    for share in BATCHES:
        found.append(knobs.with_(max_batch_size=max(1, min(round(share * knobs.max_batch_size), most.max_batch_size))))
    return [cell for cell in dict.fromkeys(found) if cell != knobs]
