"""How many prompt tokens a second are asked for, whether or not they are computed."""

from __future__ import annotations

import math

from runtime.records import RequestRecord, StepRecord

_MEMORY_S = 5.0
_GAP_S = 60.0  # silence longer than that says nothing of the load before it


class Demand:
    """Prompt tokens asked for a second: computed, more of them waiting than before, or lost from the queue; with a memory of
    five seconds. Until so long has passed, the mean so far."""

    __slots__ = ("_last", "_seconds", "_tokens", "_waiting")

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._waiting = 0
        self._last = -math.inf

    def step(self, record: StepRecord) -> None:
        """A step with sound times has ended."""
        passed = record.end - self._last
        if not 0 <= passed <= _GAP_S:
            passed = min(record.end - record.start, _GAP_S)
        self._last = record.end
        keep = math.exp(-passed / _MEMORY_S)
        self._tokens = (
            keep * self._tokens + record.prefill_tokens * record.steps + record.waiting_tokens - self._waiting
        )
        self._seconds = keep * self._seconds + passed
        self._waiting = record.waiting_tokens

    def lost(self, record: RequestRecord) -> None:
        """A request has ended without having begun."""
        self._tokens += record.prompt_tokens

    @property
    def per_second(self) -> float:
        """0 before anything was seen."""
        return max(0.0, self._tokens) / self._seconds if self._seconds > 0 else 0.0
