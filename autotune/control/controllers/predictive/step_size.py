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
from collections.abc import Callable, Mapping

from autotune.control.controllers.galloping import largest
from autotune.control.controllers.running_statistics import Recent

_BUSY = 0.9  # share of the time that may go into steps with prompts
_LONG = 1.0  # what a second of a step beyond the target counts beside a second of the mean gap
_GROWTH = 1.19  # from one size tried to the next: four for a factor of two
_SHARE = 0.75  # of the target for first tokens that a long prompt may take to compute
_LEAST = 32


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
        if demand * took < _BUSY * (n - decodes):
            gap = alone / (1 - demand * (took - alone) / (n - decodes)) if decodes else 0.0
            cost = gap + _LONG * max(0.0, took - target)
            if 0 <= gap <= target and cost < least:
                best, least = n, cost
        size *= _GROWTH
    return best, within


def _rate(seconds: Callable[[int], float], decodes: int, n: int) -> float:
    """Prompt tokens a second of steps of ``n`` tokens."""
    if n <= decodes:
        return 0.0
    took = seconds(n)
    return (n - decodes) / took if took > 0 else math.inf


class Chunks:
    """How much of one prompt a step may hold: all that it has room for, unless a prompt with time would hold up those without.

    Formula. Prompts are computed in the order of arrival, so a prompt whose first token may come late can precede one whose may
    not. With q the 95% quantile of a class's prompts, F its target for first tokens and T the time of a step, q·T/(¾·F) tokens
    a step are enough for its long prompts to be in time, with a quarter for the queue. The chunk is the most that any class
    served needs. Where all have the same target, what short prompts gain long ones lose, and more where the machine is busy:
    then the chunk is the whole step.

    Units: tokens, seconds. Failure mode: long prompts of the class in a hurry itself; they get what they need, and others wait.

    Follows the prompts of each class. The names of classes are few.
    """

    __slots__ = ("_prompts",)

    def __init__(self) -> None:
        self._prompts: dict[str, Recent] = {}

    def saw(self, request_class: str, tokens: int) -> None:
        """A request of this class had so many prompt tokens to compute."""
        if request_class not in self._prompts:
            self._prompts[request_class] = Recent(128)
        self._prompts[request_class].add(tokens)

    def size(self, firsts: Mapping[str, float], seconds: float, most: int) -> int:
        """The chunk in steps of ``seconds`` that hold ``most`` tokens; ``firsts``: the target of each class served, s."""
        if len(set(firsts.values())) < 2 or not all(name in self._prompts for name in firsts):
            return most
        needed = max(
            0.0 if first == math.inf else self._prompts[name].quantile(0.95) * seconds / (_SHARE * first)
            for name, first in firsts.items()
        )
        return min(most, max(_LEAST, int(min(needed, most))))
