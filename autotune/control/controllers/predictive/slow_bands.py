"""Numbers of decodes at which steps take far longer than at fewer: what no smooth model of a step can say.

A graph that was never captured, or a kernel that falls off a cliff. Decodes are taken in bands of eight, and each band has a
running mean of the logarithm of actual/predicted. A band is slow if its steps take more than ``_SLOW`` times as much of what is
predicted as those of the bands below it do, and if that has been seen to begin, from one step to the next, whenever the
decodes came up from below, at least twice: a machine that has become slower as a whole does so once, and for all bands.

Failure mode: a region that is entered once and not left is not found; the model then learns it as if it were all.
"""

from __future__ import annotations

import math

_WIDTH = 8
_SLOW = math.log(2.5)
_ENTRIES = 2
_FEW = 4  # steps that say nothing yet
_RATE = 0.2  # weight of the latest step
_WEIGHT = 50  # steps that count of a band, at most
_AGE = 5000  # steps after which a band says nothing any more


class _Band:
    __slots__ = ("entries", "mean", "seen", "steps")

    def __init__(self) -> None:
        self.entries = self.steps = self.seen = 0
        self.mean = 0.0


class SlowBands:
    """Which bands are slow. See the module."""

    __slots__ = ("_bands", "_last", "_steps", "_suspects")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """The model is another one."""
        self._bands: dict[int, _Band] = {}
        self._suspects: set[int] = set()  # bands that were entered often enough
        self._last = -1, 0.0  # band and logarithm of the step before
        self._steps = 0

    def rescaled(self, by: float) -> None:
        """The model predicts ``by`` times as much as before."""
        for band in self._bands.values():
            band.mean -= math.log(by)
        self._last = self._last[0], self._last[1] - math.log(by)

    def saw(self, decodes: int, ratio: float) -> bool:
        """A step of so many decodes took ``ratio`` times what was predicted. Whether its band is slow."""
        self._steps += 1
        number = decodes // _WIDTH
        off = min(max(math.log(ratio), -4.0), 4.0)
        band = self._bands.get(number)
        if band is None:
            band = self._bands[number] = _Band()
        came_from, before = self._last
        if 0 <= came_from < number and off - before > _SLOW:
            band.entries += 1
            if band.entries >= _ENTRIES:
                self._suspects.add(number)
        band.steps, band.seen = band.steps + 1, self._steps
        band.mean += max(_RATE, 1 / band.steps) * (off - band.mean)
        self._last = number, off
        return bool(self._suspects) and self.slow(decodes)

    def slow(self, decodes: int) -> bool:
        """Whether steps of so many decodes are."""
        number = decodes // _WIDTH
        if number not in self._suspects:
            return False
        band = self._bands[number]
        if band.steps < _FEW or self._steps - band.seen > _AGE:
            return False
        below = [b for n, b in self._bands.items() if n < number and self._steps - b.seen <= _AGE]
        weight = sum(min(b.steps, _WEIGHT) for b in below)
        return weight >= _FEW and band.mean - sum(min(b.steps, _WEIGHT) * b.mean for b in below) / weight > _SLOW

    @property
    def room(self) -> float:
        """Decodes that stay below all slow bands; inf if there is none."""
        return min((n * _WIDTH - 1 for n in self._suspects if self.slow(n * _WIDTH)), default=math.inf)
