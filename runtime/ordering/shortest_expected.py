"""Shortest expected job first: prompt and answer, as long as answers have been lately. Waiting makes up for length.

Key = arrival + ``step_s`` · (prompt tokens + expected output tokens), the latter by
:class:`~runtime.ordering.learned.OutputLengths`: mean of the class's latest answers to prompts of like length.
``max_tokens`` is not looked at: clients set it far too high, or all alike.

Bound: nobody that comes more than ``step_s`` · (own prompt + expected answer) seconds later goes before: 30 s for 3,000
tokens. Cost: constant for each request that comes or ends, O(log n) in the queue.

What it gains: the mean wait. What it cannot do: tell apart two requests of one class whose prompts are as long. Preempted
requests and their answers so far are not ordered anew; they go first in every order.

Source: shortest expected processing time, the order of least mean wait where only means are known (Smith, Naval Research
Logistics Quarterly 3, 1956; Rothkopf, Management Science 12, 1966); ageing as in :mod:`~runtime.ordering.shortest`.
"""

from __future__ import annotations

from math import inf

from runtime.ordering.fcfs import Fcfs
from runtime.ordering.learned import OutputLengths
from runtime.ordering.protocol import Queued
from runtime.ordering.shortest import SHORTEST_STEP_S
from runtime.records import RequestRecord, StepRecord


class ShortestExpected(Fcfs):
    """See the module. Raises ``ValueError`` unless ``step_s`` (s a token) is a number above 0."""

    def __init__(self, step_s: float = SHORTEST_STEP_S) -> None:
        if not 0 < step_s < inf:
            raise ValueError(f"step_s is {step_s!r}; it must be a number of seconds above 0")
        self._step = step_s
        self._outputs = OutputLengths()

    def key(self, queued: Queued) -> float:
        expected = queued.size + self._outputs.expected(queued.request_class, queued.size)
        return queued.arrival + self._step * expected

    def on_step(self, record: StepRecord) -> None:
        """Requests are enough."""

    def on_request(self, record: RequestRecord) -> None:
        self._outputs.observe(record)
