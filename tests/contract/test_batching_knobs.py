"""Every knob means something to the batcher, or is said to mean nothing to it: then it changes nothing there."""

from __future__ import annotations

import pytest

from runtime.batching.item import Item
from runtime.batching.options import BATCHER_LIMITS, first_knobs
from runtime.batching.strategies import Adaptive, Dynamic
from runtime.knobs import KNOBS, Knobs
from runtime.records import LimitedBy
from tests.unit.batching_world import BatchCore

NAMES = [spec.name for spec in KNOBS]
LOOSE = Knobs(max_batch_size=64, max_wait_ms=0, token_budget=1024, chunk_size=1024)

TIGHT: dict[str, tuple[float, LimitedBy]] = {
    "max_batch_size": (2, LimitedBy.SLOTS),
    "max_wait_ms": (100, LimitedBy.WAIT),
    "token_budget": (50, LimitedBy.BUDGET),
}
"""For each knob a value that binds three items of cost 40 which come together, and what is then said."""


def first_call(knobs: Knobs) -> tuple[int, LimitedBy, float]:
    core = BatchCore(Dynamic(), knobs=knobs)
    for _ in range(3):
        core.submit(Item(None, 0.0, 40), 0.0)
    step = core.next(0.0)
    if step.call is None:
        return 0, LimitedBy.WAIT, step.wake_at
    return len(step.call.items), step.call.limited_by, 0.0


def test_no_knob_is_forgotten() -> None:
    assert list(TIGHT) == [spec.name for spec in KNOBS if spec.batcher]


@pytest.mark.parametrize("name", NAMES)
def test_the_batcher_obeys_it(name: str) -> None:
    assert first_call(LOOSE) == (3, LimitedBy.DEMAND, 0.0)
    tight = TIGHT.get(name)
    if not getattr(BATCHER_LIMITS, name):  # it has none
        with pytest.raises(ValueError, match=f"{name} is 1; it must be .* between 0 and 0"):
            first_call(LOOSE.with_(**{name: 1}))
        return
    if tight is None:
        assert first_call(LOOSE.with_(**{name: 1})) == first_call(LOOSE)
        return
    items, bound, _ = first_call(LOOSE.with_(**{name: tight[0]}))
    assert items < 3 and bound is tight[1]


@pytest.mark.parametrize("name", NAMES)
def test_one_that_nobody_gave_is_open(name: str) -> None:
    assert getattr(first_knobs({}, BATCHER_LIMITS, Adaptive()), name) == getattr(BATCHER_LIMITS, name)
    given = min(3, getattr(BATCHER_LIMITS, name))
    assert getattr(first_knobs({name: given}, BATCHER_LIMITS, Dynamic()), name) == given
