"""Builders shared by tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from autotune.cost.facts import StepPoint
from runtime.records import FinishReason, RequestRecord
from runtime.step_model import StepFeatures


def request_record(
    token_times: Sequence[float] = (),
    *,
    arrival: float = 0.0,
    scheduled: float | None = None,
    finished: float | None = None,
    reason: FinishReason = FinishReason.LENGTH,
    request_class: str = "default",
    epochs: tuple[int, int] = (0, 0),
) -> RequestRecord:
    """A record of which only the times matter."""
    last = token_times[-1] if token_times else arrival
    return RequestRecord(
        id="r",
        arrival=arrival,
        scheduled=scheduled,
        finished=last if finished is None else finished,
        token_times=token_times,
        prompt_tokens=10,
        output_tokens=len(token_times),
        cached_tokens=0,
        preemptions=0,
        reason=reason,
        request_class=request_class,
        tenant="",
        priority=0,
        epoch_first=epochs[0],
        epoch_last=epochs[1],
    )


def step_points(hardware: Callable[[StepFeatures], float], steps: Iterable[StepFeatures]) -> list[StepPoint]:
    """What a calibration keeps of ``steps``, whose times scatter by 1% about what ``hardware`` says."""
    rng = random.Random(2)
    return [
        StepPoint(
            region="mixed" if step.chunks else "decode", **step._asdict(), seconds=hardware(step) * rng.gauss(1, 0.01),
            spread=0.02, repeats=5,
        )
        for step in steps
    ]  # fmt: skip
