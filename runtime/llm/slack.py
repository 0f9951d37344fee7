"""How long until the first SLO target is missed, kept in heaps that change only when a sequence does.

The next token of a decoding sequence with a TPOT target τ is due at ``first token + τ · tokens so far``. All decodes
advance together, so that is ``key + τ · g`` with the scheduler's step index g and a key that stands still: one heap for
each τ gives the earliest in constant time, whatever the batch.

Sequences are followed while a step policy asks in every step. Who looks now and then has a tracker made for that look: an
engine that nobody budgets pays nothing for all this.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from math import inf

from runtime.request import Sequence
from runtime.slo import SLO, find_slo

GIVE_UP = 16
"""Token times behind schedule at which a sequence is counted as late for good."""


class _Earliest:
    """A heap of (key, sequence) whose entries die when the sequence's stamp moves on."""

    __slots__ = ("_heap", "_pushed", "live")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self.live: dict[Sequence, int] = {}
        """Its sequences, each with the stamp of its entry. One that is taken out leaves a dead entry."""
        self._pushed = 0

    def add(self, key: float, sequence: Sequence) -> None:
        self._pushed += 1
        self.live[sequence] = self._pushed
        heapq.heappush(self._heap, (key, self._pushed, sequence))
        if len(self._heap) > 2 * len(self.live) + 64:
            self._heap = [entry for entry in self._heap if self.live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def least(self, give_up_below: float = -inf) -> float:
        """The smallest live key. Those below ``give_up_below`` are forgotten."""
        heap = self._heap
        while heap and (self.live.get(heap[0][2]) != heap[0][1] or heap[0][0] < give_up_below):
            _, stamp, sequence = heapq.heappop(heap)
            if self.live.get(sequence) == stamp:
                del self.live[sequence]
        return heap[0][0] if heap else inf


class SlackTracker:
    """Follows the sequences of one scheduler, from :meth:`follow` to :meth:`stop`. ``slos`` maps request classes to SLOs,
    ``default`` for the others.

    TTFT and E2E are due at fixed times; TPOT as above; an ITL target is due at the last step's end plus the target.
    """

    __slots__ = ("_deadlines", "_expected", "_gap", "_gaps", "_pending", "_tpot", "_whole", "following", "slos")

    def __init__(self, slos: Mapping[str, SLO]) -> None:
        self.slos = dict(slos)
        self._deadlines = self._deadlines_now()
        self._pending = _Earliest()  # until the first token, or the next one of those that were preempted
        self._whole = _Earliest()  # until the last one, of those that decode
        self._tpot: dict[float, _Earliest] = {}
        self._gaps: dict[float, int] = {}  # ITL target -> decodes that have it
        self._gap: dict[Sequence, float] = {}
        self._expected: dict[Sequence, float] = {}  # TPOT targets of those whose first token is on its way, s
        self.following = False

    def _deadlines_now(self) -> dict[str, tuple[float | None, float | None]]:
        return {name: (slo.ttft_ms, slo.e2e_ms) for name, slo in [*self.slos.items()]}  # another thread may set one

    def deadlines_changed(self) -> bool:
        """Whether a TTFT or E2E target has changed since the last call: requests that wait were queued by another."""
        before, self._deadlines = self._deadlines, self._deadlines_now()
        return self._deadlines != before

    def requeued(self, sequences: Iterable[Sequence]) -> None:
        """``sequences``, whose prompts wait or are being computed, go by the SLOs of now."""
        for sequence in sequences:
            self._pending.live.pop(sequence, None)
            self.queued(sequence)

    def follow(self, queued: Iterable[Sequence], decoding: Iterable[Sequence]) -> None:
        """Begin, with those that wait for their first or next token and those that decode, by the SLOs of now."""
        self.following = True
        for sequence in queued:
            self.queued(sequence)
        for sequence in decoding:
            self.decoding(sequence)

    def stop(self) -> None:
        """Forget all of them."""
        self.following = False
        self._pending, self._whole = _Earliest(), _Earliest()
        self._tpot, self._gaps, self._gap, self._expected = {}, {}, {}, {}

    def queued(self, sequence: Sequence) -> None:
        """``sequence`` waits for its first token, or, if preempted, for its next one. One that was relegated is a miss, and has
        no target any more: here and in :meth:`decoding`."""
        if not self.following or sequence.relegated is not None:
            return
        slo = find_slo(self.slos, sequence.request.request_class)
        if slo is None:
            return
        due = inf
        if not sequence.generated:
            if slo.ttft_ms is not None:
                due = sequence.request.arrival + slo.ttft_ms / 1e3
        elif slo.tpot_ms is not None:
            due = sequence.token_times[0] + slo.tpot_ms / 1e3 * sequence.generated
        if slo.e2e_ms is not None:
            due = min(due, sequence.request.arrival + slo.e2e_ms / 1e3)
        if due < inf:
            self._pending.add(due, sequence)

    def decoding(self, sequence: Sequence, expected: bool = False) -> None:
        """``sequence`` has begun to decode (``joined`` is set). ``expected``: it will have when the step in flight has ended,
        from when on its token deadlines count; :meth:`left` and this follow then."""
        if not self.following:
            return
        self._pending.live.pop(sequence, None)
        slo = find_slo(self.slos, sequence.request.request_class)
        if slo is None or sequence.relegated is not None:
            return
        if slo.e2e_ms is not None:
            self._whole.add(sequence.request.arrival + slo.e2e_ms / 1e3, sequence)
        if slo.tpot_ms is not None:
            target = slo.tpot_ms / 1e3
            if expected and sequence.generated == 1:
                self._expected[sequence] = target
            else:
                key = sequence.token_times[0] + target * (sequence.generated - sequence.joined)
                self._tpot.setdefault(target, _Earliest()).add(key, sequence)
        if slo.itl_ms is not None:
            gap = slo.itl_ms / 1e3
            self._gap[sequence] = gap
            self._gaps[gap] = self._gaps.get(gap, 0) + 1

    def gone(self, sequence: Sequence) -> None:
        """``sequence`` has ended, or has been preempted (then :meth:`queued` follows)."""
        if not self.following:
            return
        self._pending.live.pop(sequence, None)
        self._whole.live.pop(sequence, None)
        self._expected.pop(sequence, None)
        for target, heap in [*self._tpot.items()]:
            heap.live.pop(sequence, None)
            if not heap.live:
                del self._tpot[target]
        gap = self._gap.pop(sequence, None)
        if gap is not None:
            self._gaps[gap] -= 1
            if not self._gaps[gap]:
                del self._gaps[gap]

    @property
    def step_time_target(self) -> float:
        """The tightest TPOT target of those that decode, s; inf if none has one."""
        tightest = min(self._expected.values(), default=inf)
        for target, heap in self._tpot.items():
            if target < tightest and heap.live:
                tightest = target
        return tightest

    def fixed(self, now: float) -> float:
        """Seconds from ``now`` until the first TTFT or E2E target is missed; negative if one is, inf if there is none."""
        return self.fixed_and_pending(now)[0]

    def pending(self, now: float) -> float:
        """The same of those alone whose prompts wait or are being computed."""
        return self._pending.least() - now

    def fixed_and_pending(self, now: float) -> tuple[float, float]:
        """:meth:`fixed` and :meth:`pending`, for who wants both."""
        pending = self._pending.least()
        return min(pending, self._whole.least()) - now, pending - now

    def token_deadlines(self, now: float, step: int, last_end: float) -> tuple[tuple[float, float], ...]:
        """(target, seconds until the first next token is due under it) for each TPOT and ITL target of those that decode, and
        once more for TPOT targets of those that are expected to.

        One that is further behind than :data:`GIVE_UP` token times no longer counts: it is late whatever is done, and
        would hold up all others.
        """
        found = []
        for target, heap in [*self._tpot.items()]:
            due = heap.least(now - target * (step + GIVE_UP)) + target * step
            if due < inf:
                found.append((target, due - now))
            else:  # there may come no other with this target
                del self._tpot[target]
        if self._expected:  # apart: a whole target would hide who is behind by less than the step in flight takes
            found.extend((target, target) for target in set(self._expected.values()))
        if self._gaps:
            found.extend((gap, last_end + gap - now) for gap in self._gaps)
        return tuple(found)
