"""What becomes of each request of one vLLM scheduler: who waits, runs, is late, has ended.

Beside each of vLLM's requests stands one of our own sequences, so that admission, slack and the waiting order are the engine's
own, and mean the same here. What is done to a sequence is done to vLLM's request: its priority says whose turn it is, and who is
rejected is ended in vLLM too, and told with the next outputs.

Steps are those of :mod:`autotune.engines.vllm.steering`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from autotune.engines.vllm.families import Families, Refusal
from autotune.engines.vllm.kv import KvPool
from runtime.clock import Clock
from runtime.llm.admission import Admission, AdmissionPolicy, Verdict
from runtime.llm.prefill_rate import RateSource
from runtime.llm.prefix import ComingPrefixes
from runtime.llm.scheduler import Finished
from runtime.llm.slack import SlackTracker
from runtime.llm.waiting import WaitingQueue, precedes, put_behind, unrelegate
from runtime.ordering import Ordering, ordering_of
from runtime.records import FinishReason, RequestRecord
from runtime.request import Request, SamplingParams, Sequence
from runtime.shared.expiries import Expiries
from runtime.shared.settings import Settings
from runtime.slo import SLO

log = logging.getLogger("vllm.autotune")  # where vLLM's own lines go

CLASS: Final = "request_class"
TENANT: Final = "tenant"
"""Names under which a client of ``vllm serve`` says in ``vllm_xargs`` whose request it is."""
NEVER_REJECTED: Final = "never_rejected"
"""The same, for a request that is relegated where it would be rejected."""
_FIRST: Final = -1e15  # of what runs: it stands before all that waits, should it be preempted
_LEVEL: Final = 1e10  # of a client's priority among what runs
_MOST_PRIORITY: Final = 10_000
_DECODES: Final = -_LEVEL / 2  # prompts are preempted before decodes
QUEUES: Final = ("waiting", "kv_holding_waiting", "skipped_waiting")
"""Queues of a scheduler of vLLM's, of which each version has its own."""
_UNKNOWN_CLASSES: Final = 20  # of which the log tells: clients name them
_BEAM: Final = re.compile(r"-beam-\d+(-[0-9a-f]+)?$")  # how vLLM calls the requests that a beam search is made of
_REASONS: Final = {
    "stop": FinishReason.STOP, "repetition": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED,
}  # fmt: skip
_NO_PARAMS: Final = SamplingParams()


class Aborted(NamedTuple):
    """A request of vLLM's that was ended here, and what its client is to be told."""

    request: Any
    why: str
    retry_after_s: float | None


class SteeredRequests:
    """The requests of ``scheduler``. One thread.

    ``drop`` ends requests in vLLM, by their ids, and tells nobody of it.
    """

    def __init__(
        self,
        scheduler: Any,
        clock: Clock,
        drop: Callable[[list[str]], object],
        settings: Settings,
        slos: Mapping[str, SLO],
        ordering: Ordering,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.kv = KvPool(scheduler)
        self._to_come = ComingPrefixes(self.kv.total_blocks)
        self.slack = SlackTracker(slos)
        self.waiting = WaitingQueue(ordering)
        self.prefills: dict[Sequence, None] = {}
        self.decodes: dict[Sequence, int] = {}
        """With each its tokens computed, less ``_advanced``."""
        self.coming: Request | None = None
        """What vLLM is about to be given, where that is known better than from its request."""
        self.newest: Sequence | None = None
        """The latest request added; with ``refusal``, why it was not accepted."""
        self.refusal: Verdict | None = None
        self.ended: list[Finished] = []
        """Requests that have ended since they were last taken."""
        self._scheduler, self._drop = scheduler, drop
        self._admission: Admission | None = None
        self._expiries: Expiries[Sequence] = Expiries(lambda sequence: sequence.state == "finished")
        self._by_name: dict[str, Sequence] = {}
        self._idled = True  # since the last step was planned: there was nothing to run
        self._said: dict[str, int] = {}  # priorities, as clients gave them
        # else vLLM does not look at priorities
        self._by_priority = str(getattr(getattr(scheduler, "_stock_policy", ""), "value", "priority")) == "priority"
        self._aborted: list[Aborted] = []
        self._outweighed: list[tuple[Sequence, Verdict]] = []  # by the latest request added
        self._families = Families()
        self._unknown_classes: set[str] = set()
        self._step = 0  # that have landed with decodes
        self._advanced = 0  # steps planned in which every decode got its token
        self._offsets = 0  # sum of the values of ``decodes``
        self._order = 0  # in which sequences began

    def give_back_priorities(self) -> None:
        """Of :meth:`let_go` what clients said of their requests."""
        for name, sequence in self._by_name.items():
            sequence.data.priority = self._said[name]

    def adding(self, request: Any) -> bool:
        """vLLM is about to queue ``request``: the admission policy decides. False if it has it already.

        One that is relegated has its place from the beginning: vLLM would look at all that wait to give it another.
        """
        if request.request_id in self._by_name:
            return False
        if self._families.doomed:
            self._end_doomed()
        ours, self.coming = self.coming or self._request_of(request), None
        sequence = Sequence(ours)
        sequence.data = request
        self._queue(sequence)  # raises where the ordering does
        self.newest, self.refusal, self._outweighed = sequence, None, []
        self._by_name[request.request_id] = sequence
        self._said[request.request_id] = int(request.priority)
        self._families.joined(request.request_id, sequence, ours.arrival)
        if ours.expires is not None:
            self._expiries.add(sequence, ours.expires)
        if self._admission is not None and not self._families.doomed:
            self._judge(self._admission, sequence)
        request.priority = sequence.key
        return True

    def _judge(self, admission: Admission, sequence: Sequence) -> None:
        """Whether ``sequence``, which vLLM is about to queue, is late, and who is instead."""
        now = self.clock.now()
        first = [s for s in self.prefills if precedes(s, sequence)]
        verdict = admission.arrive(sequence, now, self.waiting.work_before(sequence), first)
        if verdict is None:
            return
        others = admission.outweighed(sequence, verdict, now, self.waiting.up_to(sequence))
        if others:
            self._outweighed = [(one, verdict) for one in others]
        elif self._relegates(admission, sequence, verdict):
            self.slack.gone(sequence)
            self._to_come.drop(sequence)
            self.waiting.relegate(sequence)
        else:
            self.refusal = verdict

    def refused(self) -> None:
        """vLLM has not queued it after all, and whoever added it knows."""
        if self.newest is not None:
            self.end(self.newest, FinishReason.ERROR, self.clock.now())

    def added(self) -> None:
        """vLLM has queued it: what is late by it, itself or others, is ended or relegated."""
        sequence, admission = self.newest, self._admission
        if self._families.doomed:
            self._end_doomed()
        if sequence is None or admission is None or sequence.state == "finished":
            return
        now = self.clock.now()
        late = self._outweighed if self.refusal is None else [(sequence, self.refusal)]
        for one, verdict in late:
            self._late(admission, one, verdict, now)
        if self._families.doomed:
            self._end_doomed()
        if sequence.state == "waiting":
            admission.queued(sequence)

    def _request_of(self, request: Any) -> Request:
        ago = max(0.0, time.time() - request.arrival_time)  # vLLM's arrivals are wall time
        said = getattr(request.sampling_params, "extra_args", None) or {}
        return Request(
            id=request.request_id,
            prompt=(),
            params=_NO_PARAMS,
            max_tokens=request.max_tokens,
            arrival=self.clock.now() - ago,
            priority=-int(request.priority) if self._by_priority else 0,  # vLLM's lowest goes first
            tenant=str(said.get(TENANT, "")),
            request_class=self._class_of(said),
            prompt_len=request.num_prompt_tokens,
        )

    def _class_of(self, said: Mapping[str, object]) -> str:
        """The class that a client has named. The log tells of each that nobody has set up, where some are."""
        name, known, unknown = str(said.get(CLASS, "default")), self.slack.slos, self._unknown_classes
        if name == "default" or name in known or name in unknown:
            return name
        if known.keys() - {"default"} and len(unknown) < _UNKNOWN_CLASSES:
            unknown.add(name)
            log.warning(
                "%s is %.100r; it must be one of %s: such requests go by the common SLO", CLASS, name, ", ".join(known)
            )
        return name

    def _queue(self, sequence: Sequence) -> None:
        sequence.state = "waiting"
        request, target = sequence.data, int(sequence.target)
        sequence.uncached = self._uncached(sequence)
        cached = target - sequence.uncached
        sequence.pending = sequence.uncached - self.kv.shared(request, cached, self._to_come)
        self.waiting.push(sequence)
        self._to_come.add(sequence, self.kv.named(request, cached, target))
        self.slack.queued(sequence)

    def _uncached(self, sequence: Sequence) -> int:
        return int(sequence.target - self.kv.cached(sequence.data)[0])

    def _recount(self, sequence: Sequence) -> bool:
        return self.waiting.recount(sequence, self._uncached(sequence))

    def _late(self, admission: Admission, sequence: Sequence, verdict: Verdict, now: float) -> None:
        """As the scheduler of our engine: relegate or end ``sequence``."""
        if self._relegates(admission, sequence, verdict):
            self._relegate(sequence)
            return
        sequence.retry_after = verdict.retry_after_s
        self.reject(sequence, verdict.reason, now, why=verdict.why)

    @staticmethod
    def _relegates(admission: Admission, sequence: Sequence, verdict: Verdict) -> bool:
        """Whether it is late and not rejected. An answer of vLLM's to who wants log probabilities of the prompt, or of given
        tokens, cannot be empty: its API server would make it an error. Nor can that to a pooling request: its API server would
        end. Of a beam search each token is a request, and one that is rejected would end the answer in the middle. Who has asked
        for an answer in the background has gone."""
        request, params = sequence.data, sequence.data.sampling_params
        wants = any(getattr(params, name, None) is not None for name in ("prompt_logprobs", "logprob_token_ids"))
        pooled = getattr(request, "pooling_params", None) is not None
        part = _BEAM.search(request.request_id) is not None
        spared = bool((getattr(params, "extra_args", None) or {}).get(NEVER_REJECTED))
        return wants or pooled or part or spared or admission.relegates(sequence, verdict)

    def _relegate(self, sequence: Sequence) -> None:
        """Have it go behind those that can still be met, in vLLM's queue too; once."""
        if sequence.relegated is not None:
            return
        self.slack.gone(sequence)
        self._to_come.drop(sequence)
        if sequence.state != "waiting":
            put_behind(sequence)
            return
        self.waiting.relegate(sequence)
        request = sequence.data
        for name in QUEUES:
            queue = getattr(self._scheduler, name, None)
            if queue is None:
                continue
            others = len(queue) - 1
            queue.remove_requests({request})
            if len(queue) == others:  # else it waits in another
                request.priority = sequence.key
                queue.add_request(request)
                return

    def reject(
        self,
        sequence: Sequence,
        reason: str,
        now: float,
        kind: FinishReason = FinishReason.REJECTED,
        *,
        why: str = "",
    ) -> None:
        """End ``sequence`` in vLLM too, and have its client told ``why`` with the next outputs."""
        said = self._said.get(sequence.data.request_id, 0)
        if kind is FinishReason.REJECTED:
            self._families.refuse(sequence, Refusal(reason, why, sequence.retry_after), now)
        record = self.end(sequence, kind, now, reason)
        if record is not None:
            self.ended.append((sequence, record))
            try:
                self._drop([sequence.data.request_id])
            finally:
                if sequence.data.is_finished():
                    self._aborted.append(Aborted(sequence.data, why or reason, sequence.retry_after))
                else:  # vLLM goes on with it
                    sequence.data.priority = said

    def _end_doomed(self) -> None:
        now = self.clock.now()
        for sequence, refusal in self._families.take_doomed():
            sequence.retry_after = refusal.retry_after
            self.reject(sequence, refusal.reason, now, why=refusal.why)

    def end(self, sequence: Sequence, reason: FinishReason, now: float, cause: str = "") -> RequestRecord | None:
        """Forget ``sequence``, which has ended or is about to. None if it had ended before."""
        state = sequence.state
        if state == "finished":
            return None
        sequence.state = "finished"
        if state == "waiting":
            self.waiting.removed(sequence)
        self._leave(sequence)
        sequence.generated = len(sequence.token_times)
        sequence.cause = cause
        record = sequence.record(reason, now, self.settings.epoch)
        self.waiting.ended(record)
        if self._admission is not None:
            self._admission.ended(record)
        name = sequence.data.request_id
        self._families.left(sequence)
        del self._by_name[name], self._said[name]  # the last: until then its priority is known
        self._idled |= not self._by_name
        return record

    def _leave(self, sequence: Sequence) -> None:
        """It waits or runs no longer."""
        self.prefills.pop(sequence, None)
        self._to_come.drop(sequence)
        self._offsets -= self.decodes.pop(sequence, 0)
        self.slack.gone(sequence)

    def dropped(self, names: Iterable[str]) -> None:
        """vLLM has ended these requests, or some of them, from outside a step."""
        now = self.clock.now()
        for name in names:
            sequence = self._by_name.get(name)
            if sequence is not None and sequence.data.is_finished():
                record = self.end(sequence, finish_reason(sequence.data.get_finished_reason()), now)
                if record is not None:
                    self.ended.append((sequence, record))

    @property
    def admission(self) -> AdmissionPolicy | None:
        return None if self._admission is None else self._admission.policy

    def set_admission(
        self,
        policy: AdmissionPolicy | None,
        *,
        weights: Mapping[str, float] | None = None,
        source: RateSource | None = None,
    ) -> None:
        """End or relegate what comes too late from now on, by ``policy``; None accepts everything, in the order of before."""
        order = None if policy is None else policy.order
        wanted = self.waiting.own if order is None else ordering_of(order, self.slack.slos)
        behind = self.waiting.relegated_tokens or any(s.relegated is not None for s in self.prefills)
        if (before := self.waiting.ordering) is not wanted or behind:
            self.waiting.reorder(wanted)
            self.waiting.key_anew(self.prefills, before)  # one that has no key there keeps its own
            self._requeue()
        self._admission = made = (
            None if policy is None else Admission(policy, self.slack, weights=weights, source=source)
        )
        if made is not None:
            for sequence in self.waiting:
                made.queued(sequence)

    def retarget(self) -> None:
        """SLOs have changed: what waits goes by those of now, where its deadlines differ."""
        if not self.slack.deadlines_changed():
            return
        waiting = self.waiting
        waiting.reorder(waiting.ordering, slos_changed=True)
        waiting.key_anew(self.prefills, None)
        self.slack.requeued((*waiting, *self.prefills))
        self._requeue()
        if self._admission is not None:
            self._admission.retime(waiting)

    def _requeue(self) -> None:
        """Have vLLM's queue stand as ours does."""
        taken = []
        for name in QUEUES:
            queue = getattr(self._scheduler, name, None)
            if queue is not None and (
                requests := [request for request in queue if request.request_id in self._by_name]
            ):
                queue.remove_requests(requests)
                taken.append((queue, requests))
        for sequence in self.waiting:
            if not sequence.preemptions:
                sequence.data.priority = sequence.key
        for queue, requests in taken:
            for request in requests:
                queue.add_request(request)

    @property
    def next_expiry(self) -> float:
        """When the next request times out, altogether or in the queue; inf if none does."""
        expiry = self._expiries.next
        return expiry if self._admission is None else min(expiry, self._admission.next_timeout)

    def expire(self, now: float) -> None:
        """End what has timed out."""
        while (expiry := self.next_expiry) <= now:
            admission = self._admission
            if admission is not None and admission.next_timeout == expiry:
                sequence, verdict = admission.timed_out()
                self._late(admission, sequence, verdict, now)
            else:
                _, sequence = self._expiries.pop()
                self.reject(sequence, "its timeout passed", now, FinishReason.TIMEOUT)

    @property
    def has_work(self) -> bool:
        return bool(self._by_name or self._aborted)

    def _begin(self, sequence: Sequence, count: int, now: float, epoch: int) -> None:
        if sequence.state != "waiting":
            return
        cached = sequence.data.num_computed_tokens - count
        self.waiting.take(sequence)
        sequence.state = "prefill"
        sequence.computed = cached
        self.prefills[sequence] = None
        sequence.data.priority = self._while_it_runs(sequence)
        if sequence.scheduled is None:
            sequence.scheduled, sequence.epoch_first, sequence.cached = now, epoch, cached

    def _while_it_runs(self, sequence: Sequence) -> float:
        """vLLM preempts the highest: of those whose clients gave the least priority, the newest."""
        self._order += 1
        level = min(max(-sequence.request.priority, -_MOST_PRIORITY), _MOST_PRIORITY) if self._by_priority else 0
        return _FIRST + level * _LEVEL + self._order

    def _first_token(self, sequence: Sequence) -> None:
        """It decodes from now on."""
        del self.prefills[sequence]
        self._to_come.drop(sequence)
        self.decodes[sequence] = offset = sequence.data.num_computed_tokens - self._advanced
        self._offsets += offset
        sequence.state = "decode"
        sequence.generated = len(sequence.token_times)
        sequence.joined = self._step
        sequence.data.priority = self._while_it_runs(sequence) + _DECODES
        self.slack.decoding(sequence)

    def _preempted(self, name: str) -> bool:
        sequence = self._by_name.get(name)
        if sequence is None or sequence.state == "waiting":
            return False
        self._leave(sequence)
        sequence.generated = len(sequence.token_times)
        sequence.computed = 0
        sequence.target = sequence.request.prompt_len + sequence.generated
        sequence.preemptions += 1
        if self._admission is None:  # it may have decoded since it was relegated
            unrelegate(sequence)
        self._queue(sequence)
        return True

    def aborted(self) -> list[Aborted]:
        """Those that were ended here since the last call: their clients wait for a word."""
        found, self._aborted = self._aborted, []
        return found

    def take_ended(self) -> list[Finished]:
        found, self.ended = self.ended, []
        return found


def finish_reason(said: object) -> FinishReason:
    """Our word for vLLM's; what it calls anything else ended by a fault."""
    return _REASONS.get(str(said), FinishReason.ERROR)
