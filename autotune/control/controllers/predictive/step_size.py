"""How many tokens a step may hold where steps within the target do not carry the load, and how many of one prompt.

Formula. With t(n) the predicted time of a step of n tokens, D of them decodes, τ the target and N the demand in prompt tokens a
second:

- the largest n with t(n) ≤ τ: however busy the engine is, nobody's mean step is longer. Where knobs alone hold, the smallest
  that computes prompts nearly as fast (:func:`as_fast`): who comes next waits for the step in flight;
- unless steps of that size cannot compute N, which happens where any prompt at all makes a step long (experts that all have to
  be read), and where the machine is overloaded. There, prompts may come together in few large steps. A share
  f = N·t(n)/(n − D) of the time goes into those, decodes alone have the rest, and a token's mean gap is
  h = t(D) / (1 − N·(t(n) − t(D))/(n − D)). Of the sizes with f below 0.9 and h of at most τ, the one with the least
  h + l·(t(n) − τ): the mean is the same for whole ranges of sizes, and a short answer meets few steps of either kind. l is 1
  where knobs alone hold. Where each step has a budget of its own, the slack of all decodes pays for a long one, and l is less;
- and only if more requests are in time than in steps within the target (:mod:`.attainment_model`). None is looked for where
  decodes alone take nearly all of τ (``BUSY``): no size leaves a mean gap of at most τ then.

Where τ follows from an E2E target, it is what long answers need, and short ones have far more. The size is then that with which
most requests are in time by the same model, τ's or larger (:func:`most_in_time`), and no step is held to τ.

Units: tokens, seconds. Failure mode: steps within the target that are thought to carry less than they do, for a demand that
was a burst; what was lost by it is over within the memory of the demand.

How many of one prompt: see :class:`Chunks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from autotune.control.controllers.parts.galloping import largest
from autotune.control.controllers.parts.running_statistics import Recent
from autotune.control.controllers.predictive import constants


def full_step(
    seconds: Callable[[int], float],
    decodes: int,
    target: float,
    demand: float,
    top: int,
    guess: int,
    attains: Callable[[int], float] | None = None,
    long: float = constants.LONG,
) -> tuple[int, int]:
    """The tokens of a step, at most ``top``, and those of the largest step within the target; ``guess`` is about the latter.

    ``attains``: the share of requests in time where steps hold so many tokens, not a number where it is not known; None: it does
    not matter. ``long``: l of the module.
    """
    within = largest(lambda n: seconds(n) <= target, top, guess)
    carried = _rate(seconds, decodes, within)
    alone = seconds(decodes) if decodes else 0.0
    if demand <= 0 or carried >= demand or alone > constants.BUSY * target:
        return within, within
    best, least = within, math.inf
    size = float(max(within, decodes + 32))
    while (n := int(size)) <= top:
        took = seconds(n)
        if demand * took < constants.BUSY * (n - decodes):
            gap = alone / (1 - demand * (took - alone) / (n - decodes)) if decodes else 0.0
            cost = gap + long * max(0.0, took - target)
            if 0 <= gap <= target and cost < least:
                best, least = n, cost
        size *= constants.GROWTH
    if best > within and attains is not None and attains(best) <= attains(within):
        best = within
    return best, within


def most_in_time(attains: Callable[[int], float], within: int, top: int) -> int:
    """Of ``within`` tokens, twice as many and so on up to ``top``: the smallest size that has as many requests in time as any,
    but for ``ALIKE`` of all. ``attains``: the share of them."""
    sizes, shares = [within], [attains(within)]
    while sizes[-1] < top and shares[-1] < 1 - constants.ALIKE:
        sizes.append(min(2 * sizes[-1], top))
        shares.append(attains(sizes[-1]))
    enough = max(shares) - constants.ALIKE
    return next(size for size, share in zip(sizes, shares, strict=True) if share >= enough)


def as_fast(seconds: Callable[[int], float], decodes: int, most: int) -> int:
    """The smallest step, of ``WORTHWHILE`` prompt tokens at least, that computes prompts nearly as fast as one of ``most``."""
    size = float(decodes + constants.WORTHWHILE)
    enough = constants.AS_FAST * _rate(seconds, decodes, most)
    while size < most and _rate(seconds, decodes, int(size)) < enough:
        size *= constants.GROWTH
    return min(most, int(size))


def _rate(seconds: Callable[[int], float], decodes: int, n: int) -> float:
    """Prompt tokens a second of steps of ``n`` tokens."""
    if n <= decodes:
        return 0.0
    took = seconds(n)
    return (n - decodes) / took if took > 0 else math.inf


class Chunks:
    """How many tokens of one prompt a step may hold, where the engine computes prompts as they come: all that it has room for,
    unless a prompt that has time would hold up those that have none.

    Formula. In steps of T seconds with room for P prompt tokens, a prompt of q tokens keeps those behind it waiting for q·T/P.
    With F the tightest target for first tokens and q the 95% quantile of the prompts of classes whose target is looser, they
    are cut where q·T/P > F/2: two such prompts in a row, and who comes behind them is late. Then a step holds of one prompt what
    the long ones of each class need to be in time, q·T/(¾·F) with q and F of that class; a quarter is left for the queue. Nothing
    is cut while demand is above P/T: the queue grows then, and prompts that are computed side by side are all late, where one
    after the other some are in time.

    Units: tokens, seconds. Failure modes: long prompts of the class in a hurry itself; they get what they need, and others wait.
    Machines on which any prompt makes a step long; more steps have some.

    Follows the prompts of each class. The names of classes are few.
    """

    __slots__ = ("_prompts",)

    def __init__(self) -> None:
        self._prompts: dict[str, Recent] = {}

    def saw(self, request_class: str, tokens: int) -> None:
        """A request of this class had so many prompt tokens to compute."""
        if request_class not in self._prompts:
            self._prompts[request_class] = Recent(constants.WINDOW)
        self._prompts[request_class].add(tokens)

    def size(self, firsts: Mapping[str, float], seconds: float, capacity: int, demand: float, most: int) -> int:
        """At most ``most`` tokens, in steps of ``seconds`` with room for ``capacity`` prompt tokens.

        ``firsts``: seconds until a first token that each class served has, inf where it has all the time.
        ``demand``: prompt tokens a second.
        """
        tightest = min(firsts.values(), default=math.inf)
        loose = [name for name, first in firsts.items() if first > tightest]
        if not loose or demand * seconds > capacity or not all(name in self._prompts for name in firsts):
            return most
        long = {name: self._prompts[name].quantile(0.95) for name in firsts}
        if max(long[name] for name in loose) * seconds <= constants.HOLDS_UP * tightest * capacity:
            return most
        needed = max(long[name] * seconds / (constants.COMPUTED * first) for name, first in firsts.items())
        return most if needed >= capacity else min(most, max(constants.FLOOR, math.ceil(needed)))
