"""A study in a database: several processes at it, some of which die."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState

import autotune.profiling.study as studies
from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profiling import storage
from autotune.profiling.reporting import Silent
from autotune.profiling.session import Session
from autotune.profiling.storage import SharedStorage, hidden, without_passwords
from autotune.profiling.study import SweepStudy, differences, open_study, study_name
from runtime.clock import VirtualClock
from runtime.errors import InputError
from tests.unit.profiled_machine import FACTS, machine, no_locks, question
from tests.unit.simulating import note, noted, spawned

IDENTITY = {"model": "tiny", "slo": "ttft=500ms"}


@pytest.fixture
def shared(tmp_path: Path) -> SharedStorage:
    return SharedStorage.of(f"sqlite:///{tmp_path / 'study.db'}", "tiny", heartbeat_s=1)


def measure(shared: SharedStorage, log: Path, seconds: float, count: int = 1) -> None:
    """``count`` measurements; ``log`` gets a line when one is begun, and another when it is done."""

    def run(number: int) -> dict[str, int]:
        note(log, f"begin {number}")
        time.sleep(seconds)
        note(log, f"end {number}")
        return {"number": number}

    with open_study(shared, IDENTITY) as study:
        for number in range(count):
            assert study.measured(str(number), lambda number=number: run(number)) == {"number": number}


@pytest.mark.slow
def test_several_processes_measure_nothing_twice_and_never_at_the_same_time(
    shared: SharedStorage, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    processes = [spawned(measure, shared, log, 0.05, 6) for _ in range(3)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert noted(log) == [f"{what} {number}" for number in range(6) for what in ("begin", "end")]


@pytest.mark.slow
def test_what_a_dead_process_was_measuring_is_measured_by_who_waits(shared: SharedStorage, tmp_path: Path) -> None:
    """Its signs of life stay away, and there is nothing else to be told it by."""
    log = tmp_path / "log"
    victim = spawned(measure, shared, log, 600.0)
    wait_for(lambda: noted(log) == ["begin 0"])
    wait_for(lambda: signs_of_life(shared) > 0)  # a thread of its own gives them
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    with open_study(shared, IDENTITY) as study:
        assert study.measurements.known("0"), "for all that anybody can know yet"
    measure(shared, log, 0.0)
    assert noted(log) == ["begin 0", "begin 0", "end 0"]


@pytest.mark.slow
def test_a_claim_without_any_sign_of_life_is_given_up(shared: SharedStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine died in the moment between. Optuna looks at trials only that have a heartbeat."""
    with open_study(shared, IDENTITY) as study:
        claim(shared, {"key": "a"})
        monkeypatch.setattr(studies, "_LONGEST_S", 0.5)
        assert study.measured("a", lambda: {"run": 1}) == {"run": 1}


@pytest.mark.slow
def test_who_began_before_and_has_not_said_what_it_measures_is_waited_for(
    shared: SharedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_study(shared, IDENTITY) as study:
        other, calls = claim(shared, {}), []
        thread = threading.Thread(target=lambda: calls.append(study.measured("a", lambda: {"by": "mine"})))
        thread.start()
        wait_for(lambda: states(shared).count("RUNNING") == 2)
        other.set_user_attr("key", "a")
        wait_for(lambda: "PRUNED" in states(shared))
        assert calls == [], "it was first"
        other.set_user_attr("result", {"by": "other"})
        thread.join()
        assert calls == [{"by": "other"}]

        claim(shared, {})  # and says nothing ever
        monkeypatch.setattr(studies, "_CLAIMED_WITHIN_S", 1.0)
        assert study.measured("b", lambda: {"by": "mine"}) == {"by": "mine"}


def test_a_database_that_answers_too_slowly_is_given_up_and_stopping_is_asked_for(
    shared: SharedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that comes late holds nothing, however often it is tried again."""
    monkeypatch.setattr(studies, "_CLAIMED_WITHIN_S", 0.0)
    asked: list[int] = []
    with open_study(shared, IDENTITY) as study:
        with pytest.raises(InputError) as caught:
            study.measured("run/a", lambda: pytest.fail("not claimed"))
        assert states(shared) == ["PRUNED"] * 5
        with pytest.raises(Interrupted):
            study.measured("run/a", dict, stop=lambda: bool(asked.append(1)) or len(asked) == 2)
        assert states(shared) == ["PRUNED"] * 7
        monkeypatch.undo()
        assert study.measured("run/a", lambda: {"run": 1}) == {"run": 1}
    told = str(caught.value)
    assert told.startswith("--storage: study tiny in sqlite:///") and "answers too slowly (" in told
    assert "s for a claim; it must be within 0 s)" in told and "\n" not in told


def test_what_comes_before_a_claim_takes_none_of_its_time(
    shared: SharedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signs of life of others are looked at before a trial begins, and parameters are kept behind the claim."""
    told: list[str] = []
    suggest = optuna.Trial.suggest_float

    def noted(trial: optuna.Trial, name: str, *given: Any, **more: Any) -> float:
        told.append(f"{name} behind {trial.user_attrs['key']}")
        return suggest(trial, name, *given, **more)

    monkeypatch.setattr(optuna.Trial, "suggest_float", noted)
    with open_study(shared, IDENTITY) as study:
        clock = iter(range(0, 10**6, 60))  # a minute from one look to the next
        monkeypatch.setattr(studies.time, "monotonic", lambda: float(next(clock)))
        monkeypatch.setattr(studies, "_LONGEST_S", 1e9)
        assert study.measured("run/a", lambda: {"run": 1}, params={"rate": 2.0}) == {"run": 1}
    assert told == ["rate behind run/a"]


def test_a_study_of_any_name_has_its_place_in_the_queue(tmp_path: Path, shared: SharedStorage) -> None:
    names = ("n" * 240, "a/b", "a-b", "ä b")
    for name in names:
        with open_study(SharedStorage.of(shared.url, name), IDENTITY) as study:
            assert study.measured("a", lambda: {"run": 1}) == {"run": 1}
    assert len({studies._turn_of(name) for name in names}) == len(names)


def test_a_temporary_folder_without_locks_is_named(shared: SharedStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_study(shared, IDENTITY) as study:
        no_locks(monkeypatch)
        with pytest.raises(InputError, match=r"\.turn: this file system has no locks \(Func.*; set TMPDIR to"):
            study.measured("a", lambda: {"run": 1})
        monkeypatch.undo()
        monkeypatch.setattr(studies, "_turn_of", lambda name: Path("/no/such/folder/a.turn"))
    with (
        pytest.raises(InputError, match=r"a\.turn: cannot be written \(No such file"),
        open_study(shared, IDENTITY) as study,
    ):
        study.measured("a", lambda: {"run": 1})


def signs_of_life(shared: SharedStorage) -> int:
    """Trials that Optuna has given any for."""
    engine = sqlalchemy.create_engine(shared.url)
    with engine.connect() as connection:
        found = connection.execute(sqlalchemy.text("SELECT count(*) FROM trial_heartbeats")).scalar()
    engine.dispose()
    return int(found or 0)


def claim(shared: SharedStorage, attrs: dict[str, str]) -> optuna.Trial:
    """A trial that another machine has just begun."""
    study = optuna.load_study(storage=shared.url, study_name=shared.name)
    trial = study.ask()
    for name, value in attrs.items():
        trial.set_user_attr(name, value)
    return trial


def states(shared: SharedStorage) -> list[str]:
    return [trial.state.name for trial in optuna.load_study(storage=shared.url, study_name=shared.name).trials]


def test_what_another_machine_is_measuring_is_waited_for(shared: SharedStorage) -> None:
    calls: list[str] = []

    def measure(who: str, seconds: float) -> dict[str, str]:
        calls.append(who)
        time.sleep(seconds)
        return {"by": who}

    with open_study(shared, IDENTITY) as mine, open_study(shared, IDENTITY) as other:
        thread = threading.Thread(target=lambda: other.measured("calibration", lambda: measure("other", 1.0)))
        thread.start()
        wait_for(lambda: bool(calls))
        assert mine.measurements.known("calibration") and not mine.measurements.known("another"), (
            "it costs no time of ours"
        )
        with pytest.raises(Interrupted):
            mine.measured("calibration", lambda: measure("mine", 0), stop=lambda: True)
        assert mine.measured("calibration", lambda: measure("mine", 0)) == {"by": "other"}
        thread.join()
        assert mine.measured("another", lambda: measure("mine", 0)) == {"by": "mine"}
    assert calls == ["other", "mine"]


def test_who_was_held_for_dead_takes_what_the_others_measured(shared: SharedStorage) -> None:
    """Its own result comes too late: on every machine a key has one result."""
    for fault in (None, EvaluationError("out of memory")):
        key = f"a {fault}"
        with open_study(shared, IDENTITY) as mine, open_study(shared, IDENTITY) as other:

            def slow(other: SweepStudy = other, key: str = key, fault: Exception | None = fault) -> dict[str, str]:
                inner = optuna.load_study(storage=shared.url, study_name=shared.name)
                for trial in inner.get_trials(states=(TrialState.RUNNING,)):
                    inner.tell(trial.number, state=TrialState.FAIL)  # as if nothing had been heard of this process
                other.measurements._turn = Path(f"{shared.url[10:]}.turn")  # as if on another machine
                assert other.measured(key, lambda: {"by": "other"}) == {"by": "other"}
                if fault is not None:
                    raise fault
                return {"by": "mine"}

            assert mine.measured(key, slow) == {"by": "other"}
            assert mine.measured(key, lambda: {"by": "nobody"}) == {"by": "other"}
            assert mine.measurements.results() == other.measurements.results()
            assert mine.measurements.find(key) == {"by": "other"}


@pytest.mark.parametrize("kind", ["journal", "database"])
def test_measured_once_whatever_happens(shared: SharedStorage, tmp_path: Path, kind: str) -> None:
    place = shared if kind == "database" else tmp_path / "a.journal"
    calls = 0

    def run(fault: BaseException | None = None) -> dict[str, int]:
        nonlocal calls
        calls += 1
        if fault:
            raise fault
        return {"run": calls}

    for _ in range(2):
        with open_study(place, IDENTITY) as study:
            assert study.measured("a", run) == {"run": 1}
            with pytest.raises(EvaluationError, match="out of memory"):
                study.measured("run/b", lambda: run(EvaluationError("out of memory")))
    assert calls == 2
    with open_study(place, IDENTITY) as study:
        for fault in (Interrupted("interrupted"), KeyboardInterrupt()):
            with pytest.raises(type(fault)):
                study.measured("c", lambda fault=fault: run(fault))
        assert study.measured("c", run) == {"run": 5}
        assert study.measurements.results() == [("a", {"run": 1}), ("c", {"run": 5})]
        assert study.measurements.find("run/b") is None and study.measurements.find("c") == {"run": 5}
        assert (study.count("n"), study.count("n"), study.count("m")) == (0, 1, 0)


def test_the_hardwares_time_of_all_machines_counts(shared: SharedStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of simulating is each machine's own. Studies had one fact for all."""
    with open_study(shared, IDENTITY) as mine, open_study(shared, IDENTITY) as other:
        mine.put("spent", {"hardware_s": 8.0, "simulating_s": 4.0})
        mine.spend("one", {"hardware_s": 1.0, "simulating_s": 0.5})
        mine.spend("one", {"hardware_s": 2.0, "simulating_s": 1.0})
        monkeypatch.setattr("platform.node", lambda: "another")
        other.spend("two", {"hardware_s": 32.0, "simulating_s": 16.0})
        assert mine.spent() == other.spent() == {"hardware_s": 42.0, "simulating_s": 20.0}
        assert other.spent(but="two") == {"hardware_s": 10.0, "simulating_s": 4.0}
        monkeypatch.undo()
        assert mine.spent() == {"hardware_s": 42.0, "simulating_s": 5.0}


def test_a_session_learns_what_others_spend_meanwhile(shared: SharedStorage) -> None:
    with open_study(shared, IDENTITY) as mine, open_study(shared, IDENTITY) as other:
        contexts = [
            Session(machine(), FACTS, question(), study, Silent(), host=VirtualClock())._context
            for study in (mine, other)
        ]
        for context, seconds in zip(contexts, (3.0, 5.0), strict=True):
            with context.meter.hardware():
                cast(VirtualClock, context.target.clock).advance(seconds)
            context.keep_time()
        contexts[0].keep_time()
        assert [context.meter.spent_s for context in contexts] == [8.0, 8.0]
        assert mine.spent()["hardware_s"] == 8.0


@pytest.mark.slow
def test_other_questions_have_other_names_or_are_refused(shared: SharedStorage) -> None:
    other = IDENTITY | {"slo": "ttft=1s"}
    assert study_name("tiny", IDENTITY) == study_name("tiny", dict(reversed(IDENTITY.items())))
    assert study_name("tiny", IDENTITY) != study_name("tiny", other)
    assert study_name("tiny", IDENTITY).startswith("tiny-")
    said = IDENTITY | {"machine": {"cpu": "A CPU", "flags": ["sve2"]}, "torch": "2.13", "transformers": "5"}
    for unlike in (
        said | {"torch": "2.14"},
        said | {"machine": {"cpu": "A CPU", "flags": []}},
        said | {"transformers": "6"},
    ):
        assert study_name("tiny", said) == study_name("tiny", unlike) and differences(said, unlike), "refused by name"
    assert study_name("tiny", said) != study_name("tiny", said | {"machine": {"cpu": "B CPU", "flags": ["sve2"]}})
    with open_study(shared, IDENTITY) as study:
        study.put("setup", 1)
        with pytest.raises(InputError) as caught, open_study(shared, other):
            pass
        assert "study tiny in sqlite" in str(caught.value) and "slo was ttft=500ms, is now ttft=1s" in str(caught.value)
        assert "--study" in str(caught.value)
    with open_study(shared, other, fresh=True) as study:
        assert study.get("setup") is None
    with open_study(SharedStorage.of(shared.url, "tiny-2"), IDENTITY) as study:
        study.measured("a", lambda: {"run": 1})
        assert study.restarted(IDENTITY).measurements.results() == []


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "not the address of a database"),
        ("study.journal", "not the address of a database"),
        ("mysql://me:secret@db/x", "mysql is not supported; use postgresql"),
        ("postgresql://me:secret@db", "names no database"),
        ("postgresql://me:p@secret@db/x", "write an @ within a password as %40"),
        ("sqlite://", "names no database"),
        ("sqlite:///:memory:", "is in memory, which ends with the process; write sqlite:///FILE"),
        ("sqlite:///file:a?mode=memory&uri=true", "is in memory"),
        ("postgresql://me:secret@db:notaport/x", "not the address of a database"),
        ("postgresql://me:secret@db:/x", "not the address of a database"),
        ("postgresql://me:secret@[::1/x", "not the address of a database"),
    ],
)
def test_addresses_that_cannot_be_used(url: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as caught:
        SharedStorage.of(url, "x")
    assert "secret" not in str(caught.value)


def test_the_password_is_never_shown() -> None:
    shared = SharedStorage.of("postgres://me:s3cret@127.0.0.1:1/x", "name")
    assert shared.url == "postgresql+psycopg://me:s3cret@127.0.0.1:1/x"
    assert "s3cret" not in f"{shared} {shared!r} {hidden(shared.url)}"
    with pytest.raises(InputError, match="cannot be used") as caught, open_study(shared, IDENTITY):
        pass
    assert "s3cret" not in str(caught.value) and "127.0.0.1" in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    short = SharedStorage.of("postgres://me:o@127.0.0.1:1/x", "name")
    with pytest.raises(InputError, match=r"cannot be used: .*connection") as caught, open_study(short, IDENTITY):
        pass
    assert ":o@" not in str(caught.value), "nor one of a letter, which words of any text hold"
    given = (
        "profile --storage postgresql://me:s3cret@db/x --storage=postgres://me:s:3@cret@db/x a@b sqlite:///x.db "
        "postgresql://db/x?password=s3cret&user=me"
    )
    assert " ".join(without_passwords(given.split())) == (
        "profile --storage postgresql://me:***@db/x --storage=postgres://me:***@db/x a@b sqlite:///x.db "
        "postgresql://db/x?password=***&user=me"
    )


def test_a_database_that_cannot_be_opened_or_goes_away(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, but a text of some length, or so it seems\n" * 40)
    for url in (f"sqlite:///{tmp_path / 'text.db'}", f"sqlite:///{tmp_path / 'no' / 'a.db'}"):
        with pytest.raises(InputError, match="cannot be used"), open_study(SharedStorage.of(url, "x"), IDENTITY):
            pass
    shared = SharedStorage.of(f"sqlite:///{tmp_path / 'a.db'}", "x")
    with pytest.raises(InputError, match="cannot be used"), open_study(shared, IDENTITY) as study:
        (tmp_path / "a.db").write_bytes(b"scribble" * 2000)
        study.put("a", 1)


@pytest.fixture
def locked(shared: SharedStorage, monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """The lock of another program on the file of ``shared``."""
    monkeypatch.setattr(storage, "_TABLES_TIMEOUT_S", 0.01)
    with closing(sqlite3.connect(shared.url.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield other


def test_who_waits_for_another_programs_lock_can_be_stopped(shared: SharedStorage, locked: sqlite3.Connection) -> None:
    asked = iter([False, True])
    with pytest.raises(Interrupted), open_study(shared, IDENTITY, stop=lambda: next(asked)):
        pass


def test_another_programs_lock_is_waited_for(
    shared: SharedStorage, locked: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: locked.rollback() if locked.in_transaction else None)
    with storage.database(shared) as opened, opened.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 30_000, (
            "of the tables' makers it is shorter"
        )


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["journal", "database"])
def test_what_failed_for_the_machines_state_is_tried_again(shared: SharedStorage, tmp_path: Path, kind: str) -> None:
    place = shared if kind == "database" else tmp_path / "a.journal"

    def busy() -> dict[str, int]:
        raise EvaluationError("no step for 60 s")

    for _ in range(2):
        with open_study(place, IDENTITY) as study, pytest.raises(EvaluationError, match="no step for 60 s"):
            study.measured("calibration", busy)
    with open_study(place, IDENTITY) as study:
        assert not study.measurements.known("calibration")
        assert study.measured("calibration", lambda: {"steps": 3}) == {"steps": 3}
