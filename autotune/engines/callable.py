"""A callable as an engine: a batcher over it, and the inputs that requests are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from runtime.batching.batcher import Batcher
from runtime.batching.future import ItemFuture
from runtime.batching.tuning import TunableBatcher
from runtime.knobs import KNOBS, KnobLimits, Knobs


class CallableEngine(TunableBatcher):
    """``batcher`` with ``inputs``: ``submit(prompt)`` submits the input that ``prompt``'s first number picks, or, if it is
    empty, the next one. Raises ``ValueError`` without inputs."""

    def __init__(self, batcher: Batcher, inputs: Sequence[Any]) -> None:
        if not inputs:
            raise ValueError("inputs is empty; at least one item is needed")
        super().__init__(batcher._pool)
        self.batcher = batcher
        self.inputs = inputs
        self._turns = count()

    def submit(
        self,
        prompt: list[int],
        params: object = None,
        *,
        tenant: str = "",
        request_class: str = "default",
        request_id: str | None = None,
    ) -> ItemFuture:
        """``params`` are those of a language model and say nothing here."""
        del params
        index = prompt[0] if prompt else next(self._turns)
        item = self.inputs[index % len(self.inputs)]
        return self.batcher.submit(item, tenant=tenant, request_class=request_class, request_id=request_id)

    def close(self, drain: bool = True) -> None:
        self.batcher.close(drain)


@dataclass(frozen=True)
class CallableSource:
    """Starts batchers of ``function`` that serve ``inputs``; ``options`` are those of :class:`runtime.Batcher`."""

    function: Callable[..., Any]
    inputs: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> None:
        return None

    def start(self, knobs: Knobs | None = None, limits: KnobLimits | None = None, seed: int = 0) -> CallableEngine:
        """``seed`` is not used: a batcher draws nothing at random."""
        del seed
        first = {} if knobs is None else {s.name: getattr(knobs, s.name) for s in KNOBS if s.batcher}
        batcher: Batcher = Batcher(self.function, limits=limits, **{**self.options, **first})
        return CallableEngine(batcher, self.inputs)
