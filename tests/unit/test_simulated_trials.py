"""Simulated trials: the same study however often its process dies, in worker processes or not."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import autotune.profiling.journal as journals
from autotune.measure.evaluate import Interrupted
from autotune.profiling.pool import Objective, Pool, WorkerError
from autotune.profiling.study import open_study
from autotune.profiling.workers import SimulatedTrial, simulate_trials
from runtime.errors import InputError
from runtime.knobs import Knobs
from tests.unit.simulating import SPACE, STARTING, Fatal, Refusing, Valley, noted

TRIALS = 14


def simulate(journal: Path, objective: Objective | None = None, **options: Any) -> list[SimulatedTrial]:
    given: dict[str, Any] = {"identity": {"cost": 1}, "starting": STARTING, "trials": TRIALS, "seed": 3}
    with open_study(journal, {"q": 1}) as study:
        return simulate_trials(study, objective or Valley(), SPACE, **(given | options))


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "a.journal"


def test_starting_points_first_then_what_tpe_proposes(journal: Path) -> None:
    seen: list[tuple[int, SimulatedTrial | None]] = []
    found = simulate(journal, progress=lambda n, trial: seen.append((n, trial)))
    assert [t.number for t in found] == list(range(TRIALS))
    assert [(t.label, t.knobs) for t in found[:2]] == STARTING, "as they are, though one lies outside the space"
    assert {t.label for t in found[2:]} == {"search"}
    assert all(t.knobs.max_wait_ms == 0 and t.value == t.result["goodput"] for t in found if t.result)
    assert seen == [(n + 1, trial) for n, trial in enumerate(found)]
    assert simulate(journal) == found and len(noted(journal)) > 50
    longer = simulate(journal, trials=TRIALS + 4)
    assert longer[:TRIALS] == found and len(longer) == TRIALS + 4


def test_it_finds_better_settings_than_chance(tmp_path: Path) -> None:
    found = simulate(tmp_path / "a", trials=60)
    guided, chance = ([t.value or 0.0 for t in part] for part in (found[40:], found[2:10]))
    assert sum(guided) / len(guided) > sum(chance) / len(chance)
    assert max(t.value or -9.0 for t in found) > -0.35


class Killed(BaseException):
    """Stands for SIGKILL: from here on this process writes nothing."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], None]:
    """``kill_at(n, torn)``: the n-th write from now is the first not to happen; ``torn``: half of it still does."""
    real = journals._write
    state = {"left": 10**9, "torn": False}

    def write(file: int, data: bytes) -> None:
        state["left"] -= 1
        if state["left"] >= 0:
            return real(file, data)
        if state["left"] == -1 and state["torn"]:
            real(file, data[: len(data) // 2])
        raise Killed

    def arm(writes: int, torn: bool) -> None:
        state.update(left=writes, torn=torn)

    monkeypatch.setattr(journals, "_write", write)
    return arm


def test_killed_at_any_write_it_goes_on_as_if_nothing_had_been(
    tmp_path: Path, kill_at: Callable[[int, bool], None]
) -> None:
    expected = simulate(tmp_path / "whole.journal")
    writes = len(noted(tmp_path / "whole.journal"))
    assert writes > 7 * TRIALS
    kept = 0
    for number, at in enumerate([*range(0, writes - 30, 5), *range(writes - 30, writes)]):
        journal, log = tmp_path / f"{at}.journal", tmp_path / f"{at}.log"
        kill_at(at, number % 2 == 0)
        with pytest.raises(Killed):
            simulate(journal, Valley(log))
        last = next(iter(noted(journal)[-1:]), "")
        kill_at(10**9, False)
        assert simulate(journal, Valley(log)) == expected, f"killed at write {at}"
        again = len(noted(log)) - TRIALS
        assert again in (0, 1), f"killed at write {at} of {writes}"
        if '"result":' in last and last.endswith("}"):
            assert again == 0, "its result was written, only the trial's end was not"
            kept += 1
    assert kept


@pytest.mark.parametrize("later", [0, 1, 2, 3])
def test_killed_while_it_puts_back_what_was_cut_short(
    tmp_path: Path, kill_at: Callable[[int, bool], None], later: int
) -> None:
    """After the 10th trial, from where on proposals depend on the results there are."""
    expected, journal = simulate(tmp_path / "whole.journal"), tmp_path / "a.journal"
    kill_at(len(noted(tmp_path / "whole.journal")) - 12, False)
    with pytest.raises(Killed):
        simulate(journal)
    kill_at(later, False)
    with pytest.raises(Killed):
        simulate(journal)
    kill_at(10**9, False)
    assert simulate(journal) == expected


def test_killed_again_and_again(tmp_path: Path, kill_at: Callable[[int, bool], None]) -> None:
    expected = simulate(tmp_path / "whole.journal")
    for seed in range(4):
        dice, journal = random.Random(seed), tmp_path / f"{seed}.journal"
        deaths = -1
        while True:
            deaths += 1
            kill_at(dice.randint(1, 25), dice.random() < 0.5)
            try:
                assert simulate(journal) == expected
            except Killed:
                continue
            break
        assert deaths >= 8


def test_a_different_question_under_the_same_name_is_refused(journal: Path) -> None:
    found = simulate(journal)
    for changed, what in (
        ({"identity": {"cost": 2}}, "objective.cost was 1, is now 2"),
        ({"seed": 4}, "seed was 3, is now 4"),
        ({"starting": STARTING[:1]}, "starting was"),
    ):
        with pytest.raises(InputError, match=what):
            simulate(journal, **changed)
    assert simulate(journal) == found
    assert len(simulate(journal, name="at half the rate", seed=4)) == TRIALS


def test_what_cannot_be_tried_is_a_failed_trial_with_its_cause(journal: Path) -> None:
    found = simulate(journal, Refusing())
    failed = [t for t in found if t.failed]
    assert 0 < len(failed) < len(found) == TRIALS
    assert all(t.failed == f"{t.knobs.token_budget} tokens are too few" and t.value is None for t in failed)
    assert simulate(journal, Refusing(wrong=True)) == found, "nothing is tried again"
    with pytest.raises(ZeroDivisionError):
        simulate(journal.with_name("b.journal"), Refusing(wrong=True))


def test_stopped_it_puts_back_what_was_being_tried(journal: Path, tmp_path: Path) -> None:
    expected = simulate(tmp_path / "whole.journal")
    done: list[object] = []
    with pytest.raises(Interrupted):
        simulate(journal, stop=lambda: len(done) >= 5, progress=lambda n, trial: done.append(trial))
    assert done == expected[:5]
    done = []
    assert simulate(journal, enough=lambda: len(done) >= 6, progress=lambda n, t: done.append(t)) == expected[:10]
    assert done[0] is None  # those settled before
    assert simulate(journal) == expected


def test_several_workers_share_the_work(journal: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = simulate(journal, Valley(log, seconds=0.02), workers=2)
    assert [t.number for t in found] == list(range(TRIALS))
    assert sorted(noted(log)) == sorted(str(t.knobs) for t in found)
    with pytest.raises(Interrupted):
        simulate(journal, Valley(seconds=30), workers=2, trials=TRIALS + 2, stop=after(2.0))
    assert simulate(journal, Valley(log), trials=TRIALS + 2)[:TRIALS] == found


def after(seconds: float) -> Callable[[], bool]:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


@pytest.mark.parametrize("times", [2, pytest.param(99, marks=pytest.mark.slow)])
def test_what_a_dead_worker_was_at_is_given_to_another(journal: Path, tmp_path: Path, times: int) -> None:
    log = tmp_path / "deaths"
    found = simulate(journal, Fatal(log, times), workers=2, trials=5)
    assert len(found) == 5 and len(noted(log)) == min(times, 3)
    assert found[1].failed == (None if times == 2 else "its worker process died 3 times (exit code -9)")


def test_an_error_of_the_objective_itself_ends_it(journal: Path) -> None:
    with pytest.raises(WorkerError, match=r"ZeroDivisionError while simulating .*: no such thing"):
        simulate(journal, Refusing(wrong=True), workers=2)


def test_leaving_the_pool_ends_its_processes() -> None:
    with Pool(Valley(seconds=60), 2) as pool:
        pool.submit(0, Knobs())
        assert list(pool.finished(0.5)) == [] and pool.busy == 1 and pool.room == 1
        pids = pool.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


def _hold_a_pool(pipe: Any) -> None:
    with Pool(Valley(seconds=60), 2) as pool:
        pool.submit(0, Knobs())
        while not all(worker.ready for worker in pool._workers):
            list(pool.finished(0.1))
        pipe.send(pool.pids)
        time.sleep(60)


def test_workers_end_when_their_parent_is_killed() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    parent = context.Process(target=_hold_a_pool, args=(theirs,))
    parent.start()
    pids = ours.recv()
    for pid in pids:
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches them too, and is not theirs to act on
    time.sleep(0.2)
    assert all(psutil.pid_exists(pid) for pid in pids)
    os.kill(parent.pid or 0, signal.SIGKILL)
    parent.join()
    gone = threading.Event()
    for _ in range(1200):
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            gone.set()
            break
        time.sleep(0.05)
    assert gone.is_set()


@pytest.mark.parametrize("options", [{"trials": 0}, {"workers": 0}])
def test_numbers_that_make_no_sense(journal: Path, options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        simulate(journal, **options)
