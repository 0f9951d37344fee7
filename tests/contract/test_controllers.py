"""What every controller keeps, whatever it is told: one suite over the registry."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import pickle
import pkgutil
import random
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autotune.controllers
from autotune.attach import control
from autotune.attached import Control
from autotune.controllers.protocol import Controller
from autotune.controllers.registry import CONTROLLERS
from runtime.knobs import KnobLimits, Knobs
from runtime.records import FinishReason, LimitedBy, RequestRecord, StepRecord
from runtime.slo import SLO, attainment
from runtime.tunable import Listener, SchedulerView
from tests.engines import bench
from tests.unit.control_world import VLLM, SimulatedEngine, h200, poisson, slow_cpu

NAMES = list(CONTROLLERS)
SLOS = [SLO(ttft_ms=500, tpot_ms=30), SLO(tpot_ms=1), SLO(itl_ms=40), SLO(ttft_ms=300), SLO(e2e_ms=5000, tpot_ms=40)]
LOAD = poisson(12, 12, 800, 100, seed=21)

Bad = Callable[[StepRecord | RequestRecord, random.Random], list[StepRecord | RequestRecord]]


def make(name: str, slo: SLO = SLOS[0], start: Knobs = VLLM) -> Controller:
    return CONTROLLERS[name](slo, start, 760_000, 16)


def test_every_controller_is_in_the_registry() -> None:
    """A class with the methods of the protocol, in any file beside them, is one."""
    found = set()
    for module in pkgutil.iter_modules(autotune.controllers.__path__):
        for _, made in inspect.getmembers(
            importlib.import_module(f"autotune.controllers.{module.name}"), inspect.isclass
        ):
            if all(hasattr(made, m) for m in ("observe_step", "observe_request", "decide", "budget")):
                found.add(made)
    found.discard(Controller)
    assert {type(make(name)) for name in NAMES} == found
    assert all(make(name).name == name for name in NAMES)
    with pytest.raises(ValueError, match="controller is 'pid'; it must be one of predictive, static"):
        control(SimulatedEngine(h200), slo=SLOS[0], controller="pid")


def explained(attached: Control) -> None:
    """Every decision says why in one line, for a person, and brings evidence that can be stored."""
    for decision in attached.decisions:
        assert decision.cause and "\n" not in decision.cause, decision
        assert json.loads(decision.as_json())["evidence"] == dict(decision.evidence)
        if decision.action in ("hold", "observe") or (decision.action == "set" and decision.evidence):
            assert decision.regime and decision.evidence, decision


# -- limits and progress -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slo", SLOS, ids=str)
@pytest.mark.parametrize("start", [VLLM, Knobs(1, 0, 1, 1), Knobs(3, 400, 7, 2)], ids=str)
def test_the_engine_makes_progress_from_any_start_under_any_promise(name: str, slo: SLO, start: Knobs) -> None:
    limits = KnobLimits(512, 1000, 8192, 8192)
    engine = SimulatedEngine(h200, knobs=limits.clamp(start), limits=limits)
    arrivals = [(t, min(p, 40 if start.token_budget < 10 else 4000), o) for t, p, o in LOAD[:40]]
    with control(engine, slo=slo, controller=name) as attached:
        records = engine.play(arrivals)
        assert not attached.status().ended
        assert len(records) == len(arrivals) and all(r.completed for r in records)
        for decision in attached.decisions:
            limits.check(Knobs.from_mapping(decision.new))
        explained(attached)


@pytest.mark.parametrize("name", NAMES)
def test_bounds_and_pins_and_ceilings_that_shrink(name: str) -> None:
    engine = SimulatedEngine(h200)
    bounds = {"token_budget": (256.0, 1024.0), "max_batch_size": (16.0, 64.0)}
    with control(engine, slo=SLOS[0], controller=name, bounds=bounds, pinned={"chunk_size": 128}) as attached:
        engine.play(LOAD)
        for decision in attached.decisions:
            if decision.action == "set":
                assert 256 <= decision.new["token_budget"] <= 1024 and decision.new["chunk_size"] == 128
                assert 16 <= decision.new["max_batch_size"] <= 64
        engine.core._shrink(400)  # a step ran out of memory
        engine.play([(engine.now + t, p, o) for t, p, o in LOAD])
        assert engine.knobs.token_budget <= 200 and engine.knobs == engine.effective_limits.check(engine.knobs)
        assert not attached.status().ended


# -- what it is told is wrong --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", DISTURBANCES)
@pytest.mark.parametrize("sound_first", [True, False], ids=["after sound records", "from the start"])
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
    if name != "static":
        assert attached.decisions[-1].regime != "fallback"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hardware", [h200, slow_cpu])
def test_a_machine_that_turns_a_thousand_times_slower_and_back(name: str, hardware: Callable[..., float]) -> None:
    engine = SimulatedEngine(hardware, limits=KnobLimits(256, 100, 2048, 2048), knobs=Knobs(256, 0, 2048, 2048))
    load = poisson(3, 10, 200, 30, seed=3)
    with control(engine, slo=SLO(ttft_ms=2000, tpot_ms=60), controller=name) as attached:
        for factor in (1.0, 1000.0, 1.0):
            engine.formula.hardware = lambda step, factor=factor: factor * hardware(step)  # type: ignore[misc]
            records = engine.play([(engine.now + t, p, o) for t, p, o in load])
            assert len(records) == len(load) and all(r.completed for r in records)
            assert not attached.status().ended
        explained(attached)


@pytest.mark.parametrize("name", NAMES)
def test_another_listener_that_raises_changes_nothing(name: str) -> None:
    class Broken:
        def on_step(self, record: StepRecord) -> None:
            raise ZeroDivisionError("a listener of somebody else")

        on_request = on_step  # type: ignore[assignment]

    with bench() as world:
        world.engine.subscribe(Broken())
        with control(world.engine, slo=SLOS[0], controller=name, interval_s=0.001) as attached:
            world.engine.subscribe(Broken())
            done = world.engine.generate([[1, 2, 3]] * 16, max_tokens=30)
            assert all(len(c.token_ids) == 30 for c in done)
            assert not attached.status().ended
            assert attached.status().attainment.offered == 16
            explained(attached)


# -- the algorithm alone -------------------------------------------------------------------------------------------------

any_float = st.floats(allow_nan=True, allow_infinity=True)
counts = st.integers(0, 10**7)
steps = st.builds(
    StepRecord,
    start=any_float, end=any_float, steps=st.integers(1, 100), decodes=counts, decode_context=counts, chunks=counts,
    prefill_tokens=counts, prefill_context=counts, prefill_attention=st.integers(0, 10**14), sampled=counts, running=counts,
    waiting=counts, waiting_tokens=counts, kv_free_blocks=counts, preemptions=counts, epoch=counts, budget_used=counts,
    limited_by=st.sampled_from(LimitedBy), failed=st.sampled_from([0, 0, 0, 1]),
)  # fmt: skip
requests = st.builds(
    RequestRecord,
    id=st.just("r"), arrival=any_float, scheduled=st.none() | any_float, finished=any_float,
    token_times=st.lists(any_float, max_size=4), prompt_tokens=counts, output_tokens=counts, cached_tokens=st.just(0),
    preemptions=counts, reason=st.sampled_from(FinishReason), request_class=st.just("default"), tenant=st.just(""),
    priority=st.just(0), epoch_first=st.just(-1), epoch_last=st.just(-1),
)  # fmt: skip
knobs = st.builds(
    Knobs,
    max_batch_size=st.integers(1, 512),
    max_wait_ms=st.floats(0, 1000),
    token_budget=st.integers(1, 8192),
    chunk_size=st.integers(1, 8192),
)
ceilings = st.builds(
    KnobLimits,
    max_batch_size=st.integers(1, 512),
    max_wait_ms=st.floats(0, 1000),
    token_budget=st.integers(1, 8192),
    chunk_size=st.integers(1, 8192),
)


def view(now: float, in_force: Knobs, limits: KnobLimits, decoding: int, slack: float, context: int) -> SchedulerView:
    return SchedulerView(
        now, decoding, 1, 3, 900, 200, context, 100, 1000, 0.0, slack, slack, in_force, 0, limits
    )  # fmt: skip


views = st.builds(view, any_float, knobs, ceilings, st.integers(0, 4000), any_float, counts)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150)
@given(st.lists(steps | requests, max_size=40), views, knobs, ceilings, st.sampled_from(SLOS))
def test_any_history_gives_a_proposal_inside_the_limits_and_a_budget_that_lets_work_go_on(
    name: str,
    history: list[StepRecord | RequestRecord],
    seen: SchedulerView,
    start: Knobs,
    limits: KnobLimits,
    slo: SLO,
) -> None:
    made = make(name, slo, start)
    for i in range(20):  # something learned before it goes wrong
        made.observe_step(sound(i))
    for record in history:
        if isinstance(record, StepRecord):
            made.observe_step(record)
        else:
            made.observe_request(record)
        check(made, seen, limits)
    for i in range(20):
        made.observe_step(sound(i))
    check(made, seen, limits)


def check(made: Controller, seen: SchedulerView, limits: KnobLimits) -> None:
    proposal = made.decide(seen.now, limits.clamp(seen.knobs), limits)
    assert limits.check(proposal.knobs) == proposal.knobs
    assert proposal.regime and proposal.cause and "\n" not in proposal.cause
    json.dumps(proposal.evidence, allow_nan=False)
    granted, top = made.budget(seen), seen.knobs.token_budget
    assert granted <= top and granted >= min(top, max(1, seen.decoding)), (
        "decodes, or the first prompt, would wait for ever"
    )


def sound(i: int, decodes: int = 0, end: float | None = None) -> StepRecord:
    decodes, prefill = decodes or 8 + i % 32, 128 * (i % 3)
    seconds = 0.004 + 1e-4 * decodes + 2e-5 * prefill
    end = 0.02 * i if end is None else end
    return StepRecord(
        end - seconds, end, 1, decodes, 300 * decodes, int(prefill > 0), prefill, prefill, prefill * (prefill + 1) // 2,
        decodes, decodes, 0, 0, 1000, 0, 0, 8192, LimitedBy.BUDGET if i % 4 == 0 else LimitedBy.DEMAND,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_same_records_give_the_same_proposals(name: str) -> None:
    one, other = make(name), make(name)
    for i in range(200):
        assert _fed(one, i) == _fed(other, i)


def _fed(made: Controller, i: int) -> object:
    made.observe_step(sound(i))
    made.observe_request(request(i))
    seen = view(0.02 * i, VLLM, KnobLimits(), 8, 0.03, 2400)
    return made.decide(0.02 * i, VLLM, KnobLimits()), made.budget(seen)


def request(i: int) -> RequestRecord:
    n = 2 + i * 7 % 60
    times = [1.0 + 0.02 * k for k in range(n)]
    return RequestRecord(
        "r", 0.5, 0.6, times[-1], times, 100 + i % 900, n, 0, 0, FinishReason.LENGTH, "default", "", 0, 0, 0
    )  # fmt: skip


def grown(made: Controller, steps: int, first: int) -> tuple[int, float]:
    """(bytes of its state, CPU s of the quietest twentieth) after ``steps`` more steps; a request and a decision every ten."""
    block, costs = max(1, steps // 20), []
    for begin in range(first, first + steps, block):
        started = time.process_time()
        for i in range(begin, begin + block):
            made.observe_step(sound(i))
            if i % 10 == 0:
                _fed(made, i)
        costs.append(time.process_time() - started)
    return len(pickle.dumps(made)), min(costs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [6_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_neither_grows_nor_slows_with_the_steps_seen(name: str, steps: int) -> None:
    made = make(name)
    early_bytes, early = grown(made, 6_000, 0)
    for first in range(6_000, 6_000 + steps - 6_000, 6_000):
        grown(made, 6_000, first)
    late_bytes, late_cost = grown(made, 6_000, steps)
    assert late_bytes <= 1.02 * early_bytes + 64
    assert late_cost < 2 * early + 0.002


@pytest.mark.parametrize("name", NAMES)
def test_a_start_above_a_shrunken_ceiling_is_never_proposed(name: str) -> None:
    limits = replace(KnobLimits(), token_budget=100, chunk_size=100, max_batch_size=10)
    made = make(name, start=VLLM)
    regimes = set()
    for i in range(600):  # nothing explains these times
        made.observe_step(sound(i)._replace(end=0.02 * i + (5.0 if i % 2 else 0.0)))
        proposal = made.decide(0.0, limits.clamp(VLLM), limits)
        regimes.add(proposal.regime)
        assert limits.check(proposal.knobs)
    assert name == "static" or "fallback" in regimes
