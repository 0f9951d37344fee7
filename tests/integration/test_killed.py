"""The profiler killed with SIGKILL at random moments and started again until it is done."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.profiling.study import open_study
from autotune.profiling.workers import SimulatedTrial, simulate_trials
from tests.unit.simulating import SPACE, STARTING, Valley, noted

pytestmark = pytest.mark.slow
KILLS = 10
TRIALS = 60


def simulate(journal: Path, log: Path, workers: int, seconds: float) -> list[SimulatedTrial]:
    with open_study(journal, {"q": 1}) as study:
        return simulate_trials(
            study, Valley(log, seconds), SPACE, identity={}, starting=STARTING, trials=TRIALS, seed=7, workers=workers
        )


def killed_ten_times(
    target: Callable[..., Any], arguments: tuple[Any, ...], log: Path, journal: Path, seed: int, whole: int
) -> list[tuple[int, list[str]]]:
    """Start ``target`` again and again, and kill it ten times while it writes ``whole`` lines to ``log`` in all.

    For each kill: how many lines there were by then, and what had been finished in the journal.
    """
    dice, context, kills = random.Random(seed), multiprocessing.get_context("spawn"), []
    moments = sorted(dice.randint(0, whole - 2) for _ in range(KILLS))
    for moment in moments:
        process = context.Process(target=target, args=arguments)
        process.start()
        until = time.monotonic() + 120
        while len(noted(log)) < moment or not journal.exists():
            assert process.is_alive() and time.monotonic() < until
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.05))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        kills.append((len(noted(log)), finished(journal)))
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join(300)
    assert process.exitcode == 0
    return kills


def finished(journal: Path) -> list[str]:
    """What the journal's whole lines hold of finished trials: the parameters of each, in order."""
    trials: list[dict[str, Any]] = []
    study = -1
    done = []
    for line in journal.read_bytes().split(b"\n")[:-1]:
        entry = json.loads(line)
        code = entry["op_code"]
        study += code == 0
        if code == 4:
            trials.append({"study": entry["study_id"]} | entry.get("params", {}))
        elif code == 5:
            trials[entry["trial_id"]][entry["param_name"]] = entry["param_value_internal"]
        elif code == 6 and entry["state"] == 1:
            done.append(json.dumps(trials[entry["trial_id"]]))
    return done


@pytest.mark.parametrize("seed", range(2))
def test_one_worker_comes_to_the_study_it_would_have_come_to(tmp_path: Path, seed: int) -> None:
    expected = simulate(tmp_path / "whole.journal", tmp_path / "whole.log", 1, 0.0)
    assert len({t.knobs for t in expected}) == TRIALS, "or a setting could not be told from another trial's"
    journal, log = tmp_path / "a.journal", tmp_path / "log"
    kills = killed_ten_times(simulate, (journal, log, 1, 0.02), log, journal, seed, TRIALS)
    assert finished(journal) == finished(tmp_path / "whole.journal")
    assert simulate(journal, log, 1, 0.0) == expected, "the same settings and values in the same order"
    measured = Counter(noted(log))
    assert set(measured) == {str(t.knobs) for t in expected}, "none lost, none of its own"
    extra = sum(measured.values()) - TRIALS
    assert extra <= KILLS, "at most the one in progress at each kill"
    for lines, done in kills:
        assert done == finished(journal)[: len(done)], "nothing finished changes any more"
        begun_later = Counter(noted(log)[lines:])
        for trial in expected[: len(done)]:
            assert begun_later[str(trial.knobs)] == 0, "what was finished at a kill is never measured again"


def test_several_workers_lose_and_repeat_nothing(tmp_path: Path) -> None:
    journal, log = tmp_path / "a.journal", tmp_path / "log"
    kills = killed_ten_times(simulate, (journal, log, 2, 0.05), log, journal, 3, TRIALS)
    found = simulate(journal, log, 1, 0.0)
    assert [t.number for t in found] == list(range(TRIALS)) and not any(t.failed for t in found)
    done = finished(journal)
    assert len(done) == TRIALS
    assert set(noted(log)) == {str(t.knobs) for t in found}
    assert len(noted(log)) <= TRIALS + 2 * KILLS
    for lines, before in kills:
        assert done[: len(before)] == before
        later = Counter(noted(log)[lines:])
        assert sum(later.values()) >= TRIALS - len(before)
