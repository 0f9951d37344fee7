"""Feedback: a gain on the step-time target, moved by the targets that requests met and missed. It corrects what no model knows.

Formula. Each request that ends, and has a TPOT target, moves the factor k by a share of itself (``RATE``):

- where each step has a budget of its own: up by 1 for a TTFT that was missed, else down by 1 for a TPOT. A request lost to its
  queue is as lost as one that decoded too slowly, and the budgets already hold every step to its target. Above 1 it goes up only
  where relief (below) exceeds ``HELPS``, and else down by 1 for a TPOT alone: where time is all tokens, longer steps serve no
  queue, and all who decode are late as well;
- where knobs alone hold: down by 1 for a TPOT missed, or an ITL. A TTFT missed moves it up by ``relief`` (0 to 1), how much
  faster, as a share, prompts would be computed in larger steps: where a step costs little beside its tokens, larger ones help
  no queue;
- either way, while load binds and nothing is missed below 1: up by 1 − attainment, at least a hundredth. So k settles where that
  share of the requests misses. With budgets it is up to a twentieth, by how much throughput shorter steps cost: a step 1% shorter
  computes e% fewer prompt tokens a second, e = relief ÷ (1 − relief), and where the TPOT of requests scatters by σ about it,
  what is gained and what is missed are level when about e·σ/2 miss (``SCATTER`` is σ/2). While the speed of the machine keeps
  changing, it is a twentieth: misses then say little of how long steps are.

While demand is what limits, k above 1 goes back to it, by e in ten seconds: what a burst taught is not true of what comes after.
k stays in 0.6 to 4; with budgets in 0.6 to 1 while late requests are rejected or time out. Where those leave, longer steps
save none of them, and make decodes late that hold the KV pool; where none ever leaves, a queue only shrinks by longer steps.
Which it is (``sheds``, ``keeps``) is said by the latest requests that were late.
Failure mode: a target that no setting meets. Then it sinks to its bound, which costs what a step of 0.6 of the target costs in
throughput, and no more.
"""

from __future__ import annotations

import math

from autotune.control.controllers.predictive import constants


def worth_missing(relief: float) -> float:
    """Share of requests that may miss a target before shorter steps gain more than they cost: e·σ/2 of the module."""
    return constants.SCATTER * relief / (1 - relief) if relief < 1 else math.inf


class FeedbackGain:
    """``value`` is k. See the module."""

    __slots__ = ("_left", "_stayed", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self._stayed, self._left = 0, False  # late requests that were served since one was not, if one ever was not

    def clear(self) -> None:
        """Forget what the old SLOs taught."""
        self.value, self._stayed, self._left = 1.0, 0, False

    def shed(self) -> None:
        """A request has left the queue unserved because it was late."""
        self._stayed, self._left = 0, True

    def served_late(self) -> None:
        """A request has been served although its first token was late."""
        self._stayed += 1

    @property
    def sheds(self) -> bool:
        """Whether late requests leave the queue, by the latest of them."""
        return self._left and self._stayed < constants.WINDOW

    @property
    def keeps(self) -> bool:
        """Whether late requests are served all the same: the latest, or some while none has left."""
        return self._stayed >= (constants.WINDOW if self._left else constants.FEW)

    def rest(self, seconds: float) -> None:
        """Demand alone has been the limit for so long, s."""
        if self.value > 1:
            self.value = 1 + (self.value - 1) * math.exp(-seconds / constants.REST_S)

    def budgeted(self, *, slow: bool, late: bool, loaded: bool, attainment: float, worth: float, relief: float) -> None:
        """A request has ended that was ``slow`` (TPOT) or ``late`` (TTFT), while each step had its own budget. ``worth``: the
        share of misses that costs what shorter steps would, see :func:`worth_missing`."""
        least, most = constants.MISSED
        late &= self.value < 1 or relief > constants.HELPS
        by = 1.0 if late else -1.0 if slow else self._back(loaded, max(1 - attainment, min(max(worth, least), most)))
        self._move(by, 1.0 if self.sheds else constants.GAIN[1])

    def unbudgeted(self, *, slow: bool, late: bool, loaded: bool, attainment: float, relief: float) -> None:
        """The same while knobs alone held."""
        self._move(-1.0 if slow else relief if late else self._back(loaded, max(1 - attainment, constants.MISSED[0])))

    def _back(self, loaded: bool, by: float) -> float:
        # without load, a target that is met says nothing about the limit
        return by if loaded and self.value < 1 else 0.0

    def _move(self, by: float, most: float = constants.GAIN[1]) -> None:
        self.value = min(max(self.value * (1 + constants.RATE * by), constants.GAIN[0]), most)
