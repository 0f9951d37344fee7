"""Which tokens go into each step. A step costs what changes in it, not how many sequences run.

There is no prefill or decode phase: a sequence has ``computed`` tokens that catch up with its ``target``. Decodes are
planned first, one token each; prompts fill what is left of the budget by the ordering, those in progress and those that wait:
where one begins, prompts in progress that come behind it yield the step. Where a step policy says what the step may hold, those
whose next chunk fits in what is left of it go on: it lengthens no step beyond what targets allow. (A part of a chunk could go on
as well, but vLLM has no way to say so.) When KV blocks run out, the newest sequence gives its own back and is recomputed later;
the oldest always gets on.

A prompt has the blocks of all its tokens from its beginning on. As vLLM hands them out (``by_chunk``) it has those of the chunks
planned so far, while others begin only if it will find the rest: decodes grow into that. Then a chunk finds no block, and the
newest prompt gives its own back, itself if need be, and ends the step there; nobody begins in it.

Drafted tokens come last: up to ``draft_tokens`` behind the last token of each decode, while budget and KV blocks are left that
nobody else can use. So they delay no prompt and preempt nobody. Of the step's decodes, those with drafts are planned as chunks
and set aside (:mod:`runtime.llm.decodes`); when the step is done they have one token more than drafts that were right, and give
back the blocks of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Final, NamedTuple

from runtime.knobs import Knobs
from runtime.llm.admission import Admission, Verdict, rejected
from runtime.llm.decodes import Decodes
from runtime.llm.drafts import Drafter
from runtime.llm.holdings import Computing, Holdings
from runtime.llm.kv_blocks import KVBlocks
from runtime.llm.plan import Chunk, StepPlan, StepResult
from runtime.llm.slack import SlackTracker
from runtime.llm.waiting import Entry, WaitingQueue, precedes, put_behind, rank, unrelegate
from runtime.ordering import Ordering, ordering_of
from runtime.records import FinishReason, LimitedBy, RequestRecord
from runtime.request import Request, Sequence, TokenHasher
from runtime.slo import SLO

Finished = tuple[Sequence, RequestRecord]


_MOST_ASIDE: Final = 256
"""How many a step passes over that wait for a prompt in progress, before those behind them wait with them."""


class Unsettled(NamedTuple):
    """What is known of a step before its result: the prompt ``chunks`` it computes, the sequences it brings to max_tokens
    (``ending``), its number among the decode steps (−1: nothing decodes). ``after``: sequences that run, requests and prompt
    tokens that wait, and free KV blocks, behind it."""

    chunks: list[Chunk]
    ending: dict[Sequence, None]
    step: int
    after: tuple[int, int, int, int]


class Scheduler:
    """``schedule(now, knobs) -> StepPlan``; then ``update(plan, result)`` before the next ``schedule``.

    Between a plan that is not empty and its update nothing may be added or finished. Where steps overlap, an update is in two
    parts: ``commit(plan)`` moves on to the state behind the step, as far as it is certain before its result is, so that the next
    step can be planned (if :attr:`can_plan_ahead`); ``settle(unsettled, result)`` takes the result in. Between the plan and
    ``commit``, requests may be added and finished. ``slos`` (class -> SLO) feed
    :attr:`slack`, deadline order and ``admission``, which says what comes too late: those it ended while a step was planned
    are in ``rejected`` until somebody takes them. ``hasher`` lets outputs be found as prefixes too. ``growth_reserve``: free KV
    blocks kept for each decode when a prompt is admitted. ``by_chunk``: prompts get their blocks chunk by chunk, and these are
    known by their content as soon as they are planned; such plans are for :meth:`update` alone. ``before_preempting`` is called
    before a sequence is made to give its blocks back. ``drafter`` guesses tokens where ``draft_tokens`` allows it; without one
    that knob does nothing. Plans with drafts are for :meth:`update` alone.
    ``most_sampled``: rows of logits that a step with drafts may have, one for each drafted token among them, as there is memory
    for no more; None: any number.
    """

    def __init__(
        self,
        *,
        kv_blocks: int,
        block_size: int = 16,
        ordering: str | Ordering = "priority",
        slos: Mapping[str, SLO] | None = None,
        hasher: TokenHasher | None = None,
        growth_reserve: int = 1,
        by_chunk: bool = False,
        drafter: Drafter | None = None,
        most_sampled: int | None = None,
    ) -> None:
        self.kv = KVBlocks(kv_blocks, block_size, every_copy=by_chunk)
        self.holdings = Holdings(self.kv, hasher)
        self.decodes = Decodes(self.kv)
        self.prefills: dict[Sequence, None] = {}
        self.slack = SlackTracker(slos or {})
        self.waiting = WaitingQueue(ordering_of(ordering, self.slack.slos))
        self.admission: Admission | None = None
        self.rejected: list[Finished] = []
        self.preemptions = 0
        self._planned_at = 0  # preemptions until the last plan
        self.fast_forward = False
        """Whether a plan may stand for many identical decode steps."""
        self.growth_reserve = growth_reserve
        self.by_chunk = by_chunk
        self._grew = False  # whether decodes have the blocks of the step that is planned
        self._handed = 0  # how many of its chunks have theirs
        self.most_request_tokens = kv_blocks * block_size + 1
        """The longest prompt + output that can ever run, alone in the whole pool. The last token needs no KV."""
        self.drafter = drafter
        self.most_sampled = most_sampled
        self.before_preempting: Callable[[], None] | None = None
        self._epoch = 0
        # prompts in progress -> where the chunk that is committed, not settled, begins
        self._unsettled: dict[Sequence, int] = {}
        self._computing: Computing | None = None  # of the step that is planned, once somebody may wait for it

    @property
    def running(self) -> int:
        """Sequences that hold a slot: decoding, or with a prompt begun."""
        return len(self.decodes.members) + len(self.prefills)

    @property
    def has_work(self) -> bool:
        return bool(self.decodes.members or self.prefills or self.waiting.count)

    @property
    def free_blocks(self) -> int:
        """KV blocks that nobody holds, and that no prompt in progress will need."""
        return max(0, self.kv.free - self._owed()) if self.by_chunk else self.kv.free

    def _owed(self) -> int:
        """Blocks that prompts in progress will need, beside those that they hold."""
        blocks_for = self.kv.blocks_for
        return sum([blocks_for(s.target) - len(s.blocks) for s in self.prefills])

    def add(self, request: Request, now: float | None = None) -> Sequence:
        """Queue ``request``, ``now`` (its arrival, unless given). Raises ``ValueError`` for an empty prompt or one that can
        never fit in the pool, RejectedError if it would come too late, StepFailedError if a custom ordering raises."""
        length = request.prompt_len
        if length < 1:
            raise ValueError("the prompt is empty; it needs at least one token")
        output = max(1, request.max_tokens)
        if length + output > self.most_request_tokens:
            raise ValueError(
                f"prompt ({length}) + max_tokens ({output}) is {length + output} tokens;"
                f" the KV pool holds {self.most_request_tokens - 1}"
            )
        sequence = Sequence(request)
        self._queue(sequence)
        if self.admission is not None:
            now = request.arrival if now is None else now
            before = self.waiting.work_before(sequence)
            first = [s for s in self.prefills if precedes(s, sequence)]
            if (verdict := self.admission.arrive(sequence, now, before, first)) is not None:
                late = self.admission.outweighed(sequence, verdict, now, self.waiting.up_to(sequence)) or [sequence]
                if late[0] is sequence and not self.admission.relegates(sequence, verdict):
                    self.finish(sequence, FinishReason.REJECTED, now, verdict.reason)
                    raise rejected(sequence, verdict)
                for one in late:
                    self._late(self.admission, one, verdict, now)
            self.admission.queued(sequence)
        return sequence

    def finish(
        self, sequence: Sequence, reason: FinishReason, now: float, cause: str = "", *, trusted: bool = True
    ) -> RequestRecord | None:
        """End ``sequence`` in whatever state it is and take its blocks back. None if it has already ended.
        ``trusted``: no step that failed wrote them."""
        state = sequence.state
        if state == "finished":
            return None
        if state == "decode":
            self.decodes.leave(sequence)
        elif state == "prefill":
            del self.prefills[sequence]
            sequence.computed = self._unsettled.get(sequence, sequence.computed)
        sequence.state = "finished"
        if self.drafter is not None:
            self.drafter.forget(sequence)
        if state == "waiting":
            self.waiting.removed(sequence)
        self.holdings.release(sequence, trusted=trusted)
        self.slack.gone(sequence)
        sequence.cause = cause
        record = sequence.record(reason, now, self._epoch)
        self.waiting.ended(record)
        if self.admission is not None:
            self.admission.ended(record)
        return record

    def followed(self, slack: SlackTracker) -> SlackTracker:
        """``slack``, which follows from now on what runs and waits; what comes and goes is told to :attr:`slack` alone."""
        slack.follow((*self.waiting, *self.prefills), self.decodes)
        return slack

    def reorder(self, ordering: Ordering) -> list[tuple[Sequence, Exception]]:
        """Compute prompts by ``ordering`` from now on, those that were relegated too. Returns those for which it raised: they
        keep their place until they are ended."""
        before = self.waiting.ordering
        return self.waiting.reorder(ordering) + self.waiting.key_anew(self.prefills, before)

    def retarget(self) -> list[tuple[Sequence, Exception]]:
        """TTFT or E2E targets have changed: what waits, and prompts in progress, go by those of now, in order, slack and the
        queue's timeout. Returns as :meth:`reorder`."""
        waiting = self.waiting
        failed = waiting.reorder(waiting.ordering, slos_changed=True) + waiting.key_anew(self.prefills, None)
        self.slack.requeued((*waiting, *self.prefills))
        if self.admission is not None:
            self.admission.retime(waiting)
        return failed

    def _queue(self, sequence: Sequence) -> None:
        sequence.state = "waiting"
        self.holdings.queued(sequence)
        try:
            self.waiting.push(sequence)
        except BaseException:
            self.holdings.settled(sequence)
            raise
        self.slack.queued(sequence)

    # -- planning a step ----------------------------------------------------------------------------------------------

    def schedule(self, now: float, knobs: Knobs, epoch: int = 0, budget: int | None = None) -> StepPlan:
        """Plan the next step under ``knobs``; ``budget`` is a per-step one, below ``knobs.token_budget``."""
        self._epoch = epoch
        decodes = self.decodes
        if self.by_chunk:
            self._grew, self._handed = False, 0
        elif not decodes.grow():
            self._queue_again(self._grow())
        n = len(decodes.members)
        most = knobs.token_budget if budget is None else min(budget, knobs.token_budget)
        if n == 0:
            most = max(most, 1)  # whatever a policy says, a step with work does some
        chunks: list[Chunk] = []
        limited, wake = LimitedBy.DEMAND, inf
        begun = self.begun() if self.prefills else []
        aside: list[Entry] = []
        if begun or self.waiting.count:
            try:
                limited, wake = self._plan_prompts(now, knobs, most, begun, chunks, aside, fill=budget is not None)
            finally:
                if aside:
                    self.waiting.put_back(aside)
        short = self.by_chunk and not self._hand_out(chunks)
        if short:
            limited, wake = self._hand_out_short(knobs, most, begun, chunks), inf
            n = len(decodes.members)
        drafts: tuple[Chunk, ...] = ()
        each = 0 if self.drafter is None else knobs.draft_tokens
        if each and n:
            left = most - n - sum([chunk.count for chunk in chunks])
            if self.most_sampled is not None:
                left = min(left, self.most_sampled - n - len(chunks))
            drafts = self._plan_drafts(each, left)
            n -= len(drafts)
        # behind such a step others may begin
        alike = self.fast_forward and n and not (chunks or each or short or aside)
        if self.admission is not None and self.admission.policy.late and (self.prefills or self.waiting.count):
            alike = False  # it looks at each step
        repeat = decodes.steps_alike() if alike else 1
        preempted, self._planned_at = self.preemptions - self._planned_at, self.preemptions
        return StepPlan(
            decodes.step, n, decodes.context + n, tuple(chunks), decodes, decodes.version, repeat, wake, epoch, most,
            limited, preempted, drafts,
        )  # fmt: skip

    def speculates(self, knobs: Knobs) -> bool:
        """Whether steps under ``knobs`` may hold drafted tokens, which takes the tokens of the step before."""
        return self.drafter is not None and knobs.draft_tokens > 0

    def _plan_drafts(self, each: int, left: int) -> tuple[Chunk, ...]:
        """Set those decodes aside that get up to ``each`` drafted tokens of the ``left`` ones, the oldest first; returns a chunk
        for each of them. Blocks that a decode may need to grow by are left for it."""
        drafts: list[Chunk] = []
        drafter, decodes, kv = self.drafter, self.decodes, self.kv
        assert drafter is not None
        spare = max(0, self.free_blocks - self.growth_reserve * len(decodes.members))
        drafter.begin_step()
        for sequence in list(decodes.members) if left > 0 else ():
            done = decodes.step - sequence.joined
            start = sequence.computed + done
            most = min(
                each,
                left,
                sequence.request.max_tokens - sequence.generated - done - 1,  # one token comes without a draft
                (len(sequence.blocks) + spare) * kv.block_size - start - 1,
            )
            drafted = tuple(drafter.draft(sequence, most)) if most > 0 else ()
            if not drafted:
                continue
            count = 1 + len(drafted)
            fresh = max(0, kv.blocks_for(start + count) - len(sequence.blocks))
            sequence.blocks += kv.take(fresh)
            spare -= fresh
            decodes.set_aside(sequence)
            drafts.append(Chunk(sequence, start, count, True, drafted))
            left -= len(drafted)
            if left <= 0:
                break
        return tuple(drafts)

    def _plan_prompts(
        self,
        now: float,
        knobs: Knobs,
        most: int,
        begun: list[Sequence],
        chunks: list[Chunk],
        aside: list[Entry],
        *,
        fill: bool,
    ) -> tuple[LimitedBy, float]:
        """Fill ``chunks`` in order, with prompts in progress and new ones; ``fill``: with those that yielded, too. ``aside`` gets
        those that wait for a prompt in progress which they share. Returns what stopped it and when to wake."""
        decoding = len(self.decodes.members)
        left = most - decoding
        limited, held, wake = LimitedBy.DEMAND, None, inf
        admission, waiting = self.admission, self.waiting
        ahead = [] if admission is None else admission.judge_in_progress(begun, now, self._late)
        if not waiting.count:  # the same as below, where nothing is to be weighed
            for sequence in begun:
                if left <= 0:
                    return LimitedBy.BUDGET, inf
                left, limited = self._chunk(sequence, knobs.chunk_size, left, chunks, limited)
            return limited, inf
        in_progress = len(begun)
        slots = min(knobs.max_batch_size, knobs.token_budget) - decoding - in_progress
        turn, yielding = 0, False
        self._computing = None
        held_until = None if knobs.max_wait_ms else -inf
        while True:
            head = None if held else waiting.peek()
            if turn < in_progress and not yielding and (head is None or precedes(begun[turn], head)):
                if left <= 0:
                    return LimitedBy.BUDGET, inf
                left, limited = self._chunk(begun[turn], knobs.chunk_size, left, chunks, limited)
                turn += 1
                continue
            if head is None:
                passed = False
                for sequence in begun[turn:]:
                    if not fill or min(sequence.target - sequence.computed, knobs.chunk_size) > left:
                        passed = True
                    else:
                        left, limited = self._chunk(sequence, knobs.chunk_size, left, chunks, limited)
                if passed or (held is LimitedBy.KV and left <= 0):
                    return LimitedBy.BUDGET, inf
                return held or limited, wake
            if held_until is None:
                held_until = waiting.held_until(knobs, left, slots)
            if held_until > now and not head.preemptions:
                held, wake = LimitedBy.WAIT, held_until
            elif slots <= 0:
                held = LimitedBy.SLOTS
            elif left <= 0:
                return LimitedBy.BUDGET, inf
            elif head.hashes and self._awaits(head, chunks):
                aside.append(waiting.set_aside())
                if len(aside) == _MOST_ASIDE:
                    held = limited
            elif (
                admission is not None
                and (verdict := admission.turn(head, now, ahead[:turn] + ahead[in_progress:], self._recount))
                is not None
            ):
                self._late(admission, head, verdict, now)
            elif not self._admit(head, now, chunks):
                held = LimitedBy.KV
            else:
                yielding = turn < in_progress
                if admission is not None:
                    ahead.append(admission.work_left(head))
                slots -= 1
                left, limited = self._chunk(head, knobs.chunk_size, left, chunks, limited)

    @staticmethod
    def _chunk(
        sequence: Sequence, most: int, left: int, chunks: list[Chunk], limited: LimitedBy
    ) -> tuple[int, LimitedBy]:
        """Add the next chunk of ``sequence`` to ``chunks``: of ``most`` tokens (chunk_size) and what is ``left`` of the budget.
        Returns what is left then, and what cut a chunk short; ``limited`` unless this one was."""
        want = sequence.target - sequence.computed
        count = min(want, most, left)
        chunks.append(Chunk(sequence, sequence.computed, count, count == want))
        if count < want:
            limited = LimitedBy.CHUNK if count == most else LimitedBy.BUDGET
        return left - count, limited

    def begun(self) -> list[Sequence]:
        """Those whose prompts are in progress, in the order in which they are computed."""
        if len(self.prefills) < 2:
            return list(self.prefills)
        return sorted(self.prefills, key=rank)

    def _awaits(self, head: Sequence, chunks: list[Chunk]) -> bool:
        """Whether ``head``, whose turn it is, had better begin behind a step, for what others compute in it. Those go before it:
        each step brings that nearer. ``by_chunk`` blocks can be found as soon as they are handed out. A prompt no longer than
        is worth waiting for shares less."""
        unsettled = self._unsettled
        if self.by_chunk or head.target <= self.holdings.worth_waiting or not (chunks or unsettled):
            return False
        computing = self._computing
        if computing is None:
            self._computing = computing = self.holdings.computing()
            for sequence, start in unsettled.items():
                if sequence.state in ("decode", "left"):
                    computing.add(sequence, start)
        for chunk in chunks[computing.chunks :]:
            computing.add(chunk.sequence, unsettled.get(chunk.sequence, chunk.start))
        computing.chunks = len(chunks)
        return computing.awaited_by(head)

    def _recount(self, sequence: Sequence) -> bool:
        if not sequence.hashes:
            return False
        # by_chunk blocks that others of the step compute are found in it, and so are still to be counted on
        return self.waiting.recount(sequence, self.holdings.uncached(sequence), alone=not self.by_chunk)

    def _late(self, admission: Admission, sequence: Sequence, verdict: Verdict, now: float) -> None:
        """Relegate or end ``sequence``, as the policy says."""
        if admission.relegates(sequence, verdict):
            self.relegate(sequence)
            return
        sequence.retry_after = verdict.retry_after_s
        self._end(sequence, FinishReason.REJECTED, now, self.rejected, verdict.reason)

    def relegate(self, sequence: Sequence) -> None:
        """``sequence``, which waits or whose prompt is in progress, goes behind those that can still be met."""
        if sequence.state == "waiting":
            self.waiting.relegate(sequence)
        else:
            put_behind(sequence)
        self.slack.gone(sequence)
        self.holdings.settled(sequence)

    def _admit(self, sequence: Sequence, now: float, chunks: list[Chunk]) -> bool:
        """Give ``sequence`` the blocks of all its known tokens, if blocks to grow by are left for every decode. ``by_chunk`` it
        has to fit as well, but is given those alone that are cached, behind what the step of ``chunks`` takes so far."""
        owed = 0
        if self.by_chunk:
            if not self._hand_out(chunks):
                return False
            owed = self._owed()
        spare = self.kv.free - owed - self.growth_reserve * len(self.decodes.members)
        if not self.holdings.fits(sequence, spare, whole=not self.by_chunk):
            return False
        self.waiting.pop()
        sequence.state = "prefill"
        self.prefills[sequence] = None
        if sequence.scheduled is None:
            sequence.scheduled = now
            sequence.cached = sequence.computed
            sequence.epoch_first = self._epoch
        return True

    def _hand_out(self, chunks: list[Chunk]) -> bool:
        """Give decodes, and then ``chunks`` of prompts in their order, the blocks that they lack. False, and none, if there are
        not enough."""
        decodes, kv = self.decodes, self.kv
        fresh = chunks[self._handed :]
        lacking = [self._lacks(chunk.sequence, chunk.start + chunk.count) for chunk in fresh]
        if sum(lacking) + (0 if self._grew else decodes.growing) > kv.free:
            return False
        if not self._grew:
            self._grew = decodes.grow()
        for chunk, count in zip(fresh, lacking, strict=True):
            self._give(chunk, count)
        self._handed = len(chunks)
        return True

    def _hand_out_short(self, knobs: Knobs, most: int, begun: list[Sequence], chunks: list[Chunk]) -> LimitedBy:
        """The same where there are not enough: preempt for them, which changes ``chunks``. Nobody has begun in this step. Returns
        what limits it."""
        if self.before_preempting is not None:  # what is handed out from here on is to be found
            self.before_preempting()
        left = most - len(self.decodes.members)
        gave = [] if self._grew else self._grow()
        planned: dict[Sequence, Chunk] = {}
        for sequence in begun:
            if left <= 0:
                break
            if sequence not in self.prefills:
                continue
            start = sequence.computed
            count = min(sequence.target - start, knobs.chunk_size, left)
            lacks = self._lacks(sequence, start + count)
            while lacks > self.kv.free and sequence in self.prefills:
                victim = self._preempt()
                gave.append(victim)
                if victim in planned:
                    left += planned.pop(victim).count
            if sequence not in self.prefills:
                break
            planned[sequence] = chunk = Chunk(sequence, start, count, start + count == sequence.target)
            self._give(chunk, lacks)
            left -= count
        chunks[:] = planned.values()
        self._queue_again(gave)
        if len(chunks) < len(self.prefills):
            return LimitedBy.BUDGET
        if self.running >= min(knobs.max_batch_size, knobs.token_budget):
            return LimitedBy.SLOTS
        used = len(self.decodes.members) + sum([chunk.count for chunk in chunks])
        return LimitedBy.BUDGET if used >= most else LimitedBy.KV

    def _lacks(self, sequence: Sequence, end: int) -> int:
        """Blocks that ``sequence`` lacks for its first ``end`` tokens."""
        return max(0, self.kv.blocks_for(end) - len(sequence.blocks))

    def _give(self, chunk: Chunk, blocks: int) -> None:
        sequence = chunk.sequence
        sequence.blocks += self.kv.take(blocks)
        if sequence.hashes:
            self.holdings.publish(sequence, chunk.start, chunk.start + chunk.count)

    def _grow(self) -> list[Sequence]:
        """Have all decodes grow; returns those that gave their blocks back for it."""
        gave: list[Sequence] = []
        while not self.decodes.grow():
            gave.append(self._preempt())
        self._grew = True
        return gave

    def _queue_again(self, gave: list[Sequence]) -> None:
        for sequence in gave:  # not before: what the step takes may have been cached for them
            self._queue(sequence)

    def shed(self, most: int) -> None:
        """Preempt the newest until at most ``most`` sequences run, between two steps."""
        while self.running > most:
            self._queue(self._preempt())

    def _preempt(self) -> Sequence:
        """The newest sequence gives its blocks back, to be queued and recomputed."""
        if self.before_preempting is not None:
            self.before_preempting()
        if self.prefills:
            sequence = next(reversed(self.prefills))
            del self.prefills[sequence]
        else:
            sequence = self.decodes.newest()
            self.decodes.leave(sequence)
        self.slack.gone(sequence)
        self.holdings.release(sequence, trusted=True)
        sequence.computed = 0
        sequence.target = sequence.request.prompt_len + sequence.generated
        sequence.preemptions += 1
        self.preemptions += 1
        if self.admission is None:  # it may have decoded since it was relegated
            unrelegate(sequence)
        return sequence

    # -- what a step did ----------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[Finished]:
        """Take in what the step did; returns the requests that ended with it."""
        now = result.ends[-1]
        finished: list[Finished] = []
        failed = {sequence for sequence, _ in result.failed} if result.failed else ()
        if plan.n_decode or plan.drafts:
            self.decodes.advance(result.ends)
        for sequence, error in result.failed:
            if sequence.state == "decode":
                self.decodes.leave(sequence, failed=True)
                sequence.state = "left"
            self._end(sequence, FinishReason.ERROR, now, finished, f"{type(error).__name__}: {error}")
        if plan.drafts:
            accepted = dict(result.accepted)
            for draft in plan.drafts:
                if draft.sequence not in failed:
                    self._verified(draft, accepted.get(draft.sequence, 0), now)
        for chunk in plan.chunks:
            if chunk.sequence not in failed:
                self._computed(chunk, now)
        for sequence, reason in result.stopped:
            self._end(sequence, reason, now, finished)
        for sequence in self.decodes.take_ended():
            self._end(sequence, FinishReason.LENGTH, now, finished)
        return finished

    def _verified(self, draft: Chunk, accepted: int, now: float) -> None:
        """So many of the drafted tokens were right: the sequence has one token more than that, and decodes on behind them."""
        sequence, kv = draft.sequence, self.kv
        self.decodes.put_back(sequence, 1 + accepted, now)
        held = kv.blocks_for(sequence.computed)
        kv.give(sequence.blocks[held:])
        del sequence.blocks[held:]
        if accepted:  # else its token deadlines are as they were
            self.slack.gone(sequence)
            self.slack.decoding(sequence)

    def _computed(self, chunk: Chunk, now: float) -> None:
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.count
        self._publish(chunk)
        if chunk.samples:
            self._sampled(sequence, now)

    def _publish(self, chunk: Chunk) -> None:
        """Others may share what ``chunk`` has computed."""
        sequence = chunk.sequence
        if sequence.hashes:
            self.holdings.publish(sequence, chunk.start)
            if chunk.samples:
                self.holdings.settled(sequence)

    def _sampled(self, sequence: Sequence, now: float, expected: bool = False) -> None:
        """The prompt of ``sequence`` is done, and its first token, or its next, is sampled, or ``expected``."""
        sequence.generated += 1
        sequence.token_times.append(now)
        del self.prefills[sequence]
        self.decodes.join(sequence)
        self.slack.decoding(sequence, expected)

    # -- the same in two parts ----------------------------------------------------------------------------------------

    @property
    def can_plan_ahead(self) -> bool:
        """Whether the step behind the one committed can be planned before that is settled: nobody would be preempted for it,
        whose last token is on its way."""
        return self.decodes.can_grow

    def commit(self, plan: StepPlan, now: float) -> Unsettled:
        """The step of ``plan`` will be done. It is taken to end ``now``, to yield a token for every row that samples, and to stop
        nobody but who reaches max_tokens; :meth:`settle` puts right what came otherwise."""
        step = -1
        if plan.n_decode and self.decodes.members:
            step = self.decodes.step
            self.decodes.advance((now,))
        self.decodes.grown = False
        chunks = [chunk for chunk in plan.chunks if chunk.sequence.state == "prefill"]
        for chunk in chunks:
            chunk.sequence.computed = chunk.start + chunk.count
            self._unsettled[chunk.sequence] = chunk.start
            if chunk.samples:
                self._sampled(chunk.sequence, now, expected=True)
        ending: dict[Sequence, None] = {}
        for sequence in self.decodes.take_ended():
            self.decodes.leave(sequence)
            self.slack.gone(sequence)
            sequence.state = "left"
            ending[sequence] = None
        after = self.running, self.waiting.count, self.waiting.tokens, self.kv.free
        return Unsettled(chunks, ending, step, after)

    def settle(self, done: Unsettled, result: StepResult) -> list[Finished]:
        """Take in what the committed step did, in which ``result`` names only sequences that have not ended meanwhile; returns
        the requests that ended with it. The step behind it may be planned already, and is not committed."""
        now = result.ends[-1]
        finished: list[Finished] = []
        ending = done.ending
        self._unsettled.clear()
        if done.step >= 0:
            self.decodes.ended_at(done.step, now)
        new = {chunk.sequence for chunk in done.chunks if chunk.samples}
        for sequence in (*ending, *(s for s in new if s.state == "decode")):
            sequence.token_times[-1] = now  # of all others the time belongs to the step
        for sequence, error in result.failed:
            counted = sequence in ending or sequence in new  # as if its token had come
            if sequence.state == "decode":
                self.decodes.leave(sequence, failed=not counted)
                sequence.state = "left"
            if counted:
                ending.pop(sequence, None)
                sequence.generated -= 1
                sequence.token_times.pop()
            self._end(sequence, FinishReason.ERROR, now, finished, f"{type(error).__name__}: {error}")
        for chunk in done.chunks:  # not before: others would share what may not be finite
            sequence = chunk.sequence
            if sequence.state != "finished":
                self._publish(chunk)
            if self.slack.following and sequence in new and sequence.state == "decode":
                self.slack.gone(sequence)
                self.slack.decoding(sequence)
        for sequence, reason in result.stopped:
            self._end(sequence, reason, now, finished)
        for sequence in ending:  # unless it stopped with its last token
            self._end(sequence, FinishReason.LENGTH, now, finished)
        return finished

    def abandon(self, done: Unsettled, rows: Iterable[Sequence]) -> None:
        """Nothing will be known of the committed step, in which ``rows`` decoded: no token of it counts. All that is left to do
        with whoever was in it is :meth:`finish`."""
        new = [chunk.sequence for chunk in done.chunks if chunk.samples]
        for sequence in dict.fromkeys((*rows, *new)):
            if sequence.state not in ("decode", "left"):
                continue  # it has ended meanwhile
            counted = sequence in done.ending or sequence in new
            if sequence.state == "decode":
                self.decodes.leave(sequence, failed=not counted)
                sequence.state = "left"
            if counted:
                sequence.generated -= 1
                sequence.token_times.pop()

    def _end(
        self, sequence: Sequence, reason: FinishReason, now: float, finished: list[Finished], cause: str = ""
    ) -> None:
        record = self.finish(sequence, reason, now, cause, trusted=reason is not FinishReason.ERROR)
        if record is not None:
            finished.append((sequence, record))

    def check_integrity(self) -> None:
        """Raise AssertionError if a counter, heap or block disagrees with the sequences. For tests: O(everything)."""
        unsettled = (s for s in self._unsettled if s.state in ("decode", "left"))
        self.holdings.check_integrity((*self.decodes, *self.prefills), (*self.waiting, *self.prefills, *unsettled))
        self.decodes.check_integrity()
        for s in self.prefills:
            held = s.computed if self.by_chunk else s.target
            assert s.state == "prefill" and len(s.blocks) == self.kv.blocks_for(held), s
            assert s.computed < s.target, s
        self.waiting.check_integrity()
