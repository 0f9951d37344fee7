"""The profiler killed with SIGKILL at random moments, and what is left of its journal."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tests.unit.simulating import noted, spawned

KILLS = 10
"""Moments drawn for a kill."""


@dataclass
class Kill:
    """What there was at a kill: lines of the log, and keys of what had been measured."""

    lines: int
    measured: list[str]


def killed_often(
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    log: Path,
    journal: Path,
    seed: int,
    whole: Path,
    pauses: Sequence[float] = (0.0, 0.02, 0.2),
) -> list[Kill]:
    """Start ``target`` again and again, and kill it at ``KILLS`` moments while its journal grows to the size of ``whole``.

    Each kill comes up to one of ``pauses`` (s) after the journal has grown to a random size: between two entries too, in the
    middle of a measurement. Then let it finish. Journals need not come out equally long (a calibration takes as many steps as
    the machine has time for): a run may be done before the last moments, but not before half of them. One that is killed
    when its study is finished is done, too: the next would measure anew.
    """
    dice, kills = random.Random(seed), []
    for size in sorted(dice.randrange(int(0.95 * whole.stat().st_size)) for _ in range(KILLS)):
        process = spawned(target, *arguments)
        until = time.monotonic() + 240
        while process.is_alive() and (not journal.exists() or journal.stat().st_size < size):
            assert time.monotonic() < until
            time.sleep(0.001)
        time.sleep(dice.choice(pauses) * dice.random())
        process.kill()
        process.join()
        if process.exitcode == 0 or finished(journal):
            break
        assert process.exitcode == -signal.SIGKILL
        kills.append(Kill(len(noted(log)), measured(journal)))
    if not finished(journal):
        process = spawned(target, *arguments)
        process.join(300)
        assert process.exitcode == 0
    assert len(kills) >= KILLS // 2
    return kills


def measured(journal: Path) -> list[str]:
    """The keys of what was measured, in order."""
    return _kept(journal)[0]


def finished(journal: Path) -> bool:
    """Whether all that was asked for has been done, so that the same command would measure anew."""
    return _kept(journal)[1]


def _kept(journal: Path) -> tuple[list[str], bool]:
    """The keys of what was measured, and whether the study is finished, as Optuna itself reads the file's whole lines."""
    if not journal.exists():
        return [], False
    whole = journal.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        copy.write_bytes(whole)
        storage = JournalStorage(JournalFileBackend(str(copy)))
        if "autotune" not in optuna.get_all_study_names(storage):
            return [], False
        study = optuna.load_study(study_name="autotune", storage=storage)
        keys = [trial.user_attrs["key"] for trial in study.trials if "result" in trial.user_attrs]
        return keys, study.user_attrs.get("finished") is not None
