"""What a controller is told is wrong, and it gets over it: one suite over the registry."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from autotune import control
from runtime.knobs import KnobLimits, Knobs
from runtime.records import FinishReason, LimitedBy, RequestRecord, StepRecord
from runtime.slo import attainment
from runtime.tunable import Listener
from tests.contract.contract_of_controllers import FALLS_BACK, NAMES, SLOS, explained
from tests.tiers import SLOW
from tests.unit.control_world import SimulatedEngine, h200, poisson

Bad = Callable[[StepRecord | RequestRecord, random.Random], list[StepRecord | RequestRecord]]


def nan_times(record: StepRecord | RequestRecord, dice: random.Random) -> list[StepRecord | RequestRecord]:
    if dice.random() < 0.2:
        return [record]
    if isinstance(record, RequestRecord):
        return [record._replace(arrival=math.nan, token_times=[math.nan] * len(record.token_times))]
    return [record._replace(**{dice.choice(["start", "end"]): dice.choice([math.nan, math.inf, -math.inf])})]


def silent(record: StepRecord | RequestRecord, dice: random.Random) -> list[StepRecord | RequestRecord]:
    return []


def frozen(record: StepRecord | RequestRecord, dice: random.Random) -> list[StepRecord | RequestRecord]:
    return [record._replace(start=3.0, end=3.0)] if isinstance(record, StepRecord) else [record]


def backwards(record: StepRecord | RequestRecord, dice: random.Random) -> list[StepRecord | RequestRecord]:
    if isinstance(record, RequestRecord):
        return [record]
    return [record._replace(start=1e6 - record.end, end=1e6 - record.end + record.duration)]


def stretched(factor: float) -> Bad:
    def change(record: StepRecord | RequestRecord, dice: random.Random) -> list[StepRecord | RequestRecord]:
        if isinstance(record, RequestRecord):
            return [record]
        return [record._replace(end=record.start + factor * (record.end - record.start))]

    return change


def lost_and_doubled(record: StepRecord | RequestRecord, dice: random.Random) -> list[StepRecord | RequestRecord]:
    return [record] * dice.choice([0, 0, 1, 2])


def late() -> Bad:
    kept: list[StepRecord | RequestRecord] = []

    def shuffle(record: StepRecord | RequestRecord, dice: random.Random) -> list[StepRecord | RequestRecord]:
        kept.append(record)
        if len(kept) < 20:
            return []
        out = kept[:]
        kept.clear()
        dice.shuffle(out)
        return out

    return shuffle


def absurd(record: StepRecord | RequestRecord, dice: random.Random) -> list[StepRecord | RequestRecord]:
    if isinstance(record, RequestRecord):
        odd = record._replace(token_times=[], output_tokens=0, prompt_tokens=0, reason=dice.choice(list(FinishReason)))
        return [odd, record._replace(prompt_tokens=10**9, output_tokens=10**9), record]
    return [
        record._replace(decodes=0, decode_context=0, prefill_tokens=0, prefill_context=0, prefill_attention=0),
        record._replace(decodes=10**6, decode_context=10**12, prefill_attention=10**15),
        record._replace(failed=3, preemptions=10**6, kv_free_blocks=0, limited_by=dice.choice(list(LimitedBy))),
        record._replace(end=record.start + 5e-324),
        record._replace(end=record.start + 1e300),
    ]


DISTURBANCES: dict[str, Callable[[], Bad]] = {
    "NaN": lambda: nan_times,
    "silence": lambda: silent,
    "frozen time": lambda: frozen,
    "time jumps back": lambda: backwards,
    "a thousandfold slower": lambda: stretched(1000),
    "a thousandfold faster": lambda: stretched(0.001),
    "lost and doubled": lambda: lost_and_doubled,
    "out of order": late,
    "absurd": lambda: absurd,
}


class Disturbing(SimulatedEngine):
    """Tells its listeners what ``bad`` makes of each record; the engine itself is sound."""

    bad: Bad | None = None
    dice = random.Random(0)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return super().subscribe(_Through(self, listener))


class _Through:
    def __init__(self, engine: Disturbing, listener: Listener) -> None:
        self.engine, self.listener = engine, listener

    def on_step(self, record: StepRecord) -> None:
        self._tell(record)

    def on_request(self, record: RequestRecord) -> None:
        self._tell(record)

    def _tell(self, record: StepRecord | RequestRecord) -> None:
        for told in [record] if self.engine.bad is None else self.engine.bad(record, self.engine.dice):
            if isinstance(told, StepRecord):
                self.listener.on_step(told)
            else:
                self.listener.on_request(told)


SOON = {"predictive": {"NaN", "silence", "absurd", "time jumps back", "out of order"}}
"""Of each controller those that run in the default tier, after sound records; of others one."""
WITH_NOTHING_LEARNED = {"NaN", "silence", "absurd"}
"""From the start on, for controllers that have no model of steps to spoil."""
CASES = [
    pytest.param(
        name, what, sound_first,
        id=f"{name}-{what}-{'after sound records' if sound_first else 'from the start'}",
        marks=() if sound_first and what in SOON.get(name, {"silence"}) else SLOW,
    )
    for name in NAMES for what in DISTURBANCES for sound_first in (True, False)
    if sound_first or name in FALLS_BACK or what in WITH_NOTHING_LEARNED
]  # fmt: skip


@pytest.mark.parametrize(("name", "what", "sound_first"), CASES)
def test_survives(name: str, what: str, sound_first: bool) -> None:
    """It stays attached, inside the limits, and every request ends; once the records are sound again, it recovers."""
    slo, limits = SLOS[0], KnobLimits(512, 1000, 8192, 8192)
    engine = Disturbing(h200, knobs=Knobs(256, 0, 2048, 2048), limits=limits, noise=0.02)
    engine.dice = random.Random(7)

    def serve(bad: Bad | None, seconds: float) -> list[RequestRecord]:
        engine.bad = bad
        return engine.play(poisson(12, seconds, 800, 100, seed=5, start=engine.now))

    with control(engine, slo=slo, controller=name) as attached:
        if sound_first:
            serve(None, 8)
        records = serve(DISTURBANCES[what](), 12)
        assert all(r.completed for r in records) and len(records) > 100
        serve(None, 12)
        after = serve(None, 20)
        assert not attached.status().ended, attached.decisions[-2]
        for decision in attached.decisions:
            limits.check(Knobs.from_mapping(decision.new))
        explained(attached)
    assert all(r.completed for r in after)
    assert attainment(after, slo).share > 0.9
    assert attached.decisions[-1].regime != "fallback"
