"""Earliest deadline first, across classes."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from runtime.ordering.fcfs import Fcfs
from runtime.ordering.protocol import Queued
from runtime.slo import SLO, find_slo, first_target

NO_DEADLINE_S = 60.0
"""What has no deadline is ordered as if it were due this long after its arrival."""


class Deadline(Fcfs):
    """Its own deadline; else its arrival + the TTFT (or E2E) target of its class in ``slos``, of ``default`` for classes not
    named; else its arrival + :data:`NO_DEADLINE_S`."""

    def __init__(self, slos: Mapping[str, SLO] | None = None) -> None:
        self._slos = {} if slos is None else slos  # the scheduler's own, which may change

    def slo_of(self, queued: Queued) -> SLO | None:
        """That of its class, or of ``default``; None for what has a deadline of its own."""
        if queued.deadline is not None:
            return None
        return find_slo(self._slos, queued.request_class)

    def key(self, queued: Queued) -> float:
        due = queued.deadline
        if due is None:
            slo = find_slo(self._slos, queued.request_class)
            due = inf if slo is None else queued.arrival + first_target(slo)
        return due if due < inf else queued.arrival + NO_DEADLINE_S
