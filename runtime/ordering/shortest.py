"""Shortest job first, by what is known of its length. Waiting makes up for length, so that nobody starves."""

from __future__ import annotations

from runtime.ordering.fcfs import Fcfs
from runtime.ordering.protocol import Queued

SHORTEST_STEP_S = 0.01
"""Seconds of waiting that outweigh one prompt token, or one cost unit of an item."""


class ShortestFirst(Fcfs):
    """Each token (cost unit) is worth :data:`SHORTEST_STEP_S` of waiting."""

    def key(self, queued: Queued) -> float:
        return queued.arrival + SHORTEST_STEP_S * queued.size
