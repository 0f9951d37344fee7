"""Settings found in simulation beside the trials, and what the finalists are judged by."""

from __future__ import annotations

import pytest

from autotune.profiling.findings import Findings
from autotune.profiling.simulator import Simulator
from autotune.profiling.stages.finalists import CANDIDATE
from autotune.profiling.stages.rate import neighbours, panel
from autotune.simulate import SimulatedEngine
from runtime.knobs import Knobs
from tests.unit.profiled_machine import machine, question, session


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """One at a rate that was given, with few trials."""
    return session(tmp_path_factory.mktemp("given") / "a.journal")[0]


def simulator(found: Findings, speed: float = 1.0) -> Simulator:
    assert found.setup is not None and found.cost is not None
    engine: SimulatedEngine = machine()
    setup = found.setup.model_copy(update={"speed": speed})
    return Simulator.of(found.cost, engine, question().workload, setup)


def test_at_a_rate_that_was_given_the_search_ends_on_a_hill(given: Findings) -> None:
    """No neighbour of the best candidate serves more, and it is at least as good as the panel and all trials."""
    assert given.setup is not None and given.setup.candidates
    sim, seed, rate = simulator(given, given.setup.speed), given.setup.simulated_seeds[0], given.setup.rate
    space = question().space.narrowed(given.setup.fitted)

    def served(knobs: Knobs) -> float:
        return sim.long(knobs, rate, seed).attainment

    best = served(given.setup.candidates[0])
    asked = [*panel(space, given.setup.fitted), *neighbours(space, given.setup.candidates[0])]
    assert best >= max(map(served, asked)) - 0.02  # the speed moved a little since
    assert best >= max(served(run.knobs) for run in given.simulated) - 0.02


def test_candidates_are_tried_and_may_be_finalists(given: Findings) -> None:
    assert CANDIDATE in {run.label for run in given.simulated}
    assert given.setup is not None
    finals = {point.knobs for point in given.finalists}
    assert finals & set(given.setup.candidates)


def test_finalists_behave_differently(given: Findings) -> None:
    """Those that are not yardsticks: where a limit never binds, one setting stands for all above it."""
    search = [p for p in given.finalists if "defaults" not in p.label]
    told = {(p.met, p.offered, p.ttft_p50_ms, p.ttft_p99_ms, p.tpot_p50_ms, p.tpot_p99_ms) for p in search}
    assert len(told) >= len(search) - 2  # under the fresh seeds two may fall together that the search told apart


def test_a_finalist_is_judged_at_several_speeds_and_loads(given: Findings) -> None:
    assert given.setup is not None
    seeds, rate = given.setup.simulated_seeds[1:], given.setup.rate
    point = given.finalists[0]
    speed = given.setup.speed
    slow, _, fast = (
        sum(simulator(given, factor * speed).long(point.knobs, rate, seed).met for seed in seeds)
        for factor in (0.95, 1.0, 1.05)
    )
    assert len(seeds) == 6 and slow - 0.02 * point.offered <= point.met <= fast + 0.02 * point.offered
    assert slow < fast
