"""A study in a database: several processes at it, some of which die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import autotune.profiling.storage as storages
from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profiling.measurements import Measurements
from autotune.profiling.slots import SlotSampler
from autotune.profiling.storage import SharedStorage, hidden, without_passwords
from autotune.profiling.study import SweepStudy, open_study, study_name
from autotune.profiling.trials import Trials, fail_and_retry
from autotune.profiling.workers import SimulatedTrial, simulate_trials
from runtime.errors import InputError
from tests.unit.simulating import SPACE, STARTING, Valley, noted

IDENTITY = {"model": "tiny", "slo": "ttft=500ms"}


@pytest.fixture
def shared(tmp_path: Path) -> SharedStorage:
    return SharedStorage.of(f"sqlite:///{tmp_path / 'study.db'}", "tiny", heartbeat_s=1)


def simulate(shared: SharedStorage, objective: Valley, trials: int = 6) -> list[SimulatedTrial]:
    with open_study(shared, IDENTITY) as study:
        return simulate_trials(study, objective, SPACE, identity={}, starting=STARTING, trials=trials, seed=0)


def spawned(target: Callable[..., Any], *arguments: Any) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    return process


@pytest.mark.slow
def test_two_processes_divide_the_trials(shared: SharedStorage, tmp_path: Path) -> None:
    logs = [tmp_path / "0", tmp_path / "1"]
    other = spawned(simulate, shared, Valley(logs[1], seconds=0.3), 12)
    wait_for(lambda: bool(noted(logs[1])))
    found = simulate(shared, Valley(logs[0], seconds=0.3), 12)
    other.join()
    assert other.exitcode == 0
    assert [t.number for t in found] == list(range(12))
    assert sorted(noted(logs[0]) + noted(logs[1])) == sorted(str(t.knobs) for t in found), "each tried once"
    assert min(len(noted(log)) for log in logs) >= 1, "how many each does, the machine decides"
    assert simulate(shared, Valley(logs[0]), 12) == found


def test_alone_it_proposes_what_a_journal_proposes(shared: SharedStorage, tmp_path: Path) -> None:
    with open_study(tmp_path / "a.journal", IDENTITY) as study:
        expected = simulate_trials(study, Valley(), SPACE, identity={}, starting=STARTING, trials=12, seed=0)
    assert simulate(shared, Valley(), 5) == expected[:5]
    assert simulate(shared, Valley(), 12) == expected


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_dead_process_leaves_nothing_undone(
    shared: SharedStorage, tmp_path: Path, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same machine its death is seen at once, from another one when its heartbeats stay away."""
    log = tmp_path / "log"
    shared = replace(shared, heartbeat_s=1 if elsewhere else 100)
    victim = spawned(simulate, shared, Valley(log, seconds=60))
    with open_study(shared, IDENTITY) as study:
        wait_for(lambda: running(study) == 1)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        if elsewhere:
            monkeypatch.setattr(storages, "this_machine", lambda: "another machine")
        begun = time.monotonic()
        found = simulate(shared, Valley(log))
        took = time.monotonic() - begun
    assert took > 2 if elsewhere else took < 100
    assert [t.number for t in found] == list(range(6)) and found[0].knobs == STARTING[0][1]
    assert len(noted(log)) == 6


def running(study: SweepStudy) -> int:
    with_worker = (t for s in study._storage.get_all_studies() for t in study._storage.get_all_trials(s._study_id))
    return sum(1 for t in with_worker if "worker" in t.user_attrs and not t.state.is_finished())


@pytest.mark.slow
def test_one_that_died_before_its_first_sign_of_life(shared: SharedStorage) -> None:
    """Optuna looks at trials only that have a heartbeat."""
    with open_study(shared, IDENTITY) as study:
        inner, _ = study.part("simulation", identity())
        study._storage.create_new_trial(inner._study_id)
    found = simulate(shared, Valley())
    assert [t.number for t in found] == list(range(6))


def identity() -> dict[str, Any]:
    starting = [[label, knobs.as_dict()] for label, knobs in STARTING]
    return {"objective": {}, "space": SPACE.as_dict(), "starting": starting, "seed": 0}


def test_what_a_dead_machine_was_measuring_is_not_waited_for(shared: SharedStorage) -> None:
    with open_study(shared, IDENTITY) as mine, open_study(shared, IDENTITY) as other:
        inner, _ = other.part("measurements", {})
        made = optuna.create_trial(state=TrialState.RUNNING, user_attrs={"key": "calibration"})
        inner._storage.create_new_trial(inner._study_id, template_trial=made)  # and never a sign of life
        assert mine.measurements.known("calibration")
        wait_for(lambda: not mine.measurements.known("calibration"))


@pytest.mark.slow
def test_a_result_that_comes_too_late_is_left_out(shared: SharedStorage) -> None:
    with open_study(shared, IDENTITY) as mine, open_study(shared, IDENTITY) as other:
        trials = [Trials(*study.part("simulation", identity())) for study in (mine, other)]
        sampler = SlotSampler(SPACE.distributions(), 0)
        trial, slot = next_of(trials[0], sampler)
        mine._watch.ended(trial._trial_id)  # as if this process slept: no sign of life
        time.sleep(4.5)
        again, same = next_of(trials[1], sampler)
        assert again.number == 1 and same == slot == 0 and again.params == trial.params
        assert not trials[0].done(trial, 1.0, {})
        assert trials[1].done(again, 2.0, {"goodput": 2})
        assert [t.value for t in trials[0].all()] == [None, 2.0]


def next_of(trials: Trials, sampler: SlotSampler) -> tuple[Any, int]:
    found = trials.next(SPACE.distributions(), sampler)
    assert found is not None
    return found


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
    with open_study(shared, IDENTITY) as mine, open_study(shared, IDENTITY) as other:

        def slow() -> dict[str, str]:
            inner, _ = other.part("measurements", {})
            fail_and_retry(inner, inner.get_trials(deepcopy=False)[0])  # as if nothing had been heard of this process
            assert other.measured("a", lambda: {"by": "other"}) == {"by": "other"}
            return {"by": "mine"}

        assert Measurements(*mine.part("measurements", {})).measure("a", slow) == {"by": "other"}
        assert mine.measured("a", lambda: {"by": "nobody"}) == {"by": "other"}
        assert mine.measurements.results() == other.measurements.results() == [("a", {"by": "other"})]


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
                study.measured("b", lambda: run(EvaluationError("out of memory")))
    assert calls == 2
    with open_study(place, IDENTITY) as study:
        for fault in (Interrupted("interrupted"), KeyboardInterrupt()):
            with pytest.raises(type(fault)):
                study.measured("c", lambda fault=fault: run(fault))
        assert study.measured("c", run) == {"run": 5}
        assert study.measurements.results() == [("a", {"run": 1}), ("c", {"run": 5})]
        assert study.measurements.find("b") is None and study.measurements.find("c") == {"run": 5}
        assert (study.count("n"), study.count("n"), study.count("m")) == (0, 1, 0)


def test_other_questions_have_other_names_or_are_refused(shared: SharedStorage) -> None:
    other = IDENTITY | {"slo": "ttft=1s"}
    assert study_name("tiny", IDENTITY) == study_name("tiny", dict(reversed(IDENTITY.items())))
    assert study_name("tiny", IDENTITY) != study_name("tiny", other)
    assert study_name("tiny", IDENTITY).startswith("tiny-")
    with open_study(shared, IDENTITY) as study:
        study.put("setup", 1)
        with pytest.raises(InputError) as caught, open_study(shared, other):
            pass
        assert "study tiny in sqlite" in str(caught.value) and "slo was ttft=500ms, is now ttft=1s" in str(caught.value)
        assert "--study" in str(caught.value)
    simulate(shared, Valley())
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


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.05)
