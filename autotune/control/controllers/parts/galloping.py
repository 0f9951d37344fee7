"""The largest number that fits, found from a guess that is mostly near it."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], top: int, guess: int) -> int:
    """The largest number from 0 to ``top`` for which ``fits``, which must hold up to some number and not above it.

    0 is taken to fit and is not asked for. Costs twice the logarithm of how far ``guess`` is off.
    """
    low, high, reach = 0, top + 1, 1  # low fits, high does not or is not allowed
    guess = max(1, min(guess, top))
    if fits(guess):
        low = guess
        while low + reach < high and fits(low + reach):
            low, reach = low + reach, 2 * reach
        high = min(high, low + reach)
    else:
        high = guess
        while high - reach > 0 and not fits(high - reach):
            high, reach = high - reach, 2 * reach
        low = max(0, high - reach)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
