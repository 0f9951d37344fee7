"""Profiling runs on hardware that is slower than its calibration, and on a host that takes its time: virtual time throughout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.cost.model import CostModel
from autotune.measure.score import Score
from autotune.profiling.findings import Findings
from autotune.profiling.points import Run
from autotune.profiling.stages import simulating
from autotune.profiling.stages.engine_validation import EngineValidation
from autotune.profiling.timing import Schedule
from autotune.profiling.warnings import warnings
from autotune.simulate.scenario import Scenario
from runtime.clock import VirtualClock
from runtime.knobs import Knobs
from tests.unit.profiled_machine import LIMITS, LONG, KeepingReporter, changed, question, session

VLLM = LIMITS.clamp(Knobs(1024, 0, 8192, 8192))
SHORTER = replace(LONG, simulate_s=0.5)  # 500 requests at 10 trials


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "a.journal"


@pytest.mark.slow
def test_hardware_slower_than_its_steps_said_is_met_at_a_lower_rate(journal: Path) -> None:
    """The rate follows it, and the SLO is still about met."""
    found, reported = changed(1.35, journal, question(rate=None, sim_trials=10), schedule=SHORTER)
    assert reported.setup is not None and found.setup is not None
    assert any("the machine serves at 7" in note for note in reported.notes)
    assert 0.5 < found.setup.rate / reported.setup.rate < 0.9
    best = max(p.attainment for p in found.comparable())
    assert best > 0.75


def rates(reported: KeepingReporter) -> list[float]:
    """At which settings were compared, one after the other."""
    return [float(note.split("comparing at ")[1].split()[0]) for note in reported.notes if "comparing at " in note]


def there(found: Findings) -> list[Run]:
    """What was measured at the rate of the comparison."""
    assert found.setup is not None
    return found.validated_at(found.setup.rate)


@pytest.mark.slow
def test_a_first_bad_minute_does_not_choose_the_rate(journal: Path) -> None:
    """The first measurements saw a slower machine: at the rate that suits that one all settings meet everything."""
    requested = question(rate=None, sim_trials=24)
    found, reported = changed(1.5, journal, requested, until=2)
    assert found.setup is not None and len(rates(reported)) >= 2 and rates(reported)[-1] == found.setup.rate
    assert found.setup.rate > 1.1 * min(rates(reported))
    assert len(there(found)) >= 3 and {run.knobs for run in there(found)} == set(found.expected)
    best = max(p.attainment for p in found.comparable())
    assert best > 0.6 and min(p.attainment for p in found.comparable()) < 0.98, "settings can be told apart"
    again, _ = changed(1.0, journal, requested, last=1, schedule=replace(LONG, budget_s=1.0))
    assert again.setup is not None and again.setup.rate == found.setup.rate, "whatever the budget of who goes on"
    assert not again.stopped, "nothing is measured anew"


@pytest.mark.slow
def test_a_second_comparison_that_was_stopped_leaves_the_first_one_and_is_gone_on_with(journal: Path) -> None:
    requested = question(rate=None, sim_trials=10)
    whole, reported = changed(1.5, journal, requested, until=2, schedule=SHORTER)
    assert whole.setup is not None
    compared = [i for i, run in enumerate(whole.runs, 1) if run.stage == "validation"]
    elsewhere = [i for i in compared if whole.runs[i - 1].score.rate != whole.setup.rate]
    first = 1 + max(elsewhere)  # of the last comparison
    other = journal.with_name("stopped.journal")
    for factor, last in ((1.5, first), (1.0, 2)):  # before its first measurement, and before its second
        found, _ = changed(factor, other, requested, until=2, last=last, schedule=SHORTER)
        assert found.stopped and found.setup is not None and found.setup.rate == rates(reported)[-2]
        assert len(found.expected) >= 2 and found.settings()["balanced"].knobs in found.expected
        assert len({p.knobs for p in found.comparable()}) >= 2
    found, _ = changed(1.0, other, requested, schedule=SHORTER)
    assert not found.stopped and found.setup is not None and found.setup.rate == pytest.approx(whole.setup.rate)
    assert len(there(found)) >= 3


@pytest.mark.slow
def test_where_settings_can_be_told_apart_no_speed_moves_the_rate(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cost model that is wrong for large steps alone tells 85% at one rate, and 100% again at the rate that follows from it."""
    monkeypatch.setattr("autotune.profiling.stages.engine_validation.speed_in", lambda *_: 0.85)
    found, reported = session(journal, question(rate=None, sim_trials=10), schedule=SHORTER)
    first = next(run for run in found.runs if run.stage == "validation")
    assert reported.setup is not None and first.score.rate == reported.setup.rate
    assert 0.7 <= first.score.weighted_attainment <= 0.98 and not rates(reported)


@pytest.mark.slow
def test_noise_is_measured_first_and_where_nothing_is_measured_nothing_moves(journal: Path) -> None:
    found, reported = changed(1.0, journal, question(rate=None, sim_trials=10), schedule=SHORTER)
    first, second, *others = there(found)
    assert (first.knobs, first.score.seed) == (second.knobs, second.score.seed)
    assert {run.knobs for run in others} - {first.knobs}, "others are, as many as are worth it"
    assert len(reported.notes) <= 2


@pytest.mark.slow
def test_what_was_measured_before_the_speed_was_known_is_judged_like_the_rest(journal: Path) -> None:
    found, reported = changed(1.35, journal, question(sim_trials=10, trials=3), schedule=SHORTER)
    assert any("the machine serves at" in note for note in reported.notes)
    assert {run.knobs for run in found.runs if run.stage == "validation"} == set(found.expected)
    assert found.setup is not None and 0.6 < found.setup.speed < 0.85


@pytest.mark.slow
def test_vllms_defaults_are_measured_though_the_comparison_began_anew(journal: Path) -> None:
    """The first speed is off: what was best at it is not what is best at the next, and two settings were asked for."""
    found, reported = changed(1.35, journal, question(sim_trials=10, trials=2), schedule=SHORTER)
    assert any("the machine serves at" in note for note in reported.notes)
    measured = {run.knobs for run in found.runs if run.stage == "validation"}
    assert 2 <= len(measured) <= 3 and VLLM in measured and VLLM in found.expected


@pytest.mark.slow
def test_a_speed_far_off_is_followed_and_said(journal: Path) -> None:
    found, heard = changed(5.0, journal, question(sim_trials=10, trials=1), schedule=SHORTER)
    assert any("the machine serves at " in note and "its calibrated speed" in note for note in heard.notes)
    # so slow, it serves full steps only, which a calibration of six seconds predicts 15% too short
    assert found.setup is not None and found.setup.speed == pytest.approx(0.2, rel=0.2)
    assert any("of the speed it was calibrated at" in reason for reason in warnings(found))


@pytest.mark.slow
@pytest.mark.parametrize("speeds", [(0.7, 0.7, 0.7), (0.7, 0.7, 1.1, 1.1, 0.7)], ids=["there already", "left before"])
def test_a_speed_that_was_moved_to_before_is_no_reason_to_compare_anew(
    journal: Path, speeds: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a given rate a move changes the expectations only; that the study knows of it says nothing of a second comparison."""
    shown, compared = iter(speeds), []

    def speed_in(*_: object) -> float:
        return next(shown, speeds[-1])

    class Counted(EngineValidation):
        def __init__(self, context: Any, setup: Any, *rest: Any, **options: Any) -> None:
            compared.append(setup.speed)
            super().__init__(context, setup, *rest, **options)

    monkeypatch.setattr("autotune.profiling.stages.engine_validation.speed_in", speed_in)
    monkeypatch.setattr("autotune.profiling.stages.engine_validation.EngineValidation", Counted)
    session(journal, question(sim_trials=10), schedule=SHORTER)
    assert len(compared) == 1 and compared == pytest.approx([speeds[-2]])


@pytest.mark.slow
def test_where_measurements_change_the_cost_model_the_settings_are_searched_for_anew(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the trials found by another cost model may be far from the best by this one. Taken up again it is the same."""
    searched: list[simulating.Trial] = []
    real = simulating.search

    def search(objective: Any, *given: Any, **options: Any) -> Any:
        searched.append(objective)
        return real(objective, *given, **options)

    def refitted(cost: CostModel, *_: object) -> CostModel:
        return (
            cost
            if cost.facts.serving_overhead_s == 2e-4
            else CostModel(cost.facts.model_copy(update={"serving_overhead_s": 2e-4}))
        )

    monkeypatch.setattr(simulating, "search", search)
    monkeypatch.setattr("autotune.profiling.stages.engine_validation.refitted", refitted)
    requested = question(sim_trials=10)
    found, _ = session(journal, requested, schedule=SHORTER)
    first, second = searched
    assert first.simulator.scenario.cost.facts != second.simulator.scenario.cost.facts
    assert [run.trial for run in found.simulated] == list(range(10))
    for run in found.simulated[:3]:
        assert second.simulator.long(run.knobs, second.rate, second.seed) == run.score
    again, _ = session(journal, requested, schedule=SHORTER)
    assert len(searched) == 4 and [run.score for run in again.simulated] == [run.score for run in found.simulated]
    assert again.settings() == found.settings()


class Busy:
    """A host that takes its time over simulations: so many seconds for each request."""

    def __init__(self, seconds_each: float, patch: pytest.MonkeyPatch) -> None:
        self.clock = VirtualClock()
        real = Scenario.measure_over

        def measure_over(scenario: Scenario, knobs: Knobs, rate: float, *rest: Any, **options: Any) -> Score:
            score = real(scenario, knobs, rate, *rest, **options)
            self.clock.advance(score.offered * seconds_each)
            return score

        patch.setattr(Scenario, "measure_over", measure_over)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "seconds_each"), [
    (20.0, 2e-5), (20.0, 5e-4), (60.0, 5e-4),
])  # fmt: skip
def test_a_budget_is_held_however_slow_the_host(
    journal: Path, budget: float, seconds_each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(seconds_each, monkeypatch)
    schedule = Schedule.of(budget)
    requested = question(budget_s=budget, rate=None, sim_trials=60)
    found, _ = session(journal, requested, schedule=schedule, host=busy.clock)
    assert found.spent_s == pytest.approx(found.hardware_s + busy.clock.now())
    assert found.spent_s <= 1.15 * budget + schedule.window_s + 3 * schedule.warmup_s  # and one measurement
    assert found.capacity is not None and len([run for run in found.runs if run.stage == "validation"]) >= 2
    if seconds_each < 1e-4:
        assert len(found.simulated) == 60  # where there is time, everything is done
