"""Adaptive: learned service time, dispatch when free, early drop of what cannot make its deadline. The default.

- A call goes as soon as a worker is free, with everything that waits: calls then grow by themselves with the load, for what
  comes while one runs makes the next. Nothing is learned from queues, so nothing is left over from a burst.
- The time of a call is learned (:mod:`runtime.batching.service_model`). With a deadline in sight the items of a call are
  chosen so that they are on time (:mod:`~runtime.batching.strategies.lookahead`).
- What has all the time there is, or far more than others, is passed over for them, but not for ever: the oldest of it goes
  once it has waited for half its target time, and for a minute at most. Such calls get a tenth of the time.
- Early drop: what could not be on time even in a call of its own is rejected, and at arrival what would come to be late
  behind those that wait already, once a full call of them does. The knobs are ceilings.
- Holding back only where it pays (:mod:`~runtime.batching.strategies.holding`): with a price for each call, or where calls
  slow one another down. Else the wait is 0 whenever a worker is free.
- Sizes nobody gave are felt out: a call holds at most twice what the largest one held.

Units: seconds, items, cost units. Failure mode: a wrong model would drop what could be served, and never see that it is
wrong; so where everything seems to be late one item is tried now and then, and where the SLO is too short for an item
alone, it is served late rather than never.
"""

from __future__ import annotations

from math import ceil, inf

from runtime.batching.item import Call, Item
from runtime.batching.service_model import Price, ServiceModel
from runtime.batching.strategies.holding import better_alone, in_time_beside, lanes, likely_left, time_left, worth_more
from runtime.batching.strategies.lookahead import Bounds, choose
from runtime.batching.strategies.protocol import Decision, Fit, State, cost_of, fit
from runtime.ordering import NO_DEADLINE_S
from runtime.records import LimitedBy

_FIRST = 16  # items that a call may hold before any has been seen
_LOOK = 256  # items looked at beyond a full call, at most
_HOPE = 1.0  # of the expected time: with less than this left an item has hardly a chance
_PATIENT = 10  # times the shortest target: what has so much time is passed over for others
_PASSED_OVER = 0.5  # of its target time, after which it goes first
_OVERDUE_SHARE = 0.1  # of the time for calls with such items, or many of them would leave nothing to the others
_TRY = 8  # of so many decisions in which everything is late, one tries an item all the same
_GUARD = 0.02  # of the target time, kept in reserve when holding
_GROWTH = 0.125  # of a call that is kept apart, after which it is looked at again
_SEEN_BESIDE = 16  # calls beside others to be seen before what they do to one another is believed
_WELL = 0.75  # of what calls can get through, at most, for queues to stay short
_ONLY_AN_END = 1 << 60  # items: no arrival changes the decision
_ASK_AGAIN = 512  # calls in a row kept apart, after which one goes beside others: do they still slow one another down?


class Adaptive:
    """See the module. ``call_price_s``: what a call costs, in seconds of waiting of one item; inf: hold as long as may be."""

    name = "adaptive"

    def __init__(self, *, call_price_s: float = 0.0, model: ServiceModel | None = None) -> None:
        if not call_price_s >= 0:
            raise ValueError(f"call_price_s is {call_price_s!r}; it must be a number of seconds of at least 0")
        self.call_price_s = call_price_s
        self.model = model
        self._most_items = 0  # of a call so far
        self._most_cost = 0
        self._mean_cost = 0.0  # of an item
        self._late = 0
        self._kept_apart = 0  # calls in a row
        self._overdue_at = -inf  # before then none that was passed over goes first
        self._lanes_at = (-1, 0)  # (samples of the model, lanes)

    def admit(self, item: Item, state: State) -> float | None:
        model = self.model
        if item.deadline == inf or model is None or not model.ready or not state.queue.in_order:
            return None
        waiting = state.waiting
        most, _ = self._ceilings(state)
        if waiting < most and state.waiting_cost < state.knobs.token_budget:
            return None
        calls = max(ceil((waiting + 1) / most), (state.waiting_cost + item.cost) / state.knobs.token_budget)
        cost = state.waiting_cost + item.cost
        left = sum(time_left(call, state.now) for call in state.running)
        at_once = self._lanes(state)
        a, b, d = model.price(at_once - 1)
        took = (a * calls + b * waiting + d * cost + left) / at_once
        ready = state.now + model.margin * took
        return None if ready <= item.deadline else ready - item.deadline

    def decide(self, state: State) -> Decision:
        queue, now = state.queue, state.now
        most, budget = self._ceilings(state)
        found = fit(queue.first(most), most, budget, queue.padded)
        model = self.model
        if model is None:
            model = self.model = ServiceModel(shared=state.slots > 1)
        if not model.ready:
            return Decision(found.items, limited_by=found.limited_by)
        due = min(item.deadline for item in found.items)
        if state.running and not state.closing and state.free_places > 0:
            until = self._apart_until(found, due, state, model)
            if until > now:
                more = most if len(found.items) < most else _ONLY_AN_END
                open_to_more = found.limited_by is LimitedBy.DEMAND or not state.queue.in_order
                if open_to_more and state.slo_s is not None and now + state.slo_s < due:
                    more = state.waiting + 1  # the next one may be due sooner
                elif due < inf:
                    more = min(more, state.waiting + 1 + int(_GROWTH * state.waiting))  # a longer call must go sooner
                return Decision(wake_at=until, wake_items=more)
        price = model.price(self._beside(state, state.waiting - len(found.items), most))
        drop: list[Item] = []
        if due < inf:
            margin = model.margin
            took = margin * price.of(len(found.items), found.cost)
            if now + took > due:
                dear = Price(*(margin * p for p in price))
                bounds = Bounds(most, budget, dear, self._free_at(state), queue.padded)
                chosen, drop = self._on_time(state, bounds, price)
                if not chosen:
                    return Decision(drop=drop, wake_at=now if state.waiting > len(drop) else inf)
                found = Fit(chosen, cost_of(chosen, queue.padded), self._limit(chosen, most, state, drop))
                due = min(item.deadline for item in chosen)
        if not state.must_go:
            until = self._hold(found, due, state, model, price)
            if until > now:
                return Decision(drop=drop, wake_at=until, limited_by=LimitedBy.WAIT)
        return Decision(found.items, drop, limited_by=found.limited_by)

    def _ceilings(self, state: State) -> tuple[int, int]:
        """Items and cost of the largest call: the knobs, and what has been felt out."""
        most = min(state.knobs.max_batch_size, max(_FIRST, 2 * self._most_items))
        if not self._most_cost:
            return most, state.knobs.token_budget
        return most, min(state.knobs.token_budget, max(2 * self._most_cost, int(_FIRST * self._mean_cost)))

    def _on_time(self, state: State, bounds: Bounds, price: Price) -> tuple[list[Item], list[Item]]:
        """What is to go, and what to drop because it cannot make it."""
        now, queue = state.now, state.queue
        alive: list[Item] = []
        doomed: list[Item] = []
        for item in queue.first(bounds.most + min(_LOOK, 2 * bounds.most)):
            hopeless = item.deadline < now + _HOPE * price.of(1, item.cost)
            (doomed if hopeless else alive).append(item)
        if alive:
            self._late = 0
            overdue = self._overdue(alive, state, bounds)
            if overdue:
                return overdue, doomed
            chosen = choose(alive, now, bounds, reorder=queue.in_order)
            if chosen:
                return chosen, doomed
            return [max(alive, key=lambda item: item.deadline)], doomed  # none is sure to make it, one may
        last = doomed[-1]
        if last.deadline - last.arrival < price.of(1, last.cost):  # the SLO itself is too short
            return list(fit(doomed, bounds.most, bounds.budget, queue.padded).items), []
        self._late += 1
        if self._late % _TRY == 0:
            return [last], doomed[:-1]
        return [], doomed

    def _overdue(self, alive: list[Item], state: State, bounds: Bounds) -> list[Item]:
        """A call of those in no hurry, if the oldest of them has been passed over for too long."""
        now = state.now
        if not state.queue.in_order or now < self._overdue_at:
            return []
        least = _PATIENT * min(item.deadline - item.arrival for item in alive)
        patient = [item for item in alive if item.deadline - item.arrival >= least]
        if not patient:
            return []
        first = min(patient, key=_first_by)
        if now <= _first_by(first):
            return []
        others = [item for item in patient if item is not first]
        found = fit([first, *others], bounds.most, bounds.budget, bounds.padded)
        self._overdue_at = now + bounds.price.of(len(found.items), found.cost) / _OVERDUE_SHARE
        return list(found.items)

    def _limit(self, chosen: list[Item], most: int, state: State, drop: list[Item]) -> LimitedBy:
        if len(chosen) == most:
            return LimitedBy.SLOTS
        return LimitedBy.DEMAND if len(chosen) + len(drop) >= state.waiting else LimitedBy.BUDGET

    def _hold(self, found: Fit, due: float, state: State, model: ServiceModel, price: Price) -> float:
        """Until when to hold ``found`` back; ``now`` for not at all."""
        now, items = state.now, found.items
        full = found.limited_by is not LimitedBy.DEMAND
        if full or not self.call_price_s:
            return now
        oldest = state.oldest
        last = oldest + state.knobs.max_wait_ms / 1e3
        if due < inf:  # with one more of its kind it must still be on time
            guard = 0.0 if state.slo_s is None else _GUARD * state.slo_s
            last = min(last, due - guard - model.margin * price.of(len(items) + 1, found.cost * (1 + 1 / len(items))))
        waited = sum(now - item.arrival for item in items)
        return min(last, worth_more(waited, len(items), oldest, state, self.call_price_s))

    def _lanes(self, state: State) -> int:
        """Calls that are worth making at a time, as far as has been seen."""
        model = self.model
        if model is None or model.beside < _SEEN_BESIDE or state.slots == 1:
            return state.slots
        if self._lanes_at[0] != model.samples:
            start = self._lanes_at[1] or state.slots
            count = lanes(start, state.slots, max(1, self._most_items), max(1, self._most_cost), model)
            self._lanes_at = (model.samples, count)
        return self._lanes_at[1]

    def _apart_until(self, found: Fit, due: float, state: State, model: ServiceModel) -> float:
        """Until when ``found`` had better wait for a call that runs to end, because they slow one another down; ``now``: it
        need not. It may be asked again before, when the last moment has come to be on time."""
        now, running = state.now, state.running
        if model.beside < _SEEN_BESIDE or self._kept_apart >= _ASK_AGAIN:
            return now
        free = now + model.margin * min(likely_left(call, now) for call in running)
        beside, alone = (
            model.margin * model.predict(len(found.items), found.cost, len(running) - ended) for ended in (0, 1)
        )
        if len(running) >= self._lanes(state):
            waits = free + alone <= due or not in_time_beside(found.items, found.cost, state, model)
        elif found.limited_by is not LimitedBy.DEMAND or self._too_much(state, model):
            waits = False
        else:
            waits = better_alone(found.items, found.cost, due, state, model)
        if not waits:
            return now
        window = state.oldest + state.knobs.max_wait_ms / 1e3
        chances = (due - (1 + _GROWTH) * beside, due - alone)  # to be on time beside it, and once it has ended
        return min([window, *(at for at in chances if at > now)])

    def _too_much(self, state: State, model: ServiceModel) -> bool:
        """Whether more comes than as many calls as run now could well serve, were they full."""
        running = len(state.running)
        full = model.predict(max(1, self._most_items), max(1, self._most_cost), running - 1)
        return _WELL * running * self._most_items * state.gap_s < full

    def _beside(self, state: State, left: int, most: int) -> int:
        """How many calls one that begins now will have beside it: those that run, and those that ``left`` items begin."""
        running = len(state.running)
        return max(running, min(self._lanes(state) - 1, running - (-left // most)))

    def _free_at(self, state: State) -> float:
        """When another worker can take the next call."""
        if len(state.running) + 1 < self._lanes(state):
            return state.now
        return min((call.start + (call.predicted or 0.0) for call in state.running), default=inf)

    def began(self, call: Call, state: State) -> None:
        self._kept_apart = 0 if state.running else self._kept_apart + 1
        if self.model is not None and self.model.ready:
            others = self._beside(state, state.waiting, self._ceilings(state)[0])
            call.predicted = self.model.predict(len(call.items), call.cost, others)

    def observe(self, call: Call, state: State) -> None:
        if self.model is not None:
            self.model.observe(call)
        if call.informative:
            self._most_items = max(self._most_items, len(call.items))
            self._most_cost = max(self._most_cost, call.cost)
            mean = call.cost / len(call.items)
            self._mean_cost += (0.05 if self._mean_cost else 1.0) * (mean - self._mean_cost)


def _first_by(item: Item) -> float:
    """When ``item``, which has more time than others, has been passed over for long enough."""
    return item.arrival + min(NO_DEADLINE_S, _PASSED_OVER * (item.deadline - item.arrival))
