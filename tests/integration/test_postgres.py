"""One study, several machines, a real PostgreSQL: workers that join, die and are stood in for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import TrialState

import autotune.profiling.storage as storages
from autotune.profile import load_profile
from autotune.profiling.storage import SharedStorage
from autotune.profiling.study import open_study
from autotune.profiling.trials import quiet
from autotune.profiling.workers import SimulatedTrial, simulate_trials
from runtime.errors import InputError
from tests.integration.killed_session import command
from tests.integration.llama_folder import llama_folder
from tests.integration.postgres_server import PASSWORD, postgres
from tests.unit.simulating import SPACE, STARTING, Valley, note, noted

pytestmark = [pytest.mark.slow, pytest.mark.beside]
TRIALS = 12


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture
def shared(server: str, request: pytest.FixtureRequest) -> SharedStorage:
    return SharedStorage.of(server, request.node.name, heartbeat_s=1)


def simulate(shared: SharedStorage, objective: Valley, machine: str, workers: int = 1) -> list[SimulatedTrial]:
    """As on a machine of that name: the death of a process is then seen by its heartbeats only."""
    storages.this_machine = lambda: machine  # type: ignore[assignment]  # in a process of its own
    with open_study(shared, {"q": 1}) as study:
        return simulate_trials(
            study, objective, SPACE, identity={}, starting=STARTING, trials=TRIALS, seed=0, workers=workers
        )


def measure(shared: SharedStorage, log: Path, machine: str, seconds: float) -> None:
    storages.this_machine = lambda: machine  # type: ignore[assignment]
    with open_study(shared, {"q": 1}) as study:

        def run() -> dict[str, str]:
            note(log, f"{machine} begins")
            time.sleep(seconds)
            return {"by": machine}

        found = study.measured("calibration", run)
        note(log, f"{machine} has {found['by']}")


def started(target: Callable[..., Any], *arguments: Any) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    return process


def ended(process: Any, seconds: float = 90) -> int:
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail("it did not end")
    return int(process.exitcode)


def trials_of(shared: SharedStorage) -> list[Any]:
    storage = RDBStorage(shared.url)
    try:
        study = storage.get_study_id_from_name(f"{shared.name}/simulation")
        return storage.get_all_trials(study)
    except KeyError:
        return []
    finally:
        storage.remove_session()
        storage.engine.dispose()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.1)


def test_three_machines_at_once_on_an_empty_database(shared: SharedStorage, tmp_path: Path) -> None:
    """None of them makes the tables for the others first."""
    logs = [tmp_path / name for name in "abc"]
    processes = [started(simulate, shared, Valley(log, seconds=0.4), log.name) for log in logs]
    assert [ended(process) for process in processes] == [0, 0, 0]
    settings = Counter(line for log in logs for line in noted(log))
    assert sum(settings.values()) == TRIALS == len(settings), "every setting once"
    trials = trials_of(shared)
    assert sum(t.state is TrialState.COMPLETE for t in trials) == TRIALS
    assert len({t.user_attrs["worker"]["machine"] for t in trials if t.state is TrialState.COMPLETE}) >= 2


def test_a_worker_killed_in_a_trial_is_stood_in_for(shared: SharedStorage, tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim = started(simulate, shared, Valley(log, seconds=300), "one machine")
    other = started(simulate, shared, Valley(log, seconds=0.3), "another")
    wait_for(lambda: any("worker" in t.user_attrs and of(t) == "one machine" for t in trials_of(shared)))
    killed = next(t for t in trials_of(shared) if "worker" in t.user_attrs and of(t) == "one machine")
    assert killed.state is TrialState.RUNNING
    os.kill(victim.pid, signal.SIGKILL)
    assert ended(victim) == -signal.SIGKILL and ended(other) == 0
    trials = trials_of(shared)
    assert trials[killed.number].state is TrialState.FAIL
    with quiet():
        again = [t for t in trials if RetryHeartbeatStaleTrialCallback.retried_trial_number(t) == killed.number]
    assert [(t.state, t.params, of(t)) for t in again] == [(TrialState.COMPLETE, killed.params, "another")]
    assert len(noted(log)) == TRIALS == sum(t.state is TrialState.COMPLETE for t in trials)


def of(trial: Any) -> str:
    return str(trial.user_attrs["worker"]["machine"])


def test_killed_again_and_again_and_taken_up_on_the_same_machine(shared: SharedStorage, tmp_path: Path) -> None:
    """With worker processes of its own; what was finished at a kill is not tried again."""
    log, finished = tmp_path / "log", 0
    for _ in range(4):
        process = started(simulate, shared, Valley(log, seconds=0.2), "one machine", 2)
        until = time.monotonic() + 60
        while len(noted(log)) <= finished:
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        finished = len(noted(log))
    assert ended(started(simulate, shared, Valley(log, seconds=0.2), "one machine", 2)) == 0
    done = [t for t in trials_of(shared) if t.state is TrialState.COMPLETE]
    assert len(done) == TRIALS
    assert len(noted(log)) <= TRIALS + 4 * 2, "at most what was being tried in either process"


def test_a_measurement_whose_machine_dies_is_made_by_who_waited(shared: SharedStorage, tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim = started(measure, shared, log, "one", 300.0)
    wait_for(lambda: noted(log) == ["one begins"])
    waiting = [started(measure, shared, log, name, 1.0) for name in ("two", "three")]
    time.sleep(2.0)
    assert noted(log) == ["one begins"]
    os.kill(victim.pid, signal.SIGKILL)
    assert [ended(p) for p in (victim, *waiting)] == [-signal.SIGKILL, 0, 0]
    lines = noted(log)
    assert len(lines) == 4 and lines[1] in ("two begins", "three begins")
    who = lines[1].split()[0]
    assert sorted(lines[2:]) == [f"three has {who}", f"two has {who}"]


def test_the_command_shares_a_study(server: str, tmp_path: Path) -> None:
    """Two at the same time, one of which is killed; then one more when all is done, which measures nothing."""
    model, log = llama_folder(tmp_path / "model"), tmp_path / "log"
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    victim, other = [started(command, folder, model, log, "--storage", server) for folder in folders[:2]]
    wait_for(lambda: "measurements" in studies_of(server))
    time.sleep(2.0)
    os.kill(victim.pid, signal.SIGKILL)
    assert ended(victim) == -signal.SIGKILL and ended(other, 200) == 0
    before = len(noted(log))
    assert ended(started(command, folders[2], model, log, "--storage", server), 200) == 0
    assert len(noted(log)) == before, "nothing is measured again"
    made = [load_profile(folder / "a.yaml") for folder in folders[1:]]
    assert made[0].points and made[1].points == made[0].points and made[1].knobs == made[0].knobs
    assert not (folders[0] / "a.yaml").exists() and not list(tmp_path.rglob("*.journal"))
    assert PASSWORD not in (folders[1] / "a.yaml").read_text() and ":***@127.0.0.1" in made[0].command


def studies_of(url: str) -> str:
    storage = RDBStorage(url)
    try:
        return " ".join(
            study.study_name for study in storage.get_all_studies() if study.study_name.startswith("model-")
        )
    finally:
        storage.remove_session()
        storage.engine.dispose()


def test_a_study_that_another_machine_discards(shared: SharedStorage) -> None:
    with pytest.raises(InputError, match="has been discarded"), open_study(shared, {"q": 1}) as study:
        study.measured("a", lambda: {"run": 1})
        with open_study(shared, {"q": 2}, fresh=True):
            pass
        study.measured("b", lambda: {"run": 2})
    with pytest.raises(KeyError, match="of its own"), open_study(shared, {"q": 2}):
        raise KeyError("of its own")


def test_a_server_that_goes_away_is_one_line_without_the_password() -> None:
    with postgres() as url:
        shared = SharedStorage.of(url, "x", heartbeat_s=1)
        intruder = SharedStorage.of(url.replace(PASSWORD, "wrong-password"), "x")
        with pytest.raises(InputError, match="cannot be used") as wrong, open_study(intruder, {"q": 1}):
            pass
        context = open_study(shared, {"q": 1})
        study = context.__enter__()
        study.put("a", 1)
    with pytest.raises(InputError, match="cannot be used") as caught:
        try:
            study.put("b", 2)
        except BaseException as error:
            context.__exit__(type(error), error, error.__traceback__)
            raise
    for text in (str(wrong.value), str(caught.value)):
        assert PASSWORD not in text and "wrong-password" not in text and "\n" not in text and ":***@" in text
