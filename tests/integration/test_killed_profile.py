"""Whole profiling runs killed with SIGKILL at random moments and started again until they are done."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.profile import load_profile
from tests.integration.killed_session import MOMENTS, SIMULATED_TRIALS, command, command_that_dies, profile
from tests.integration.killing import Kill, killed_often, measured
from tests.integration.llama_folder import llama_folder
from tests.unit.simulating import noted, spawned

pytestmark = [pytest.mark.slow, pytest.mark.beside]


def test_a_whole_run_measures_nothing_twice(tmp_path: Path) -> None:
    """Calibration, simulation, validation and capacity, with a simulated machine as the hardware."""
    whole = uninterrupted(tmp_path / "whole.journal", tmp_path / "whole.log")
    journal, log = tmp_path / "a.journal", tmp_path / "log"
    kills = killed_often(profile, (journal, log), log, journal, 1, tmp_path / "whole.journal")
    simulated = noted(log.with_suffix(".simulated"))
    assert simulated == noted(tmp_path / "whole.simulated"), "trial by trial, though none of it is kept"
    assert len(simulated) == SIMULATED_TRIALS
    ended = sum(line.startswith("end") for line in whole)
    assert abs(len(on_the_hardware(measured(journal))) - ended) <= 3, "other noise, and so another one or two chosen"
    nothing_twice(journal, log, kills)


def test_the_command_itself(tmp_path: Path) -> None:
    """``autotune profile`` of a real model on the CPU. Its files are whole at the end, and tell what the journal holds."""
    model = llama_folder(tmp_path / "model")
    whole, folder, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    for place in (whole, folder):
        place.mkdir()
    finish(command, whole, model, tmp_path / "whole.log")
    journal = folder / "a.journal"
    kills = killed_often(command, (folder, model, log), log, journal, 2, whole / "a.journal", pauses=(0.0, 0.3, 1.5))
    nothing_twice(journal, log, kills)
    made = load_profile(folder / "a.yaml")
    assert made.status == "complete" and made.capacity is not None
    lines = [json.loads(line) for line in (folder / "a.points.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line.get("stage") in ("validation", "capacity")]
    assert len(kept) == len(on_the_hardware(measured(journal))), "all that was measured, and that once"
    assert {point.stage for point in made.points} >= {"validation"}
    assert sorted(path.name for path in folder.iterdir()) == ["a.journal", "a.points.jsonl", "a.yaml"]


def test_the_command_killed_while_it_writes(tmp_path: Path) -> None:
    """At each moment of its end. What was measured is not measured again, and a profile that is there is a whole one."""
    model, folder, log = llama_folder(tmp_path / "model"), tmp_path / "killed", tmp_path / "log"
    folder.mkdir()
    kept: list[str] = []
    for moment in MOMENTS:
        process = spawned(command_that_dies, folder, model, log, moment)
        process.join(300)
        assert process.exitcode == -signal.SIGKILL, moment
        keys = measured(folder / "a.journal")
        assert keys[: len(kept)] == kept and len(keys) == len(set(keys))
        assert not kept or len(on_the_hardware(keys)) == len(on_the_hardware(kept)), "all had been measured by then"
        kept = keys
        names = {path.name for path in folder.iterdir() if path.suffix != ".tmp"}
        there = {"both files ready": 0, "one file of two": 1}.get(moment, 2)
        assert names == {"a.journal", *("a.points.jsonl", "a.yaml")[:there]}
        if there == 2:
            assert load_profile(folder / "a.yaml").status == "complete"
    assert len([line for line in noted(log) if line.startswith("end")]) == len(on_the_hardware(kept))
    lines = [json.loads(line) for line in (folder / "a.points.jsonl").read_text().splitlines()]
    assert sum(line.get("stage") in ("validation", "capacity") for line in lines) == len(on_the_hardware(kept))


def nothing_twice(journal: Path, log: Path, kills: list[Kill]) -> None:
    """``log``: a line for the begin and the end of each measurement on the hardware that was really made."""
    keys = measured(journal)
    assert len(keys) == len(set(keys)) and "calibration" in keys
    ends = [line for line in noted(log) if line.startswith("end")]
    runs = len(on_the_hardware(keys))
    assert runs <= len(ends) <= runs + len(kills), "one at each kill may end and not be kept"
    for kill in kills:
        assert keys[: len(kill.measured)] == kill.measured, "what was kept stays"
        missing = Counter(map(setting, keys)) - Counter(map(setting, kill.measured))
        later = {line.removeprefix("begin ") for line in noted(log)[kill.lines :] if line.startswith("begin")}
        assert later <= set(missing), "what was kept is not measured again"


def on_the_hardware(keys: list[str]) -> list[str]:
    """Without the calibration and what was found by simulating, which is kept so that a resumed run compares at the same rate."""
    return [key for key in keys if key.startswith("run/")]


def setting(key: str) -> str:
    """``run/STAGE/KNOBS/RATE/SEED/REPEAT`` as the log says it."""
    if not key.startswith("run/"):
        return key
    _, _, knobs, rate, seed, _ = key.split("/")
    return f"{knobs} at {rate} seed {seed}"


def uninterrupted(journal: Path, log: Path) -> list[str]:
    """A run in a process of its own; its log."""
    finish(profile, journal, log)
    return noted(log)


def finish(target: Callable[..., None], *arguments: object) -> None:
    process = spawned(target, *arguments)
    process.join(300)
    assert process.exitcode == 0
