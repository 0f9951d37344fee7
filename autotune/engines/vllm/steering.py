"""The knobs, budgets and step records of one vLLM scheduler, from inside it.

vLLM reads its ceilings from attributes in every ``schedule()``, so they are the knobs: :meth:`Steering.before` sets them for
the step that is about to be planned, :meth:`Steering.planned` notes what vLLM made of them, :meth:`Steering.landed` what came
of it. Of requests :mod:`autotune.engines.vllm.requests` keeps track.

Three rules make vLLM schedule as our engine does:

- decodes come first in ``running``: vLLM serves it in order, and a prompt in progress would take the token of a decode behind it;
- no budget is below the number of decodes: the last of them would starve;
- vLLM does not cut the prompt of a request that is alone to ``long_prefill_token_threshold``: the budget does it.

While the KV pool is nearly full, ``growth_reserve`` blocks are kept for each decode, through vLLM's own watermark.

What a step costs here follows what changes in it: decodes that all get their token advance together, and their context is known
without a look at any.

No vLLM and no torch is imported here: the scheduler is whatever has the attributes in
:data:`autotune.engines.vllm.scheduler.NEEDED`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from math import inf
from typing import Any, Final, NamedTuple

from autotune.engines.vllm.requests import SteeredRequests, finish_reason
from runtime.clock import Clock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.plan import Token
from runtime.llm.prefill_rate import Work
from runtime.llm.slack import SlackTracker
from runtime.llm.waiting import precedes, rank
from runtime.ordering import Ordering, ordering_of
from runtime.records import FinishReason, LimitedBy, StepRecord
from runtime.request import Sequence
from runtime.shared.settings import Settings
from runtime.slo import SLO
from runtime.tunable import SchedulerView

_TRIED_AGAIN: Final = 8  # steps after which prompts yield again to a request that did not begin when they last did
GROWTH_RESERVE: Final = 1
"""KV blocks kept free for each decode while a prompt is admitted: those that hold its next token."""


class _Chunk(NamedTuple):
    sequence: Sequence
    end: int  # tokens computed after it


class _Planned(NamedTuple):
    """A step that vLLM has planned: more than one is on its way under async scheduling."""

    record: StepRecord
    chunks: list[_Chunk]


class _Prompts(NamedTuple):
    """Of the coming step: until when the wait window holds new prompts (-inf: it does not), the most of these that may begin,
    KV blocks that prompts in progress will need after the step, and those of them that yield it."""

    held: float
    may_begin: int
    owed: int
    yielding: list[Sequence]


class Steering(SteeredRequests):
    """Steers ``scheduler``, one of vLLM's. One thread, but for ``settings``.

    ``limits`` are lowered to what vLLM was started with; ``knobs`` None: vLLM's own defaults. ``drop`` ends requests in vLLM,
    by their ids, and tells nobody of it. ``tokens``: whether to keep the tokens of a step for :meth:`take_tokens`.
    """

    def __init__(
        self,
        scheduler: Any,
        clock: Clock,
        drop: Callable[[list[str]], object],
        *,
        knobs: Knobs | None = None,
        limits: KnobLimits | None = None,
        slos: Mapping[str, SLO] | None = None,
        ordering: Ordering | None = None,
        tokens: bool = False,
    ) -> None:
        config = scheduler.scheduler_config
        slots, most = (
            min(scheduler.max_num_running_reqs, scheduler.max_num_active_reqs),
            min(config.max_num_batched_tokens, scheduler.max_num_scheduled_tokens),
        )
        top = KnobLimits(
            max_batch_size=slots, token_budget=most, chunk_size=most, draft_tokens=0
        )  # set when vLLM starts
        if limits is not None:
            lower = {name: min(value, limits.as_dict()[name]) for name, value in top.as_dict().items()}
            top = KnobLimits(**lower)  # type: ignore[arg-type]  # whole numbers where both have them
        stock = Knobs(slots, 0.0, most, min(config.long_prefill_token_threshold or most, most))
        settings = Settings(top.clamp(stock) if knobs is None else knobs, top)
        super().__init__(scheduler, clock, drop, settings, slos or {}, ordering or ordering_of("priority"))
        self.steps: list[StepRecord] = []
        """Those that have landed since they were last taken."""
        self._free_blocks, self._blocks = self.kv.free, self.kv.blocks
        self._caches: bool = scheduler.kv_cache_manager.enable_caching
        self._watermark: int = scheduler.kv_cache_manager.watermark_blocks
        aligned = getattr(scheduler, "need_mamba_block_aligned_split", False)
        self._aligned_block: int = scheduler.cache_config.block_size if aligned else 0
        self._stock = (
            scheduler.max_num_active_reqs,
            scheduler.max_num_scheduled_tokens,
            config.long_prefill_token_threshold,
        )
        self._plans: deque[tuple[Any, _Planned | None]] = deque()  # each with vLLM's own plan
        self._tokens: list[Token] | None = [] if tokens else None
        self._last_end = -inf
        self._prepared = False  # for the coming step
        self._yielding: list[Any] = []  # requests whose prompts wait for the coming step to be over
        self._yields_for: list[str] = []  # requests for which they wait
        self._in_vain: dict[
            str, int
        ] = {}  # of those that did not begin then: the step from which on one is yielded for again
        self._may_yield = not getattr(scheduler, "lora_config", None)  # vLLM counts the adapters of what runs
        self._steps_planned = 0
        self._preparing: tuple[float, int, Knobs, int, int, float]

    def let_go(self) -> None:
        """Give vLLM the settings back that it was started with, and the requests their priorities."""
        self.put_back()
        self.give_back_limits()
        self.give_back_priorities()

    def give_back_limits(self) -> None:
        """Of :meth:`let_go` the ceilings that vLLM was started with."""
        scheduler = self._scheduler
        scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens, threshold = self._stock
        scheduler.scheduler_config.long_prefill_token_threshold = threshold
        scheduler.kv_cache_manager.watermark_blocks = self._watermark

    def view(self, now: float, *, elsewhere: bool = False) -> SchedulerView:
        """As :meth:`runtime.llm.core.EngineCore.view`. ``elsewhere``: on another thread than vLLM's, so what is kept in order
        there must not be put in order here; raises RuntimeError or IndexError where something changes meanwhile.
        """
        waiting, slack = self.waiting, self.slack
        if elsewhere or not slack.following:
            slack = SlackTracker(slack.slos)
            slack.follow((*waiting, *self.prefills), self.decodes)
        oldest = None
        if waiting.count:
            oldest = waiting.look_for_oldest() if elsewhere else waiting.oldest()
        in_progress = tuple([(s.computed, s.target - s.computed) for s in self.begun()]) if self.prefills else ()
        deadlines = slack.token_deadlines(now, self._step, self._last_end if self._step else now)
        decode_slack = min([left for _, left in deadlines], default=inf)
        decodes = len(self.decodes)
        epoch, knobs = self.settings.current
        return SchedulerView(
            now, decodes, len(in_progress), waiting.count, waiting.tokens, sum([left for _, left in in_progress]),
            self._offsets + self._advanced * decodes, self.free_blocks(), self.kv.total_blocks,
            inf if oldest is None else oldest.request.arrival, min(slack.fixed(now), decode_slack), decode_slack, knobs,
            epoch, self.settings.effective_limits, slack.step_time_target, in_progress, deadlines, waiting.relegated_tokens,
            prompt_slack=slack.pending(now),
        )  # fmt: skip

    def free_blocks(self) -> int:
        """KV blocks that nobody holds, and that no prompt in progress will need."""
        free = self._free_blocks()
        return max(0, free - self._owed()) if self.prefills else free

    def _owed(self) -> int:
        """Blocks that prompts in progress will need: vLLM hands them out chunk by chunk."""
        blocks = 0
        for sequence in self.prefills:
            blocks += self._blocks(sequence.target) - self._blocks(sequence.data.num_computed_tokens)
        return blocks

    @staticmethod
    def _slots(knobs: Knobs) -> int:
        return min(knobs.max_batch_size, knobs.token_budget)

    def before(self) -> None:
        """The coming step is about to be planned; :meth:`prepare` may have been called for it."""
        if not self._prepared:
            self.prepare()

    def prepare(self) -> float:
        """Put knobs and budget in force for the coming step, and end what comes too late.

        Returns until when the wait window holds all there is to do: no step is needed before then. -inf if it does not.
        """
        scheduler, now = self._scheduler, self.clock.now()
        epoch, knobs = self.settings.current
        admission = self._admission
        self._yields_for = []
        if self._yielding:  # of a step that was prepared and did not come
            self.put_back()
        for name in getattr(scheduler, "reset_preempted_req_ids", ()):  # since the last step: its caches were reset
            self._preempted(name)
        if self._expiries.heap or (admission is not None and admission.timeouts.heap):
            self.expire(now)
        if self._families.doomed:
            self._end_doomed()
        requested, fill = knobs.token_budget, False
        if self.settings.policy is None:
            if self.slack.following:
                self.slack.stop()
        elif self._by_name:
            if not self.slack.following:
                self.slack.follow((*self.waiting, *self.prefills), self.decodes)
            budget = self.settings.budget(lambda: self.view(now))
            requested, fill = (requested, False) if budget is None else (min(requested, budget), True)
        running: list[Any] = scheduler.running
        begun: list[Sequence] = []
        ahead: list[float] = []
        prompts = 0
        if self.prefills:
            begun = self.begun()
            if admission is not None:
                ahead = admission.judge_in_progress(begun, now, self._late)
            if len(begun) > 1:
                self.prefills = dict.fromkeys(begun)  # in the order of the step
            prompts = self._put_in_order(running, begun)
        decodes = len(running) - prompts
        if not decodes:
            requested = max(requested, 1)  # whatever a policy says, a step with work does some
        given = max(requested, decodes)
        slots = self._slots(knobs)
        held, may_begin, owed, growing, kept = -inf, 0, 0, 0, 0
        yielding: list[Sequence] = []
        if self.waiting.count:
            kept = self.kv.grow * decodes
            growing = self.kv.growing(running[:decodes])
        if self.waiting.count or begun:
            held, may_begin, owed, yielding = self._plan_prompts(
                knobs, requested - decodes, slots - len(running), growing + kept, begun, ahead, now, fill
            )
        if yielding:
            self._yielding = [s.data for s in yielding if s.data.is_prefill_chunk]
            yields = set(yielding)
            self._put_in_order(running, [*(s for s in begun if s not in yields), *yielding])
            del running[len(running) - len(self._yielding) :]
        if not self._yielding:
            self._yields_for = []
        free = slots - len(self._yielding)
        reserve, active = self._watermark, free
        if self.waiting.count:
            reserve = max(reserve, kept + owed)
            active = min(free, len(running) + may_begin)
        if len(self._by_name) - len(self._yielding) == 1:
            given = min(given, knobs.chunk_size)
        scheduler.max_num_scheduled_tokens = given
        scheduler.scheduler_config.long_prefill_token_threshold = self._chunk(knobs.chunk_size, given - decodes)
        scheduler.max_num_active_reqs = active
        scheduler.kv_cache_manager.watermark_blocks = reserve
        self._preparing = now, epoch, knobs, requested, slots, held
        self._prepared = True
        if held > now and not running and not active:
            self._idled = True
            return held
        return -inf

    def _chunk(self, most: int, left: int) -> int:
        """What a prompt may take of a step with ``left`` tokens beside its decodes.

        vLLM cuts prompts of models with Mamba states ("align") at the ends of blocks, unless a block is larger than a step may
        hold, decodes included. Where less than a block is left beside them no prompt would go on, so vLLM is told how much is.
        """
        return max(1, min(most, left)) if left < self._aligned_block else most

    def begun(self) -> list[Sequence]:
        """Those whose prompts are in progress, in the order in which they are computed."""
        return sorted(self.prefills, key=rank) if len(self.prefills) > 1 else list(self.prefills)

    @staticmethod
    def _put_in_order(running: list[Any], begun: list[Sequence]) -> int:
        """Decodes first, then the prompts in progress as in ``begun``; returns how many of these there are."""
        wanted = [s.data for s in begun if s.data.is_prefill_chunk]
        if wanted and not all([a is b for a, b in zip(running[-len(wanted) :], wanted, strict=False)]):
            place = {request.request_id: i for i, request in enumerate(wanted, 1)}
            running.sort(key=lambda r: place.get(r.request_id, 0))
        return len(wanted)

    def _plan_prompts(
        self,
        knobs: Knobs,
        left: int,
        slots: int,
        taken: int,
        begun: list[Sequence],
        ahead: list[float],
        now: float,
        fill: bool,
    ) -> _Prompts:
        """What the scheduler of our engine would do with ``left`` tokens and ``slots``, as far as vLLM must be told.

        As many may begin as have their whole prompts fit beside the ``taken`` blocks. Ends or relegates those whose turn it is
        and that would be late. Of the first vLLM sees to the blocks itself, and knows what of it is cached; but it would
        begin others before the first has all of its blocks.
        """
        admission, waiting = self._admission, self.waiting
        turn, begins, owed, held, most = 0, 0, 0, -inf, slots
        yielding = False
        shared: set[int] = (
            set()
        )  # blocks of a cached prefix that nobody held, which the first of this step takes for all
        named: set[Any] = set()  # hashes of blocks that the step computes, of prompts before those that it begins now
        spare: int | None = None
        heads = waiting.in_order()
        head = next(heads, None)
        while True:
            if turn < len(begun) and not yielding and (head is None or precedes(begun[turn], head)):
                sequence = begun[turn]
                done = sequence.data.num_computed_tokens
                count = min(knobs.chunk_size, sequence.target - done, max(left, 0))
                left -= count
                owed += self._blocks(sequence.target) - self._blocks(done + count)
                if self._caches and head is not None:
                    named.update(self.kv.named(sequence.data, done, done + count))
                turn += 1
                continue
            if head is None:
                break
            if spare is None:
                held = waiting.held_until(knobs, left, slots)
                spare = self._free_blocks() - self._owed() - taken
                if held > now:
                    most = sum(1 for s in waiting if s.preemptions)
            if held > now and not head.preemptions:
                head = None
                continue
            if left <= 0 or begins >= slots:
                head = None
                continue
            plain = admission is None and not self._caches and turn == len(begun) and held <= now
            if plain and spare >= self._blocks(waiting.tokens) + waiting.count:
                break  # whatever vLLM begins has room
            if admission is not None:
                verdict = admission.turn(head, now, ahead[:turn] + ahead[len(begun) :], self._recount)
                if verdict is not None:
                    self._late(admission, head, verdict, now)
                    head = next(heads, None)
                    continue
            cached, idle = self.kv.cached(head.data)  # some may have been evicted since it was queued
            cached += self.kv.shared(head.data, cached, named)
            pending = head.target - cached
            spare -= self._blocks(pending) + len(idle - shared)
            shared |= idle
            if spare < 0:
                most, head = max(1, begins), None
                continue
            if turn < len(begun) and not yielding and self._yields_to(head):
                yielding = True
            if yielding:
                self._yields_for.append(head.data.request_id)
            if admission is not None:
                ahead.append(admission.rate.tokens(Work.of(pending, cached)))
            begins += 1
            count = min(knobs.chunk_size, pending, left)
            left -= count
            if self._caches:
                named.update(self.kv.named(head.data, cached, cached + count))
            head = next(heads, None)
        yields: list[Sequence] = []
        for sequence in begun[turn:] if yielding else ():
            done = sequence.data.num_computed_tokens
            count = max(0, min(knobs.chunk_size, sequence.target - done))
            if count > (left if fill else 0):
                yields.append(sequence)
                count = 0
            left -= count
            owed += self._blocks(sequence.target) - self._blocks(done + count)
        return _Prompts(held, most, owed, yields)

    def _yields_to(self, head: Sequence) -> bool:
        """Whether prompts in progress wait for ``head``, which goes first. Not for one that vLLM would not begin (a grammar is
        compiled first, say): it is tried again after some steps."""
        return self._may_yield and self._steps_planned >= self._in_vain.get(head.data.request_id, 0)

    def put_back(self) -> None:
        """Let vLLM run the requests again that yielded the step that it has planned, or could not plan."""
        self._prepared = False
        if self._yielding:
            self._scheduler.running += self._yielding
            self._yielding = []

    def planned(self, output: Any) -> None:
        """Note what is in the step that vLLM has planned. :meth:`put_back` was called."""
        now, epoch, knobs, requested, slots, held = self._preparing
        preempted = 0
        for name in output.preempted_req_ids or ():
            preempted += self._preempted(name)
        scheduled: dict[str, int] = output.num_scheduled_tokens
        begun = len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids)
        self._steps_planned += 1
        if begun:  # vLLM plans them last
            for name in reversed([*islice(reversed(scheduled), begun)]):
                self._begin(self._by_name[name], scheduled[name], now, epoch)
        if self._yields_for or self._in_vain:
            self._note_in_vain()
        context = tokens = prefix = pairs = unfinished = early = 0
        chunks: list[_Chunk] = []
        limited = LimitedBy.DEMAND
        for sequence in self.prefills:
            request = sequence.data
            count = scheduled.get(request.request_id)
            if count is None:
                continue
            end = request.num_computed_tokens  # vLLM has moved it on already
            start = end - count
            if start >= sequence.target:  # its first token is on its way
                early += 1
                context += end
                continue
            chunks.append(_Chunk(sequence, end))
            tokens += count
            prefix += end
            pairs += count * start + count * (count + 1) // 2
            if end < sequence.target:
                unfinished += 1
                limited = LimitedBy.CHUNK if count == knobs.chunk_size else LimitedBy.BUDGET
        used: int = output.total_num_scheduled_tokens
        decodes = len(scheduled) - len(chunks)
        advancing = decodes - early
        if advancing == len(self.decodes) and used == tokens + decodes:
            self._advanced += 1
            context += self._offsets + self._advanced * advancing
        else:
            context += self._some_advance(scheduled)
        if len(chunks) < len(self.prefills):
            limited = LimitedBy.BUDGET
        elif self.waiting.count:
            full, head = len(self._scheduler.running) >= slots, self.waiting.peek()
            limited = (
                LimitedBy.WAIT if held > now and not (head and head.preemptions)
                else LimitedBy.SLOTS if full
                else LimitedBy.BUDGET if used >= requested
                else LimitedBy.KV
            )  # fmt: skip
        record = StepRecord(
            now, now, 1, decodes, context, len(chunks), tokens, prefix, pairs, decodes + len(chunks) - unfinished, 0,
            self.waiting.count, self.waiting.tokens, 0, preempted, epoch, requested, limited, after_idle=self._idled,
        )  # fmt: skip
        self._idled = not used
        self._plans.append((output, _Planned(record, chunks) if used else None))

    def _some_advance(self, scheduled: Mapping[str, int]) -> int:
        """A step in which not every decode gets one token. Returns the context of those that get any."""
        context = self._offsets = 0
        for sequence in self.decodes:
            computed = sequence.data.num_computed_tokens
            if sequence.data.request_id in scheduled:
                context += computed
            self.decodes[sequence] = computed - self._advanced
            self._offsets += computed - self._advanced
        return context

    def _note_in_vain(self) -> None:
        """Of the requests that prompts have yielded to, remember those that vLLM passed over: one behind them began, or none did.
        Those behind the last that began had no room. Nor had preempted ones, which vLLM never passes over, but has in an order of
        its own."""
        waiting = {name for name in (*self._in_vain, *self._yields_for) if self._waits(name)}
        self._in_vain = {name: step for name, step in self._in_vain.items() if name in waiting}
        vain = self._yields_for
        began = [at for at, name in enumerate(vain) if name not in waiting]
        if began:
            before = vain[: began[-1]]
            vain = [name for name in before if name in waiting and not self._by_name[name].preemptions]
        self._in_vain |= dict.fromkeys(vain, self._steps_planned + _TRIED_AGAIN)

    def _waits(self, name: str) -> bool:
        sequence = self._by_name.get(name)
        return sequence is not None and sequence.state == "waiting"

    def landed(self, output: Any, outputs: Mapping[int, Any]) -> None:
        """vLLM has taken in what came of the step ``output``. Older ones never land, after a fault that vLLM survived."""
        while self._plans and self._plans[0][0] is not output:
            self._plans.popleft()
        now, (_, plan) = self.clock.now(), self._plans.popleft() if self._plans else (None, None)
        if plan is not None:
            self._step += plan.record.decodes > 0
            for sequence, end in plan.chunks:
                if sequence.state == "prefill":
                    sequence.computed = end
        sampled = failed = 0
        by_name, kept = self._by_name, self._tokens
        for group in outputs.values():
            for out in group.outputs:
                one = by_name.get(out.request_id)
                if one is None:
                    continue
                if new := out.new_token_ids:
                    if len(new) == 1:
                        sampled += 1
                        one.token_times.append(now)
                    else:
                        sampled += len(new)
                        one.token_times += [now] * len(new)
                    if one.state == "prefill":
                        self._first_token(one)
                    elif one.state == "waiting":  # it was preempted while its token was on its way
                        one.generated = len(one.token_times)
                        self.slack.gone(one)
                        self.slack.queued(one)
                    if kept is not None:
                        kept += _tokens(one, out)
                elif out.pooling_output is not None:  # the whole answer, and so its first token
                    one.token_times.append(now)
                if out.finish_reason is not None:
                    reason = finish_reason(out.finish_reason)
                    failed += reason is FinishReason.ERROR
                    ended = self.end(one, reason, now)
                    if ended is not None:
                        self.ended.append((one, ended))
        if plan is None:
            return
        (
            start, _, steps, decodes, context, chunks, tokens, prefix, pairs, _, _, waiting, waiting_tokens, _, preempted, epoch,
            used, limited, *_, after_idle,
        ) = plan.record  # fmt: skip
        record = StepRecord(  # _replace() takes three times as long
            max(start, self._last_end),  # steps of an async scheduler overlap
            now, steps, decodes, context, chunks, tokens, prefix, pairs, sampled, len(self._scheduler.running), waiting,
            waiting_tokens, self.free_blocks(), preempted, epoch, used, limited, failed, 0, 0, after_idle,
        )  # fmt: skip
        self._last_end = now
        self.steps.append(record)
        if self._admission is not None:
            self._admission.observe(record)
        self.waiting.stepped(record)

    @property
    def decodes_alone(self) -> bool:
        """Whether no prompt waits or is in progress: what a step holds then is settled, whatever its budget is."""
        return not (self.waiting.count or self.prefills)

    @property
    def planned_last(self) -> StepRecord | None:
        """What the latest step holds that is on its way; None if there is none, or nothing in it."""
        plan = self._plans[-1][1] if self._plans else None
        return None if plan is None else plan.record

    def take_tokens(self) -> list[Token]:
        """Those sampled since the last call."""
        found, self._tokens = self._tokens or [], []
        return found

    def take_steps(self) -> list[StepRecord]:
        found, self.steps = self.steps, []
        return found

    def end_all(self, cause: str) -> None:
        """vLLM makes no more steps: what it leaves has ended, with an error."""
        now = self.clock.now()
        for sequence in list(self._by_name.values()):
            record = self.end(sequence, FinishReason.ERROR, now, cause)
            if record is not None:
                self.ended.append((sequence, record))


def _tokens(sequence: Sequence, out: Any) -> list[Token]:
    found = out.new_logprobs
    if found is None:
        return [Token(sequence, token) for token in out.new_token_ids]
    made = []
    for token, ids, values in zip(out.new_token_ids, found.logprob_token_ids, found.logprobs, strict=False):
        top = tuple((int(i), float(v)) for i, v in zip(ids[1:], values[1:], strict=True))
        made.append(Token(sequence, token, float(values[0]), top))
    return made
