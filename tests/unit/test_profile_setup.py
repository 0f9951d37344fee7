"""The calibration's conclusions, each from known step costs, and the request alone on a simulated engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autotune.measure.evaluate import Interrupted
from autotune.profiling.calibrate import Alone, draw_setup, request_alone
from autotune.profiling.points import points
from autotune.profiling.reporting import Silent
from autotune.profiling.session import Session
from autotune.profiling.setup import (
    MOST_RATE,
    TARGET_RATE,
    Setup,
    alike_under,
    balanced_seeds,
    default_slo,
    fitted_knobs,
    in_window,
    length_scale,
    most_rate,
    rounded,
    service_times,
    spread_seeds,
    typical_step,
)
from autotune.profiling.stages.rate import _with_validation_seeds
from autotune.profiling.study import open_study
from autotune.profiling.timing import Meter, Schedule
from autotune.simulate import SimulatedEngine
from autotune.workload import Workload, parse_workload
from autotune.workload.mix import Mix, Part
from autotune.workload.traces import Trace, TraceRow
from runtime.clock import VirtualClock
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO
from runtime.step_model import StepFeatures, StepModel
from tests.unit.profiled_machine import FACTS, Padded, machine, question, session
from tests.unit.profiles import TARGETS


@dataclass(frozen=True)
class Linear:
    base: float
    per_prompt_token: float
    per_decode: float

    def predict(self, step: StepFeatures) -> float:
        return self.base + self.per_prompt_token * step.prefill_tokens + self.per_decode * step.decodes


FAST = Linear(base=0.005, per_prompt_token=0.0001, per_decode=0.0002)


def test_lengths_shrink_by_powers_of_two_to_a_useful_rate_but_not_to_nothing() -> None:
    assert length_scale(1000, 200, 1e-6, 1e-4) == 1.0
    scale = length_scale(1000, 200, 3e-4, 0.012)
    assert scale == 1 / 16
    assert TARGET_RATE * (3e-4 * 1000 + 0.012 * 200 / 6) * scale <= 1
    assert length_scale(1000, 200, 1.0, 1.0) == 1 / 16  # a hopeless machine: outputs keep 8 tokens on average
    assert length_scale(2048, 28, 1.0, 1.0) == 1 / 8  # already short: an eighth


def test_a_machine_whose_steps_hold_many_decodes_is_not_judged_by_a_lone_request() -> None:
    gpu = Linear(base=0.005, per_prompt_token=0.00002, per_decode=0.00003)
    prompt, output = service_times(gpu, 0.0001, 0.005, 1000.0, 200.0, 1024, 10**6)
    assert prompt == pytest.approx((0.005 + 0.02) / 1000)
    assert output == pytest.approx(6 * (0.005 + 0.00003 * 128) / 128)  # 256 take more than a quarter of 50 ms
    cpu = Linear(base=0.02, per_prompt_token=0.001, per_decode=0.002)
    assert service_times(cpu, 0.0011, 0.022, 1000.0, 200.0, 1024, 10**6) == pytest.approx((0.00102, 0.022))
    for slots, kv_tokens in ((32, 10**6), (1024, 64 * 1100 - 1)):  # an engine that cannot hold so many
        assert service_times(gpu, 0.0001, 0.005, 1000.0, 200.0, slots, kv_tokens)[1] == 0.005


def test_the_default_slo_is_relaxed_only_where_it_must_be_and_says_so() -> None:
    assert default_slo(FAST, 150) == (TARGETS, "default")
    slow = Linear(base=0.04, per_prompt_token=0.001, per_decode=0.001)
    slo, why = default_slo(slow, 150)
    assert slo == SLO(ttft_ms=1000, tpot_ms=100)
    assert why.startswith("default × 2: here a step of 8 decodes takes 48 ms, an average prompt 198 ms")


def test_the_first_guess_has_its_step_within_tpot() -> None:
    guess = fitted(FAST, TARGETS, 20, 25)
    assert FAST.predict(typical_step(guess.max_batch_size, guess.token_budget - guess.max_batch_size, 0)) < 1.6 * 0.05
    assert guess.chunk_size == guess.token_budget >= 2 * guess.max_batch_size
    loose = fitted(FAST, SLO(ttft_ms=500, tpot_ms=500), 20, 25)
    assert loose.token_budget > guess.token_budget and loose.max_batch_size > guess.max_batch_size
    assert fitted(Linear(base=1, per_prompt_token=1, per_decode=1), TARGETS, 1, 1).token_budget == 16


def test_the_first_guess_keeps_to_the_engine_s_ceilings() -> None:
    """A minute a token asks for more slots than any engine has; the budget is that beside as many as this one has."""
    patient, few = SLO(tpot_ms=60_000), KnobLimits(max_batch_size=64, token_budget=4096, chunk_size=4096)
    assert fitted(FAST, patient, 100, 200).max_batch_size == KnobLimits().max_batch_size
    assert fitted(FAST, patient, 100, 200, few) == Knobs(64, 0, 4096, 4096)
    slow = Linear(base=0.0, per_prompt_token=0.0001, per_decode=0.01)
    assert fitted(slow, SLO(tpot_ms=1000), 100, 200, few).token_budget == 2048, "beside 16,384 none would fit"


def fitted(cost: StepModel, slo: SLO, rate: float, output: float, limits: KnobLimits | None = None) -> Knobs:
    return fitted_knobs(cost, slo, rate, output, 0.0, limits or KnobLimits())


def test_the_first_guess_fills_a_tile_where_a_begun_one_takes_longer() -> None:
    class Tiles:
        def predict(self, step: StepFeatures) -> float:
            tokens = step.decodes + step.prefill_tokens
            return 0.005 + 0.00006 * tokens + 0.0002 * (-tokens % 256)

    guess = fitted(Tiles(), TARGETS, 2, 25)
    assert guess.token_budget == 512  # of 300 tokens a step takes 65 ms, of 512 36 ms, of 1,024 66 ms


def calibrated(workload: str, **given: Any) -> tuple[Setup, SimulatedEngine]:
    engine = machine(noise=0.0)
    load, cost = parse_workload(workload), Padded()
    alone = request_alone(engine, FACTS, seed=0)
    options: dict[str, Any] = {"seed": 0, "slo": None, "rate": None, "window_s": 3.0, "warmup_s": 0.5} | given
    return draw_setup(engine, FACTS, load, cost, alone, **options), engine


def test_it_draws_from_the_engine_what_it_was_made_to_do() -> None:
    found, engine = calibrated("poisson:rate=40,prompt=12,output=4")
    assert engine.view().running == engine.view().waiting == 0
    one, full = Padded().predict(typical_step(1, 0, 140)), Padded().predict(typical_step(32, 0, 14))
    assert found.calibration.alone_tpot_ms == pytest.approx(1000 * one, rel=0.02)
    assert found.calibration.step_base_ms == pytest.approx(4.6, rel=0.1)
    assert found.length_scale == 1.0 and found.mean_prompt == 12
    assert 0.4 / full < found.calibration.saturated_rate < 32 / 4 / full  # four steps a request at least, 32 at a time
    assert found.rate > 20 and found.rate_from == "calibration"
    assert found.apply(parse_workload("poisson:rate=40,prompt=12,output=4")).rate == pytest.approx(found.rate)
    assert found.cap_prompt + found.cap_output <= FACTS.max_model_len


def test_a_request_alone_fits_a_pool_smaller_than_the_context() -> None:
    engine = machine(noise=0.0, kv_tokens=128)
    assert request_alone(engine, FACTS, seed=0).prompt_tokens == 116


def test_what_was_asked_for_is_taken() -> None:
    slo = SLO(e2e_ms=900)
    found, _ = calibrated("poisson:rate=40,prompt=12,output=4,length=1/2", slo=slo, rate=7.5)
    assert (found.slo, found.slo_from, found.rate, found.rate_from) == (slo, "given", 7.5, "user")
    assert found.length_scale == 0.5 and found.mean_prompt == 6


def test_it_stops_when_told() -> None:
    engine = machine()
    with pytest.raises(Interrupted):
        request_alone(engine, FACTS, seed=0, stop=lambda: True)
    assert engine.view().running == engine.view().waiting == 0


def test_seeds_are_taken_whose_windows_are_average() -> None:
    load = parse_workload("azure-conv:length=1/8").at_rate(20.0)

    def off(seed: int) -> float:
        inside = [a for a in load.arrivals(seed, duration=4.5) if a.time >= 0.5]
        return abs(len(inside) / 80 - 1)

    chosen = balanced_seeds(load, 1, 3, 0.5, 4.0)
    assert len(set(chosen)) == 3 and chosen == balanced_seeds(load, 1, 3, 0.5, 4.0)
    assert sum(map(off, chosen)) < sum(map(off, range(1, 25))) / 8 / 2


def test_fresh_seeds_are_light_and_heavy_as_the_workload_is() -> None:
    load = parse_workload("gamma:cv=4,prompt=100~1,output=20~1,length=1").at_rate(20.0)

    def tokens(seed: int) -> int:
        return sum(a.prompt_tokens + a.output_tokens for a in in_window(load, seed, 1.0, 10.0))

    chosen = spread_seeds(load, 7, 6, 1.0, 10.0)
    brought = [tokens(seed) for seed in chosen]
    assert len(set(chosen)) == 6 and brought == sorted(brought) and chosen == spread_seeds(load, 7, 6, 1.0, 10.0)
    every = [tokens(seed) for seed in range(500, 900)]
    for place, mine in enumerate(brought):  # one from the middle of each sixth
        assert place / 6 - 0.1 <= sum(other < mine for other in every) / 400 <= (place + 1) / 6 + 0.1
    even = [tokens(seed) for seed in balanced_seeds(load, 7, 6, 1.0, 10.0)]
    assert max(even) - min(even) < 0.3 * (brought[-1] - brought[0])


@pytest.mark.parametrize(("workload", "rate", "share"), [
    ("azure-conv", 35.0, 0.52), ("azure-conv", None, 0.38), ("finite", 35.0, 0.38),
])  # fmt: skip
def test_the_time_for_a_capacity_that_is_not_looked_for_goes_into_validating(
    tmp_path: Path, workload: str, rate: float | None, share: float
) -> None:
    rows = tuple(TraceRow(time=i / 20, prompt_tokens=40, output_tokens=6) for i in range(2000))
    load = Workload("trace", "", Trace("a.csv", rows)) if workload == "finite" else parse_workload(workload)
    requested = question(workload=load, budget_s=60.0, rate=rate)
    with open_study(tmp_path / "a.journal", {"q": 1}) as study:
        made = Session(machine(), FACTS, requested, study, Silent())
        assert made._context.schedule.validation == pytest.approx(share)
        assert made._context.schedule == Schedule.of(60.0, capacity=share < 0.5)


def test_a_budget_is_divided_and_kept() -> None:
    short, long = Schedule.of(60.0), Schedule.of(600.0)
    assert 1 < short.window_s < long.window_s
    assert Schedule.of(None).until(0.5) is None and long.until(0.5) == 300
    given = Schedule.of(60.0, capacity=False)  # whose time goes into validating
    assert given.window_s == pytest.approx(short.window_s * (0.38 + 0.14) / 0.38, abs=0.01)
    assert short.validation == 0.38 and given.validation == pytest.approx(0.52)
    clock = VirtualClock()
    host = VirtualClock()
    meter = Meter(clock, host, hardware_s=10.0)
    with meter.hardware():
        clock.advance(5.0)
        host.advance(99.0)
        assert meter.hardware_s == 15.0
    clock.advance(7.0)  # nobody held it
    with meter.simulating():
        host.advance(2.0)
    assert (meter.hardware_s, meter.simulating_s) == (15.0, 2.0)
    assert meter.fits(None, 99) and meter.fits(20.0, 4.0) and not meter.fits(20.0, 12.0)
    meter.took(2.0)
    assert meter.typical(12.0) == 2.0 and meter.fits(20.0, 12.0)


def test_no_more_is_offered_than_can_be_sent_or_than_there_is() -> None:
    endless = parse_workload("poisson:rate=1,prompt=8,output=2")
    assert most_rate(endless, 0, 5.0) == MOST_RATE
    short = parse_workload("fixed:rate=1,prompt=8,output=2,limit=101")
    assert most_rate(short, 0, 5.0) == 20.0
    assert len(in_window(short.at_rate(20.0), 0, 1.0, 4.0)) >= 79
    with pytest.raises(InputError, match="5 requests are too few to compare settings"):
        most_rate(parse_workload("fixed:rate=1,prompt=8,output=2,limit=5"), 0, 5.0)


def test_a_rate_that_brings_nothing_into_the_window_is_refused(tmp_path: Path) -> None:
    short = parse_workload("fixed:rate=1,prompt=8,output=2,limit=101")
    with pytest.raises(
        InputError,
        match=r"--rate is 1000, but fixed:.* lasts for at most 28\.57 requests/s: a measurement takes 3\.5 s",
    ):
        session(tmp_path / "a.journal", question(rate=1000.0, workload=short))


@pytest.mark.parametrize(
    ("window_s", "rate", "ways"),
    [(20.0, 0.02, "a longer --budget with --fresh for longer windows, another --rate, or a longer trace"),
     (Schedule.of(86400.0).window_s, 0.02, "another --rate or a longer trace"),
     (20.0, 1000.0, "another --rate or a longer trace")],
    ids=["longer windows", "no longer windows", "a trace that is over"],
)  # fmt: skip
def test_longer_windows_are_promised_only_where_they_help(window_s: float, rate: float, ways: str) -> None:
    few = parse_workload("fixed:rate=1,prompt=8,output=2,limit=101")
    made = draw_setup(
        machine(), FACTS, few, Padded(), Alone(ttft=1.0, tpot=0.5, prompt_tokens=100), seed=0, slo=TARGETS, rate=1.0,
        window_s=window_s, warmup_s=3.0,
    ).model_copy(update={"rate": rate})  # fmt: skip
    with pytest.raises(InputError, match=f"none falls into the window, .* after the start; give {ways}$"):
        _with_validation_seeds(cast(Any, SimpleNamespace(question=question(workload=few))), made)


@pytest.mark.parametrize(
    ("window_s", "ways"),
    [(6.0, "a longer --budget with --fresh for longer windows, or a higher --rate"),
     (Schedule.of(86400.0).window_s, "a higher --rate")],
)  # fmt: skip
def test_a_workload_without_an_end_may_be_too_seldom_too(window_s: float, ways: str) -> None:
    made = draw_setup(
        machine(), FACTS, parse_workload("fixed:rate=1,prompt=8,output=2"), Padded(), Alone(1.0, 0.5, 100), seed=0,
        slo=TARGETS, rate=0.001, window_s=window_s, warmup_s=1.0,
    )  # fmt: skip
    asked = question(workload=parse_workload("fixed:rate=1,prompt=8,output=2"))
    with pytest.raises(InputError, match=f"none falls into the window, .* after the start; give {ways}$"):
        _with_validation_seeds(cast(Any, SimpleNamespace(question=asked)), made)


def test_it_is_the_workload_s_where_that_says_it(tmp_path: Path) -> None:
    short = parse_workload("fixed:rate=50,prompt=8,output=2,limit=101")
    with pytest.raises(InputError, match=r"--workload: rate is 50, but fixed:.* lasts for at most 28\.57 requests/s"):
        session(tmp_path / "a.journal", question(rate=50.0, workload=short))


def test_too_few_requests_are_said_before_anything_is_measured(tmp_path: Path) -> None:
    few = parse_workload("fixed:rate=1,prompt=8,output=2,limit=5")
    engine = machine()
    with pytest.raises(InputError, match="5 requests are too few to compare settings; it takes"):
        session(tmp_path / "a.journal", question(rate=None, workload=few), engine=engine)
    assert engine.clock.now() == 0.0


@pytest.mark.parametrize("spelling", ["azure-conv:length=1", "azure-conv"])
def test_lengths_that_are_given_as_they_are_stay_so_on_a_slow_machine(spelling: str) -> None:
    slow = Padded(slow=100.0)
    made = draw_setup(
        machine(slow), FACTS, parse_workload(spelling), slow, Alone(ttft=1.0, tpot=0.5, prompt_tokens=100), seed=0,
        slo=TARGETS, rate=None, window_s=3.0, warmup_s=0.5,
    )  # fmt: skip
    assert (made.length_scale == 1.0) == (spelling != "azure-conv")


def test_a_replayed_trace_is_validated_under_one_seed_and_no_request_counts_twice(tmp_path: Path) -> None:
    rows = tuple(TraceRow(time=i / 20, prompt_tokens=40 + i % 7, output_tokens=6) for i in range(200))
    load = Workload("trace", "", Trace("a.csv", rows))
    assert alike_under(load, range(5), 0.5, 3.0) and not alike_under(parse_workload("azure-conv"), range(5), 0.5, 3.0)
    binned = Workload("binned", "", Trace("a.csv", rows, bin_s=0.05))
    assert alike_under(binned, range(5), 0.5, 3.0), "places inside bins are no other requests"
    for share, alike in ((0.5, True), (0.4, False)):
        parts = (Part("a", share, load), Part("b", 1 - share, parse_workload("azure-conv")))
        assert alike_under(Workload("mix", "", Mix(parts, 20.0)), range(5), 0.5, 3.0) is alike
    found, _ = session(tmp_path / "a.journal", question(rate=20.0, workload=load))
    assert found.setup is not None and len(found.setup.validation_seeds) == 1
    validated = [run for run in found.runs if run.stage == "validation"]
    again = {run.knobs: [each for each in validated if each.knobs == run.knobs] for run in validated}
    several = max(again.values(), key=len)
    assert len(several) > 1, "the best is measured again, for the noise"
    assert points(several)[0].offered == several[0].score.offered


@pytest.mark.parametrize(
    ("rate", "value"), [(0.0, 0.0), (12.3456, 12.3), (12.399, 12.3), (99.99, 99.9), (0.01239, 0.0123), (20.0, 20.0)]
)
def test_rates_are_rounded_downwards(rate: float, value: float) -> None:
    assert rounded(rate) == value
