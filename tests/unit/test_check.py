"""Is a profile still true: differences found, noise told apart from them, and what is not the profile's said at once."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from autotune.cost.model import CostModel, fit_cost_model
from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profile.parts import CostFacts
from autotune.profiling.check import Check, RegionCheck, _uncertain, check_steps, compare, median_interval
from autotune.profiling.steps import measure_steps, region_of
from autotune.simulate import SimulatedEngine
from runtime.step_model import StepFeatures
from tests.sample_profile import sample_model
from tests.unit.control_world import slow_cpu

MODEL = sample_model(name="tiny", max_model_len=8192, vocab_size=32000)


class Formula:
    """Hardware given by a formula: no family of ours."""

    def __init__(self, hardware: Callable[[StepFeatures], float]) -> None:
        self.predict = hardware


def engine(hardware: Callable[[StepFeatures], float], noise: float = 0.03, seed: int = 1) -> SimulatedEngine:
    return SimulatedEngine(Formula(hardware), kv_tokens=65536, noise=noise, seed=seed)


@pytest.fixture(scope="module")
def facts() -> CostFacts:
    """The cost model of the formula's hardware, as calibration fits it to 3% noise."""
    measured = engine(slow_cpu, seed=7)
    return fit_cost_model(measure_steps(measured, MODEL, budget_s=40, seed=0).points).facts


def planned(facts: CostFacts) -> CostFacts:
    """What check goes by."""
    assert facts.planned is not None
    return facts.planned


def checked(facts: CostFacts, hardware: Callable[[StepFeatures], float], noise: float = 0.03, **options: Any) -> Check:
    there = engine(hardware, noise)
    return check_steps(there, MODEL, facts, **{"budget_s": 10, **options})


def test_of_few_rounds_little_is_known() -> None:
    assert _uncertain([1.2]) == 1.0, "of one nothing"
    assert _uncertain([1.0, 1.1]) > 1 > _uncertain([1.0, 1.1, 1.05, 0.95, 1.0]) > 0.05
    assert _uncertain([1.0] * 5) < 0.01
    low, high = median_interval([0.9, 1.0, 1.0, 1.0, 1.0, 1.1])
    assert _uncertain([0.9, 1.0, 1.0, 1.0, 1.0, 1.1]) == max(1.0 - low, high - 1.0)


def test_nothing_changed(facts: CostFacts) -> None:
    found = checked(facts, slow_cpu)
    assert found.verdict == "fits", found.sentence
    assert [r.region for r in found.regions] == ["decode", "prefill", "prefix", "mixed"]
    assert found.sentence.startswith("fits: no kind of step differs from the profile by more than ")
    assert found.rounds >= 4 and 10 <= found.seconds < 15
    assert all(r.steps >= 8 and r.measured_ms > 5 for r in found.regions)


def test_an_engine_that_is_cold_at_first_fits(facts: CostFacts) -> None:
    worked = 0.0

    def cold(step: StepFeatures) -> float:
        nonlocal worked
        worked += slow_cpu(step)
        return slow_cpu(step) * (1.4 if worked < 5 else 1.0)

    found = checked(facts, cold)
    assert found.verdict == "fits", found.sentence


class Serving(SimulatedEngine):
    """Hardware whose steps with prompts in them take longer while it serves than while the calibration plans them."""

    dearer = 1.0

    def serve(self, *arguments: Any, **options: Any) -> Any:
        self.dearer = 1.15
        return super().serve(*arguments, **options)

    def submit(self, *arguments: Any, **options: Any) -> Any:  # by the calibration's scripts
        self.dearer = 1.0
        return super().submit(*arguments, **options)


def serving_engine(planned: float = 1.0, seed: int = 1) -> Serving:
    def seconds(step: StepFeatures) -> float:
        return (
            slow_cpu(step) * (made.dearer if step.prefill_tokens else 1.0) * (planned if step.prefill_tokens else 1.0)
        )

    made = Serving(Formula(seconds), kv_tokens=65536, noise=0.03, seed=seed)
    return made


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_serving_that_costs_more_than_planned_steps_is_no_change_of_the_machine(seed: int) -> None:
    """The model is fitted to what serving costs, and check measures planned steps: 10% is what it is to tell."""
    then, now, slower = serving_engine(seed=7 + seed), serving_engine(), serving_engine(planned=1.2)
    known = fit_cost_model(measure_steps(then, MODEL, budget_s=40, seed=seed).points).facts
    assert known.planned is not None and known.planned.coefficients != known.coefficients
    found = check_steps(now, MODEL, known, budget_s=10, seed=seed)
    assert found.verdict == "fits", found.sentence
    assert max(abs(r.difference) for r in found.regions) < 0.04
    off = check_steps(slower, MODEL, known, budget_s=10, seed=seed)
    assert {r.region for r in off.regions if r.verdict == "stale"} == {"prefill", "prefix", "mixed"}, off.sentence


def test_of_a_profile_without_a_model_of_planned_steps_the_error_is_not_averaged_out(facts: CostFacts) -> None:
    """As profiles were before: its steps are all off to one side by what serving costs more."""
    rough = tuple(r.model_copy(update={"median": 0.12, "p90": 0.2}) for r in facts.regions)
    old = facts.model_copy(update={"regions": rough, "planned": None})
    found = checked(old, lambda s: 1.16 * slow_cpu(s))
    assert found.verdict == "unclear" and all(r.model == 0.12 for r in found.regions)
    none_served = old.model_copy(update={"regions": tuple(r for r in rough if r.region != "served")})
    assert checked(none_served, lambda s: 1.16 * slow_cpu(s)).verdict == "stale"


def test_decode_steps_14_percent_slower(facts: CostFacts) -> None:
    found = checked(facts, lambda step: slow_cpu(step) * (1.0 if step.prefill_tokens else 1.14))
    assert re.fullmatch(
        r"stale: decode steps 1[345]% slower than the profile; to renew it, profile this machine again", found.sentence
    )
    assert {r.region: r.verdict for r in found.regions} == {
        "decode": "stale", "prefill": "fits", "prefix": "fits", "mixed": "fits",
    }  # fmt: skip


@pytest.mark.parametrize("budget_s", [2, 5, 10])
def test_prompts_beside_several_decodes_are_measured_however_short_the_time(facts: CostFacts, budget_s: float) -> None:
    """Many short prompts at once beside a single decode, all that some short rounds had room for, say nothing of them."""

    def dearer(step: StepFeatures) -> float:
        return slow_cpu(step) * (1.4 if step.prefill_tokens and step.decodes > 1 else 1.0)

    found = checked(facts, dearer, budget_s=budget_s)
    assert {r.region for r in found.regions if r.verdict == "stale"} == {"mixed"}, found.sentence


@pytest.mark.parametrize(
    ("hardware", "regions", "how"),
    [
        (lambda s: 1.3 * slow_cpu(s), {"decode", "prefill", "prefix", "mixed"}, "slower"),
        (lambda s: 0.7 * slow_cpu(s), {"decode", "prefill", "prefix", "mixed"}, "faster"),
        (lambda s: slow_cpu(s) + 2.5e-4 * s.prefill_tokens, {"prefill", "prefix", "mixed"}, "slower"),
    ],
    ids=["slower clock", "faster machine", "prompts twice as dear"],
)
def test_what_changed_is_named(facts: CostFacts, hardware: Any, regions: set[str], how: str) -> None:
    found = checked(facts, hardware)
    assert found.verdict == "stale"
    assert {r.region for r in found.regions if r.verdict == "stale"} == regions
    assert found.sentence.count(how) == len(regions) and "than the profile; to renew it, " in found.sentence


@pytest.mark.slow
def test_the_threshold_says_what_matters(facts: CostFacts) -> None:
    def slower(step: StepFeatures) -> float:
        return 1.07 * slow_cpu(step)

    assert checked(facts, slower).verdict == "fits"
    assert checked(facts, slower, threshold=0.04).verdict == "stale"
    assert checked(facts, slow_cpu, threshold=0.003).verdict == "unclear"  # it is not known as well as that


@pytest.mark.slow
def test_noise_is_not_taken_for_a_change(facts: CostFacts) -> None:
    """A machine that stalls for rounds on end: in some of them everything takes up to thrice as long."""
    verdicts = []
    for seed in range(12):
        dice, mood = random.Random(seed), [1.0, 0.0]

        def moody(step: StepFeatures, dice: random.Random = dice, mood: list[float] = mood) -> float:
            mood[1] -= 1
            if mood[1] < 0:
                mood[:] = [dice.choice([1.0, 1.0, 1.0, 3.0]), dice.randint(20, 200)]
            return slow_cpu(step) * mood[0]

        found = checked(facts, moody, seed=seed)
        verdicts.append(found.verdict)
        if found.verdict == "unclear":
            assert found.sentence.startswith("cannot tell: machine too noisy (")
            assert found.sentence.endswith("); check again when it is idle, or with a longer --budget")
    assert "unclear" in verdicts and verdicts.count("stale") <= 1, verdicts


def test_slower_while_others_work_is_no_verdict(facts: CostFacts) -> None:
    found = checked(facts, lambda s: 1.3 * slow_cpu(s), taken=lambda: 0.8)
    assert found.verdict == "unclear"
    words = r"cannot tell: other processes took 0.8 cores meanwhile \(decode steps (29|30|31)% slower.*; check again when they "
    assert re.fullmatch(words + "have ended", found.sentence)
    assert checked(facts, lambda s: 0.7 * slow_cpu(s), taken=lambda: 0.8).verdict == "stale", "faster all the same"
    assert checked(facts, slow_cpu, taken=lambda: 0.8).verdict == "fits"
    assert checked(facts, lambda s: 1.3 * slow_cpu(s), taken=lambda: 0.2).verdict == "stale"


def test_a_cost_model_too_rough_to_compare_with(facts: CostFacts) -> None:
    everywhere = tuple(r.model_copy(update={"median": 0.9, "p90": 1.0}) for r in planned(facts).regions)
    rough = planned(facts).model_copy(update={"error": 0.9, "regions": everywhere})
    found = checked(rough, slow_cpu)
    assert found.sentence.startswith("cannot tell: the profile's cost model is too rough (decode steps ")
    assert found.sentence.endswith("); profile this machine again, with a longer --budget")


def test_a_region_that_the_cost_model_hardly_knows_is_left_out(facts: CostFacts) -> None:
    def rough(r: Any) -> Any:
        return r.model_copy(update={"median": 0.9, "p90": 1.0}) if r.region == "mixed" else r

    known = planned(facts).model_copy(update={"regions": tuple(rough(r) for r in planned(facts).regions)})
    found = checked(known, slow_cpu)
    assert found.verdict == "fits" and found.sentence.endswith("(of mixed steps its cost model knows too little)")
    assert checked(known, lambda s: slow_cpu(s) * (1.0 if s.prefill_tokens else 1.14)).verdict == "stale"


def test_a_machine_ten_times_slower_is_found_out_soon(facts: CostFacts) -> None:
    found = checked(facts, lambda s: 10 * slow_cpu(s))
    assert found.verdict == "stale" and found.seconds < 60


def region(difference: float, noise: float, model: float = 0.0, **options: Any) -> RegionCheck:
    return RegionCheck("decode", 9, 3, 1.0, 1.0, difference, noise, model, 0.1, **options)


@pytest.mark.parametrize(
    ("difference", "noise", "verdict"),
    [
        (0.0, 0.0, "fits"), (0.1, 0.1, "fits"), (-0.1, 0.1, "fits"), (0.101, 0.05, "stale"), (-0.101, 0.05, "stale"),
        (0.101, 0.06, "unclear"), (0.2, 0.149, "stale"), (0.2, 0.151, "unclear"), (0.05, 0.11, "unclear"), (-0.2, 0.3, "unclear"),
    ],
)  # fmt: skip
def test_the_three_verdicts(difference: float, noise: float, verdict: str) -> None:
    assert region(difference, noise).verdict == verdict


def test_uncertainties_add_as_squares() -> None:
    assert region(0.0, 0.03, 0.04).uncertainty == pytest.approx(0.05)


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    """Skewed, with a tail: the case that normal intervals get wrong. Counted over 4,000 samples of known median."""
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval(list(range(1, 7))) == (1, 6)
    assert median_interval(list(range(1, 21)), 0.95) == (6, 15)  # the sign test's 95.9%
    dice = random.Random(3)
    held = 0
    for _ in range(4000):
        low, high = median_interval([dice.lognormvariate(0, 1) for _ in range(11)], 0.95)
        held += low <= 1 <= high
    assert held / 4000 == pytest.approx(1 - 2 * 12 / 2**11, abs=0.006)  # fewer than two of eleven on one side


@pytest.mark.slow
def test_regions_are_called_as_the_calibration_calls_them(facts: CostFacts) -> None:
    there = engine(slow_cpu, 0.0)
    seen: dict[tuple[int, ...], str] = {}

    class Listener:
        def on_step(self, record: Any) -> None:
            seen[record.decodes, record.prefill_tokens, record.prefill_context] = region_of(record)

        def on_request(self, record: Any) -> None:
            pass

    there.subscribe(Listener())
    points = measure_steps(there, MODEL, budget_s=6, seed=0).points
    assert {p.region for p in points} - {"served"} == {"decode", "prefill", "prefix", "mixed"}
    for p in points:
        if p.region != "served" and (kind := (p.decodes, p.prefill_tokens, p.prefill_context)) in seen:
            assert seen[kind] == p.region


def test_stopping_and_nothing_to_compare(facts: CostFacts) -> None:
    with pytest.raises(Interrupted):
        checked(facts, slow_cpu, stop=lambda: True)
    with pytest.raises(EvaluationError, match="no step came about"):
        compare([[], []], CostModel(facts), 0.1, 1.0)


def test_it_is_told_as_one_object(facts: CostFacts) -> None:
    told = checked(facts, slow_cpu).as_dict()
    assert json.loads(json.dumps(told)) == told
    assert told["verdict"] == "fits" and len(told["regions"]) == 4
    assert set(told["regions"][0]) >= {"region", "difference", "uncertainty", "measured_ms", "predicted_ms", "verdict"}


# -- the command ------------------------------------------------------------------------------------------------------------


def test_far_slower_is_told_as_a_multiple_and_no_difference_is_not_0_percent() -> None:
    def region(difference: float) -> RegionCheck:
        return RegionCheck("decode", 9, 9, 1.0, 1.0, difference, 0.01, 0.01, 0.1, False)

    assert (
        region(21.88).words() == "decode steps 22.9 times slower" and region(0.99).words() == "decode steps 99% slower"
    )
    same = Check((region(0.0),), 9, 9.0, 0.1, 0.0)
    assert same.sentence == "fits: no kind of step differs from the profile by more than 1%"
