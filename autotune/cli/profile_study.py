"""The study behind ``autotune profile``: opened, gone on with or begun anew, and worked on with the engine it was begun with."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.display import Display, print_as_is
from autotune.cli.exits import FELL_SHORT, INTERRUPTED
from autotune.cli.profile_output import Files
from autotune.cli.target import running
from autotune.engines import Engine
from autotune.engines.named import NamedSource, engine_identity
from autotune.profile import Machine, ModelFacts
from autotune.profile.fingerprint import package_version
from autotune.profiling.findings import Findings, Question
from autotune.profiling.pool import started
from autotune.profiling.session import Session
from autotune.profiling.storage import SharedStorage, unwritable
from autotune.profiling.study import SweepStudy, open_study, study_name
from autotune.workload import Workload
from runtime.knobs import KnobLimits
from runtime.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

_KEPT = "kept"  # names of the copies of earlier studies, which go when there is a new profile
_MACHINE = {"kind", "cpu", "cores", "threads", "gpu"}  # what of it belongs to a study's identity; of a CPU also flags
_LAYOUT = 2  # of what is kept in a study: another is refused, and not misread


@dataclass(frozen=True)
class Requested:
    """What is to be profiled, and what is requested of it. ``spec``: the workload as it was written; ``price``: per hour."""

    source: NamedSource
    model: ModelFacts
    machine: Machine
    spec: str
    price: float | None
    question: Question

    @property
    def identity(self) -> dict[str, Any]:
        """What makes a study this one and no other. Its KV pool belongs to it, too, and is kept in it (:func:`pool_of`)."""
        question, source = self.question, self.source
        machine = _MACHINE if self.machine.kind == "gpu" else _MACHINE | {"flags"}
        return {
            "model": self.model.model_dump(mode="json"),
            "machine": self.machine.model_dump(mode="json", include=machine),
            "workload": self.spec,
            **({"requests": content_of(question.workload)} if question.workload.finite else {}),
            "rate": question.rate,
            "slo": None if question.slo is None else str(question.slo),
            "seed": question.seed,
            "space": question.space.as_dict(),
            "autotune": __version__,
            "torch": package_version("torch"),
            "transformers": package_version("transformers"),
            "layout": _LAYOUT,
            **({"classes": [str(one) for one in question.classes]} if question.classes else {}),
            **({} if question.objective == "goodput" else {"objective": question.objective}),
            **engine_identity(source),
        }


def work(
    requested: Requested,
    files: Files,
    storage: str | None,
    name: Path | None,
    console: Console,
    *,
    limits: KnobLimits,
    fresh: bool,
    stop: Callable[[], bool],
    write: Callable[[Findings, Engine], int],
) -> int:
    """Work on the study until it is done or stopped, and have what was found written; the exit code."""
    facts, question, identity = requested.model, requested.question, requested.identity
    weights = "random weights, " if facts.random_weights else ""
    head = f"model {facts.name} ({facts.size}, {weights}{facts.dtypes}) · workload {requested.spec}"
    display = Display(console, head)
    place: Path | SharedStorage = files.journal
    if storage is not None:
        place = SharedStorage.of(storage, str(name) if name else study_name(stem(facts.name), identity))
        display.note(str(place))
    with open_study(place, identity, fresh=fresh, keep=(_KEPT,), stop=stop) as study:
        bounds = question.trials, question.budget_s, question.sim_trials
        if study.exhausted(*bounds) and not study.shared:  # others may be reading it
            before = _kept(files.journal)
            display.note(
                f"{place} holds a finished study; measuring anew (a larger --budget, --trials or --sim-trials extends it). "
                f"Until the new profile is written the old study is kept as {before}"
            )
            kept = [*(study.get(_KEPT) or ()), before.name]
            study = study.restarted(identity)
            study.put(_KEPT, kept)
        study.extend(question.budget_s, question.sim_trials)
        with running(started(study, requested.source, place, limits, question.seed)) as engine:
            session = Session(engine, facts, question, study, display, stop=stop)
            try:
                found = session.run()
            finally:
                display.close()
            if not found.settings():
                why = f", for {found.fault}" if found.fault else ""
                print_as_is(
                    console,
                    f"stopped{why} before the first trial was done; nothing written to {files.profile}. "
                    "Run the same command to go on.",
                )
                return FELL_SHORT if found.fault else INTERRUPTED
            code = write(found, engine)
            if not found.stopped:  # with its profile written: until then it is gone on with, and nothing measured anew
                study.finish(*bounds)
                _let_go(study, files.journal)
            return code


def content_of(workload: Workload) -> str:
    """A digest of the requests of a workload that runs out: its spelling names a file, whose content may change."""
    found = hashlib.sha256()
    for arrival in workload.arrivals(0):
        found.update(repr(arrival).encode())
    return found.hexdigest()[:16]


def stem(model: str) -> str:
    """``./models/My Model/`` → ``My-Model``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model.rstrip("/")).name).strip("-.") or "model"


def _kept(journal: Path) -> Path:
    """A copy of ``journal`` beside it, under a name that no file has: ``.old``, else ``.old.2`` and so on."""
    for number in count(1):
        to = journal.with_name(f"{journal.name}.old{'' if number == 1 else f'.{number}'}")
        try:
            file = to.open("xb")
        except FileExistsError:
            continue
        except OSError as error:
            raise unwritable(to, error) from None
        try:
            with file, journal.open("rb") as source:
                shutil.copyfileobj(source, file)
        except OSError as error:
            to.unlink(missing_ok=True)
            raise unwritable(to, error) from None
        return to
    raise AssertionError("numbers do not end")


def _let_go(study: SweepStudy, journal: Path) -> None:
    """Remove the copies that were kept until there is a new profile, and no file that is not one of them."""
    if kept := study.get(_KEPT):
        study.put(_KEPT, None)  # a file of that name may be somebody's from now on
        for name in kept:
            journal.with_name(name).unlink(missing_ok=True)
