"""Whether the starting knobs serve better than those decided on, by the requests that each of them served.

Where knobs alone hold, a wrong decision costs goodput until something tells, and no model of a step can: what it leaves out is
what it is wrong about. So requests are counted by the knobs that they came under, and the shares that met every feasible target
are compared. The starting knobs come back when theirs is higher by more than chance (``SURE`` standard errors). They are left
again when theirs turns out lower, or after a pause, to see whether that is still so. What waits for them then is not held against
the others: requests do not count for as long as the start was in force, up to ``TRIAL_S``. Others that were left within
``SHORT_S`` of the first decision served an engine that was empty: that theirs is higher says nothing, unless hardly any request
(``HOPELESS``) is in time under the start. The pause doubles each time, but for trials that no prediction speaks for; where they
serve most requests in time (``KEPT``), and others served fewer, by chance or not, it is ``LONGEST_PAUSE_S``. New targets make
what was seen worthless, not the knobs: starting knobs that hold do so for ``TRIAL_S`` more, and on while nearly all requests
are in time (``FINE``).

Where it is not known how the starting knobs would do, and requests miss their targets, they are tried: at once where they are
predicted to do better, and otherwise for ``TRIAL_S`` where few requests have been in time for as long (``tried_below``), for the
prediction may be wrong.

Units: seconds. Failure mode: a load that changes while either serves. Then the wrong one is tried for as long as ``FEW``
requests take, or the starting knobs hold for up to ``LONGEST_PAUSE_S`` where others would serve better by now.
"""

from __future__ import annotations

import math
from collections import deque

from autotune.control.controllers.predictive import constants


class StartComparison:
    """See the module."""

    def __init__(self) -> None:
        # whether requests under the starting knobs met their targets
        self._starts: deque[bool] = deque(maxlen=constants.STARTS)
        self._ours: deque[bool] = deque(maxlen=constants.OURS)
        self.at_start = True
        """Whether the starting knobs were decided on last."""
        self._since = -math.inf  # when the knobs in force came
        self._begun = math.inf  # the first decision
        self._holds = False
        self._pause, self._until, self._known_until = constants.PAUSE_S, -math.inf, math.inf
        self._lost = False  # whether the starting knobs were last left because they served worse
        self._settle = constants.SETTLE_S  # after the latest change, in which requests do not count

    def forget(self) -> None:
        """Nothing is known of either any more (the targets are others, or somebody else set the knobs). The starting knobs, if
        they hold, are on trial from the next decision on."""
        self._starts.clear()
        self._ours.clear()
        self._since, self._pause, self._settle = math.inf, constants.PAUSE_S, constants.SETTLE_S

    def saw(self, arrival: float, met: bool) -> None:
        """A request that arrived then has ended."""
        if arrival >= self._since + self._settle:
            (self._starts if self.at_start else self._ours).append(met)

    def holds(self, now: float, tried_below: float) -> bool:
        """Whether the starting knobs are to hold. ``tried_below``: the share of requests in time below which they are tried where
        nothing is known of them, ``GOOD`` where they are predicted to do better."""
        if self._since == math.inf:
            self._since, self._until = now, now + constants.TRIAL_S
        in_force = now - self._since
        if in_force < constants.LEAST_S:
            return self._holds
        if not self.at_start and in_force > constants.STALE_S:
            self._starts.clear()
        self._lost = False
        if not self._holds:
            unsaid = len(self._starts) < constants.FEW <= len(self._ours)
            worth = tried_below >= constants.GOOD
            untried = unsaid and share(self._ours) < tried_below and (worth or in_force >= constants.TRIAL_S)
            if not self.at_start and (untried or worse(self._ours, self._starts)):
                pause = constants.TRIAL_S
                if worth or not untried:
                    pause, self._pause = self._pause, min(2 * self._pause, constants.LONGEST_PAUSE_S)
                self._holds, self._until, self._known_until = True, now + pause, now + constants.LONGEST_PAUSE_S
        else:
            early = self._since < self._begun + constants.SHORT_S and share(self._starts) >= constants.HOPELESS
            half = in_force >= constants.SHORT_S and share(self._starts) < share(self._ours) / 2
            tried = not early and (half or in_force >= constants.TRIAL_S)
            self._lost = tried and worse(self._starts, self._ours, constants.CERTAIN)
            due = now >= self._until and len(self._starts) >= constants.FEW and share(self._starts) < constants.FINE
            kept = share(self._starts) >= constants.KEPT and worse(self._ours, self._starts, errors=0.0)
            self._holds = not (self._lost or (due and not (kept and now < self._known_until)))
        return self._holds

    def decided(self, now: float, at_start: bool) -> None:
        """From now on the starting knobs are in force, or others."""
        self._begun = min(self._begun, now)
        if at_start != self.at_start:
            if self.at_start and now - self._begun < constants.SHORT_S:
                self._starts.clear()  # of an engine that was empty, where the shortest answers end first
            queued = min(now - self._since, constants.TRIAL_S) if self._lost else 0.0  # what it could not serve waits
            self._settle, self._lost = max(constants.SETTLE_S, queued), False
            self.at_start, self._since = at_start, now
            if not at_start:
                self._ours.clear()

    @property
    def attained(self) -> float:
        """Share of requests under other knobs than the starting ones that met their targets; 0 before any has ended."""
        return share(self._ours)

    @property
    def lately(self) -> float:
        """The same of the latest ``FEW``."""
        return share(deque(self._ours, constants.FEW))

    @property
    def said(self) -> str:
        """The shares, in words."""
        if not self._ours:
            return "nothing is known of other knobs any more: the starting knobs stay"
        if len(self._starts) < constants.FEW:
            return f"{share(self._ours):.0%} of requests met their targets: trying the starting knobs"
        start, ours = share(self._starts), share(self._ours)
        return f"{start:.0%} of requests met their targets under the starting knobs, {ours:.0%} under others"


def share(met: deque[bool]) -> float:
    return sum(met) / len(met) if met else 0.0


def worse(one: deque[bool], other: deque[bool], errors: float = constants.SURE) -> bool:
    """Whether fewer of ``one`` met their targets than of ``other``, by more than chance."""
    if min(len(one), len(other)) < constants.FEW:
        return False
    both = (sum(one) + sum(other)) / (len(one) + len(other))
    return share(other) - share(one) > errors * math.sqrt(both * (1 - both) * (1 / len(one) + 1 / len(other)))
