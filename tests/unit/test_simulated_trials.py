"""The simulated search: the same trials whoever makes them, in however many processes, and however fast those are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.measure.evaluate import Interrupted
from autotune.profiling.search import InProcesses, ObjectiveFunction, SimulatedTrial, WorkerError, search
from autotune.profiling.space import make_space
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from tests.tiers import slow_but_for
from tests.unit.simulating import SPACE, STARTING, Fatal, Refusing, Valley, noted

TRIALS = 40


def tried(objective: ObjectiveFunction | None = None, **options: Any) -> list[SimulatedTrial]:
    given: dict[str, Any] = {"starting": STARTING, "trials": TRIALS, "seed": 3}
    return list(search(objective or Valley(), SPACE, **(given | options)))


@dataclass(frozen=True)
class Uneven(Valley):
    """The first settings take longest, so that they come back after those that were begun later."""

    def __call__(self, knobs: Knobs, stop: Any) -> Any:
        time.sleep(0.1 if knobs.max_batch_size > 60 else 0.0)
        return super().__call__(knobs, stop)


def test_starting_points_first_then_what_tpe_proposes() -> None:
    found = tried()
    assert [t.number for t in found] == list(range(TRIALS))
    assert [(t.label, t.setting) for t in found[:2]] == STARTING, "as they are, though one lies outside the space"
    assert {t.label for t in found[2:]} == {"search"}
    assert all(t.setting.max_wait_ms == 0 and t.outcome for t in found)
    assert tried(seed=4)[2:] != found[2:]


@pytest.mark.slow
def test_the_trials_are_the_same_for_any_number_of_processes() -> None:
    found = tried()
    assert tried(Uneven(), workers=3) == found
    assert tried(workers=2) == found


@pytest.mark.parametrize("workers", slow_but_for((1,), (1, 2)))
def test_a_setting_proposed_again_is_not_tried_again(tmp_path: Path, workers: int) -> None:
    log = tmp_path / "tried"
    narrow = make_space(KnobLimits(), ["max_wait_ms=0", "max_batch_size=48", "token_budget=512"])  # chunks alone
    starting = [*STARTING, ("the same", STARTING[1][1])]
    found = list(search(Valley(log), narrow, starting=starting, trials=TRIALS, seed=3, workers=workers))
    settings = [t.setting for t in found]
    assert [t.again for t in found] == [t.setting in settings[: t.number] for t in found]
    assert sum(t.again for t in found) > 5 and found[2].again and found[2].label == "the same"
    assert sorted(noted(log)) == sorted(map(str, dict.fromkeys(settings))), "each once"
    outcomes = {t.setting: t.outcome for t in found if not t.again}
    assert all(t.outcome == outcomes[t.setting] is not None for t in found)


def test_fewer_trials_are_the_first_of_more() -> None:
    """Whatever number there is time for, and whoever breaks off, has those."""
    begun = search(Valley(), SPACE, starting=STARTING, trials=TRIALS, seed=3)
    assert [next(begun) for _ in range(20)] == tried(trials=20) == tried()[:20]
    begun.close()


def test_it_finds_better_settings_than_chance() -> None:
    values = [t.outcome.value for t in tried(trials=60) if t.outcome]
    guided, chance = values[40:], values[2:10]
    assert sum(guided) / len(guided) > sum(chance) / len(chance)
    assert max(values) > -0.35


@pytest.mark.parametrize("workers", slow_but_for((1,), (1, 2)))
def test_what_cannot_be_tried_is_a_failed_trial_with_its_cause(workers: int) -> None:
    found = tried(Refusing(), workers=workers, trials=14)
    failed = [t for t in found if t.failed]
    assert 0 < len(failed) < len(found) == 14
    assert all(t.failed == f"{t.setting.token_budget} tokens are too few" and t.outcome is None for t in failed)
    with pytest.raises(ZeroDivisionError):
        tried(Refusing(wrong=True), workers=workers)


def test_stopped_it_ends_at_once() -> None:
    done: list[SimulatedTrial] = []
    with pytest.raises(Interrupted):
        for trial in search(Obeying(), SPACE, starting=STARTING, trials=TRIALS, seed=3, stop=lambda: len(done) >= 5):
            done.append(trial)
    assert done == tried()[:5]
    begun = time.monotonic()
    with pytest.raises(Interrupted):
        tried(Valley(seconds=600), workers=2, stop=lambda: True)
    assert time.monotonic() - begun < 300, "processes in the middle of a setting are not waited for"


@dataclass(frozen=True)
class Obeying(Valley):
    def __call__(self, knobs: Knobs, stop: Any) -> Any:
        if stop():
            raise Interrupted("interrupted")
        return super().__call__(knobs, stop)


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 99])
def test_what_kills_its_process_is_tried_three_times(tmp_path: Path, times: int) -> None:
    log = tmp_path / "deaths"
    found = tried(Fatal(log, times), workers=2, trials=6)
    assert len(found) == 6 and len(noted(log)) >= min(times, 3)
    assert found[1].failed == (None if times == 2 else "its worker process died 3 times")
    assert [t.number for t in found if t.failed] == ([] if times == 2 else [1])


@dataclass(frozen=True)
class Stillborn:
    def __call__(self, knobs: Knobs, stop: Any) -> Any: ...

    def __reduce__(self) -> Any:
        return os._exit, (7,)


def test_processes_that_cannot_start() -> None:
    with pytest.raises(WorkerError, match="end before they begin"):
        tried(Stillborn(), workers=2)


def _hold(pipe: Any) -> None:
    with InProcesses(Valley(seconds=600), 2) as processes:
        for _ in range(2):
            processes.begun(Knobs(), lambda: False)
        until = time.monotonic() + 120
        while len(multiprocessing.active_children()) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        pipe.send([child.pid for child in multiprocessing.active_children()])
        time.sleep(600)


@pytest.mark.slow
def test_processes_end_with_the_one_that_began_them() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    parent = context.Process(target=_hold, args=(theirs,))
    parent.start()
    pids = ours.recv()
    assert len(pids) == 2
    os.kill(parent.pid or 0, signal.SIGKILL)
    parent.join()
    until = time.monotonic() + 120
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("options", [{"trials": 0}, {"workers": 0}])
def test_numbers_that_make_no_sense(options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        tried(**options)


def test_processes_that_ctrl_c_ends_before_they_begin_are_an_interruption() -> None:
    with pytest.raises(Interrupted), InProcesses(Stillborn(), 2, lambda: True):
        pass
