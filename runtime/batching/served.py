"""A batcher with a set of inputs, as what measures an engine sees it: requests that name no input get one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from runtime.batching.batcher import Batcher
from runtime.batching.future import ItemFuture
from runtime.knobs import KnobLimits, Knobs
from runtime.tunable import Listener, SchedulerView


class ServedInputs:
    """``submit(prompt)`` submits the input that ``prompt``'s first number picks, or the next one if it is empty."""

    def __init__(self, batcher: Batcher, inputs: Sequence[Any]) -> None:
        if not inputs:
            raise ValueError("inputs is empty; at least one item is needed")
        self.batcher = batcher
        self.inputs = inputs
        self._turns = count()

    @property
    def limits(self) -> KnobLimits:
        return self.batcher.limits

    @property
    def effective_limits(self) -> KnobLimits:
        return self.batcher.effective_limits

    @property
    def knobs(self) -> Knobs:
        return self.batcher.knobs

    @property
    def epoch(self) -> int:
        return self.batcher.epoch

    @property
    def kv_tokens(self) -> int:
        return self.batcher.kv_tokens

    def set_knobs(self, knobs: Knobs) -> int:
        return self.batcher.set_knobs(knobs)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self.batcher.subscribe(listener)

    def view(self) -> SchedulerView:
        return self.batcher.view()

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
