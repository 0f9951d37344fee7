"""The profiler killed with SIGKILL at random moments, and what is left of its journal."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.simulating import noted

KILLS = 10


@dataclass
class Kill:
    """What there was at a kill: lines of the log, finished trials, and keys of finished measurements on the hardware."""

    lines: int
    trials: list[str]
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
    """Start ``target`` again and again, and kill it ``KILLS`` times or more while its journal grows to the size of ``whole``.

    Each kill comes up to one of ``pauses`` (s) after the journal has grown to a random size: between two entries too, in the
    middle of a measurement. Then let it finish. Two moments more than kills are drawn: journals need not come out equally long,
    and it may be done before the last of them.
    """
    dice, context, kills = random.Random(seed), multiprocessing.get_context("spawn"), []
    for size in sorted(dice.randrange(int(0.95 * whole.stat().st_size)) for _ in range(KILLS + 2)):
        process = context.Process(target=target, args=arguments)
        process.start()
        until = time.monotonic() + 240
        while process.is_alive() and (not journal.exists() or journal.stat().st_size < size):
            assert time.monotonic() < until
            time.sleep(0.001)
        time.sleep(dice.choice(pauses) * dice.random())
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills.append(Kill(len(noted(log)), finished(journal), measured(journal)))
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join(300)
    assert process.exitcode == 0 and len(kills) >= KILLS
    return kills


def finished(journal: Path) -> list[str]:
    """The parameters and values of finished trials, in order."""
    return [json.dumps(trial) for trial in complete(journal) if "key" not in trial["attrs"]]


def measured(journal: Path) -> list[str]:
    """The keys of finished measurements."""
    return [trial["attrs"]["key"] for trial in complete(journal) if "key" in trial["attrs"]]


def complete(journal: Path) -> list[dict[str, Any]]:
    """Read from the file's whole lines by Optuna's operation codes, without any of the code that is tested."""
    trials: list[dict[str, Any]] = []
    done = []
    for line in journal.read_bytes().split(b"\n")[:-1]:
        entry = json.loads(line)
        if entry["op_code"] == 4:
            attrs = {name: value for name, value in (entry.get("user_attrs") or {}).items() if name == "key"}
            trials.append({"params": dict(entry.get("params") or {}), "attrs": attrs})
        elif entry["op_code"] == 5:
            trials[entry["trial_id"]]["params"][entry["param_name"]] = entry["param_value_internal"]
        elif entry["op_code"] == 6 and entry["state"] == 1:
            done.append(trials[entry["trial_id"]] | {"values": entry["values"]})
    return done
