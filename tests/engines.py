"""Engines around a fake executor, closed when a test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from runtime.llm.engine import Engine
from runtime.llm.stream import Stream
from runtime.request import Sequence
from tests.fakes import FakeExecutor, FakeModel, Heard, count_up


class Bench:
    """An engine, its executor and a listener. ``held()`` waits until a step stands still."""

    def __init__(self, engine: Engine, executor: FakeExecutor) -> None:
        self.engine = engine
        self.executor = executor
        self.heard = Heard()
        engine.subscribe(self.heard)

    def held(self) -> None:
        assert self.executor.held.acquire(timeout=30), "no step began"

    def step(self) -> None:
        """Let the step that stands still end, and wait until the next one does."""
        self.executor.step()
        self.held()

    def decoding(self, count: int, **options: Any) -> list[Stream]:
        """``count`` requests that decode, the engine standing still in the middle of a step that computes them all."""
        self.executor.hold()
        streams = [self.engine.submit([i], **{"max_tokens": 50, **options}) for i in range(count)]
        self.held()  # the first prompt, and those that came in time
        self.step()  # the other prompts
        self.step()
        assert self.executor.plans[-1].n_decode == count
        return streams


@contextmanager
def bench(
    sample: Callable[[Sequence], int] = count_up, model: FakeModel | None = None, **options: Any
) -> Iterator[Bench]:
    executor = FakeExecutor(sample)
    engine = Engine(model or FakeModel(), executor=executor, **{"kv_tokens": 1024, **options})
    try:
        yield Bench(engine, executor)
    finally:
        executor.go()
        engine.close(drain=False)
        assert engine.view().running == engine.view().waiting == 0
        engine._core.scheduler.check_integrity()
        assert engine.view().kv_free_blocks == engine.view().kv_total_blocks, "blocks were lost"
