"""What a profiling run of a callable keeps the moment it exists, so that one that was killed or stopped can be gone on with.

It is the study of a language model's profile, with the same journal and the same rules
(:class:`autotune.profiling.study.SweepStudy`). Kept are the calls timed for each size, where the calibration ended, which
settings are measured under what load, and each run of one. What is simulated is not: it costs no call of the function, and
comes out the same again.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from autotune.callables.subject import Subject
from autotune.profile import Machine
from autotune.version import __version__

if TYPE_CHECKING:
    from autotune.callables.sweep import Question


class Kept(Protocol):
    """Facts by name and measurements by key; see :class:`autotune.profiling.study.SweepStudy`."""

    def get(self, name: str) -> Any: ...

    def put(self, name: str, value: Any) -> None: ...

    def measured(
        self, key: str, run: Callable[[], Mapping[str, Any]], *, stop: Callable[[], bool] | None = None
    ) -> dict[str, Any]: ...


class NothingKept:
    """Every run begins anew."""

    def get(self, name: str) -> Any:
        return None

    def put(self, name: str, value: Any) -> None: ...

    def measured(
        self, key: str, run: Callable[[], Mapping[str, Any]], *, stop: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        return dict(run())


def identity(subject: Subject, question: Question, inputs: Path, machine: Machine) -> dict[str, Any]:
    """What a study is about: only a run that asks the same goes on with it. The function counts as changed when its file has."""
    return {
        "function": subject.name,
        "file of the function": _digest(_source(subject.function)),
        "inputs": _digest(inputs),
        "cost": subject.cost_name,
        "slo": None if question.slo is None else str(question.slo),
        "rate": question.rate,
        "budget": f"{question.budget_s:g}s",
        "most": question.most,
        "strategies": list(question.strategies),
        "seed": question.seed,
        "machine": machine.model_dump(mode="json", include={"cpu", "cores", "threads"}),
        "autotune": __version__,
    }


def _source(function: Callable[..., Any]) -> Path | None:
    for candidate in (function, type(function)):
        try:
            found = inspect.getsourcefile(candidate)
        except TypeError:  # built in, or an object of a class that is
            continue
        return None if found is None else Path(found)
    return None


def _digest(path: Path | None) -> str | None:
    if path is None or not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
