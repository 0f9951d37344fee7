"""What a profiling run simulates is the machine it measures: its step-time noise, its prefix cache, one speed for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.cost.model import features_of
from autotune.measure.score import Latency
from autotune.profile.parts import StepPoint
from autotune.profiling.points import Run
from autotune.profiling.posterior import Observation
from autotune.profiling.refit import WRONG_BY, merged, refitted, speed_in, speed_of, unlike
from autotune.profiling.simulator import Simulator
from autotune.profiling.stages.candidates import around
from autotune.profiling.stages.engine_validation import EngineValidation
from autotune.simulate import SimulatedEngine
from benchmarks.controller.hardware import h200
from runtime.step_model import NO_GRAPHS, StepFeatures
from tests.unit.jitter_cases import STALLS
from tests.unit.profiled_machine import LIMITS, SCHEDULE, Padded, changed, machine, question
from tests.unit.profiles import SMALL, run, setup

NOTHING = Latency(p50=None, p99=None)


def seen(decodes: int, seconds: float, repeats: int = 50) -> StepPoint:
    return StepPoint(
        region="served", decodes=decodes, decode_context=100 * decodes, prefill_tokens=0, prefill_context=0,
        prefill_attention=0, seconds=seconds, spread=0.02, repeats=repeats,
    )  # fmt: skip


def features(decodes: int) -> StepFeatures:
    return features_of(seen(decodes, 1.0))


def served(*steps: StepPoint) -> Run:
    return run(SMALL, 40).model_copy(update={"steps": steps})


# -- the machine ----------------------------------------------------------------------------------------------------------


def test_step_times_scatter_in_the_search_and_in_paired_simulations() -> None:
    """As in ``autotune simulate`` and ``capacity``: without the noise, settings near their SLO look better than they are."""
    facts = h200().facts.model_copy(update={"jitter": STALLS})
    noisy, even = (
        Simulator.of(type(h200())(f), machine(), question().workload, setup()) for f in (facts, h200().facts)
    )
    assert noisy.scenario.cost.facts.jitter == STALLS
    scores = [one.long(SMALL, 30.0, 5) for one in (noisy, even)]
    assert scores[0].steps.p99_ms > 1.5 * scores[1].steps.p99_ms
    measured = run(SMALL, 40)
    assert noisy.paired(measured).score.steps.p99_ms > 1.5 * even.paired(measured).score.steps.p99_ms


@pytest.mark.slow
def test_what_serving_adds_to_each_step_is_in_the_search_and_in_paired_simulations() -> None:
    facts = h200().facts.model_copy(update={"serving_overhead_s": 5e-3})
    more, less = (Simulator.of(type(h200())(f), machine(), question().workload, setup()) for f in (facts, h200().facts))
    measured = run(SMALL, 40)
    for longer, shorter in (
        (more.long(SMALL, 5.0, 5), less.long(SMALL, 5.0, 5)),
        (more.paired(measured).score, less.paired(measured).score),
    ):
        assert longer.steps.p99_ms > shorter.steps.p99_ms + 4


@pytest.mark.parametrize("shared", [True, False])
def test_the_prefix_cache_is_simulated_as_the_engine_has_it(shared: bool) -> None:
    engine = SimulatedEngine(Padded(), kv_tokens=60_000, limits=LIMITS, prefix_cache=shared)
    assert engine.prefix_cache is shared
    found = Simulator.of(h200(), engine, question().workload, setup())
    assert found.scenario.prefix_cache is shared and found.scenario.start(SMALL).facts.prefix_cache is shared


# -- its speed ------------------------------------------------------------------------------------------------------------


def test_the_speed_is_what_steps_were_predicted_to_take_over_what_they_took() -> None:
    cost = h200()
    steps = [seen(n, 1.25 * cost.predict(features(n))) for n in (4, 32, 128)]
    assert speed_in(cost, served(*steps)) == pytest.approx(0.8)
    long, short = seen(128, 2 * cost.predict(features(128)), 30), seen(4, cost.predict(features(4)), 30)
    predicted = 30 * (cost.predict(features(128)) + cost.predict(features(4)))
    assert speed_in(cost, served(long, short)) == pytest.approx(predicted / (30 * (long.seconds + short.seconds)))


def test_a_run_without_steps_or_tokens_tells_no_speed() -> None:
    """It is no run of steps of a millisecond: the speed stays what it was."""
    empty = run(SMALL, 0, ttft_ms=NOTHING, tpot_ms=NOTHING, e2e_ms=NOTHING)
    assert speed_in(h200(), empty) is None and speed_of(h200(), [empty]) is None
    told = served(seen(8, 2 * h200().predict(features(8))))
    assert speed_of(h200(), [empty, told]) == pytest.approx(0.5)
    cost = h200()
    assert refitted(cost, [], [empty]) is cost


def test_one_bad_minute_is_not_the_speed() -> None:
    cost = h200()
    runs = [served(seen(8, cost.predict(features(8)) / speed)) for speed in (0.5, 0.98, 1.0, 1.02)]
    assert speed_of(cost, runs) == pytest.approx(0.99)


@pytest.mark.slow
def test_a_fit_to_what_was_served_is_taken_where_settings_disagree_and_it_makes_them_agree() -> None:
    """Steps of many decodes take a fifth longer than the calibration said: two settings show two speeds of one machine."""
    cost = h200()
    planned = [seen(n, cost.predict(features(n))).model_copy(update={"region": "decode"}) for n in range(1, 40)]
    few = served(*(seen(n, cost.predict(features(n))) for n in range(2, 30)))
    many = served(*(seen(n, 1.2 * cost.predict(features(n))) for n in range(150, 250, 4)))
    assert unlike(cost, [few, many]) > 2 * WRONG_BY
    found = refitted(cost, planned, [few, many])
    assert found is not cost and unlike(found, [few, many]) < 0.5 * unlike(cost, [few, many])
    assert refitted(cost, planned, [few, few]) is cost  # all agree: nothing to learn


def test_what_the_cost_model_is_wrong_by_is_not_taken_for_the_speed_of_the_machine() -> None:
    """By it the runs show 92% of the speed on average. Yet small steps take what they took when it was calibrated."""
    cost = h200()
    planned = [seen(n, cost.predict(features(n))).model_copy(update={"region": "decode"}) for n in range(1, 40)]
    few = served(*(seen(n, cost.predict(features(n))) for n in range(2, 30)))
    many = served(*(seen(n, 1.2 * cost.predict(features(n))) for n in range(150, 250, 4)))
    assert speed_of(cost, [few, many]) == pytest.approx(0.917, abs=0.01)
    found = refitted(cost, planned, [few, many])
    assert [speed_in(found, run) for run in (few, many)] == pytest.approx([1.0, 1.0], abs=0.02)


@pytest.mark.parametrize("speed", [0.7, 1.3])
def test_a_machine_of_another_speed_is_told_from_a_wrong_cost_model(speed: float) -> None:
    cost = h200()
    planned = [seen(n, cost.predict(features(n))).model_copy(update={"region": "decode"}) for n in range(1, 40)]
    few = served(*(seen(n, cost.predict(features(n)) / speed) for n in range(2, 30)))
    many = served(*(seen(n, 1.2 * cost.predict(features(n)) / speed) for n in range(150, 250, 4)))
    found = refitted(cost, planned, [few, many])
    assert [speed_in(found, run) for run in (few, many)] == pytest.approx([speed, speed], rel=0.05)


def test_steps_of_a_kind_are_one_point_at_their_mean() -> None:
    (one,) = merged([seen(16, 0.010, 10), seen(16, 0.020, 30)], NO_GRAPHS)
    assert one.seconds == pytest.approx(0.0175) and one.repeats == 40 and one.decodes == 16


# -- what is expected -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_differences_from_simulation_are_of_one_speed_and_one_cost_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference told at another speed than its neighbour's is no repeat of it: the posterior of both is of neither."""
    kept: list[EngineValidation] = []
    real = EngineValidation.__init__

    def init(self: EngineValidation, *given: Any, **options: Any) -> None:
        kept.append(self)
        real(self, *given, **options)

    monkeypatch.setattr(EngineValidation, "__init__", init)
    speeds: list[float] = []
    difference = EngineValidation._difference

    def observed(self: EngineValidation, index: int, run: Run) -> Observation:
        speeds.append(self._setup.speed)
        return difference(self, index, run)

    monkeypatch.setattr(EngineValidation, "_difference", observed)
    costs: list[Any] = []
    done = EngineValidation._conclude

    def conclude(self: EngineValidation) -> None:
        costs.append(self._context.found.cost)
        done(self)

    monkeypatch.setattr(EngineValidation, "_conclude", conclude)
    changed(1.06, tmp_path / "a.journal", question(sim_trials=10), schedule=SCHEDULE)
    last = kept[-1]
    assert len(set(speeds)) > 1, "the speed is found to be another when some have been measured"
    assert len(last._runs) == len(last._posterior.observations) >= 3
    last._context.found.cost = costs[-1]
    simulators = around(last._context, last._setup)
    for (index, measured), told in zip(last._runs, last._posterior.observations, strict=True):
        paired = [one.paired(measured).score.attainment for one in simulators]
        assert told.candidate == index
        assert told.difference == pytest.approx(measured.score.attainment - sum(paired) / len(paired))
