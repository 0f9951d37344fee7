"""The Optuna study behind a sweep: nothing of it is lost when its process is killed, at whatever moment.

A study belongs to one question (space, model, workload, SLO, machine, seed). That identity is stored with it and checked
when it is opened again, because Optuna itself hands back an old study under the same name whatever was asked then. It lives
in a journal file, which one process at a time has open, or in a database that several machines share. It holds up to three
of Optuna's studies: one without trials for facts, keyed measurements (:meth:`SweepStudy.measured`), and simulated trials
(:mod:`autotune.profiling.workers`).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage
from optuna.study import Study

from autotune.profiling.journal import Journal, check_journal, owned, unwritable
from autotune.profiling.measurements import Measurements, turns
from autotune.profiling.storage import Heartbeats, SharedStorage, connect, storage_errors
from autotune.profiling.trials import SoleOwner, Watch
from runtime.errors import InputError

__all__ = ["STUDY_NAME", "SharedStorage", "SweepStudy", "differences", "open_study", "study_name"]

STUDY_NAME = "autotune"
_IDENTITY = "identity"
_IDENTITY_WAIT_S = 5.0  # for whoever made a study to say what it is about


def study_name(stem: str, identity: Mapping[str, Any]) -> str:
    """A name for a shared study: whoever asks the same question comes to the same name, and nobody else does."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@contextmanager
def open_study(
    place: Path | SharedStorage, identity: Mapping[str, Any], *, fresh: bool = False
) -> Iterator[SweepStudy]:
    """The study in a journal file or in a shared database, made if it does not exist.

    A journal is open in one process at a time; a shared study in any number. ``fresh`` forgets what was there.
    Raises :class:`InputError` when a journal is in use, when the place cannot be read or written (then, or later while the
    study is open), or when the study there asks another question.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with ExitStack() as stack:
        if isinstance(place, Path):
            storage, watch = _open_journal(place, stack, fresh)
            name, where = STUDY_NAME, str(place)
        else:
            stack.enter_context(storage_errors(place))
            shared = connect(place)
            stack.callback(shared.remove_session)
            stack.callback(shared.engine.dispose)
            beats = Heartbeats(shared, place.heartbeat_s)
            stack.callback(beats.close)
            storage, watch = shared, beats
            name, where = place.name, f"--storage: {place}"
        opened = SweepStudy(storage, name, where, watch)
        if fresh and not isinstance(place, Path):
            opened.discard()
        opened.open(identity)
        yield opened


def _open_journal(path: Path, stack: ExitStack, fresh: bool) -> tuple[BaseStorage, Watch]:
    stack.enter_context(owned(path))
    try:
        if fresh:
            os.truncate(path, 0)
        return JournalStorage(Journal(path, check_journal(path, STUDY_NAME))), SoleOwner()
    except InputError:
        raise
    except OSError as error:
        raise unwritable(path, error) from None
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        # what Optuna raises for lines that are whole, and make no sense one after the other
        raise InputError(
            f"{path}: is not a readable study ({type(error).__name__}: {error}); --fresh starts a new one"
        ) from None


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """What differs between two identities: ``slo was ttft=500ms, is now ttft=1s``."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            text
            for key in sorted(old.keys() | new.keys())
            for text in differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))
        ]
    return [] if old == new else [f"{name} was {_plain(old)}, is now {_plain(new)}"]


class SweepStudy:
    """Facts, measurements and trials of one question, with nothing lost in between."""

    def __init__(self, storage: BaseStorage, name: str, where: str, watch: Watch) -> None:
        self._storage, self.name, self._where, self._watch = storage, name, where, watch
        self._study: Study
        self._measurements: Measurements | None = None

    @property
    def shared(self) -> bool:
        """Whether other machines may be at work on it."""
        return self._watch.several

    def open(self, identity: Mapping[str, Any]) -> None:
        self._study = self._identified(self.name, identity)
        self._measurements = None

    def part(self, name: str, identity: Mapping[str, Any]) -> tuple[Study, Watch]:
        """Another of Optuna's studies in the same place, which belongs to this one. Raises :class:`InputError`."""
        return self._identified(f"{self.name}/{name}", identity), self._watch

    def discard(self) -> None:
        """Delete it with all its parts."""
        for found in self._storage.get_all_studies():
            if found.study_name == self.name or found.study_name.startswith(f"{self.name}/"):
                self._storage.delete_study(found._study_id)

    def restarted(self, identity: Mapping[str, Any]) -> SweepStudy:
        """An empty study of the same question in the same place, in place of this one."""
        self.discard()
        self.open(identity)
        return self

    # -- facts ----------------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Any:
        """A fact stored with the study, or None."""
        return self._study.user_attrs.get(name)

    def put(self, name: str, value: Any) -> None:
        self._study.set_user_attr(name, value)

    def count(self, name: str) -> int:
        """0, 1, 2, …: the next number of that name, never given before, in this session or an earlier one."""
        number = int(self.get(f"count/{name}") or 0)
        self.put(f"count/{name}", number + 1)
        return number

    def finish(self, trials: int | None, budget_s: float | None, sim_trials: int | None = None) -> None:
        """All that was asked is done."""
        self.put("finished", {"trials": trials, "budget_s": budget_s, "sim_trials": sim_trials})

    def exhausted(self, trials: int | None, budget_s: float | None, sim_trials: int | None = None) -> bool:
        """Whether it was finished under bounds as wide as these, so that going on with it would measure nothing."""
        finished = self.get("finished")
        if finished is None:
            return False
        bounds = (
            (trials, finished["trials"]),
            (budget_s, finished["budget_s"]),
            (sim_trials, finished.get("sim_trials")),
        )
        return all(_no_wider(asked, before) for asked, before in bounds)

    def extend(self, budget_s: float | None, sim_trials: int) -> None:
        """More trials than it was finished with are asked of it: those, and what they show, have a budget of their own."""
        finished = self.get("finished")
        if finished is None or _no_wider(sim_trials, finished.get("sim_trials")):
            return
        if _no_wider(budget_s, finished["budget_s"]):
            self.put("spent", None)
        self.put("finished", None)

    # -- measurements on the hardware -----------------------------------------------------------------------------------

    def measured(
        self, key: str, run: Callable[[], Mapping[str, Any]], *, stop: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """What ``run`` measures under ``key``, once in the life of the study: later it is what it was then.

        ``run`` gives plain data. Its :class:`EvaluationError` is kept and raised again later; after being interrupted or
        killed it is run again. On a shared study one process of a machine measures at a time, and what another machine is
        just measuring is waited for.
        """
        turn = turns(self.name) if self.shared else None
        return self.measurements.measure(key, run, stop=stop, one_at_a_time=turn)

    @property
    def measurements(self) -> Measurements:
        if self._measurements is None:
            self._measurements = Measurements(*self.part("measurements", {}))
        return self._measurements

    # -- identity -------------------------------------------------------------------------------------------------------

    def _identified(self, name: str, identity: Mapping[str, Any]) -> Study:
        """The study under ``name``, made with ``identity`` or checked against it."""
        asked = json.loads(json.dumps(identity))
        if all(known.study_name != name for known in self._storage.get_all_studies()):
            with suppress(optuna.exceptions.DuplicatedStudyError):  # another process has just made it
                study = optuna.create_study(storage=self._storage, study_name=name, direction="maximize")
                study.set_user_attr(_IDENTITY, asked)
                return study
        study = optuna.load_study(storage=self._storage, study_name=name)
        until = time.monotonic() + (_IDENTITY_WAIT_S if self.shared else 0.0)
        while (found := study.user_attrs.get(_IDENTITY)) is None and time.monotonic() < until:
            time.sleep(0.1)
        if found is None:  # who made it died before saying what it is about: nothing has been tried yet
            study.set_user_attr(_IDENTITY, asked)
        elif changed := differences(found, asked):
            way = "give it another name with --study" if self.shared else "another --out leaves it alone"
            raise InputError(
                f"{self._where}: holds a study of something else ({'; '.join(changed)}); --fresh discards it, {way}"
            )
        return study


def _no_wider(asked: float | None, before: float | None) -> bool:
    return before is None if asked is None else before is None or asked <= before


def _plain(value: Any) -> str:
    return "not given" if value is None else str(value)
