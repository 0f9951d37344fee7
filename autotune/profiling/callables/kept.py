"""What a profiling run of a callable keeps the moment it exists, so that one that was killed or stopped can be gone on with.

It is the study of a language model's profile, with the same journal and the same rules
(:class:`autotune.profiling.study.SweepStudy`). Kept are the calls timed for each size, where the calibration ended, which
settings are measured under what load, and each run of one. What is simulated is not: it costs no call of the function, and
comes out the same again.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from autotune.profile import Machine
from autotune.profiling.callables.subject import Subject
from autotune.version import __version__

if TYPE_CHECKING:
    from autotune.profiling.callables.sweep import Question


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
    """What a study is about: only a run that asks the same goes on with it. The function counts as changed when a file of it has:
    that of the module it was named in, or that in which it is written."""
    return {
        "function": subject.name,
        "files of the function": _digest(_sources(subject)),
        "inputs": _digest([inputs]),
        "cost": subject.cost_name,
        "slo": None if question.slo is None else str(question.slo),
        "rate": question.rate,
        "budget": f"{question.budget_s:g}s",
        "most": question.most,
        "replicas": question.replicas,
        "strategies": list(question.strategies),
        "seed": question.seed,
        "machine": machine.model_dump(mode="json", include={"cpu", "cores", "threads"}),
        "autotune": __version__,
    }


def _sources(subject: Subject) -> list[Path]:
    module = sys.modules.get(subject.name.partition(":")[0])
    found = [getattr(module, "__file__", None)]
    with contextlib.suppress(TypeError):  # built in, or an object
        found.append(inspect.getsourcefile(subject.function))
    return [Path(name) for name in dict.fromkeys(found) if name]


def _digest(paths: Sequence[Path]) -> str:
    made = hashlib.sha256()
    for path in paths:
        made.update(path.read_bytes() if path.is_file() else b"")
    return made.hexdigest()[:12]
