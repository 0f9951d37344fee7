"""The Optuna study behind a sweep: a journal file that survives being killed at any moment.

A study belongs to one question (space, model, workload, SLO, machine, seed). That identity is stored with it and checked
when it is opened again, because Optuna itself hands back an old study under the same name whatever was asked then.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.profiling.space import SearchSpace
from runtime.errors import InputError
from runtime.knobs import Knobs

STUDY_NAME = "autotune"
STALE = "the process ended while it ran"
_IDENTITY = "identity"
_LABEL = "label"
_KNOBS = "knobs"
_CAUSE = "cause"
_RANDOM_TRIALS = 7  # settings tried before TPE models the results; the starting points count among them


@contextmanager
def open_study(journal: Path, identity: Mapping[str, Any], *, fresh: bool = False) -> Iterator[SweepStudy]:
    """The study in ``journal``, made if it does not exist; only one process at a time may have it open.

    ``fresh`` forgets what the journal held.
    Raises :class:`InputError` when another process has it, when it cannot be written, or when it asks another question.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with _sole_owner(journal):
        try:
            if fresh:
                os.truncate(journal, 0)
            _mend(journal)
            storage = JournalStorage(JournalFileBackend(str(journal)))
            study = optuna.create_study(
                storage=storage, study_name=STUDY_NAME, direction="maximize", load_if_exists=True
            )
        except OSError as error:
            raise InputError(f"{journal}: cannot be written ({error.strerror or error})") from None
        except (ValueError, KeyError) as error:
            raise InputError(f"{journal}: is not a readable study ({error}); --fresh starts a new one") from None
        found = study.user_attrs.get(_IDENTITY)
        if found is None:
            study.set_user_attr(_IDENTITY, json.loads(json.dumps(identity)))
        elif (changed := differences(found, json.loads(json.dumps(identity)))) != []:
            raise InputError(
                f"{journal}: holds a study of something else ({'; '.join(changed)}); "
                "--fresh discards it, another --out leaves it alone"
            )
        opened = SweepStudy(study)
        opened.revive()
        yield opened


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
    """Ask and tell, with nothing lost in between."""

    def __init__(self, study: Study) -> None:
        self._study = study

    def get(self, name: str) -> Any:
        """A fact stored with the study, or None."""
        return self._study.user_attrs.get(name)

    def put(self, name: str, value: Any) -> None:
        self._study.set_user_attr(name, value)

    def finish(self, trials: int | None, budget_s: float | None) -> None:
        """All that was asked is done."""
        self.put("finished", {"trials": trials, "budget_s": budget_s})

    def exhausted(self, trials: int | None, budget_s: float | None) -> bool:
        """Whether it was finished under bounds as wide as these, so that going on with it would measure nothing."""
        finished = self.get("finished")
        if finished is None:
            return False
        return _no_wider(trials, finished["trials"]) and _no_wider(budget_s, finished["budget_s"])

    def restarted(self, identity: Mapping[str, Any]) -> SweepStudy:
        """An empty study of the same question in the same journal, in place of this one."""
        storage = self._study._storage
        optuna.delete_study(study_name=STUDY_NAME, storage=storage)
        study = optuna.create_study(storage=storage, study_name=STUDY_NAME, direction="maximize")
        study.set_user_attr(_IDENTITY, json.loads(json.dumps(identity)))
        return SweepStudy(study)

    def enqueue(self, label: str, params: Mapping[str, float], knobs: Knobs | None = None) -> None:
        """Have ``params`` tried next. ``knobs``: what to measure instead, for a yardstick outside the space."""
        attrs: dict[str, Any] = {_LABEL: label}
        if knobs is not None:
            attrs[_KNOBS] = knobs.as_dict()
        self._study.enqueue_trial(dict(params), user_attrs=attrs)

    def ask(self, space: SearchSpace, seed: int) -> tuple[Trial, str, Knobs]:
        """The next trial, its label and its setting.

        The sampler is seeded by the trial's number, so a resumed study goes on alike.
        """
        number = len(self._study.get_trials(deepcopy=False))
        self._study.sampler = TPESampler(seed=(seed * 1_000_003 + number) % 2**32, n_startup_trials=_RANDOM_TRIALS)
        trial = self._study.ask(space.distributions())
        override = trial.user_attrs.get(_KNOBS)
        knobs = Knobs.from_mapping(override) if override is not None else space.knobs(trial.params)
        return trial, str(trial.user_attrs.get(_LABEL, "search")), knobs

    def done(self, trial: Trial, value: float, result: Mapping[str, Any]) -> None:
        trial.set_user_attr("result", dict(result))
        self._study.tell(trial, value)

    def failed(self, trial: Trial, cause: str, *, again: bool = False) -> None:
        """FAIL with its cause, never a bad score; ``again``: put the same setting back into the queue."""
        trial.set_user_attr(_CAUSE, cause)
        self._study.tell(trial, state=TrialState.FAIL)
        if again:
            self._requeue(trial.params, trial.user_attrs)

    def revive(self) -> int:
        """Tell trials a dead process left RUNNING as FAIL and queue their settings again; how many there were.

        A journal has no heartbeat; holding its lock is what shows that nobody runs them any more.
        """
        stale = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        for trial in stale:
            self._study._storage.set_trial_user_attr(trial._trial_id, _CAUSE, STALE)
            self._study.tell(trial.number, state=TrialState.FAIL)
            self._requeue(trial.params or trial.system_attrs.get("fixed_params", {}), trial.user_attrs)
        return len(stale)

    def completed(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    def failures(self) -> list[tuple[int, str]]:
        """(number, cause) of trials that failed for a reason of their own."""
        trials = self._study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        return [(t.number, str(t.user_attrs.get(_CAUSE, ""))) for t in trials]

    def waiting(self) -> int:
        return len(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def _requeue(self, params: Mapping[str, Any], attrs: Mapping[str, Any]) -> None:
        if params:
            kept = {name: attrs[name] for name in (_LABEL, _KNOBS) if name in attrs}
            self._study.enqueue_trial(dict(params), user_attrs=kept)


@contextmanager
def _sole_owner(journal: Path) -> Iterator[None]:
    """Hold an advisory lock on the journal for the whole session: the kernel drops it however the process ends.

    With it held, Optuna's own lock beside the journal can only be a leftover, and is removed (it would cost 30 s).
    """
    try:
        file = os.open(journal, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(f"{journal}: cannot be written ({error.strerror or error})") from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{journal}: another autotune is profiling into it; wait, or use another --out") from None
        for leftover in journal.parent.glob(f"{journal.name}.lock*"):
            leftover.unlink(missing_ok=True)
        yield
    finally:
        os.close(file)


def _mend(journal: Path) -> None:
    """Cut off a last line a killed process left half-written: Optuna would choke on it once another line follows."""
    data = journal.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with journal.open("rb+") as file:
            file.truncate(whole)
            os.fsync(file.fileno())


def _no_wider(asked: float | None, before: float | None) -> bool:
    return before is None if asked is None else before is None or asked <= before


def _plain(value: Any) -> str:
    return "not given" if value is None else str(value)
