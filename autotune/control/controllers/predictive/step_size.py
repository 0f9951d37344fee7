"""How many tokens a step may hold where steps within the target do not carry the load.

Formula. With t(n) the predicted time of a step of n tokens, D of them decodes, τ the target and N the demand in prompt tokens a
second:

- the largest n with t(n) ≤ τ: however busy the engine is, nobody's mean step is longer;
- unless steps of that size cannot compute N, which happens where any prompt at all makes a step long (experts that all have to
  be read), and where the machine is overloaded. There, prompts may come together in few large steps. A share
  f = N·t(n)/(n − D) of the time goes into those, decodes alone have the rest, and a token's mean gap is
  h = t(D) / (1 − N·(t(n) − t(D))/(n − D)). Of the sizes with f below 0.9 and h of at most τ, the one with the least
  h + (t(n) − τ): the mean is the same for whole ranges of sizes, and a short answer meets few steps of either kind;
- and only if more answers are in time than of steps within the target. An answer of g gaps meets ⌈x⌉ or ⌊x⌋ of the large
  steps, x = g·h·N/(n − D), the more of them with probability x − ⌊x⌋, and is late where m of them take longer than its target
  leaves: m·(t(n) − t(D)) > g·(τ − t(D)). Steps within the target answer the share of N that they can compute where late
  requests leave the queue, and none in time where it only grows.

Units: tokens, seconds. Failure mode: steps within the target that are thought to carry less than they do, for a demand that
was a burst; what was lost by it is over within the memory of the demand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autotune.control.controllers.galloping import largest
from autotune.control.controllers.predictive import constants


def full_step(
    seconds: Callable[[int], float],
    decodes: int,
    target: float,
    demand: float,
    top: int,
    guess: int,
    gaps: Sequence[float] = (),
) -> tuple[int, int]:
    """The tokens of a step, at most ``top``, and those of the largest step within the target; ``guess`` is about the latter.

    ``gaps``: of answers as they come, one less than their tokens, where late requests leave the queue; none where they stay.
    """
    within = largest(lambda n: seconds(n) <= target, top, guess)
    carried = _rate(seconds, decodes, within)
    if demand <= 0 or carried >= demand:
        return within, within
    alone = seconds(decodes) if decodes else 0.0
    best, least, late = within, math.inf, 0.0
    size = float(max(within, decodes + 32))
    while (n := int(size)) <= top:
        took = seconds(n)
        if demand * took < constants.BUSY * (n - decodes):
            gap = alone / (1 - demand * (took - alone) / (n - decodes)) if decodes else 0.0
            cost = gap + constants.LONG * max(0.0, took - target)
            if 0 <= gap <= target and cost < least:
                best, least = n, cost
                late = _late(gaps, took - alone, target - alone, gap * demand / (n - decodes))
        size *= constants.GROWTH
    return (within if gaps and carried / demand > 1 - late else best), within


def _late(gaps: Sequence[float], longer: float, left: float, often: float) -> float:
    """The share of answers of so many ``gaps`` that are late where ``often`` large steps come with a gap, each ``longer`` by so
    many seconds than one that leaves ``left`` of the target."""
    late = 0.0
    for each in gaps:
        met = each * often
        late += (met - math.floor(met)) * (math.ceil(met) * longer > each * left)
    return late / max(1, len(gaps))


def _rate(seconds: Callable[[int], float], decodes: int, n: int) -> float:
    """Prompt tokens a second of steps of ``n`` tokens."""
    if n <= decodes:
        return 0.0
    took = seconds(n)
    return (n - decodes) / took if took > 0 else math.inf
