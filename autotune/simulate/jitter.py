"""Step times that scatter as served ones did: factors for one step after the other, drawn before the simulation begins."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
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


@lru_cache(maxsize=32)
def _lines(facts: JitterFacts, seed: int, each: float) -> tuple[list[float], list[float]]:
    """(seconds at which each stretch ends, what the line of each begins at), to be read only."""
    factors = jitter_factors(facts, seed)
    stretches = list(accumulate(factor * each for factor in factors))
    begins = (0.0, *stretches[:-1])
    offsets = [begin - k * each * factor for k, (begin, factor) in enumerate(zip(begins, factors, strict=True))]
    return stretches, offsets


class SlowStretches:
    """The same factors over time: how much longer than usual the machine takes for whatever it does then.

    The work of ``each`` seconds takes one factor times as long, and then the next one is in force. Steps are slow at the same
    times whatever they are, and what a stretch of work takes on average is the mean of the factors, however long its steps are.

    So time is a piecewise linear function of the work done. Work that begins where other work ended adds to that: what was done
    by the latest ends is kept, so steps one by one end when those of a run do, to the last bit.
    """

    def __init__(self, facts: JitterFacts, seed: int, each: float) -> None:
        self._factors, self._each = jitter_factors(facts, seed), each
        self._stretches, self._offsets = _lines(facts, seed, each)
        self._round_s, self._round_work, self._per_work = self._stretches[-1], FACTORS * each, 1 / each
        self._ends: list[float] = []
        self._works: list[float] = []  # done by then

    def end(self, now: float, seconds: float) -> float:
        """When that which usually takes ``seconds`` is done, if it begins at ``now``."""
        work = self._done(now) + seconds
        found = self._time(work)
        self._ends, self._works = [found], [work]
        return found

    def ends(self, now: float, seconds: Sequence[float]) -> list[float]:
        """The same of one thing after the other."""
        works = list(accumulate(seconds, initial=self._done(now)))
        del works[0]
        per_work, round_work = self._per_work, self._round_work
        rounds = int(works[0] * per_work) // FACTORS
        if int(works[-1] * per_work) // FACTORS > rounds:
            found = list(map(self._time, works))
        else:
            base, before, first = rounds * self._round_s, rounds * round_work, rounds * FACTORS
            factors, offsets = self._factors, self._offsets
            found = [
                base + (offsets[place] + (work - before) * factors[place])
                for work in works
                for place in (int(work * per_work) - first,)
            ]
        self._ends, self._works = found, works
        return found

    def _time(self, work: float) -> float:
        """When so much is done. As in :meth:`ends`, operation by operation."""
        rounds, place = divmod(int(work * self._per_work), FACTORS)
        return rounds * self._round_s + (
            self._offsets[place] + (work - rounds * self._round_work) * self._factors[place]
        )

    def _done(self, now: float) -> float:
        """The work of the time until ``now``."""
        ends = self._ends
        place = bisect_left(ends, now)
        if place < len(ends) and ends[place] == now:
            return self._works[place]
        rounds, at = divmod(now, self._round_s)
        place = min(bisect_right(self._stretches, at), FACTORS - 1)
        return rounds * self._round_work + (at - self._offsets[place]) / self._factors[place]
