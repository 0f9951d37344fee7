"""Objectives for simulated trials, importable by worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.measure.evaluate import EvaluationError
from autotune.profiling.search import Outcome
from autotune.profiling.space import make_space
from runtime.knobs import KnobLimits, Knobs

SPACE = make_space(KnobLimits(), ["max_wait_ms=0"])
STARTING = [("vLLM defaults", Knobs(1024, 0, 8192, 8192)), ("fitted", Knobs(64, 0, 512, 512))]


@dataclass(frozen=True)
class Valley:
    """Best at 600 tokens and 48 slots. Notes every setting it computed in ``log``, one line each, as it finishes."""

    log: Path | None = None
    seconds: float = 0.0

    def __call__(self, knobs: Knobs, stop: Callable[[], bool]) -> Outcome:
        time.sleep(self.seconds)
        value = -abs(knobs.token_budget / 600 - 1) - abs(knobs.max_batch_size / 48 - 1) - knobs.chunk_size / 1e5
        note(self.log, str(knobs))
        return Outcome(value, {"goodput": value, "setting": knobs.as_dict()})


@dataclass(frozen=True)
class Fatal:
    """Kills its process whenever ``deadly`` says so, and the first ``times`` times only."""

    log: Path
    times: int

    def __call__(self, knobs: Knobs, stop: Callable[[], bool]) -> Outcome:
        if knobs == STARTING[1][1] and len(noted(self.log)) < self.times:
            note(self.log, str(knobs))
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome(float(knobs.token_budget), {})


@dataclass(frozen=True)
class Refusing:
    """Cannot try settings below 600 tokens; ``wrong``: raises what no objective should."""

    wrong: bool = False

    def __call__(self, knobs: Knobs, stop: Callable[[], bool]) -> Outcome:
        if self.wrong:
            raise ZeroDivisionError("no such thing")
        if knobs.token_budget < 600:
            raise EvaluationError(f"{knobs.token_budget} tokens are too few")
        return Outcome(1.0, {})


def spawned(target: Callable[..., object], *arguments: object) -> Any:
    """A process that runs ``target``, begun."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    return process


def note(log: Path | None, text: str) -> None:
    """Append one line at once: what was noted stays noted, whoever is killed next."""
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, f"{text}\n".encode())
        os.close(file)


def noted(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []
