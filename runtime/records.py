"""Raw timestamps of steps and requests, and the only definitions of every latency metric.

All times are seconds on the engine's clock. A record stores when things happened; each metric is derived here and
nowhere else, so that the engine, the simulator, the bench and the dashboard cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, NamedTuple


class FinishReason(StrEnum):
    """How a request ended."""

    LENGTH = "length"  # max_tokens reached
    STOP = "stop"  # end-of-sequence token, stop id or stop string
    CANCELLED = "cancelled"  # by the client
    TIMEOUT = "timeout"  # its own timeout passed
    REJECTED = "rejected"  # not accepted, or given up before its first token: too late, or another of its call was
    ERROR = "error"  # its step failed, the engine was closed, or another of its call failed or was rejected


SLO_REASON: Final = "slo"
QUEUE_TIMEOUT_REASON: Final = "queue_timeout"
SAME_CALL_REASON: Final = "same_call"
"""The ``cause`` of a rejection whose first token would come too late, of one that has waited for too long, and of one that was
asked for together with a request that was rejected."""

_NATURAL_ENDS = FinishReason.LENGTH, FinishReason.STOP


class LimitedBy(StrEnum):
    """What kept a step from holding more."""

    DEMAND = "demand"  # nothing: everything there was to do is in the step
    SLOTS = "slots"  # max_batch_size
    BUDGET = "budget"  # token_budget, or the step policy's smaller one
    CHUNK = "chunk"  # chunk_size
    KV = "kv"  # no free KV blocks
    WAIT = "wait"  # the wait window holds new prompts back


class StepRecord(NamedTuple):
    """One engine step (or ``steps`` identical decode steps, when a simulation fast-forwards).

    Token counts are those of ONE step; ``start`` and ``end`` enclose all ``steps``. ``decode_context`` is the sum of context
    lengths read by the decodes of the first of them. ``prefill_attention`` is the number of (query, key) pairs of the prefill
    chunks: for a chunk of n tokens behind s computed ones, n·s + n·(n+1)/2. ``prefill_context`` is the sum over chunks of s +
    n. ``decodes`` are sequences past their prompt, ``chunks`` parts of prompts, of ``prefill_tokens`` in all. ``epoch``
    numbers the knob setting the step was scheduled under, ``budget_used`` is the token budget it was planned with, and
    ``limited_by`` what kept it from holding more. ``waiting`` counts requests and ``waiting_tokens`` prompt tokens still
    queued after scheduling. ``sampled`` is how many tokens came out. ``running``: sequences in the batch, and
    ``kv_free_blocks``: KV blocks that none of them holds, both after the step. ``preemptions``: sequences that lost their
    blocks in planning it. ``failed``: sequences that it ended with an error. ``drafted`` tokens were computed behind the last
    ones of some of the decodes, and are part of their context; ``accepted`` of them were right. ``after_idle``: whether there
    was nothing to run at some time between it and the step before.
    """

    start: float
    end: float
    steps: int
    decodes: int
    decode_context: int
    chunks: int
    prefill_tokens: int
    prefill_context: int
    prefill_attention: int
    sampled: int
    running: int
    waiting: int
    waiting_tokens: int
    kv_free_blocks: int
    preemptions: int
    epoch: int
    budget_used: int
    limited_by: LimitedBy
    failed: int = 0
    drafted: int = 0
    accepted: int = 0
    after_idle: bool = False

    @property
    def duration(self) -> float:
        """Seconds of one step."""
        return (self.end - self.start) / self.steps

    @property
    def tokens(self) -> int:
        """Tokens computed in one step."""
        return self.decodes + self.drafted + self.prefill_tokens

    def split(self, ends: Sequence[float]) -> list[StepRecord]:
        """The records of the single steps that ended at ``ends``; what is counted after a step is as of the last one."""
        values: list[Any] = list(self)
        values[2] = 1
        single = []
        for end in ends:
            values[1] = end
            single.append(StepRecord._make(values))
            values[0] = end
            values[4] += self.decodes
            values[_PREEMPTIONS] = 0
            values[_AFTER_IDLE] = False
        return single

    @property
    def leaves_idle(self) -> bool:
        """Whether nothing was left to do when it ended: nothing ran, and what waited was held back by the wait window."""
        return not self.running and (not self.waiting or self.limited_by is LimitedBy.WAIT)


class StepTimes:
    """What each step takes of an engine's time, told of its records in order.

    That is from the end of the step before to its own: the host's share between them (tokens are delivered, the next step is
    planned) is part of what a step costs, and of steps that overlap, each counts for what it adds. A step that found the engine
    idle takes from its own start. So does one after a pause longer than itself and than 20 ms: records are missing, or the
    process was stopped.
    """

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = math.nan  # of the step before; not a number where that left the engine idle

    def of(self, record: StepRecord) -> float:
        """Seconds of one of its steps."""
        took = record.end - record.start
        gap = record.start - self._end
        self._end = math.nan if record.leaves_idle else record.end
        counts = -took < gap <= max(took, _PAUSE_S) and not record.after_idle
        return (took + gap if counts else took) / record.steps


_PAUSE_S: Final = 0.02
_PREEMPTIONS = StepRecord._fields.index("preemptions")
_AFTER_IDLE = StepRecord._fields.index("after_idle")
assert StepRecord._fields[:5] == ("start", "end", "steps", "decodes", "decode_context")


class RequestRecord(NamedTuple):
    """One request that has ended. ``token_times`` holds the time of each output token, ascending.

    ``id``, ``request_class``, ``tenant`` and ``priority`` are as it was submitted. It came at ``arrival`` and ended at
    ``finished``, by ``reason``. ``output_tokens`` came out behind ``prompt_tokens``, of which ``cached_tokens`` were found in
    the prefix cache. It was preempted ``preemptions`` times. ``scheduled`` is when it first entered a step, None if it never
    did. ``epoch_first`` and ``epoch_last`` are the knob settings in force when it was first scheduled and when it ended (-1:
    never scheduled). ``cause`` says more than ``reason``: of a rejection it is the reason of
    :class:`runtime.errors.RejectedError`, and ``retry_after_s`` the hint, if there is one. ``relegated``: whether admission
    put it behind all that could still meet their targets, as a miss.
    """

    id: str
    arrival: float
    scheduled: float | None
    finished: float
    token_times: Sequence[float]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    reason: FinishReason
    request_class: str
    tenant: str
    priority: int
    epoch_first: int
    epoch_last: int
    cause: str = ""
    retry_after_s: float | None = None
    relegated: bool = False

    @property
    def queue_time(self) -> float | None:
        """First scheduled − arrival, s. None if it never entered a step."""
        return None if self.scheduled is None else self.scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token: first token − arrival, s. None without a token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Time per output token: (last − first) / (tokens − 1), s. None with fewer than two tokens."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: the gaps between neighbouring tokens, s."""
        times = self.token_times
        return [b - a for a, b in pairwise(times)]

    @property
    def itl_p99(self) -> float | None:
        """The request's own 99th percentile gap (nearest rank; the largest when there are fewer than 100), s."""
        return percentile(self.itl, 99)

    @property
    def e2e(self) -> float | None:
        """End to end: last token − arrival, s. None without a token."""
        return self.token_times[-1] - self.arrival if self.token_times else None

    @property
    def spans_change(self) -> bool:
        """Whether the knobs changed while it ran."""
        return self.epoch_first != self.epoch_last

    @property
    def completed(self) -> bool:
        """Whether it ran to its natural end."""
        return self.reason in _NATURAL_ENDS

    @property
    def offered(self) -> bool:
        """Whether it counts in attainment: everything but what the client itself cancelled."""
        return self.reason is not FinishReason.CANCELLED


def percentile(values: Sequence[float], q: float) -> float | None:
    """The ``q``-th percentile (0–100) by nearest rank, None of nothing. No interpolation: it is a value that occurred."""
    if not 0 <= q <= 100:
        raise ValueError(f"q is {q}; a percentile is between 0 and 100")
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered) / 100) - 1)]
