"""Requests that cannot meet their TTFT target are rejected early, with a time to retry: a miss, not a failure.

Past capacity a queue makes every request late, and computing a prompt whose first token comes too late takes the time of one
that could still have been in time. So, with D the class's TTFT target (or E2E, if that is shorter), w the work of the prompts
computed before a request's own and of that one, and r the rate of such work as things stand:

- at arrival a request is not accepted if ``now + w/r > arrival + 0.9·D``, unless lighter ones wait before it: if enough of
  them (the largest of the lightest first) weigh less together than it does, they are ended in its place;
- when it is its turn, and while its prompt is being computed, the prediction is made again with what is left. The tenth
  before is reserved for prediction error; a prompt half computed has the whole of D, for what it has cost is spent. Nothing
  is reserved for those that weigh more than others: one that comes late after all has taken the time of lighter ones;
- ``queue_timeout`` ends what is still waiting after so long, whatever is predicted.

All three go by the SLOs of now: where those change, timeouts and places in the queue of what waits do, too.

A request that is relegated instead is not ended. It waits behind all that can still be met, by arrival, begins when none of those
waits and there is room, and counts for no other as work before its own. A prompt already begun keeps its KV blocks, and has what
others that begin leave of a step, if anything. By default that is done to classes that weigh less than 1: nobody waits at a
screen for those, and an answer that comes late is worth more than none.

Only the one whose turn it is, those being computed, and those that arrive are looked at: what changes in a step, not the
queue. In deadline order that is the one with the least time left.

An answer takes as many tokens as such requests have had lately, and a token as long (:mod:`runtime.ordering.learned`); whatever
that is, a tenth of the E2E target is left for the prompt.

Work and rate are those of :mod:`runtime.llm.prefill_rate`; while nothing is known everything is accepted. A rate too low must
not lock everybody out: when nothing has been let in for :data:`PROBE_S` and nothing else is being computed, the next is let in
whatever is predicted.

Failure mode: outputs that fill all slots or the KV pool make tokens wait for sequences to end; the measured rate follows, late,
and counts for those that still wait for a slot alone. Related: early rejection by predicted TTFT as in Mooncake (FAST 2025).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf
from typing import Final, Literal, NamedTuple

from runtime.errors import RejectedError
from runtime.llm.prefill_rate import PrefillRate, RateSource, Work
from runtime.llm.slack import SlackTracker
from runtime.llm.waiting import rank, work_of
from runtime.ordering import ordering_of
from runtime.ordering.learned import OutputLengths, TokenTimes
from runtime.records import QUEUE_TIMEOUT_REASON, SLO_REASON, RequestRecord, StepRecord
from runtime.request import Sequence
from runtime.shared.expiries import Expiries
from runtime.slo import find_slo

PROBE_S: Final = 5.0
"""Seconds without anything let in after which one is, whatever is predicted."""
_LEAST_PROMPT = 0.1  # of an E2E target, which an answer leaves to the prompt however long it is expected to be
_RESERVE = 0.1  # share of the target reserved for prediction error; a prompt half computed may use it up


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """What an engine does about requests that come too late. Without a policy it accepts all and computes all.

    ``late``: what becomes of a request as soon as its TTFT (or E2E) target cannot be met any more: ``"reject"`` ends it,
    ``"relegate"`` computes it after all that can still be met, ``"by_weight"`` relegates those of classes that weigh less than 1
    and rejects the others, None computes it like the others. ``queue_timeout``: end one that has waited
    so long, in seconds, or ``"ttft"``: its class's target, past which it is late and is relegated where ``late`` says so; None
    never. ``order``: the ordering while the policy is on, None for the engine's own.
    """

    late: Literal["by_weight", "reject", "relegate"] | None = "by_weight"
    queue_timeout: float | Literal["ttft"] | None = "ttft"
    order: str | None = "deadline"

    def __post_init__(self) -> None:
        if self.late not in ("by_weight", "reject", "relegate", None):
            raise ValueError(f'late is {self.late!r}; it must be "by_weight", "reject", "relegate" or None')
        limit = self.queue_timeout
        seconds = not isinstance(limit, bool | str) and isinstance(limit, int | float) and 0 < limit < inf
        if not (seconds or limit is None or limit == "ttft"):
            raise ValueError(f'queue_timeout is {limit!r}; it must be a time above 0 s, "ttft" or None')
        if self.order is not None:
            ordering_of(self.order)  # raises for what is none

    @classmethod
    def of(cls, value: AdmissionPolicy | bool | None) -> AdmissionPolicy | None:
        """``value``, if it is a policy; the default one for True, none for False and None. Raises ``ValueError`` otherwise."""
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if not isinstance(value, cls):
            raise ValueError(f"admission is {value!r}; it must be True, False or an AdmissionPolicy")
        return value


class Verdict(NamedTuple):
    """Why a request is not to be computed, and in how many seconds it might be."""

    reason: str
    why: str
    retry_after_s: float


class _Ahead:
    """What is left of prompts in progress, for who comes behind them one after the other, of which so many go ``side_by_side``:
    as :meth:`Admission.before`, at a cost that does not follow their number each time."""

    __slots__ = ("_lefts", "_side_by_side", "_total")

    def __init__(self, side_by_side: int) -> None:
        self._side_by_side = side_by_side
        self._lefts: list[float] = []  # ascending
        self._total = 0.0

    def add(self, left: float) -> None:
        insort(self._lefts, left)
        self._total += left

    def before(self, own: float) -> float:
        lefts = self._lefts
        if len(lefts) >= self._side_by_side:
            return self._total
        less = bisect_left(lefts, own)
        return sum(lefts[:less]) + own * (len(lefts) - less)


class Admission:
    """A policy at work in one scheduler; ``weights`` are those of request classes, 1 for others."""

    def __init__(
        self,
        policy: AdmissionPolicy,
        slack: SlackTracker,
        *,
        weights: Mapping[str, float] | None = None,
        source: RateSource | None = None,
    ) -> None:
        self.policy = policy
        self.rate = PrefillRate(source)
        self._slack = slack
        self._weights = dict(weights or {})
        self._lightest = min([1.0, *self._weights.values()])
        self.timeouts: Expiries[Sequence] = Expiries(self._untimed)
        """Of the queue; empty where the policy has none."""
        self._answers, self._times = OutputLengths(), TokenTimes()
        self._let_in = -inf
        self._probe: Sequence | None = None

    def arrive(self, sequence: Sequence, now: float, waiting: Work, in_progress: Iterable[Sequence]) -> Verdict | None:
        """Why ``sequence``, which has just come, is late behind the work ``waiting`` and prompts ``in_progress``; None if it is
        not.

        :meth:`queued` follows if it waits.
        """
        if not self.policy.late:
            return None
        ahead, own = self.rate.tokens(waiting), self.rate.tokens(work_of(sequence))
        ahead += self.before(ahead + own, [self.work_left(one) for one in in_progress])
        return self._judge(sequence, now, ahead)

    def work_left(self, sequence: Sequence) -> float:
        """Work of ``sequence``, whose prompt is being computed, that is left; as tokens."""
        return self.rate.tokens(Work.of(sequence.target - sequence.computed, sequence.computed))

    def relegates(self, sequence: Sequence, verdict: Verdict) -> bool:
        """Whether ``sequence``, which is late by ``verdict``, waits behind the others; else it is ended."""
        return verdict.reason == SLO_REASON and self._relegated_when_late(sequence)

    def _relegated_when_late(self, sequence: Sequence) -> bool:
        late = self.policy.late
        return late == "relegate" or (late == "by_weight" and self._weight(sequence) < 1)

    def outweighed(
        self, sequence: Sequence, verdict: Verdict, now: float, before: Iterable[Sequence]
    ) -> list[Sequence]:
        """Those of ``before`` to be late so that ``sequence``, which waits behind them and is late by ``verdict``, comes in time;
        none if that is not to be had for less than its own weight."""
        own, late = self._weight(sequence), verdict.retry_after_s * self.rate.per_second(now)
        if own <= self._lightest:
            return []
        lighter = [s for s in before if not s.preemptions and self._weight(s) < own]
        chosen: list[Sequence] = []
        for other in sorted(lighter, key=lambda s: (self._weight(s), -self.rate.tokens(work_of(s)), s.key)):
            if late <= 0:
                break
            own -= self._weight(other)
            late -= self.rate.tokens(work_of(other))
            chosen.append(other)
        return chosen if late <= 0 < own else []

    def _weight(self, sequence: Sequence) -> float:
        return self._weights.get(sequence.request.request_class, 1.0)

    def before(self, own: float, in_progress: Seq[float]) -> float:
        """Work on prompts in progress that is done before ``own`` is; ``in_progress``: what is left of each (:meth:`left`).

        All of it, unless a step has room for one more beside them: then they go on side by side, and each is before the
        others with as much as those have at most.
        """
        if self.policy.late and len(in_progress) < self.rate.prompts_per_step:
            return sum(min(left, own) for left in in_progress)
        return sum(in_progress)

    def turn(
        self, sequence: Sequence, now: float, in_progress: Seq[float], recount: Callable[[Sequence], bool]
    ) -> Verdict | None:
        """Why ``sequence``, whose turn it is to begin, is late behind prompts in progress of which so much is left.

        If it is by what was in the prefix cache when it came, it is judged once more by what is there now, since others may have
        computed the same prefix: ``recount`` says whether that is more. One that counted on others is judged by that at once.
        """
        if self.policy.late is None or sequence.generated or sequence.relegated is not None:
            return None
        if sequence.preemptions and self._relegated_when_late(sequence):  # it had begun
            return None
        if sequence.pending < sequence.uncached:
            recount(sequence)
        verdict = self._begins(sequence, now, in_progress)
        if verdict is not None and recount(sequence):
            verdict = self._begins(sequence, now, in_progress)
        if verdict is None:
            self._let_in = now
        return verdict

    def _begins(self, sequence: Sequence, now: float, in_progress: Seq[float]) -> Verdict | None:
        own = self.rate.tokens(work_of(sequence))
        return self._judge(sequence, now, self.before(own, in_progress), begins=not self.rate.short_of_kv)

    def judge_in_progress(
        self, begun: list[Sequence], now: float, late: Callable[[Admission, Sequence, Verdict, float], None]
    ) -> list[float]:
        """Hand those of ``begun`` to ``late`` that come too late: prompts in progress in the order in which they are computed.

        Those that it ends are taken out, those that it relegates go last. Returns what is left of each.
        """
        lefts: list[float] = []
        ahead = _Ahead(self.rate.prompts_per_step if self.policy.late else 0)
        relegated = False
        for sequence in tuple(begun):
            left = self.work_left(sequence)
            if (verdict := self._in_progress(sequence, now, left, ahead)) is None:
                lefts.append(left)
                ahead.add(left)
                continue
            late(self, sequence, verdict, now)
            if sequence.state == "finished":
                begun.remove(sequence)
            else:
                relegated = True
        if relegated:
            begun.sort(key=rank)
            return [self.work_left(sequence) for sequence in begun]
        return lefts

    def _in_progress(self, sequence: Sequence, now: float, left: float, ahead: _Ahead) -> Verdict | None:
        """Why ``sequence``, whose prompt is being computed behind others, is late; ``left``: what is left of it."""
        if self.policy.late is None or sequence.generated or sequence is self._probe or sequence.relegated is not None:
            return None
        target = self.target(sequence)
        return self._late(sequence, now, ahead.before(left) + left, target, target, begins=True)

    def observe(self, record: StepRecord) -> None:
        """A step has been made."""
        self.rate.observe(record)
        self._times.on_step(record)

    def ended(self, record: RequestRecord) -> None:
        """A request has ended, in whatever way."""
        self._times.on_request(record)
        self._answers.observe(record)

    def target(self, sequence: Sequence) -> float:
        """Seconds from its arrival by which the first token of ``sequence`` must have come; inf if never."""
        slo = find_slo(self._slack.slos, sequence.request.request_class)
        if slo is None:
            return inf
        target = inf if slo.ttft_ms is None else slo.ttft_ms / 1e3
        if slo.e2e_ms is not None:
            e2e, request = slo.e2e_ms / 1e3, sequence.request
            answer = self._answers.expected(request.request_class, request.prompt_len) * self._times.output_token_s
            target = min(target, max(_LEAST_PROMPT * e2e, e2e - answer))
        return target

    def _judge(self, sequence: Sequence, now: float, ahead: float, *, begins: bool = False) -> Verdict | None:
        target = self.target(sequence)
        if target == inf:
            return None
        reserve = 0.0 if self._weight(sequence) > self._lightest else _RESERVE
        work = ahead + self.rate.tokens(work_of(sequence))
        verdict = self._late(sequence, now, work, target, (1 - reserve) * target, begins=begins)
        if verdict is not None and not ahead and now - self._let_in >= PROBE_S:
            self._probe = sequence
        return None if sequence is self._probe else verdict

    def _late(
        self, sequence: Sequence, now: float, work: float, target: float, within: float, *, begins: bool
    ) -> Verdict | None:
        """A verdict if the last of ``work`` is predicted to be done more than ``within`` seconds after the arrival. ``begins``:
        ``sequence`` waits for no slot."""
        after = now + self.rate.seconds_for(work, now, begins=begins) - sequence.request.arrival
        if not after > within:
            return None
        why = f"its first token is predicted after {after:.3g} s, its target is {target:.3g} s"
        return Verdict(SLO_REASON, why, after - within)

    # -- the queue's timeout ------------------------------------------------------------------------------------------

    def queued(self, sequence: Sequence) -> None:
        """``sequence`` waits, from its arrival on."""
        limit = self.policy.queue_timeout
        if limit == "ttft":
            slo = find_slo(self._slack.slos, sequence.request.request_class)
            limit = None if slo is None or slo.ttft_ms is None else slo.ttft_ms / 1e3
        if limit is not None:
            self.timeouts.add(sequence, sequence.request.arrival + limit)

    def retime(self, waiting: Iterable[Sequence]) -> None:
        """SLOs have changed: those of ``waiting`` may wait as long as they allow now, from their arrival on."""
        self.timeouts = Expiries(self._untimed)
        for sequence in sorted(waiting, key=lambda one: one.request.arrival):
            self.queued(sequence)

    @property
    def next_timeout(self) -> float:
        """When the next one has waited too long; inf if none will."""
        return self.timeouts.next

    def timed_out(self) -> tuple[Sequence, Verdict]:
        """The one of :attr:`next_timeout`, which must be over, and why it is late."""
        when, sequence = self.timeouts.pop()
        waited = when - sequence.request.arrival
        overdue = self.policy.queue_timeout == "ttft" and self._relegated_when_late(sequence)
        reason = SLO_REASON if overdue else QUEUE_TIMEOUT_REASON
        return sequence, Verdict(reason, f"it waited {waited:.3g} s without being begun", waited)

    def _untimed(self, sequence: Sequence) -> bool:
        """Whether the queue's timeout means nothing to ``sequence`` any more."""
        begun = sequence.scheduled is not None or sequence.state != "waiting"
        return begun or (self.policy.queue_timeout == "ttft" and sequence.relegated is not None)


def rejected(sequence: Sequence, verdict: Verdict) -> RejectedError:
    """The message to the client."""
    message = f"request {sequence.request.id}: {verdict.why}"
    return RejectedError(message, reason=verdict.reason, retry_after_s=verdict.retry_after_s)
