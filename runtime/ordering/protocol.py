"""What an ordering is asked, and what it may look at."""

from __future__ import annotations

from typing import Protocol

from runtime.records import RequestRecord, StepRecord


class Queued(Protocol):
    """A request of the engine, or an item of the batcher.

    ``deadline`` (s, on the engine's clock): None takes it from the SLO of its class, inf is none at all. ``size`` is what is
    known of its length beforehand: prompt tokens, or cost units. ``work`` is the most that it may cost: prompt and output
    tokens, or cost units.
    """

    @property
    def arrival(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def tenant(self) -> str: ...
    @property
    def request_class(self) -> str: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def size(self) -> int: ...
    @property
    def work(self) -> int: ...


class Ordering(Protocol):
    def key(self, queued: Queued) -> float:
        """Asked once, when ``queued`` is queued. The smallest goes first; ties go to the earlier."""
        ...

    def took(self, queued: Queued, key: float) -> None:
        """``queued``, which was given ``key``, has left the queue to run: once, however often it is preempted."""
        ...


class Leaving(Ordering, Protocol):
    """An ordering that is told of those, too, that end before they run."""

    def left(self, queued: Queued, key: float) -> None:
        """``queued``, which was given ``key``, has left the queue and will not run: refused, cancelled or timed out."""
        ...


class Learning(Ordering, Protocol):
    """An ordering that learns from what an LLM engine did. What it learns goes into the keys of those that come afterwards.

    It is told in the engine's thread, of each request before the step that ended it. The batcher tells of nothing.
    """

    def on_step(self, record: StepRecord) -> None:
        """A step is over. In a simulation one record may stand for many steps without prompts."""
        ...

    def on_request(self, record: RequestRecord) -> None:
        """A request has ended, however it did."""
        ...
