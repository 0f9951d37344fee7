"""Settings found in simulation beside the trials, and what the candidates are judged by."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autotune.engines.defaults import VLLM_LABEL
from autotune.measure.evaluate import EvaluationError
from autotune.profiling.findings import Findings
from autotune.profiling.setup import spread_seeds
from autotune.profiling.simulator import Simulator
from autotune.profiling.space import NEAR_BEST, around_guess, make_space, neighbours
from autotune.profiling.stages import engine_validation, rate
from autotune.profiling.stages.candidates import candidate, pairs
from autotune.simulate import SimulatedEngine
from autotune.workload import parse_workload
from runtime.knobs import Knobs
from tests.unit.profiled_machine import LIMITS, machine, question, session


def simulator(found: Findings, speed: float = 1.0) -> Simulator:
    assert found.setup is not None and found.cost is not None
    engine: SimulatedEngine = machine()
    setup = found.setup.model_copy(update={"speed": speed})
    return Simulator.of(found.cost, engine, question().workload, setup)


def at_either_speed(found: Findings, knobs: Knobs) -> float:
    """Attainment over half of the requests at each end of the speeds that the hardware may have."""
    assert found.setup is not None
    half = found.setup.model_copy(update={"simulated_requests": found.setup.simulated_requests // 2})
    sides = (simulator(replace(found, setup=half), factor * half.speed) for factor in (0.95, 1.05))
    return sum(sim.long(knobs, half.rate, half.simulated_seeds[0]).attainment for sim in sides) / 2


@pytest.mark.slow
def test_at_a_rate_that_was_given_the_search_ends_on_a_hill(given: Findings) -> None:
    """No neighbour of the best candidate serves more, and it is at least as good as those around the guess and all trials."""
    assert given.setup is not None and given.setup.candidates
    space = question().space.narrowed(given.setup.fitted)
    served = partial(at_either_speed, given)

    best = served(given.setup.candidates[0])
    searched = [*around_guess(space, given.setup.fitted), *neighbours(space, given.setup.candidates[0])]
    assert best >= max(map(served, searched)) - 0.02  # the speed moved a little since
    assert best >= max(served(run.knobs) for run in given.simulated) - 0.02


@pytest.mark.slow
def test_candidates_are_tried_and_may_be_candidates(given: Findings) -> None:
    assert NEAR_BEST in {run.label for run in given.simulated}
    assert given.setup is not None
    finals = {point.knobs for point in given.candidates}
    assert finals & set(given.setup.candidates)


@pytest.mark.slow
def test_candidates_behave_differently(given: Findings) -> None:
    """Those that are not baselines: where a limit never binds, one setting stands for all above it."""
    search = [p for p in given.candidates if "defaults" not in p.label]
    told = {(p.met, p.offered, p.ttft_p50_ms, p.ttft_p99_ms, p.tpot_p50_ms, p.tpot_p99_ms) for p in search}
    assert len(told) == len(search) > 3


@pytest.mark.slow
def test_a_candidate_is_judged_at_several_speeds_and_loads(given: Findings) -> None:
    """Its figures are those of each load at the speed paired with it, all together."""
    assert given.setup is not None
    seeds, rate = given.setup.simulated_seeds[1:], given.setup.rate
    loads = pairs(seeds)
    assert [speed for _, speed in loads] == [1, 0, 2, 2, 0, 1] and [seed for seed, _ in loads] == list(seeds)
    simulators = [simulator(given, factor * given.setup.speed) for factor in (0.95, 1.0, 1.05)]
    even = []
    for knobs in [point.knobs for point in given.candidates][:3]:
        made = candidate("x", knobs, simulators, given.setup).point
        scores = [simulators[speed].long(knobs, rate, seed) for seed, speed in loads]
        assert (made.met, made.offered) == (sum(s.met for s in scores), sum(s.offered for s in scores))
        even.append(made.met == sum(simulators[1].long(knobs, rate, seed).met for seed in seeds))
    assert not all(even)  # at one speed they would be others


def test_a_replayed_trace_is_met_at_every_speed(tmp_path: Path) -> None:
    """It is the same requests under every seed: counted once, and not taken for six loads."""
    rows = [f"2023-11-16 18:{i // 1800:02}:{i / 30 % 60:06.3f},{40 + i % 50},{8 + i % 9}" for i in range(1500)]
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    load = parse_workload(f"azure-conv:{tmp_path / 'trace.csv'}")
    assert spread_seeds(load, 5, 6, 1.0, 10.0) == [5]
    assert pairs([5]) == [(5, 0), (5, 1), (5, 2)]


@pytest.mark.slow
def test_pins_bind_the_local_search(tmp_path: Path) -> None:
    """A baseline outside of the pin may be better than all inside: it is no place to search from."""
    space = make_space(LIMITS, ["max_batch_size=6"])
    found, _ = session(tmp_path / "a.journal", question(space=space))
    assert found.setup is not None and found.setup.candidates
    assert {knobs.max_batch_size for knobs in found.setup.candidates} == {6}
    inside = [run.knobs for run in found.simulated if space.allows(run.knobs)]
    best = at_either_speed(found, found.setup.candidates[0])
    assert best >= max(at_either_speed(found, knobs) for knobs in inside) - 0.02


@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, 35.0])
def test_few_trials_are_of_settings_that_may_be_chosen(tmp_path: Path, rate: float | None) -> None:
    """The defaults of other engines, which pins exclude, come first otherwise."""
    space = make_space(LIMITS, ["token_budget=512"])
    found, _ = session(tmp_path / "a.journal", question(space=space, rate=rate, sim_trials=1, trials=1))
    assert found.settings()["balanced"].knobs.token_budget == 512


@pytest.mark.slow
def test_a_setting_that_cannot_be_simulated_is_said_and_is_no_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Simulator.long

    def picky(self: Simulator, knobs: Knobs, rate: float, seed: int, **options: Any) -> Any:
        if knobs.token_budget > 600:
            raise EvaluationError("no room for it")
        return real(self, knobs, rate, seed, **options)

    monkeypatch.setattr(Simulator, "long", picky)
    found, told = session(tmp_path / "a.journal", question(space=make_space(LIMITS, ranges=["token_budget=400:1000"])))
    assert found.setup is not None and found.setup.candidates
    assert all(knobs.token_budget <= 600 for knobs in found.setup.candidates)
    assert any("cannot be simulated: no room for it" in note for note in told.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("baseline", "moves"), [(0.7, True), (1.0, False), (1.3, False), (0.9, True)])
def test_at_a_given_rate_two_settings_must_tell_the_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, baseline: float, moves: bool
) -> None:
    """The best tells 0.7 of the calibrated speed; the correction is the smaller of both, and none where they are at odds."""
    shown_by = {True: baseline, False: 0.7}
    monkeypatch.setattr(engine_validation, "speed_in", lambda cost, run: shown_by[run.label == VLLM_LABEL])
    monkeypatch.setattr(
        engine_validation, "best_of", lambda found, slo: next(f for f in found if f.label != VLLM_LABEL)
    )
    corrected: list[float] = []

    def at_speed(context: Any, setup: Any, speed: float) -> Any:
        corrected.append(speed)
        return rate.at_speed(context, setup, speed)

    monkeypatch.setattr(engine_validation, "at_speed", at_speed)
    session(tmp_path / "a.journal")
    assert corrected[:1] == ([pytest.approx(max(0.7, baseline))] if moves else [])
