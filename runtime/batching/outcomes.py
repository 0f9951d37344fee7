"""Telling those who wait for an item what became of it, and the record of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from runtime.batching.accounts import item_record
from runtime.batching.future import StreamFuture
from runtime.batching.invoke import END, SKIP, Outcomes
from runtime.batching.item import ENDED, Call, Ended, Item
from runtime.errors import RejectedError, RequestCancelledError, RequestTimeoutError, StepFailedError
from runtime.records import FinishReason, RequestRecord
from runtime.shared.wakeups import Delivery

_PLAIN = {int, float, str, bytes, bool, list, tuple, dict, type(None)}


def _handle(item: Item) -> Any:
    """The future of an item that ends now. The two let go of each other, or only the garbage collector could free them."""
    handle, item.handle = item.handle, None
    handle._keeps = None
    return handle


def any_failed(outcomes: Outcomes) -> bool:
    """Whether an item got an exception."""
    if set(map(type, outcomes)) <= _PLAIN:
        return False
    return any(isinstance(outcome, BaseException) for outcome in outcomes)


def count_failed(outcomes: Outcomes, live: Sequence[bool]) -> int:
    """Items that end with an exception; those that had ended (not ``live``) do not."""
    return sum(alive and isinstance(outcome, BaseException) for outcome, alive in zip(outcomes, live, strict=True))


def deliver(items: Sequence[Item], outcomes: Outcomes, live: Sequence[bool]) -> None:
    """Hand each item its outcome, but for those that had ended (not ``live``)."""
    with Delivery():
        for item, outcome, alive in zip(items, outcomes, live, strict=True):
            if alive:
                _settle(_handle(item), outcome)


def outcome_records(call: Call, outcomes: Outcomes, live: Sequence[bool], epoch: int) -> list[RequestRecord]:
    """Of what :func:`deliver` has handed out."""
    records = []
    for item, outcome, alive in zip(call.items, outcomes, live, strict=True):
        if alive and isinstance(outcome, BaseException):
            records.append(item_record(item, FinishReason.ERROR, call.end, epoch, _described(outcome)))
        elif alive:
            records.append(item_record(item, FinishReason.STOP, call.end, epoch))
    return records


def _described(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # it is the user's
        return type(error).__name__


def hand_out(
    call: Call, items: Sequence[Item], outputs: Sequence[Any], now: float, epoch: int, leave: Callable[[Item], bool]
) -> list[RequestRecord]:
    """The next outputs of a function that streams, one for each of ``items``; records of those that end with them. ``leave``
    ends an item, unless somebody else has."""
    records = []
    with Delivery():
        for item, output in zip(items, outputs, strict=True):
            if output is None or output is SKIP or item.state is ENDED:
                continue
            failed = isinstance(output, BaseException)
            if failed or output is END:
                if not leave(item):
                    continue
                call.failed += failed
                _settle(_handle(item), output)
                reason = FinishReason.ERROR if failed else FinishReason.STOP
                records.append(item_record(item, reason, now, epoch, _described(output) if failed else ""))
                continue
            stream: StreamFuture | None = item.handle
            if stream is None:  # it has ended in this very moment
                continue
            if item.times is None:
                item.times = []
            item.times.append(now)
            stream.put(output)
    return records


def _settle(handle: Any, outcome: Any) -> None:
    if isinstance(outcome, BaseException):
        handle.set_exception(outcome)
    elif outcome is SKIP or outcome is END:
        handle.set_result(handle.outputs)
    else:
        handle.set_result(outcome)


def fail_lost(items: Sequence[Item], error: BaseException, now: float, epoch: int) -> list[RequestRecord]:
    """``items`` have no try left after their worker died of ``error``."""
    records = []
    with Delivery():
        for item in items:
            often = f"{item.tries} times" if item.times is None else "after its first outputs"
            died = StepFailedError(f"item {item.id}: its worker died {often}: {error!r}")
            died.__cause__ = error if isinstance(error, Exception) else None
            _settle(_handle(item), died)
            records.append(item_record(item, FinishReason.ERROR, now, epoch, str(died)))
    return records


def fail_undelivered(items: Sequence[Item], error: BaseException, now: float, epoch: int) -> list[RequestRecord]:
    """What came of ``items`` could not be handed out, for ``error``."""
    records = []
    with Delivery():
        for item in items:
            failed = StepFailedError(f"item {item.id}: its outcome could not be handed out: {_described(error)}")
            failed.__cause__ = error
            _settle(_handle(item), failed)
            records.append(item_record(item, FinishReason.ERROR, now, epoch, str(failed)))
    return records


def end_early(ended: Ended, now: float, epoch: int) -> RequestRecord:
    """An item ends without having run to its end."""
    item, reason, cause, later, cut = ended
    if cut:
        error: Exception = RequestCancelledError(f"item {item.id}: {cause}")
    elif reason is FinishReason.TIMEOUT:
        error = RequestTimeoutError(f"item {item.id}: {cause}")
    elif reason is FinishReason.REJECTED:
        error = RejectedError(f"item {item.id}: its deadline cannot be met", reason=cause, retry_after_s=later)
    elif reason is FinishReason.ERROR:
        error = StepFailedError(f"item {item.id}: {cause}")
    else:
        error = RequestCancelledError(f"item {item.id}: {cause}")
    _settle(_handle(item), error)
    return item_record(item, reason, now, epoch, cause)


def withdraw(item: Item) -> None:
    """An item has ended by its client's wish."""
    handle = _handle(item)
    Future.cancel(handle)  # its own asks the batcher
    handle.set_running_or_notify_cancel()


def refuse(item: Item, error: Exception) -> None:
    """An item that stood in line is not let into the queue; nothing, where it has its outcome."""
    if item.handle is not None:
        _settle(_handle(item), error)
