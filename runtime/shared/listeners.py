"""Who hears of every step and every request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, cast

from runtime.records import RequestRecord, StepRecord
from runtime.shared.panics import ends_program
from runtime.tunable import Listener

log = logging.getLogger(__name__)


class RunListener(Listener, Protocol):
    """Hears of identical steps at once. It must only listen: by the time it hears, all of them are over."""

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        """``record`` is of all the steps together (``record.steps`` of them); ``ends`` are their end times."""
        ...


class Listeners:
    """Tells records to listeners, in the order they subscribed. One that raises is cut off; the others hear on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: list[list[Listener]] = []
        """Of one listener each; one that subscribed twice is in two."""
        self.known: tuple[Listener, ...] = ()
        """All of them, in order."""
        self.hear_runs = True
        """Whether all can be told of identical steps at once (they have ``on_run``)."""

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Returns a function that ends this subscription, and no other of ``listener``. Any thread, any number of times."""
        subscription = [listener]
        with self._lock:
            self._subscriptions.append(subscription)
            self._subscribed()
        return partial(self._end, subscription)

    def _end(self, subscription: list[Listener]) -> None:
        with self._lock:
            self._subscriptions = [one for one in self._subscriptions if one is not subscription]
            self._subscribed()

    def _subscribed(self) -> None:
        self.known = tuple(listener for (listener,) in self._subscriptions)
        self.hear_runs = all(hasattr(listener, "on_run") for listener in self.known)

    def tell(self, step: StepRecord | None, requests: Sequence[RequestRecord], ends: Sequence[float] = ()) -> None:
        """``ends``: when each of the steps ended for which ``step`` stands, if there is more than one."""
        for listener in self.known:
            try:
                if step is not None:
                    if len(ends) > 1:
                        cast(RunListener, listener).on_run(step, ends)
                    else:
                        listener.on_step(step)
                for record in requests:
                    listener.on_request(record)
            except BaseException as error:  # SystemExit too: it is not the engine that the listener may end
                log.warning("listener %r raised and will hear no more", listener, exc_info=True)
                for its in [one for one in self._subscriptions if one[0] is listener]:
                    self._end(its)
                if isinstance(error, KeyboardInterrupt) and ends_program(error):  # of whoever waits in this thread
                    raise


class CompletionInterval:
    """How long it takes, lately, from one request's completion to the next: a moving average of the gaps, in seconds. Time in
    which there was nothing to run is no part of them."""

    WEIGHT: Final = 0.1  # of the newest gap

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._last: float | None = None  # the last completion, or when there was something to run again

    def on_step(self, record: StepRecord) -> None:
        if record.after_idle and self._last is not None:
            self._last = max(self._last, record.start)

    def on_request(self, record: RequestRecord) -> None:
        if not record.completed:
            return
        if self._last is not None:
            gap = record.finished - self._last
            self.seconds = gap if self.seconds is None else self.seconds + self.WEIGHT * (gap - self.seconds)
        self._last = record.finished
