"""User code beside the function raises: a strategy, a grouping, a measure. Every item still ends, once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest

from runtime import Batcher
from runtime.batching.core import BatchCore
from runtime.batching.groupings import grouping_of
from runtime.batching.item import Item
from runtime.batching.strategies import Decision, Dynamic
from runtime.errors import RejectedError, StepFailedError
from runtime.records import FinishReason
from tests.fakes import Records
from tests.unit.batcher_doubles import Gated, double
from tests.unit.batching_world import serve


class Bug(Exception):
    pass


class Breaks:
    """``inner``, whose ``method`` raises from the ``nth`` time on."""

    def __init__(self, inner: Any, method: str, nth: int) -> None:
        self._inner, self._method, self._left = inner, method, nth

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name != self._method:
            return found

        def counted(*args: Any) -> Any:
            self._left -= 1
            if self._left <= 0:
                raise Bug(name)
            return found(*args)

        return counted


def _broken(method: str, nth: int) -> dict[str, Any]:
    if hasattr(Dynamic, method):
        return {"strategy": Breaks(Dynamic(), method, nth)}
    return {"grouping": Breaks(grouping_of("arrival"), method, nth), "strategy": Dynamic()}


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("method", ["decide", "began", "observe", "first", "took"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_item_ends_when_a_strategy_or_a_grouping_raises(method: str, nth: int, replicas: int) -> None:
    heard = Records()
    with Batcher(double, max_batch_size=2, max_wait_ms=0, replicas=replicas, **_broken(method, nth)) as b:
        b.subscribe(heard)
        futures, refused = [], 0
        for i in range(40):
            try:
                futures.append((i, b.submit(i)))
            except RejectedError as error:
                assert error.reason == "closed" and "raised Bug" in str(error)
                refused += 1
        assert wait([f for _, f in futures], timeout=30).not_done == set()
        b.close()
    failed = 0
    for i, future in futures:
        raised = future.exception(0)
        if raised is None:
            assert future.result(0) == 2 * i
        else:
            assert isinstance(raised, StepFailedError) and "Bug" in str(raised)
            failed += 1
    assert failed + refused
    assert len(heard.requests) == len({r.id for r in heard.requests}) == 40
    assert sum(r.reason is FinishReason.ERROR for r in heard.requests) == failed


def test_a_call_under_way_keeps_its_results_when_the_strategy_breaks() -> None:
    fn = Gated()
    b = Batcher(fn, max_batch_size=1, replicas=2, strategy=Breaks(Dynamic(), "decide", 2))
    first = b.submit(1)
    fn.entered.acquire()
    second = b.submit(2)
    assert isinstance(second.exception(30), StepFailedError) and not first.done()
    with pytest.raises(RejectedError, match=r"closed, for its strategy or grouping raised Bug\('decide'\)"):
        b.submit(3)
    fn.gate.release()
    assert first.result(30) == 1
    b.close()


def test_a_grouping_that_fails_to_let_go_does_not_leave_a_cancelled_item_open() -> None:
    fn = Gated()
    with Batcher(fn, max_batch_size=1, **_broken("removed", 1)) as b:
        running = b.submit(0)
        fn.entered.acquire()
        other, cancelled = b.submit(1), b.submit(2)
        assert cancelled.cancel() and cancelled.cancelled()
        fn.gate.release(3)
        assert running.result(30) == 0
        assert isinstance(other.exception(30), StepFailedError)


def test_a_grouping_that_fails_to_let_go_of_what_is_dropped_loses_nothing() -> None:
    """The call that was chosen beside it would begin, and nobody would run it."""

    class Drops(Dynamic):
        def decide(self, state: Any) -> Decision:
            dropped, *others = state.queue.first(3)
            return Decision(others, [dropped])

    grouping: Any = Breaks(grouping_of("arrival"), "removed", 1)
    core = BatchCore(Drops(), grouping)
    items = [Item(i, 0.0) for i in range(3)]
    for item in items:
        core.submit(item, 0.0)
    step = core.next(0.0)
    assert isinstance(core.fault, Bug) and step.call is None and not core.state.running
    assert [each.item for each in [*step.ended, *core.drop_waiting("", FinishReason.ERROR)]] == items
    assert not core.has_work


def test_who_submits_hears_of_a_strategy_that_fails_to_admit_and_the_others_go_on() -> None:
    class Picky(Dynamic):
        def admit(self, item: Item, state: Any) -> float | None:
            if item.payload == 7:
                raise Bug("admit")
            return None

    with Batcher(double, strategy=Picky(), max_wait_ms=0) as b:
        assert b(1) == 2
        with pytest.raises(Bug, match="admit"):
            b.submit(7)
        assert b(2) == 4


def test_a_strategy_that_chooses_an_item_twice_is_found_out() -> None:
    class Twice(Dynamic):
        def decide(self, state: Any) -> Any:
            found = super().decide(state)
            return found._replace(items=[*found.items, *found.items])

    with Batcher(double, strategy=Twice(), max_wait_ms=0) as b:
        assert "chose items that do not wait, or one of them twice" in str(b.submit(1).exception(30))


def _raises() -> int:
    raise Bug("measure")


def _exits() -> int:
    raise SystemExit


@pytest.mark.parametrize("measure", [_raises, _exits, lambda: "many"])
def test_a_measure_that_fails_is_taken_off(measure: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    with Batcher(double, memory_limit_bytes=10_000, measure_bytes=measure) as b:
        assert [b(i) for i in range(5)] == [0, 2, 4, 6, 8]
        threads = b._pool.threads()
        assert all(thread.is_alive() for thread in threads)
    assert caplog.text.count("measure_bytes failed and has been taken off") == 1


def test_an_exception_that_cannot_be_written_is_still_an_outcome() -> None:
    class Mute(Exception):
        def __repr__(self) -> str:
            raise Bug("repr")

    def fails(items: list[int]) -> list[Any]:
        return [Mute() for _ in items]

    heard = Records()
    with Batcher(fails) as b:
        b.subscribe(heard)
        assert isinstance(b.submit(1).exception(30), Mute)
        assert isinstance(b.submit(2).exception(30), Mute)
    assert [r.cause for r in heard.requests] == ["Mute", "Mute"]


class Odd:
    """A result that cannot be looked at."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise Bug("class")


def test_an_outcome_that_cannot_be_handed_out_leaves_nobody_waiting() -> None:
    fn, heard = Gated(lambda item: Odd() if item == 1 else item), Records()
    b = Batcher(fn, strategy=Dynamic(), max_batch_size=2, max_wait_ms=0)
    b.subscribe(heard)
    futures = [b.submit(0)]
    fn.entered.acquire()
    futures += [b.submit(1), b.submit(2)]
    fn.gate.release(2)
    assert futures[0].result(30) == 0
    for future in futures[1:]:
        with pytest.raises(StepFailedError, match=r"its outcome could not be handed out: Bug\('class'\)"):
            future.result(30)
    b.close()
    assert [r.reason for r in heard.requests] == [FinishReason.STOP, FinishReason.ERROR, FinishReason.ERROR]


def test_an_outcome_that_somebody_else_has_set_costs_those_behind_it_no_wait() -> None:
    fn = Gated()
    b = Batcher(fn, strategy=Dynamic(), max_batch_size=3, max_wait_ms=0)
    futures = [b.submit(0)]
    fn.entered.acquire()
    futures += [b.submit(i) for i in (1, 2, 3)]
    futures[2].set_result("set")
    fn.gate.release(2)
    assert [future.result(30) for future in futures[:3]] == [0, 1, "set"]
    assert isinstance(futures[3].exception(30), StepFailedError)
    b.close()


def test_in_virtual_time_a_fault_is_raised() -> None:
    core = BatchCore(Breaks(Dynamic(), "decide", 2))
    with pytest.raises(Bug):
        serve(core, [Item(None, t / 10) for t in range(5)], lambda call: 0.01)


def test_what_expires_as_the_last_worker_ends_is_told() -> None:
    """Its end is found while the batcher closes, with nothing left to do."""
    fn = Gated()
    b = Batcher(fn, max_batch_size=1)
    first = b.submit(0)
    fn.entered.acquire()
    late = [b.submit(i, timeout_s=0.01) for i in range(1, 5)]
    closing = threading.Thread(target=b.close)
    closing.start()
    fn.gate.release(10)
    closing.join(30)
    assert first.result(0) == 0 and all(f.done() for f in late)
