"""What a batcher makes of calls that ran out of memory: lower ceilings, and a way back.

A call that does not fit is halved until its parts do (:func:`~runtime.batching.invoke.run_call`). Which parts fitted and which
did not says what is to blame. If all that failed held more items than all that fitted, the most that fitted is the ceiling of
``max_batch_size`` from then on; the same with cost and ``token_budget``; and neither if an item fits not even alone, for then the
calls that held it say nothing of others.

The way back: when so many calls in a row that filled at least half of the ceilings have fitted, they are doubled, or, once
that has failed, raised by a quarter. A rise that runs out of memory is taken back and doubles the number of calls before the
next, so a limit that is there to stay is run into ever more rarely, and one that has gone is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from runtime.batching.item import Call
from runtime.batching.strategies.protocol import cost_of
from runtime.knobs import KnobLimits
from runtime.settings import Settings

log = logging.getLogger(__name__)

_PATIENCE, _MOST_PATIENCE = 64, 65536  # calls before a rise
_DOUBLE, _QUARTER = 2.0, 1.25


class MemoryCeilings:
    """See the module. Lowers and raises the ceilings in ``settings``; for one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._fitted = 0  # calls in a row
        self._patience = _PATIENCE
        self._step = _DOUBLE
        self._before: KnobLimits | None = None  # the last rise, if it is on trial

    def learn(self, call: Call, failed: Sequence[range], fitted: Sequence[range], padded: bool) -> None:
        """``call`` is over: the parts of its items that ran out of memory, and those that returned."""
        if failed:
            self._lower(call, failed, fitted, padded)
        elif self._settings.effective_limits is not self._settings.limits and not call.failed:
            self._well(call)

    def _lower(self, call: Call, failed: Sequence[range], fitted: Sequence[range], padded: bool) -> None:
        self._fitted = 0
        alone = [part.start for part in failed if len(part) == 1]
        blamed = [part for part in failed if not any(at in part for at in alone)] if fitted else failed
        if not any(len(part) > 1 for part in blamed):
            return

        def cost(part: range) -> int:
            return cost_of(call.items[part.start : part.stop], padded)

        items = _ceiling([len(part) for part in blamed], [len(part) for part in fitted])
        budget = _ceiling([cost(part) for part in blamed], [cost(part) for part in fitted])
        old = self._settings.effective_limits
        new = old
        before, self._before = self._before, None
        if items is not None and items < old.max_batch_size:
            new = replace(new, max_batch_size=items)
        if budget is not None and budget < old.token_budget:
            new = replace(new, token_budget=budget)
        if before is not None and (len(call.items) > before.max_batch_size or call.cost > before.token_budget):
            self._patience, self._step = min(2 * self._patience, _MOST_PATIENCE), _QUARTER
            new = replace(
                new,
                max_batch_size=min(old.max_batch_size, max(new.max_batch_size, before.max_batch_size)),
                token_budget=min(old.token_budget, max(new.token_budget, before.token_budget)),
            )
        if new != old:
            log.warning(
                "a call of %d items (cost %d) ran out of memory; calls hold at most %d items of cost %d from now on",
                len(call.items), call.cost, new.max_batch_size, new.token_budget,
            )  # fmt: skip
            self._settings.limit(new)

    def _well(self, call: Call) -> None:
        """A call fitted while the ceilings are lower than they were at the start."""
        old, start = self._settings.effective_limits, self._settings.limits
        if 2 * len(call.items) < old.max_batch_size and 2 * call.cost < old.token_budget:
            return
        self._fitted += 1
        if self._fitted < self._patience:
            return
        self._fitted = 0
        self._before = old
        new = replace(
            old,
            max_batch_size=min(start.max_batch_size, max(old.max_batch_size + 1, int(old.max_batch_size * self._step))),
            token_budget=min(start.token_budget, max(old.token_budget + 1, int(old.token_budget * self._step))),
        )
        if new == start:
            new, self._patience, self._step = start, _PATIENCE, _DOUBLE
        self._settings.limit(new)


def _ceiling(failed: Sequence[int], fitted: Sequence[int]) -> int | None:
    """The most that fits, if that is what tells ``failed`` from ``fitted``; with none to go by, half of what failed."""
    least, most = min(failed), max(fitted, default=0)
    if most >= least:
        return None
    return most or max(1, max(failed) // 2)
