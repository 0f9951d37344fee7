"""How served steps scatter: told from measured ones, drawn for simulated ones."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
from pydantic import ValidationError

from autotune.cli.show import model_lines
from autotune.cost.model import CostModel
from autotune.measure.evaluate import evaluate
from autotune.profile.parts import JitterFacts
from autotune.profiling.serving_overhead import jitter_of, overhead_of, served_over_predicted
from autotune.simulate import SimulatedEngine
from autotune.simulate.executor import CostExecutor
from autotune.simulate.jitter import FACTORS, SlowStretches, jitter_factors
from autotune.workload import parse_workload
from benchmarks.controller.hardware import h200
from runtime.knobs import Knobs
from runtime.llm.plan import DecodeSet, StepPlan
from runtime.records import LimitedBy
from runtime.slo import SLO
from runtime.step_model import StepFeatures
from tests.sample_profile import sample_profile
from tests.unit.jitter_cases import STALLS


def in_common(values: list[float], lag: int) -> float:
    mean = statistics.fmean(values)
    off = [v - mean for v in values]
    return sum(a * b for a, b in zip(off, off[lag:], strict=False)) / sum(a * a for a in off)


def load(facts: JitterFacts, seed: int, steps: int = 1000, slower: float = 1.0) -> list[tuple[float, float]]:
    """Steps of two sizes that scatter as ``facts`` say."""
    dice = random.Random(seed)
    told = [dice.choice((0.01, 0.03)) for _ in range(steps)]
    return [(t, t * slower * f) for t, f in zip(told, jitter_factors(facts, seed), strict=False)]


def test_the_factors_have_the_quantiles_and_no_other_mean_than_one() -> None:
    drawn = jitter_factors(STALLS, 3)
    assert len(drawn) == FACTORS
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=1e-3)
    assert sum(f == 1.9 for f in drawn) == pytest.approx(FACTORS / 10, abs=1)
    assert drawn == jitter_factors(STALLS, 3) != jitter_factors(STALLS, 4)


def test_noise_is_autocorrelated_only_where_it_was() -> None:
    levels = tuple(0.5 + (i + 0.5) / 32 for i in range(32))
    noise = list(jitter_factors(JitterFacts(quantiles=levels, persistent=0.7, memory=0.8), 1))
    alone = list(jitter_factors(JitterFacts(quantiles=levels, persistent=0.0, memory=0.0), 1))
    assert in_common(noise, 1) == pytest.approx(0.7 * 0.8, abs=0.08)
    assert in_common(noise, 3) == pytest.approx(0.7 * 0.8**3, abs=0.1)
    assert abs(in_common(alone, 1)) < 0.06


def test_what_was_drawn_is_fitted_again() -> None:
    loads = [load(STALLS, seed, slower=slower) for seed, slower in ((1, 0.9), (2, 1.1), (3, 1.3))]
    found = jitter_of(loads)
    assert found is not None
    assert statistics.fmean(found.quantiles) == pytest.approx(1.0, abs=1e-3)
    assert statistics.median(found.quantiles) == pytest.approx(0.9, abs=0.03)
    assert found.quantiles[-1] == pytest.approx(1.9, abs=0.1)
    assert served_over_predicted(loads) == pytest.approx(1.1, abs=0.03)


@pytest.mark.slow
def test_autocorrelation_is_separated_from_what_is_new_in_each_step() -> None:
    levels = tuple(0.5 + (i + 0.5) / 32 for i in range(32))
    noise = jitter_of([load(JitterFacts(quantiles=levels, persistent=0.7, memory=0.8), s, 3000) for s in range(4)])
    alone = jitter_of([load(JitterFacts(quantiles=levels, persistent=0.0, memory=0.0), s, 3000) for s in range(4)])
    assert noise is not None and alone is not None
    assert noise.memory == pytest.approx(0.8, abs=0.1) and noise.persistent == pytest.approx(0.7, abs=0.12)
    assert alone.persistent * alone.memory < 0.05


def test_a_long_step_counts_for_its_time() -> None:
    """Long steps that take twice as long, short ones that are as told: nothing to speak of is what each takes more."""
    found = jitter_of([[(1.0, 2.0), (0.1, 0.1)] * 200])
    assert found is not None
    more = 1 / 101  # the long ones count a hundredth
    over = 2.1 / (1.1 + 2 * more)
    low, high = 0.1 / (0.1 + more) / over, 2.0 / (1.0 + more) / over
    assert found.quantiles[0] == pytest.approx(low, rel=5e-3) and found.quantiles[-1] == pytest.approx(high, rel=5e-3)
    assert sum(q < 0.9 for q in found.quantiles) in (3, 4)  # 0.11 of 1.12 of the time, in 32 shares


def test_too_few_steps_tell_nothing() -> None:
    assert jitter_of([]) is None and served_over_predicted([]) == 1.0
    assert jitter_of([load(STALLS, 1, 100)]) is None


def test_steps_that_never_scatter_have_a_factor_of_one() -> None:
    found = jitter_of([[(0.01, 0.011)] * 500])
    assert found is not None and set(found.quantiles) == {1.0}
    assert set(jitter_factors(found, 0)) == {1.0}


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"quantiles": (1.5, 0.5)}, "ascending order"),
        ({"quantiles": (0.0, 2.0)}, "not all above 0"),
        ({"quantiles": (0.9, 1.0)}, "mean of 0.95; it must be 1"),
        ({"persistent": 1.2}, "less than or equal to 1"),
        ({"quantiles": (1.0,)}, "at least 2"),
        ({"quantiles": (1.0, math.nan)}, "finite"),
    ],
)
def test_facts_that_make_no_sense_are_refused(facts: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        JitterFacts.model_validate({"quantiles": (0.5, 1.5), "persistent": 0.5, "memory": 0.5} | facts)


def test_the_serving_overhead_is_in_seconds_and_does_not_scatter_with_the_step() -> None:
    """Every step takes 1 ms more than told: nothing is left to scatter."""
    loads = [[(t, t + 1e-3) for t in (0.005, 0.05) * 150], [(0.01, 0.011)] * 100]
    assert overhead_of(loads) == pytest.approx(1e-3)
    found = jitter_of(loads)
    assert found is not None and set(found.quantiles) == {1.0}
    assert overhead_of([[(0.01, 0.009)] * 10]) == overhead_of([]) == 0.0


def test_a_model_that_is_off_on_long_steps_says_little_of_what_serving_adds() -> None:
    """By 10% on the long ones, 50 ms each; the short ones take 1 ms more."""
    loads = [[(0.5, 0.55), (0.01, 0.011), (0.01, 0.011)] * 100]
    assert overhead_of(loads) == pytest.approx(1e-3, rel=0.02)


def test_a_cost_model_that_serves_takes_the_serving_overhead_more_for_each_step() -> None:
    model = CostModel(h200().facts.model_copy(update={"serving_overhead_s": 2e-3, "jitter": STALLS}))
    step = StepFeatures(8, 9000, 300, 500, 60_000, 2)
    served = model.serving()
    assert served.predict(step) == pytest.approx(model.predict(step) + 2e-3)
    assert served.facts.serving_overhead_s == 0 and served.serving().predict(step) == served.predict(step)
    assert served.facts.jitter == STALLS
    slow = model.scaled(compute=0.5, bandwidth=0.5, overhead=0.5)
    assert slow.serving().predict(step) == pytest.approx(2 * served.predict(step))
    assert slow.serving().predict(step) == served.scaled(compute=0.5, bandwidth=0.5, overhead=0.5).predict(step)


def test_long_autocorrelation_is_found_in_few_steps() -> None:
    """Where the luck of the draw makes steps three apart more alike than neighbours, too."""
    slow = JitterFacts(quantiles=tuple(0.5 + (i + 0.5) / 32 for i in range(32)), persistent=0.5, memory=0.97)
    found = [jitter_of([load(slow, 7 * seed + i, 150) for i in range(4)]) for seed in range(12)]
    assert all(f is not None and f.memory > 0.5 and f.persistent > 0.2 for f in found)


def test_show_says_what_serving_adds_and_how_steps_scatter() -> None:
    facts = h200().facts.model_copy(update={"serving_overhead_s": 4e-4, "jitter": STALLS})
    told = model_lines(sample_profile(cost_model=facts))
    assert (
        "serving adds 0.4 ms to the predicted time of a step; 80% of steps (weighted by time) take 0.90 to 0.90 times the sum"
        in told
    )
    assert not any(line.startswith("serving") for line in model_lines(sample_profile(cost_model=h200().facts)))


def test_settings_are_compared_without_jitter_and_with_the_serving_overhead() -> None:
    model = CostModel(h200().facts.model_copy(update={"serving_overhead_s": 2e-3, "jitter": STALLS}))
    even = model.even()
    step = StepFeatures(8, 9000, 300, 500, 60_000, 2)
    assert (
        even.facts.jitter is None
        and even.facts.serving_overhead_s == 2e-3
        and even.predict(step) == model.predict(step)
    )


# -- slow stretches at the same times -----------------------------------------------------------------------------------


def stretches(decodes: int, seed: int = 1, until: float = 30.0, **options: Any) -> list[tuple[float, float]]:
    """(begin, factor) of decode steps one after the other."""
    cost = h200()
    executor = CostExecutor(cost, jitter=STALLS, seed=seed, **options)
    plan, now, found = decode_plan(decodes), 0.0, []
    while now < until:
        (end,) = executor.execute(plan, now, now).ends
        found.append((now, (end - now) / cost.predict(StepFeatures(decodes, 100 * decodes, 0, 0, 0))))
        now = end
    return found


def decode_plan(decodes: int) -> StepPlan:
    return StepPlan(
        step=0, n_decode=decodes, decode_context=100 * decodes, chunks=(), decodes=DecodeSet(), version=0, repeat=1,
        wake_at=math.inf, epoch=0, budget_used=512, limited_by=LimitedBy.DEMAND, preemptions=0,
    )  # fmt: skip


def test_by_time_settings_of_other_steps_are_slow_together() -> None:
    """Of two settings one makes longer steps. By the number of a step, they have as little in common as two seeds have."""

    def slow_shares(decodes: int, **options: Any) -> list[float]:
        bins: dict[int, list[float]] = {}
        for begin, factor in stretches(decodes, **options):
            bins.setdefault(int(begin), []).append(factor)
        return [statistics.fmean(bins[i]) for i in range(30)]

    def alike(**options: Any) -> float:
        return statistics.correlation(slow_shares(8, **options), slow_shares(200, **options))

    assert alike(by_time=True) > 0.9 > 0.5 > abs(alike())


@pytest.mark.parametrize("length", [0.1, 1.0, 7.3])
def test_by_time_steps_take_their_mean_on_average_however_long_they_are(length: float) -> None:
    """With one factor for the whole of a step, by when it begins, short ones would be too quick and long ones too slow."""
    wild = JitterFacts(quantiles=(0.6,) * 6 + (1.4,) * 2 + (1.8,) * 2, persistent=0.7, memory=0.8)
    stretches, now = SlowStretches(wild, 3, 1.0), 0.0
    for _ in range(int(FACTORS / length)):
        begun, now = now, stretches.end(now, length)
        assert 0.6 * length - 1e-6 < now - begun < 1.8 * length + 1e-6
    assert now == pytest.approx(FACTORS, rel=0.005)


def test_by_time_work_in_parts_ends_when_it_does_in_one_piece() -> None:
    stretches, now = SlowStretches(STALLS, 3, 0.02), 5.0
    for _ in range(1000):
        now = stretches.end(now, 0.013)
    assert now == pytest.approx(stretches.end(5.0, 13.0)) != pytest.approx(18.0, abs=0.02)
    for cycle in (stretches.end(0.0, FACTORS * 0.02), 1e6):  # where the factors begin again, and long after
        assert 0.0179 < stretches.end(cycle, 0.02) - cycle < 0.0381


def test_by_time_runs_end_when_single_steps_do_to_the_last_bit() -> None:
    """However they are cut, after a rest too, and where the factors begin again."""
    each, lengths = 0.02, [0.003, 0.011, 0.047, 0.02, 0.0305]
    seconds = [lengths[i % len(lengths)] for i in range(4 * FACTORS)]  # 91 s a round
    single, runs, at_once = (SlowStretches(STALLS, 3, each) for _ in range(3))
    now, ends = 1.7, []
    for one in seconds:
        ends.append(now := single.end(now, one))
    assert at_once.ends(1.7, seconds) == ends and ends[-1] > 3 * FACTORS * each
    now, cut = 1.7, []
    for begin in range(0, len(seconds), 37):
        found = runs.ends(now, seconds[begin : begin + 37])
        cut += found[:30]  # as far as the next arrival: the rest begins anew
        now = cut[-1]
        for one in seconds[begin + 30 : begin + 37]:
            cut.append(now := runs.end(now, one))
    assert cut == ends
    rested = ends[-1] + 0.004
    assert runs.ends(rested, [0.01, 0.02]) == [middle := single.end(rested, 0.01), single.end(middle, 0.02)]


def test_by_time_a_run_of_steps_takes_what_single_ones_do() -> None:
    slo, load, knobs = SLO(ttft_ms=500), parse_workload("azure-conv").at_rate(5.0), Knobs(64, 0, 512, 512)
    scores = []
    for fast in (True, False):
        engine = SimulatedEngine(
            h200(), kv_tokens=40_000, slo=slo, jitter=STALLS, jitter_by_time=True, seed=4, fast_forward=fast
        )
        scores.append(evaluate(engine, knobs, load, slo, vocab_size=2, seed=1, duration=10.0))
    assert scores[0].model_dump(exclude={"wall_s"}) == scores[1].model_dump(exclude={"wall_s"})


def test_by_time_there_is_no_other_noise() -> None:
    with pytest.raises(ValueError, match=r"noise is 0\.1; it must be 0 with by_time"):
        CostExecutor(h200(), noise=0.1, jitter=STALLS, by_time=True)
