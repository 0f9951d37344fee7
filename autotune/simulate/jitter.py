"""Step times that scatter as served ones did: factors for one step after the other, drawn before the simulation begins."""

from __future__ import annotations

import math
import random
from functools import lru_cache
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
