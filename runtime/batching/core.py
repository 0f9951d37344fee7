"""Takes items in, says which call comes next, takes results back. No thread and no clock of its own.

The live :class:`~runtime.batching.batcher.Batcher`, simulations and tests drive this same class: time comes in as an
argument. The knobs are read at every decision, so a change holds from the next call on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf

from runtime.batching.groupings import Grouping, grouping_of
from runtime.batching.item import ENDED, NEW, RUNNING, UNTIL_SLO, WAITING, Call, Ended, Item, Next
from runtime.batching.options import BATCHER_LIMITS
from runtime.batching.strategies.protocol import Decision, State, Strategy, cost_of, fit
from runtime.errors import RejectedError
from runtime.knobs import KnobLimits, Knobs
from runtime.ordering import Ordering
from runtime.records import FinishReason
from runtime.shared.ceilings import MemoryCeilings, StepLoad
from runtime.shared.expiries import Expiries
from runtime.shared.settings import Settings
from runtime.slo import SLO, find_slo, first_target
from runtime.tunable import SchedulerView

_ARRIVALS = 0.05  # weight of the newest gap between arrivals
# times the usual gap: one longer than that is a pause, which would pass for a low rate; and what for
_PAUSE, _COUNTS_AS = 32, 4
_NEWEST_CALL = 0.1  # its weight in the mean


class BatchCore:
    """See the module. ``settings`` may be changed from any thread, everything else from one at a time."""

    def __init__(
        self,
        strategy: Strategy,
        grouping: str | Grouping | Ordering = "arrival",
        *,
        slo: SLO | Mapping[str, SLO] | None = None,
        knobs: Knobs | None = None,
        limits: KnobLimits | None = None,
        workers: int = 1,
        concurrency: int = 1,
        max_queue: int = 100_000,
        retries: int = 1,
    ) -> None:
        for name, value, least in (
            ("workers", workers, 1), ("concurrency", concurrency, 1), ("max_queue", max_queue, 1), ("retries", retries, 0)
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        self.strategy = strategy
        self.settings = Settings(knobs, limits or BATCHER_LIMITS)
        self.memory = MemoryCeilings(self.settings.limits)
        self.max_queue = max_queue
        self.slos: dict[str, SLO] = {}
        self.slos_changed: list[Callable[[], None]] = []
        """To be called after every change of ``slos``."""
        self.state = State(grouping_of(grouping), workers * concurrency, self.knobs)
        self.loads = [0] * workers
        """Calls that run on each worker."""
        self._concurrency = concurrency
        self.retries = retries
        self._again: deque[Sequence[Item]] = deque()  # of workers that died; RUNNING still, as far as the queue goes
        self._pending: dict[Item, None] = {}  # what has no call now and no outcome yet, in order of arrival
        self.fault: BaseException | None = None
        """What the strategy or the grouping raised: no call begins any more."""
        self.expiries: Expiries[Item] = Expiries(_ended)
        self._busy = 0.0  # integral of calls running over time
        self._busy_at = 0.0
        self._gap_square = 0.0  # mean square of the gaps between arrivals, as their mean is taken
        self._paused = False  # whether the latest gap was taken for a pause
        self.item_s = 0.0
        """Seconds from one result to the next while calls run, lately."""
        self.hold_until = inf
        """When to ask :meth:`next` again, as of the last time it had nothing."""
        self.hold_items = 1
        """How many must wait for asking earlier to be of use."""
        if slo is not None:
            for name, target in ({"default": slo} if isinstance(slo, SLO) else slo).items():
                self.set_slo(name, target)

    # -- knobs and SLOs -------------------------------------------------------------------------------------------------

    @property
    def knobs(self) -> Knobs:
        return self.settings.current[1]

    @property
    def epoch(self) -> int:
        return self.settings.current[0]

    def set_slo(self, request_class: str, slo: SLO | None) -> None:
        """Items of ``request_class`` that come from now on are due as ``slo`` says; None: as those of ``default``."""
        if slo is None:
            self.slos.pop(request_class, None)
        else:
            self.slos[request_class] = slo
        self.state.slo_s = min((due for s in self.slos.values() if (due := first_target(s)) < inf), default=None)
        for hear in self.slos_changed:
            hear()

    # -- items ----------------------------------------------------------------------------------------------------------

    def submit(self, item: Item, now: float) -> None:
        """Queue ``item``. Raises :class:`RejectedError` (``queue_full``, or ``slo`` by the strategy's choice)."""
        assert item.state is NEW
        state = self.state
        if state.waiting >= self.max_queue:
            raise RejectedError(
                f"item {item.id}: {state.waiting} items are waiting and max_queue is {self.max_queue}",
                reason="queue_full",
                retry_after_s=self.item_s * max(1, state.waiting // 4),
            )
        if item.deadline == UNTIL_SLO:
            slo = find_slo(self.slos, item.request_class)
            item.deadline = inf if slo is None else item.arrival + first_target(slo)
        state.now = now
        gap = max(0.0, item.arrival - state.last_arrival)  # threads may overtake one another by a moment
        if gap < inf:
            self._learn_gap(gap)
        state.last_arrival = max(item.arrival, state.last_arrival)
        state.knobs = self.knobs
        later = self.strategy.admit(item, state)
        if later is not None:
            raise RejectedError(
                f"item {item.id}: its deadline cannot be met behind the {state.waiting} items that wait",
                reason="slo",
                retry_after_s=later,
            )
        item.state = WAITING
        try:
            state.queue.add(item)
        except Exception:
            item.state = NEW
            raise
        self._pending[item] = None
        state.waiting += 1
        state.waiting_cost += item.cost
        state.free_places = self.max_queue - state.waiting
        if item.expires < inf and not item.held:
            self.expiries.add(item, item.expires)

    def _learn_gap(self, gap: float) -> None:
        """The usual gap is the one that a moment falls into (mean square over mean): many items at once leave it as it is. A
        long one is a pause; two in a row are not."""
        state, square = self.state, self._gap_square
        if state.gap_s == inf:
            state.gap_s, self._gap_square = gap, gap * gap
            return
        usual = square / state.gap_s if square > 0 else inf
        paused, self._paused = self._paused, gap > _PAUSE * usual
        if self._paused and not paused:
            gap = _COUNTS_AS * usual
        state.gap_s += _ARRIVALS * (gap - state.gap_s)
        self._gap_square += _ARRIVALS * (gap * gap - square)

    def take_back(self, item: Item) -> None:
        """End ``item``, whose :meth:`submit` was interrupted somewhere, as by Ctrl-C, unless it runs."""
        if item.state is WAITING:
            self._pending.pop(item, None)
            state = self.state
            costs = [other.cost for other in self._pending if other.state is WAITING]
            state.waiting, state.waiting_cost = len(costs), sum(costs)
            state.free_places = self.max_queue - state.waiting
            item.state = ENDED
            with suppress(Exception):  # it may not have come as far as the queue
                state.queue.removed(item)
        elif item.state is NEW:
            item.state = ENDED

    def forget(self, item: Item) -> bool:
        """``item`` has ended, by its client's wish or otherwise. False if it did not wait: it runs, or had ended."""
        if item.state is NEW:  # it waits for room
            item.state = ENDED
            return True
        if item.state is WAITING:
            item.state = ENDED
            del self._pending[item]
            state = self.state
            state.waiting -= 1
            state.waiting_cost -= item.cost
            state.free_places = self.max_queue - state.waiting
            try:
                state.queue.removed(item)
            except Exception as error:
                self.fault = self.fault or error
            except BaseException:  # such as Ctrl-C: once too often does no harm
                with suppress(Exception):
                    state.queue.removed(item)
                raise
            return True
        return False

    def leave(self, item: Item) -> bool:
        """``item``, which runs, has ended; what comes of it is thrown away. False if it had ended, or does not run."""
        if item.state is not RUNNING:
            return False
        item.state = ENDED
        self._pending.pop(item, None)  # its worker may have died
        return True

    def expire(self, now: float) -> list[Ended]:
        """End what has timed out by ``now``, running or not; the result of one that runs will be thrown away."""
        ended = []
        for item in self.expiries.due(now):
            if self.forget(item) or self.leave(item):
                ended.append(Ended(item, FinishReason.TIMEOUT, "its timeout passed"))
        return ended

    @property
    def has_work(self) -> bool:
        return bool(self.state.waiting or self.state.running or self._again)

    # -- calls ----------------------------------------------------------------------------------------------------------

    def next(self, now: float, worker: int | None = None) -> Next:
        """The call that ``worker`` (None: the least loaded one) is to run now, if any; none once there is a ``fault``."""
        ended = self.expire(now)
        self.hold_until, self.hold_items = inf, 1
        if self.fault is None:
            try:
                return self._choose(now, worker, ended)
            except BaseException as error:
                self.fault = error
        return Next(None, inf, ended)

    def _choose(self, now: float, worker: int | None, ended: list[Ended]) -> Next:
        state = self.state
        if worker is None:
            worker = min(range(len(self.loads)), key=self.loads.__getitem__)
        if not state.idle or self.loads[worker] >= self._concurrency:
            return Next(None, inf, ended)
        state.now = now
        state.knobs = knobs = self._knobs_for_call(now)
        while self._again:
            items = [item for item in self._again.popleft() if item.state is not ENDED]
            if items:
                found = fit(items, knobs.max_batch_size, knobs.token_budget, state.queue.padded)
                if len(found.items) < len(items):
                    self._again.appendleft(items[len(found.items) :])
                return Next(self._begin(found.items, worker, now, Decision(found.items)), inf, ended)
        if not state.waiting:
            return Next(None, inf, ended)
        decision = self.strategy.decide(state)
        for item in decision.drop:
            if self.forget(item):
                ended.append(Ended(item, FinishReason.REJECTED, "slo", self.item_s * state.waiting))
        if self.fault is not None:  # the grouping could not let go of one
            return Next(None, inf, ended)
        if not decision.items:
            self.hold_until, self.hold_items = decision.wake_at, decision.wake_items
            return Next(None, decision.wake_at, ended)
        return Next(self._begin(decision.items, worker, now, decision), inf, ended)

    def _knobs_for_call(self, now: float) -> Knobs:
        knobs = self.knobs
        budget = None if self.settings.policy is None else self.settings.budget(partial(self.view, now))
        if budget is None or budget >= knobs.token_budget:
            return knobs
        return knobs.with_(token_budget=max(1, budget))

    def _begin(self, items: Sequence[Item], worker: int, now: float, decision: Decision) -> Call:
        state, knobs = self.state, self.state.knobs
        chosen = set(items)
        if len(chosen) < len(items) or not self._pending.keys() >= chosen:
            raise RuntimeError(f"the {self.strategy.name} strategy chose items that do not wait, or one of them twice")
        cost = cost_of(items, state.queue.padded)
        if len(items) > 1 and (len(items) > knobs.max_batch_size or cost > knobs.token_budget):  # whoever chose them
            items, cost, _ = fit(items, knobs.max_batch_size, knobs.token_budget, state.queue.padded)
        call = Call(items, cost, worker, now, self.epoch, len(state.running))
        call.limited_by = decision.limited_by
        waited, left = 0, 0
        for item in items:
            item.tries += 1
            if item.state is WAITING:
                waited += 1
                left += item.cost
                item.state = RUNNING
                item.scheduled = now
                item.epoch = call.epoch
        if waited:
            state.waiting -= waited
            state.waiting_cost -= left
            state.free_places = self.max_queue - state.waiting
            state.queue.took(items)
        call.waiting, call.waiting_cost = state.waiting, state.waiting_cost
        self.strategy.began(call, state)
        self._count(now)
        call._busy = self._busy
        state.running.append(call)
        for item in items:
            del self._pending[item]
        state.idle -= 1
        self.loads[worker] += 1
        return call

    def done(self, call: Call, end: float) -> None:
        """``call`` has ended; ``call.failed`` and ``call.stretched`` say how. Its items that had not ended before have now."""
        self._over(call, end)
        for item in call.items:
            item.state = ENDED
        self.item_s += (_NEWEST_CALL if self.item_s else 1.0) * (
            call.seconds / len(call.items) / self.state.slots - self.item_s
        )
        try:
            self.strategy.observe(call, self.state)
        except BaseException as error:
            self.fault = self.fault or error

    def learn_memory(self, call: Call, failed: Sequence[range], fitted: Sequence[range]) -> None:
        """``call`` is over: the parts of its items that ran out of memory, and those that returned."""
        memory, padded = self.memory, self.state.queue.padded

        def load(part: range) -> StepLoad:
            return StepLoad(len(part), cost_of(call.items[part.start : part.stop], padded))

        whole = StepLoad(len(call.items), call.cost)
        if failed:
            alone = [part.start for part in failed if len(part) == 1]  # these items never fit, whoever is beside them
            blamed = [part for part in failed if not any(at in part for at in alone)] if fitted else failed
            changed = memory.ran_out(whole, [load(part) for part in blamed], [load(part) for part in fitted])
        else:
            changed = bool(fitted) and memory.lowered and call.failed < len(call.items) and memory.fitted(whole)
        if changed:
            self.settings.limit(memory.effective)

    def lost(self, call: Call, now: float, *, apart: bool = False) -> list[Item]:
        """The worker of ``call`` died. Its items run again, in a call of their own, or (``apart``) of each its own; returns those
        that have no try left."""
        self._over(call, now)
        spent, again = [], []
        for item in call.items:
            if item.state is ENDED:
                continue
            if (
                item.tries > self.retries or item.times is not None or self.fault is not None
            ):  # outputs that came would come again
                item.state = ENDED
                spent.append(item)
            else:
                again.append(item)
                self._pending[item] = None
        if again:
            self._again += [[item] for item in again] if apart else [again]
        return spent

    def _over(self, call: Call, end: float) -> None:
        state = self.state
        self._count(end)
        call.end = end
        if end > call.start:
            call.others = max(0.0, (self._busy - call._busy) / (end - call.start) - 1)
        state.running.remove(call)
        state.idle += 1
        self.loads[call.worker] -= 1
        state.now, state.knobs = end, self.knobs

    def _count(self, now: float) -> None:
        self._busy += len(self.state.running) * (now - self._busy_at)
        self._busy_at = now

    def view(self, now: float) -> SchedulerView:
        """For step policies and controllers: items are prompts of ``cost`` tokens, and there is no KV pool."""
        state = self.state
        epoch, knobs = self.settings.current
        due = min((item.deadline for call in state.running for item in call.items), default=inf)
        return SchedulerView(
            now=now,
            decoding=0,
            prefilling=sum(len(call.items) for call in state.running),
            waiting=state.waiting + sum(map(len, self._again)),
            waiting_tokens=state.waiting_cost,
            prefilling_tokens=sum(call.cost for call in state.running),
            decode_context=0,
            kv_free_blocks=0,
            kv_total_blocks=0,
            oldest_arrival=state.oldest,
            least_slack=min([due, *(item.deadline for item in state.queue.first(1))]) - now,
            decode_slack=inf,
            knobs=knobs,
            epoch=epoch,
            effective_limits=self.settings.effective_limits,
        )

    def drop_waiting(self, cause: str, reason: FinishReason) -> list[Ended]:
        """End everything that waits, or would run again."""
        ended: list[Ended] = []
        self.drop_into(ended.append, cause, reason)
        return ended

    def drop_into(self, note: Callable[[Ended], None], cause: str, reason: FinishReason, *, cut: bool = False) -> None:
        """As :meth:`drop_waiting`. ``note`` is given each item that has ended, also where Ctrl-C interrupts this: the rest then
        waits for another :meth:`drop_into`. An item may be noted again. ``cut`` is that of :class:`Ended`."""
        for item in list(self._pending):
            each = Ended(item, reason, cause, cut=cut)
            try:
                _ = self.forget(item) or self.leave(item)
            finally:
                if item.state is ENDED:
                    note(each)
        self._pending.clear()  # what an interrupted :meth:`forget` left
        self._again.clear()
        self.state.waiting = self.state.waiting_cost = 0
        self.state.free_places = self.max_queue


def _ended(item: Item) -> bool:
    return item.state is ENDED
