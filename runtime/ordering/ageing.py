"""Ageing: a short prompt starts at a higher level than a long one, and waiting raises the level of both.

Level = ``priority`` − log2(size) + waiting / ``step_s``; the highest goes first. A prompt twice as long is one level lower,
whatever the lengths; ``step_s`` seconds of waiting make up for that. All levels rise alike, so that the order of two never
changes, and key = arrival + ``step_s`` · (log2(size) − ``priority``) stands still while they wait.

Bound: nobody that comes more than ``step_s`` · (log2(own size / size of the other) + priority of the other − own priority)
seconds later goes before. ``priority`` counts from −8 to 8, whatever clients say, so that is at most ``step_s`` · (16 +
log2 of own size): 26 s between prompts of 1 and 8,192 tokens of one priority, 58 s with the priorities furthest apart. The
wait itself is bounded by that, the work ahead at arrival, and what comes in that time. Cost: O(log n).

Where :mod:`~runtime.ordering.shortest` lets a prompt of 30,000 tokens be passed over for five minutes, this does it for
half a minute; short prompts gain less. Items of the batcher go by their cost.

Source: priorities that grow linearly with waiting (Kleinrock, Naval Research Logistics Quarterly 11, 1964), here at one
rate for all, from levels that are logarithms of length, as those of multilevel queues are.
"""

from __future__ import annotations

from math import inf, log2
from typing import Final

from runtime.ordering.fcfs import Fcfs
from runtime.ordering.protocol import Queued

AGEING_STEP_S: Final = 2.0
"""Seconds of waiting that outweigh one level: a prompt half as long, or one more of ``priority``."""
MOST_LEVELS: Final = 8
"""Levels of ``priority`` up and down; more count as these."""


class Ageing(Fcfs):
    """See the module. Raises ``ValueError`` unless ``step_s`` is a number above 0."""

    def __init__(self, step_s: float = AGEING_STEP_S) -> None:
        if not 0 < step_s < inf:
            raise ValueError(f"step_s is {step_s!r}; it must be a number of seconds above 0")
        self._step = step_s

    def key(self, queued: Queued) -> float:
        level = min(max(queued.priority, -MOST_LEVELS), MOST_LEVELS) - log2(max(queued.size, 1))
        return queued.arrival - self._step * level
