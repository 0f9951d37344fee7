"""Knobs turned while requests decode: how many steps later they are in force, and whether a step takes longer for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from benchmarks.gpu.place import Place
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.engine import Engine
from runtime.records import RequestRecord, StepRecord
from runtime.torch_backend.loading import load_model

_CHANGES: Final = (Knobs(8, 0, 512, 512), Knobs(64, 0, 4096, 4096), Knobs(64, 0, 64, 64), Knobs(33, 5, 1000, 200))
_BEFORE_S: Final = 0.3
_STEPS: Final = 10  # after a change


class _Steps:
    def __init__(self) -> None:
        self.seen: list[StepRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.seen.append(record)

    def under(self, epoch: int) -> bool:
        """Whether enough steps have been made under knobs of ``epoch`` or later."""
        return sum(record.epoch >= epoch for record in list(self.seen)) >= _STEPS

    def on_request(self, record: RequestRecord) -> None:
        """Steps are enough."""


def run(place: Place, model: str) -> None:
    """Fails where a step that began after the change, and was not yet launched, had the old knobs: one may be in flight."""
    loaded = load_model(place.model(model), dtype=place.dtype(), device=place.device)
    limits, steps = KnobLimits(max_batch_size=64, token_budget=4096, chunk_size=4096), _Steps()
    count, output = 3 if place.dry else 32, 4000  # tokens enough for all changes, however fast steps are
    with Engine(loaded, limits=limits, knobs=Knobs(64, 0, 4096, 4096), kv_tokens=4096 * count) as engine:
        engine.subscribe(steps)
        streams = [engine.submit([5 + n] * 8, max_tokens=output, ignore_eos=True) for n in range(count)]
        _wait(lambda: len(steps.seen) >= _STEPS)  # the first ones compile, or record
        late = 0
        for knobs in _CHANGES:
            time.sleep(_BEFORE_S)
            before, at = list(steps.seen), engine.clock.now()
            epoch = engine.set_knobs(knobs)
            _wait(partial(steps.under, epoch))
            after = [record for record in steps.seen if record.start >= at]
            old = sum(record.epoch < epoch for record in after)
            usual = statistics.median(record.duration for record in before[-50:])
            slowest = max(record.duration for record in after[:_STEPS])
            found = {"steps_with_old_knobs": old, "usual_ms": usual * 1e3, "slowest_after_ms": slowest * 1e3}
            place.keep(str(knobs), {name: round(value, 3) for name, value in found.items()})
            late = max(late, old)
        for stream in streams:
            stream.cancel()
    if late > 1:
        raise RuntimeError(f"{late} steps that began after a change had the knobs before it")


def _wait(until: Callable[[], bool], patience_s: float = 60.0) -> None:
    give_up = time.monotonic() + patience_s
    while not until():
        if time.monotonic() > give_up:
            raise RuntimeError(f"the engine made no {_STEPS} steps within {patience_s:g} s")
        time.sleep(0.005)
