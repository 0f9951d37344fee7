"""Step times that scatter as served ones did: factors for one step after the other, drawn before the simulation begins."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import Final

from autotune.profile.parts import JitterFacts

FACTORS: Final = 4096
"""Drawn at once, each quantile as often as any other, and then gone through again: so many steps take what as many without
jitter do."""


@lru_cache(maxsize=64)
def jitter_factors(facts: JitterFacts, seed: int) -> tuple[float, ...]:
    """:data:`FACTORS` factors for steps to come, in order, as ``facts`` say."""
    dice = random.Random(seed)
    gauss, memory = dice.gauss, facts.memory
    slow, new = math.sqrt(facts.persistent), math.sqrt(1 - facts.persistent)
    step = math.sqrt(1 - memory * memory)
    state, scores = gauss(0, 1), []
    for _ in range(FACTORS):
        scores.append(slow * state + new * gauss(0, 1))
        state = memory * state + step * gauss(0, 1)
    found, levels = [0.0] * FACTORS, facts.quantiles
    for rank, at in enumerate(sorted(range(FACTORS), key=scores.__getitem__)):
        found[at] = levels[rank * len(levels) // FACTORS]
    return tuple(found)


class SlowStretches:
    """The same factors over time: how much longer than usual the machine takes for whatever it does then.

    The work of ``each`` seconds takes one factor times as long, and then the next one is in force. Steps are slow at the same
    times whatever they are, and what a stretch of work takes on average is the mean of the factors, however long its steps are.
    """

    def __init__(self, facts: JitterFacts, seed: int, each: float) -> None:
        self._factors, self._each = jitter_factors(facts, seed), each
        self._ends = list(accumulate(factor * each for factor in self._factors))  # seconds

    def end(self, now: float, seconds: float) -> float:
        """When that which usually takes ``seconds`` is done, if it begins at ``now``."""
        factors, each, ends = self._factors, self._each, self._ends
        round_s = ends[-1]
        rounds, at = divmod(now, round_s)
        place = bisect_right(ends, at)
        if place == FACTORS:  # by rounding
            place, rounds, at = 0, rounds + 1, 0.0
        left, factor = seconds, factors[place]
        if left * factor < (here := ends[place] - at):
            return now + left * factor
        left -= here / factor  # the rest of this one
        whole, left = divmod(left, each)
        more, place = divmod(place + 1 + int(whole), FACTORS)
        begin = ends[place - 1] if place else 0.0
        return (rounds + more) * round_s + begin + left * factors[place]
