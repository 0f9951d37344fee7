"""One study, several machines, a real PostgreSQL: workers that join, die and are stood in for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

import autotune.profiling.study as studies
from autotune.profile import load_profile
from autotune.profiling.storage import SharedStorage
from autotune.profiling.study import open_study
from runtime.errors import InputError
from tests.integration.killed_session import command
from tests.integration.llama_folder import llama_folder
from tests.integration.postgres_server import PASSWORD, postgres
from tests.unit.simulating import note, noted, spawned

pytestmark = [pytest.mark.slow, pytest.mark.beside]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres() as url:
        yield url


@pytest.fixture
def shared(server: str, request: pytest.FixtureRequest) -> SharedStorage:
    return SharedStorage.of(server, request.node.name, heartbeat_s=1)


def measure(shared: SharedStorage, log: Path, machine: str, seconds: float, count: int = 1) -> None:
    """``count`` measurements, as on a machine of that name: nothing there is queued up behind another's."""
    studies._turn_of = lambda name: log.with_name(f"{machine}.turn")  # type: ignore[assignment]  # in a process of its own
    with open_study(shared, {"q": 1}) as study:
        for number in range(count):

            def run(number: int = number) -> dict[str, str]:
                note(log, f"{machine} begins {number}")
                time.sleep(seconds)
                return {"by": machine}

            found = study.measured(str(number), run, params={"token_budget": number}, value=lambda run: 1.0)
            note(log, f"{machine} has {number} by {found['by']}")


def ended(process: Any, seconds: float = 90) -> int:
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        pytest.fail("it did not end")
    return int(process.exitcode)


def trials_of(shared: SharedStorage) -> list[FrozenTrial]:
    return trials_in(shared.url, shared.name)


def trials_in(url: str, begin: str) -> list[FrozenTrial]:
    """Of the studies whose names begin like that."""
    storage = RDBStorage(url)
    try:
        names = [name for name in optuna.get_all_study_names(storage) if name.startswith(begin)]
        return [trial for name in names for trial in optuna.load_study(storage=storage, study_name=name).trials]
    finally:
        storage.remove_session()
        storage.engine.dispose()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.1)


def test_three_machines_at_once_on_an_empty_database(shared: SharedStorage, tmp_path: Path) -> None:
    """None of them makes the tables for the others first, and each comes to every key at about the same moment."""
    log = tmp_path / "log"
    processes = [spawned(measure, shared, log, name, 0.2, 5) for name in "abc"]
    assert [ended(process) for process in processes] == [0, 0, 0]
    begun = [line.split(" begins ")[1] for line in noted(log) if "begins" in line]
    assert sorted(begun) == list("01234"), "every measurement once"
    assert len({line.split(" has ")[1] for line in noted(log) if "has" in line}) == 5, "of one result each"
    done = [t for t in trials_of(shared) if t.state is TrialState.COMPLETE]
    assert [(t.params["token_budget"], t.value) for t in sorted(done, key=lambda t: t.user_attrs["key"])] == [
        (n, 1.0) for n in range(5)
    ]


def test_killed_again_and_again_and_taken_up(shared: SharedStorage, tmp_path: Path) -> None:
    """What was measured at a kill is not measured again."""
    log = tmp_path / "log"
    for kill in range(3):
        process = spawned(measure, shared, log, "one", 0.2, 5)
        wait_for(lambda kill=kill: len(set(finished(log))) > kill)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert ended(spawned(measure, shared, log, "one", 0.0, 5)) == 0
    assert set(finished(log)) == set("01234")
    begun = [line.split(" begins ")[1] for line in noted(log) if "begins" in line]
    assert len(begun) <= 5 + 3, "at most what was being measured at each kill"


def finished(log: Path) -> list[str]:
    return [line.split(" has ")[1][0] for line in noted(log) if " has " in line]


def test_a_measurement_whose_machine_dies_is_made_by_who_waited(shared: SharedStorage, tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim = spawned(measure, shared, log, "one", 300.0)
    wait_for(lambda: noted(log) == ["one begins 0"])
    waiting = [spawned(measure, shared, log, name, 1.0) for name in ("two", "three")]
    time.sleep(2.0)
    assert noted(log) == ["one begins 0"]
    os.kill(victim.pid, signal.SIGKILL)
    assert [ended(p) for p in (victim, *waiting)] == [-signal.SIGKILL, 0, 0]
    lines = noted(log)
    assert len(lines) == 4 and lines[1] in ("two begins 0", "three begins 0")
    who = lines[1].split()[0]
    assert sorted(lines[2:]) == [f"three has 0 by {who}", f"two has 0 by {who}"]


def test_the_command_shares_a_study(server: str, tmp_path: Path) -> None:
    """Two at the same time, one of which is killed; then one more when all is done, which measures nothing."""
    model, log = llama_folder(tmp_path / "model"), tmp_path / "log"
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    victim, other = [spawned(command, folder, model, log, "--storage", server) for folder in folders[:2]]
    wait_for(lambda: bool(trials_in(server, "model-")))
    time.sleep(2.0)
    os.kill(victim.pid, signal.SIGKILL)
    assert ended(victim) == -signal.SIGKILL and ended(other, 200) == 0
    before = len(noted(log))
    assert ended(spawned(command, folders[2], model, log, "--storage", server), 200) == 0
    assert len(noted(log)) == before, "nothing is measured again"
    made = [load_profile(folder / "a.yaml") for folder in folders[1:]]
    assert made[0].points and made[1].points == made[0].points and made[1].knobs == made[0].knobs
    assert not (folders[0] / "a.yaml").exists() and not list(tmp_path.rglob("*.journal"))
    assert PASSWORD not in (folders[1] / "a.yaml").read_text() and ":***@127.0.0.1" in made[0].command


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
