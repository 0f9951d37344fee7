"""Higher ``priority`` first. Waiting makes up for it, so that nobody starves."""

from __future__ import annotations

from math import inf

from runtime.ordering.fcfs import Fcfs
from runtime.ordering.protocol import Queued

PRIORITY_STEP_S = 10.0
"""Seconds of waiting that outweigh one level of priority."""


class Priority(Fcfs):
    """Each level of priority is worth ``step_s`` seconds of waiting. First come among equals."""

    def __init__(self, step_s: float = PRIORITY_STEP_S) -> None:
        if not 0 < step_s < inf:
            raise ValueError(f"step_s is {step_s!r}; it must be a number of seconds above 0")
        self._step = step_s

    def key(self, queued: Queued) -> float:
        return queued.arrival - self._step * queued.priority
