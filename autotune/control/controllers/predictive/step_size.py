"""How many tokens a step may hold where the knobs are all there is: no budget follows the slack of each step.

Formula. With t(n) the predicted time of a step of n tokens, D of them decodes, τ the target and N the demand in prompt tokens a
second:

- the largest n with t(n) ≤ τ: however busy the engine is, nobody's mean step is longer;
- unless steps of that size cannot compute N, which happens where any prompt at all makes a step long (experts that all have to
  be read) and not where the machine is overloaded. There, prompts had better come together in few large steps. A share
  f = N·t(n)/(n − D) of the time goes into those, decodes alone have the rest, and a token's mean gap is
  t(D) / (1 − N·(t(n) − t(D))/(n − D)). Of the sizes with f below 0.9 and a gap of at most τ, the one with the least
  gap + (t(n) − τ): the mean is the same for whole ranges of sizes, and a short answer meets few steps of either kind.

Units: tokens, seconds. Failure mode: short answers that meet more large steps than their share of the time says; the gain then
takes back some of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autotune.control.controllers.galloping import largest
from autotune.control.controllers.predictive import constants


def full_step(
    seconds: Callable[[int], float], decodes: int, target: float, demand: float, top: int, guess: int
) -> tuple[int, int]:
    """The tokens of a step, at most ``top``, and those of the largest step within the target; ``guess`` is about the latter."""
    within = largest(lambda n: seconds(n) <= target, top, guess)
    if demand <= 0 or _rate(seconds, decodes, within) >= demand:
        return within, within
    alone = seconds(decodes) if decodes else 0.0
    best, least = within, math.inf
    size = float(max(within, decodes + 32))
    while (n := int(size)) <= top:
        took = seconds(n)
        if demand * took < constants.BUSY * (n - decodes):
            gap = alone / (1 - demand * (took - alone) / (n - decodes)) if decodes else 0.0
            cost = gap + constants.LONG * max(0.0, took - target)
            if 0 <= gap <= target and cost < least:
                best, least = n, cost
        size *= constants.GROWTH
    return best, within


def _rate(seconds: Callable[[int], float], decodes: int, n: int) -> float:
    """Prompt tokens a second of steps of ``n`` tokens."""
    if n <= decodes:
        return 0.0
    took = seconds(n)
    return (n - decodes) / took if took > 0 else math.inf
