"""Simulated trials killed with SIGKILL at random moments and started again until they are done."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from autotune.profiling.study import open_study
from autotune.profiling.workers import SimulatedTrial, simulate_trials
from tests.integration.killing import finished, killed_often
from tests.unit.simulating import SPACE, STARTING, Valley, noted

pytestmark = [pytest.mark.slow, pytest.mark.beside]
TRIALS = 60


def simulate(journal: Path, log: Path, workers: int, seconds: float) -> list[SimulatedTrial]:
    with open_study(journal, {"q": 1}) as study:
        return simulate_trials(
            study, Valley(log, seconds), SPACE, identity={}, starting=STARTING, trials=TRIALS, seed=1, workers=workers
        )


def test_one_worker_comes_to_the_study_it_would_have_come_to(tmp_path: Path) -> None:
    expected = simulate(tmp_path / "whole.journal", tmp_path / "whole.log", 1, 0.0)
    assert len({t.knobs for t in expected}) == TRIALS, "or a setting could not be told from another trial's"
    journal, log = tmp_path / "a.journal", tmp_path / "log"
    kills = killed_often(simulate, (journal, log, 1, 0.05), log, journal, 0, tmp_path / "whole.journal")
    assert finished(journal) == finished(tmp_path / "whole.journal")
    assert simulate(journal, log, 1, 0.0) == expected, "the same settings and values in the same order"
    tried = Counter(noted(log))
    assert set(tried) == {str(t.knobs) for t in expected}, "none lost, none of its own"
    extra = sum(tried.values()) - TRIALS
    assert extra <= len(kills), "at most the one in progress at each kill"
    for kill in kills:
        assert kill.trials == finished(journal)[: len(kill.trials)], "nothing finished changes any more"
        later = Counter(noted(log)[kill.lines :])
        for trial in expected[: len(kill.trials)]:
            assert later[str(trial.knobs)] == 0, "what was finished at a kill is never measured again"


def test_several_workers_lose_and_repeat_nothing(tmp_path: Path) -> None:
    simulate(tmp_path / "whole.journal", tmp_path / "whole.log", 1, 0.0)
    journal, log = tmp_path / "a.journal", tmp_path / "log"
    kills = killed_often(simulate, (journal, log, 2, 0.05), log, journal, 3, tmp_path / "whole.journal")
    found = simulate(journal, log, 1, 0.0)
    assert [t.number for t in found] == list(range(TRIALS)) and not any(t.failed for t in found)
    done = finished(journal)
    assert len(done) == TRIALS
    assert set(noted(log)) == {str(t.knobs) for t in found}
    assert len(noted(log)) <= TRIALS + 2 * len(kills), "at most what was in progress at each kill"
    for kill in kills:
        assert done[: len(kill.trials)] == kill.trials
