"""The calibration's steps: planned ones come about on the real scheduler, and a cost model fitted to them is the hardware's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from autotune.cost.model import fit_cost_model
from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profile.parts import JitterFacts, ModelFacts, StepPoint
from autotune.profiling.step_driver import StepDriver, idle_before, samples
from autotune.profiling.steps import MeasuredSteps, measure_steps, served_points, serving_samples
from autotune.profiling.warnings import unseen
from autotune.simulate import SimulatedEngine
from runtime.knobs import KnobLimits
from runtime.llm.core import StepOutcome
from runtime.records import LimitedBy, StepRecord
from runtime.step_model import NO_GRAPHS, TERMS, StepFeatures, Term
from tests.tiers import slow_but_for

pytestmark = pytest.mark.unit


class Formula:
    """An 8B model on a GPU, memory and compute overlapped, each chunk with a cost of its own; perhaps noisy, perhaps drifting."""

    def __init__(self, noise: float = 0.0, stalls: float = 0.0) -> None:
        self.noise, self.stalls = noise, stalls
        self.pace = 1.0
        self._rng = random.Random(1)

    def truth(self, step: StepFeatures) -> float:
        tokens = step.decodes + step.prefill_tokens
        memory = (15e9 + 131072 * (step.decode_context + step.prefill_context)) / 3.84e12
        compute = (16e9 * tokens + 524288 * (step.decode_context + step.prefill_attention)) / 643e12
        return 0.75e-3 + 4e-5 * step.chunks + max(memory, compute)

    def predict(self, step: StepFeatures) -> float:
        stalled = 6 if self._rng.random() < self.stalls else 1
        return self.truth(step) * self._rng.gauss(1, self.noise) * stalled * self.pace


def facts(max_model_len: int = 16384) -> ModelFacts:
    return ModelFacts(
        name="8b", architecture="llama", parameters=8_000_000_000, dtype="bfloat16", random_weights=True, seed=0,
        max_model_len=max_model_len, vocab_size=1000, kv_bytes_per_token=131072,
    )  # fmt: skip


def machine(hardware: Formula, *, kv_tokens: int = 400_000, limits: KnobLimits | None = None) -> SimulatedEngine:
    return SimulatedEngine(hardware, kv_tokens=kv_tokens, limits=limits)


def measured(engine: SimulatedEngine, *, budget_s: float = 60.0, **more: object) -> list[StepPoint]:
    max_model_len = more.pop("max_model_len", 16384)
    return measure_steps(engine, facts(max_model_len), budget_s=budget_s, seed=3, **more).points  # type: ignore[arg-type]


def worst(points: list[StepPoint], hardware: Formula) -> float:
    """The 95th percentile of the fitted model's error on steps of serving that the plan does not hold."""
    model, rng, errors = fit_cost_model(points), random.Random(5), []
    for _ in range(400):
        decodes, prefill, before = rng.randint(1, 200), rng.choice([0, rng.randint(1, 4000)]), rng.randint(0, 3000)
        context = decodes * rng.randint(50, 1500)
        pairs = prefill * before + prefill * (prefill + 1) // 2
        step = StepFeatures(decodes, context, prefill, (before + prefill) * bool(prefill), pairs, int(prefill > 0))
        errors.append(abs(model.predict(step) / hardware.truth(step) - 1))
    return sorted(errors)[int(0.95 * len(errors))]


@pytest.mark.slow
def test_a_noiseless_machine_is_known_after_two_rounds() -> None:
    hardware, told = Formula(), []
    engine = machine(hardware)
    before = engine.clock.now()
    points = measured(engine, budget_s=300.0, advance=lambda share, note: told.append((share, note)))
    assert engine.clock.now() - before < 250  # the fit was settled: it does not use up the time
    assert {p.region for p in points} == {"decode", "prefill", "prefix", "mixed", "served"}
    assert worst(points, hardware) < 0.02
    model = fit_cost_model(points)
    assert model.facts.family.split("+")[0] == "max"
    tokens = {name: value for name, value in model.facts.coefficients.items() if name.startswith("token_s@")}
    dearest = max(
        tokens.values()
    )  # where computing is what takes the time, and so what one more token costs can be told
    assert dearest == pytest.approx(16e9 / 643e12, rel=0.03)
    assert model.facts.coefficients["chunk_s"] == pytest.approx(4e-5, rel=0.2)
    assert all(p.predicted is not None and p.predicted == pytest.approx(p.seconds, rel=0.2) for p in points)
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] <= 1
    assert told[-1][1].startswith("round 2")
    assert engine.view().running == engine.view().waiting == 0


@pytest.mark.slow
def test_noise_and_stalls_are_seen_through_within_the_time() -> None:
    hardware = Formula(noise=0.03, stalls=0.02)
    engine = machine(hardware)
    before = engine.clock.now()
    points = measured(engine, budget_s=30.0)
    assert engine.clock.now() - before < 40
    assert worst(points, hardware) < 0.05
    assert 0.001 < fit_cost_model(points).facts.error < 0.05


@pytest.mark.slow
def test_what_served_loads_take_is_told_with_their_stalls() -> None:
    def found(hardware: Formula) -> MeasuredSteps:
        engine = machine(hardware)
        return measure_steps(engine, facts(), budget_s=60.0, seed=3)

    clean, stalling = found(Formula()), found(Formula(stalls=0.02))  # 2% of the steps take six times as long
    assert clean.served == pytest.approx(1.0, abs=0.01) and clean.serving_overhead_s < 2e-4
    assert stalling.served == pytest.approx(1.1, abs=0.04) and stalling.serving_overhead_s > 4e-4
    assert clean.jitter is not None and clean.jitter.quantiles[-1] < 1.2
    assert stalling.jitter is not None and stalling.jitter.quantiles[-1] > 2
    kept = stalling.cost(9.0).facts
    assert (kept.serving_overhead_s, kept.jitter, kept.seconds) == (stalling.serving_overhead_s, stalling.jitter, 9.0)


class Cold(Formula):
    """Computes prompts, not decodes, 60% slower in its first 8 s of work."""

    def __init__(self) -> None:
        super().__init__(noise=0.01)
        self.worked = 0.0

    def predict(self, step: StepFeatures) -> float:
        self.worked += self.truth(step)
        return super().predict(step) * (1.6 if step.prefill_tokens and self.worked < 8 else 1.0)


@pytest.mark.slow
def test_a_cold_start_is_not_what_the_machine_is_known_for() -> None:
    hardware = Cold()
    assert worst(measured(machine(hardware)), hardware) < 0.025  # 0.036 where those seconds count like the rest


@pytest.mark.slow
def test_the_plan_covers_what_serving_will_ask() -> None:
    points = measured(machine(Formula()))
    alone = [p for p in points if p.region == "decode"]
    assert {1, 2, 8, 64} <= {1 << (p.decodes.bit_length() - 1) for p in alone}
    assert max(p.decode_context / p.decodes for p in alone) > 4000
    assert max(p.prefill_tokens for p in points) >= 4096
    assert max(p.chunks for p in points) >= 32
    behind = [p for p in points if p.region == "prefix"]
    assert {p.prefill_tokens for p in behind} >= {32, 128, 512}


@pytest.mark.slow
def test_it_covers_the_pool_in_the_time_that_autotune_profile_gives_it() -> None:
    hardware = Formula(noise=0.02)
    engine = machine(hardware, limits=KnobLimits(max_batch_size=256))
    points = measured(engine, budget_s=28.8)
    assert engine.clock.now() < 1.2 * 28.8
    alone = [p for p in points if p.region == "decode"]
    assert max(p.decode_context for p in alone) > 100_000
    assert max(p.decodes for p in alone) > 200
    beside = [p for p in points if p.region == "mixed"]
    assert max(p.decode_context for p in beside if p.prefill_tokens < 64) > 100_000
    assert max(p.prefill_context for p in points if p.region == "prefix") > 10_000
    sizes = {p.prefill_tokens for p in points if p.region != "served"}
    assert sum(size % 32 > 0 for size in sizes) > 50, "sizes that kernels' tiles do not fit"
    model = fit_cost_model(points)
    for decodes, context, prefill in ((200, 1500, 0), (32, 8000, 0), (200, 1500, 100), (64, 4000, 1000)):
        step = StepFeatures(
            decodes, decodes * context, prefill, prefill, prefill * (prefill + 1) // 2, int(prefill > 0)
        )
        assert model.predict(step) == pytest.approx(hardware.truth(step), rel=0.05), step


@pytest.mark.parametrize(("times", "most_s", "off"), slow_but_for(((20, 43, 1.0),), ((5, 32, 0.05), (20, 43, 1.0))))
def test_a_slow_machine_fills_no_more_of_its_pool_than_it_has_time_for(times: int, most_s: float, off: float) -> None:
    """Without filling any of it these two took 30 and 43 s, and steps of serving were 25% and 413% off."""

    class Slow(Formula):
        def truth(self, step: StepFeatures) -> float:
            return times * super().truth(step)

    engine = machine(Slow(noise=0.02))
    points = measured(engine, budget_s=28.8)
    assert engine.clock.now() < most_s
    assert unseen(points) == ()
    assert worst(points, Slow()) < off


@pytest.mark.slow
def test_a_drift_of_the_machine_is_cancelled() -> None:
    """At 1.5 times the pace from somewhere on, the fit is that of a steady machine, at one pace or another."""
    hardware = Formula(noise=0.01)
    engine = machine(hardware)

    def slower(share: float, note: str) -> None:
        hardware.pace = 1.5 if share > 0.6 else 1.0

    model = fit_cost_model(measured(engine, advance=slower))
    steady = fit_cost_model(measured(machine(Formula(noise=0.01))))
    steps = [StepFeatures(d, 500 * d, p, p, p * (p + 1) // 2, int(p > 0)) for d in (1, 30, 100) for p in (0, 300, 3000)]
    ratios = [model.predict(step) / steady.predict(step) for step in steps]
    assert max(ratios) / min(ratios) < 1.15  # of 1.5
    assert 0.85 < min(ratios) < 1.6


@pytest.mark.parametrize(
    ("limits", "kv_tokens", "max_model_len"),
    [
        pytest.param(KnobLimits(max_batch_size=4), 400_000, 16384, marks=pytest.mark.slow),
        pytest.param(KnobLimits(token_budget=64, chunk_size=64), 400_000, 16384, marks=pytest.mark.slow),
        pytest.param(KnobLimits(chunk_size=48), 400_000, 16384, marks=pytest.mark.slow),
        pytest.param(None, 2048, 16384, marks=pytest.mark.slow),
        pytest.param(None, 400_000, 128, marks=pytest.mark.slow),
        (KnobLimits(max_batch_size=2, token_budget=32, chunk_size=16), 512, 96),
    ],
)
def test_the_engine_s_ceilings_its_pool_and_the_model_s_context_are_respected(
    limits: KnobLimits | None, kv_tokens: int, max_model_len: int
) -> None:
    engine = machine(Formula(), kv_tokens=kv_tokens, limits=limits)
    seen: list[StepRecord] = []

    class Listener:
        def on_step(self, record: StepRecord) -> None:
            seen.append(record)

        def on_request(self, record: object) -> None:
            assert record.prompt_tokens + record.output_tokens <= max_model_len  # type: ignore[attr-defined]
            assert record.reason in ("length", "cancelled")  # type: ignore[attr-defined]

    engine.subscribe(Listener())
    points = measured(engine, budget_s=20.0, max_model_len=max_model_len)
    assert len(points) >= 8
    fit_cost_model(points)
    assert sum(r.preemptions for r in seen) == 0
    most = limits or KnobLimits()
    assert max(r.decodes + r.chunks for r in seen) <= most.max_batch_size
    assert max(r.tokens for r in seen) <= most.token_budget


def test_a_slow_machine_still_gets_a_whole_round() -> None:
    class Slow(Formula):
        def truth(self, step: StepFeatures) -> float:
            return 40 * super().truth(step)

    hardware = Slow()
    engine = machine(hardware)
    points = measured(engine, budget_s=30.0)
    assert {p.region for p in points} >= {"decode", "prefill", "mixed"}
    assert fit_cost_model(points).facts.error < 0.05


@pytest.mark.parametrize("budget_s", [15.0, pytest.param(22.4, marks=pytest.mark.slow)])
def test_a_machine_too_slow_for_the_plan_still_shows_a_little_of_everything(budget_s: float) -> None:
    """90 ms a step and 12 ms a prompt token: a round has room for a few prompts and one decode at a time."""

    class Sluggish(Formula):
        def truth(self, step: StepFeatures) -> float:
            return 0.09 + 0.012 * step.prefill_tokens + 0.004 * step.decodes + 1e-5 * step.decode_context

    points = measured(machine(Sluggish(noise=0.01)), budget_s=budget_s)
    assert unseen(points) == ()
    fitted = fit_cost_model(points)
    for step in (StepFeatures(4, 200, 0, 0, 0), StepFeatures(2, 60, 24, 24, 300, 1)):
        assert fitted.predict(step) == pytest.approx(Sluggish().truth(step), rel=0.1)


@pytest.mark.slow
def test_what_a_calibration_has_not_seen_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = measured(machine(Formula()), budget_s=20.0)
    assert unseen(points) == ()
    assert unseen([p for p in points if p.region != "served"]) == ("no served load",)
    assert unseen([p for p in points if p.decodes < 2]) == ("no batch of decodes",)
    one = [p for p in points if p.prefill_tokens or p.decodes == 4]
    assert unseen(one) == ("less than two batch sizes at two contexts",)
    assert unseen([p for p in points if not (p.decodes and p.prefill_tokens)]) == ("no prompt beside decodes",)
    whole = [p for p in points if p.prefill_context <= p.prefill_tokens]
    assert unseen(whole) == ("no chunk behind computed tokens",)
    monkeypatch.setitem(TERMS, "adapters", Term("adapters", "adapters", lambda s: 0.0, "adapter_s"))
    assert unseen(points) == ("no steps with more and less adapters",)


def test_it_stops_when_asked_and_says_when_requests_fail() -> None:
    engine = machine(Formula())
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls > 20

    with pytest.raises(Interrupted):
        measured(engine, stop=stop)
    assert engine.view().running == engine.view().waiting == 0

    class Broken(Formula):
        def predict(self, step: StepFeatures) -> float:
            if step.decodes > 20:
                raise RuntimeError("no such kernel")
            return super().predict(step)

    with pytest.raises(EvaluationError, match=r"a step failed|no such kernel"):
        measured(machine(Broken()))


@pytest.mark.parametrize(
    ("broken", "why"),
    [(lambda: JitterFacts(quantiles=(1.0, 3.0), persistent=0.0, memory=0.0), "Value error, .quantiles have a mean of 2;"),
     (lambda: json.loads("no number"), "Expecting value: line 1 column 1")],
)  # fmt: skip
def test_points_that_no_model_comes_of_are_one_line(
    broken: Callable[[], Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pydantic's own complaint has several, and no user would make sense of them."""
    monkeypatch.setattr("autotune.profiling.steps.fit_cost_model", lambda points, **known: broken())
    with pytest.raises(EvaluationError) as caught:
        MeasuredSteps([], 1.0, 1.0, 1.0, 0.0, None).cost(1.0)
    assert str(caught.value).startswith(f"no cost model comes of the 0 kinds of steps measured: {why}")
    assert "\n" not in str(caught.value)


def record(start: float, end: float, *, decodes: int = 0, prefill: int = 0, sampled: int = 0) -> StepRecord:
    return StepRecord(
        start=start, end=end, steps=1, decodes=decodes, decode_context=decodes * 10, chunks=int(prefill > 0),
        prefill_tokens=prefill, prefill_context=prefill, prefill_attention=prefill, sampled=sampled, running=1, waiting=0,
        waiting_tokens=0, kv_free_blocks=1, preemptions=0, epoch=0, budget_used=1, limited_by=LimitedBy.DEMAND,
    )  # fmt: skip


def test_the_time_between_steps_counts_and_a_join_belongs_to_its_prompt() -> None:
    records = [record(10.0, 10.5, prefill=8, sampled=1)]  # began idle
    for duration in (1.4, 1.0, 1.0, 1.0):
        start = records[-1].end + 0.1
        records.append(record(start, start + duration, decodes=1, sampled=1))
    found = samples(records, {0})
    assert [round(s.seconds, 6) for s in found] == [1.0, 1.1, 1.1, 1.1]  # 0.5 + the usual gap + 0.4 of the first decode
    assert found[0].record is records[0] and found[1].record is records[2]


def test_a_step_behind_the_script_s_own_doing_does_not_count_its_gap() -> None:
    records = [record(0.0, 1.0, decodes=2, sampled=2)]
    for gap in (0.1, 5.0, 0.1):
        start = records[-1].end + gap
        records.append(record(start, start + 1.0, decodes=2, sampled=2))
    assert [round(s.seconds, 6) for s in samples(records, {2})] == [1.1, 1.1, 1.1]  # the disturbed one is left out


def test_idle_is_what_had_nothing_to_do_and_not_a_long_gap() -> None:
    busy = record(0.0, 1.0, decodes=120, sampled=120)
    done = busy._replace(running=0)
    more = done._replace(
        waiting=3, limited_by=LimitedBy.SLOTS
    )  # all that ran has ended, and others wait for their slots
    held = done._replace(waiting=3, limited_by=LimitedBy.WAIT)  # by the wait window
    beside = busy._replace(waiting=3, limited_by=LimitedBy.WAIT)  # the same, and decodes go on
    assert idle_before([busy, done, more, held, beside, done, busy]) == {2, 4, 6}
    assert idle_before([]) == idle_before([done]) == set()


def test_the_host_s_time_between_steps_is_theirs_however_long() -> None:
    """vLLM needs 2 ms between two steps of 120 decodes."""
    records, now = [], 0.0
    for number in range(1, 41):
        records.append(record(now, now + 0.020, decodes=120, sampled=120))
        now += 0.020 + 0.002
        if number % 10 == 0:  # all have ended; nothing to do for a while
            records[-1] = records[-1]._replace(running=0)
            now += 3.0
    assert [round(s.seconds, 6) for s in serving_samples(records)] == [0.022] * 40
    (point,) = served_points(records, NO_GRAPHS)
    assert point.seconds == pytest.approx(0.022) and point.repeats == 40


def hosted(engine: SimulatedEngine, each: float) -> SimulatedEngine:
    """``engine`` with a host that takes ``each`` second for each decode of a step before the next one begins."""
    step, last = engine.core.step, [0.0]

    def later(now: float, until: float) -> StepOutcome:
        outcome = step(now + last[0], until)
        last[0] = 0.0 if outcome.record is None else each * outcome.record.decodes
        return outcome

    engine.core.step = later  # type: ignore[method-assign]
    engine.fast_forward = False
    return engine


@pytest.mark.slow
def test_a_calibration_counts_what_the_host_takes_between_steps() -> None:
    hardware = Formula()
    points = measure_steps(hosted(machine(hardware), 2e-5), facts(), budget_s=20.0, seed=3).points
    model = fit_cost_model(points)
    for decodes in (8, 64, 128):
        step = StepFeatures(decodes, decodes * 400, 0, 0, 0)
        assert model.predict(step) == pytest.approx(hardware.truth(step) + 2e-5 * decodes, rel=0.1)
    served = [p for p in points if p.region == "served" and p.decodes > 16]
    host = [p.seconds - hardware.truth(StepFeatures(*(getattr(p, n) for n in StepFeatures._fields))) for p in served]
    assert served and all(0.5 < more / (2e-5 * p.decodes) < 1.5 for more, p in zip(host, served, strict=True))


def test_a_silent_engine_is_not_waited_for_for_ever() -> None:
    engine = machine(Formula())
    driver = StepDriver(engine, 1000, 1000, seed=0, stop=lambda: False)

    def script():  # type: ignore[no-untyped-def]
        yield
        driver.bound(budget=1, chunk=1)
        driver.submit([50], 4)
        while True:
            yield

    assert 50 < len(driver.run(script())) < 60  # the request ends, and nothing will make another step
