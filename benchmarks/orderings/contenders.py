"""The orderings that take part, and what they are told of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from runtime.ordering import SHORTEST_STEP_S, Fcfs, Ordering, Queued, learning, leaving, ordering_of
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO

MAX_TOKENS: Final = 1024
"""What every client asks for at most, as far as orderings can see."""


class _Seen(NamedTuple):
    """What is known of a request before it runs: of its answer nothing."""

    arrival: float
    priority: int
    tenant: str
    request_class: str
    deadline: float | None
    size: int
    work: int


class Unknowing:
    """``inner``, from which the length of answers is hidden: in a benchmark ``max_tokens`` is the answer's true length, and no
    client knows that."""

    def __init__(self, inner: Ordering) -> None:
        self._inner = inner
        self._learning = learning(inner)
        self._leaving = leaving(inner)

    def key(self, queued: Queued) -> float:
        return self._inner.key(_seen(queued))

    def took(self, queued: Queued, key: float) -> None:
        self._inner.took(_seen(queued), key)

    def left(self, queued: Queued, key: float) -> None:
        if self._leaving is not None:
            self._leaving.left(_seen(queued), key)

    def on_step(self, record: StepRecord) -> None:
        if self._learning is not None:
            self._learning.on_step(record)

    def on_request(self, record: RequestRecord) -> None:
        if self._learning is not None:
            self._learning.on_request(record)


def _seen(queued: Queued) -> _Seen:
    return _Seen(
        queued.arrival, queued.priority, queued.tenant, queued.request_class, queued.deadline, queued.size,
        queued.size + MAX_TOKENS,
    )  # fmt: skip


class ShortestKnown(Fcfs):
    """Shortest job first by the true length of prompt and answer: how far learning could get at most."""

    def key(self, queued: Queued) -> float:
        return queued.arrival + SHORTEST_STEP_S * queued.work


def _named(name: str) -> Callable[[Mapping[str, SLO]], Ordering]:
    return lambda slos: Unknowing(ordering_of(name, slos))


NAMES: Final = (
    "fcfs", "fair", "shortest", "shortest_expected", "ageing", "deadline", "least_slack", "hybrid",
)  # fmt: skip
ORACLE: Final = "shortest, known"
CONTENDERS: Final[Mapping[str, Callable[[Mapping[str, SLO]], Ordering]]] = {
    **{name: _named(name) for name in NAMES},
    ORACLE: lambda slos: ShortestKnown(),
}
"""Name -> what makes the ordering, of the SLO of each class. ``priority`` is not among them: nobody here has one, and
without it is first come first served."""
