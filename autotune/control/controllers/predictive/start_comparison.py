"""Whether the starting knobs serve better than those decided on, by the requests that each of them served.

Where knobs alone hold, a wrong decision costs goodput until something tells, and no model of a step can: what it leaves out is
what it is wrong about. So requests are counted by the knobs that they came under, and the shares that met every feasible target
are compared. The starting knobs come back when theirs is higher by more than chance (``_SURE`` standard errors). They are left
again when theirs turns out lower, or after a pause, to see whether that is still so. The pause doubles each time.

Where it is not known how the starting knobs would do, and requests miss their targets, they are tried, where that is worth it
(``worth_trying``).

Units: seconds. Failure mode: a load that changes while either serves; then the wrong one is tried, for as long as ``_FEW``
requests take.
"""

from __future__ import annotations

import math
from collections import deque

# Tuned on the adversaries of benchmarks.controller and on seeds 1 to 3 of its matrix.
_STARTS, _OURS = 1024, 256  # requests that count
_FEW = 16  # requests that say nothing yet
_SETTLE_S = 1.0  # after a change: the queue is that of other knobs
_LEAST_S = 2.0  # in force: requests of the same moment fare alike
_SHORT_S, _TRIAL_S = 4.0, 10.0  # of the starting knobs, before they are left for half as good, and for worse
_STALE_S = 60.0  # after they were left, what is known of them is out of date
_SURE, _CERTAIN = 2.0, 3.0  # standard errors: to come back to the starting knobs, and to leave them
_GOOD = 0.9  # share of requests in time with which the starting knobs need not be tried
_FINE = 0.98  # and with which they are not left again
_PAUSE_S, _LONGEST_S = 30.0, 480.0


class StartComparison:
    """See the module."""

    __slots__ = ("_holds", "_ours", "_pause", "_since", "_starts", "_until", "at_start")

    def __init__(self) -> None:
        self._starts: deque[bool] = deque(maxlen=_STARTS)  # whether requests under the starting knobs met their targets
        self._ours: deque[bool] = deque(maxlen=_OURS)
        self.at_start = True
        """Whether the starting knobs were decided on last."""
        self._since = -math.inf  # when the knobs in force came
        self._holds = False
        self._pause, self._until = _PAUSE_S, -math.inf

    def saw(self, arrival: float, met: bool) -> None:
        """A request that arrived then has ended."""
        if arrival >= self._since + _SETTLE_S:
            (self._starts if self.at_start else self._ours).append(met)

    def holds(self, now: float, worth_trying: bool) -> bool:
        """Whether the starting knobs are to hold. ``worth_trying``: whether they may do better than those in force."""
        in_force = now - self._since
        if in_force < _LEAST_S:
            return self._holds
        if not self.at_start and in_force > _STALE_S:
            self._starts.clear()
        if not self._holds:
            untried = worth_trying and len(self._starts) < _FEW <= len(self._ours) and share(self._ours) < _GOOD
            if not self.at_start and (untried or worse(self._ours, self._starts)):
                self._holds, self._until = True, now + self._pause
                self._pause = min(2 * self._pause, _LONGEST_S)
        else:
            half = in_force >= _SHORT_S and share(self._starts) < share(self._ours) / 2
            lost = (half or in_force >= _TRIAL_S) and worse(self._starts, self._ours, _CERTAIN)
            paused = now >= self._until and len(self._starts) >= _FEW and share(self._starts) < _FINE
            self._holds = not (lost or paused)
        return self._holds

    def decided(self, now: float, at_start: bool) -> None:
        """From now on the starting knobs are in force, or others."""
        if at_start != self.at_start:
            self.at_start, self._since = at_start, now
            if not at_start:
                self._ours.clear()

    @property
    def said(self) -> str:
        """The shares, in words."""
        if len(self._starts) < _FEW:
            return f"{share(self._ours):.0%} of requests met their targets: trying the starting knobs"
        start, ours = share(self._starts), share(self._ours)
        return f"{start:.0%} of requests met their targets under the starting knobs, {ours:.0%} under others"


def share(met: deque[bool]) -> float:
    return sum(met) / len(met) if met else 0.0


def worse(one: deque[bool], other: deque[bool], errors: float = _SURE) -> bool:
    """Whether fewer of ``one`` met their targets than of ``other``, by more than chance."""
    if min(len(one), len(other)) < _FEW:
        return False
    both = (sum(one) + sum(other)) / (len(one) + len(other))
    return share(other) - share(one) > errors * math.sqrt(both * (1 - both) * (1 / len(one) + 1 / len(other)))
