"""The study behind a sweep: each measurement on the hardware is an Optuna trial, and none is lost or made twice.

A study belongs to one question (space, model, workload, SLO, machine, seed). That identity is stored with it and checked
when it is opened again, because Optuna itself hands back an old study under the same name whatever was asked then. It lies
in a journal file or in a database (:mod:`autotune.profiling.storage`). What is simulated is not in it: it costs no time of the
hardware, and comes out the same again (:mod:`autotune.profiling.search`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, TrialPruned, UpdateFinishedTrialError
from optuna.storages import BaseStorage, fail_stale_trials
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profile.parts import same_cpu
from autotune.profiling.kinds import Tried
from autotune.profiling.points import Run
from autotune.profiling.storage import SharedStorage, database, journal, locked, unwritable
from runtime.errors import InputError

STUDY_NAME = "autotune"
RUN = "run/"
"""What keys of measured settings begin with."""
_IDENTITY = "identity"
_SPENT, _EARLIER = "spent", "earlier"
_KEY, _RESULT, _CAUSE, _AGAIN = "key", "result", "cause", "again"
_POLL_S = 0.2
_CLAIMED_WITHIN_S = 10.0  # a trial that does not say by then what it measures is no claim
_CLAIMS = 5  # that came too late, until the database is held for too slow
_LONGEST_S = 3600.0  # nothing is measured for so long: whoever claimed it died before its first sign of life
_WHERE_SAID = frozenset({"machine.flags", "torch", "transformers"})
"""Facts that identities of earlier versions lack, and some of callables and GPUs. They count where both identities have them."""


def study_name(stem: str, identity: Mapping[str, Any]) -> str:
    """A name for a shared study: whoever asks the same question comes to the same name, and nobody else does.

    Who differs in ``_WHERE_SAID`` alone comes to it too, and is refused there, in words.
    """
    text = json.dumps(_always_said(identity), sort_keys=True, separators=(",", ":"))
    return f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@contextmanager
def open_study(
    place: Path | SharedStorage,
    identity: Mapping[str, Any],
    *,
    fresh: bool = False,
    keep: Iterable[str] = (),
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[SweepStudy]:
    """The study in a journal file or in a shared database, made if it does not exist.

    A journal is open in one process at a time; a shared study in any number. ``fresh`` forgets what was there, but for the facts
    of a journal that ``keep`` names.
    Raises :class:`InputError` when a journal is in use, when the place cannot be read or written (then, or later while the
    study is open), or when the study there asks another question; Interrupted when ``stop`` says so while another program has
    the database locked.
    """
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    if isinstance(place, Path):
        kept = _facts(place, keep) if fresh else {}
        with journal(place, fresh=fresh) as storage:
            study = SweepStudy(storage, STUDY_NAME, str(place), identity)
            for name, value in kept.items():
                study.put(name, value)
            yield study
    else:
        with database(place, stop) as storage:
            if fresh:
                _discard(storage, place.name)
            study = SweepStudy(storage, place.name, f"--storage: {place}", identity, shared=True)
            try:
                yield study
            except KeyError:
                if study.exists():
                    raise
                raise InputError(f"--storage: {place} has been discarded, by --fresh on another machine") from None


class SweepStudy:
    """Facts and measurements of one question. ``shared``: whether other machines may be at work on it."""

    def __init__(
        self, storage: BaseStorage, name: str, where: str, identity: Mapping[str, Any], *, shared: bool = False
    ) -> None:
        self._storage, self.name, self._where, self.shared = storage, name, where, shared
        self._open(identity)

    def restarted(self, identity: Mapping[str, Any]) -> SweepStudy:
        """An empty study of the same question in the same place, in place of this one."""
        _discard(self._storage, self.name)
        self._open(identity)
        return self

    def exists(self) -> bool:
        """Whether nobody has discarded it since it was opened."""
        try:
            self._study.user_attrs  # noqa: B018  # reading it raises where the study is gone
        except KeyError:
            return False
        return True

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
        """All that was requested is done."""
        runs = [key for key, _ in self.measurements.results() if key.startswith(RUN)]
        self.put("finished", {"trials": trials, "budget_s": budget_s, "sim_trials": sim_trials, "runs": runs})

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
        return all(_no_wider(requested, before) for requested, before in bounds)

    def extend(self, budget_s: float | None, sim_trials: int) -> None:
        """More simulated trials than it was finished with, or a larger budget, may lead to other settings: what was measured by
        then is :attr:`earlier`. More trials, and what they show, have a budget of their own."""
        finished = self.get("finished")
        if finished is None:
            return
        more = not _no_wider(sim_trials, finished.get("sim_trials"))
        longer = not _no_wider(budget_s, finished["budget_s"])
        if more or longer:
            self.put(_EARLIER, finished.get("runs"))
        if not more:
            return
        if not longer:
            for name in self._spent():
                self.put(name, None)
        self.put("finished", None)

    @property
    def earlier(self) -> frozenset[str]:
        """Keys of what was measured before it was extended."""
        return frozenset(self.get(_EARLIER) or ())

    # -- time -----------------------------------------------------------------------------------------------------------

    def spend(self, session: str, spent: Mapping[str, float]) -> None:
        """Keep the seconds that ``session`` has spent so far; on this machine."""
        self.put(f"{_SPENT}/{platform.node()}/{session}", dict(spent))

    def spent(self, but: str | None = None) -> dict[str, float]:
        """Seconds that sessions have spent, ``but`` for one: on the hardware of every machine, and on simulating on this one, for
        each machine simulates for itself."""
        hardware = simulating = 0.0
        for name, spent in self._spent().items():
            _, machine, session = (*name.split("/"), "", "")[:3]
            if session != but:
                hardware += spent["hardware_s"]
                simulating += spent["simulating_s"] if not self.shared or machine in ("", platform.node()) else 0.0
        return {"hardware_s": hardware, "simulating_s": simulating}

    def _spent(self) -> dict[str, dict[str, float]]:
        """By the name of the fact: of each session, and one that studies had for all of them together."""
        known = self._study.user_attrs
        return {name: spent for name, spent in known.items() if spent and name.partition("/")[0] == _SPENT}

    # -- measurements on the hardware -----------------------------------------------------------------------------------

    def measured(
        self,
        key: str,
        run: Callable[[], Mapping[str, Any]],
        *,
        stop: Callable[[], bool] | None = None,
        params: Mapping[str, float] | None = None,
        value: Callable[[Mapping[str, Any]], float] | None = None,
    ) -> dict[str, Any]:
        """What ``run`` measures under ``key``, once in the life of the study: later it is what it was then.

        ``run`` gives plain data. Its :class:`EvaluationError` is kept and raised again later where ``key`` begins with
        :data:`RUN`; else, and after being interrupted or killed, it is run again. On a shared study one process of a machine
        measures at a time, and what another machine is just measuring is waited for. ``params`` and ``value`` (of the result; 0
        unless given) are the trial's, for whoever looks at the study with Optuna's tools.
        """
        return self.measurements.measure(key, run, stop or _never, params or {}, value or _nothing)

    # -- identity -------------------------------------------------------------------------------------------------------

    def _open(self, identity: Mapping[str, Any]) -> None:
        open_ = optuna.load_study
        if self.name not in optuna.get_all_study_names(self._storage):
            open_ = partial(optuna.create_study, direction="maximize", load_if_exists=True)
        self._study: Study = open_(storage=self._storage, study_name=self.name)
        self._identify(json.loads(json.dumps(identity)))
        self.measurements = Measurements(self._study, self._where, _turn_of(self.name) if self.shared else None)

    def _identify(self, identity: dict[str, Any]) -> None:
        if (found := self.get(_IDENTITY)) is None:  # it is new, or who made it died before saying what it is about
            self.put(_IDENTITY, identity)
        elif changed := differences(found, identity):
            way = "give it another name with --study" if self.shared else "another --out leaves it alone"
            raise InputError(
                f"{self._where}: holds a study of something else ({'; '.join(changed)}); --fresh discards it, {way}"
            )


def _facts(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """Those of the study in a journal; none where it cannot be read."""
    try:
        with journal(path) as storage:
            facts = optuna.load_study(storage=storage, study_name=STUDY_NAME).user_attrs
    except (InputError, KeyError):
        return {}
    return {name: facts[name] for name in names if name in facts}


def measured_run(
    study: SweepStudy, key: str, run: Callable[[], Run], setting: Tried, rate: float, stop: Callable[[], bool]
) -> Run:
    """What ``run`` measures of ``setting`` at ``rate``, once in the life of ``study``. Raises as :meth:`SweepStudy.measured`."""
    found = study.measured(
        key,
        lambda: run().model_dump(mode="json"),
        stop=stop,
        params={**setting.as_dict(), "rate": rate},
        value=lambda kept: kept["score"]["goodput"],
    )
    return Run.model_validate(found)


class Measurements:
    """A trial for each measurement, claimed by its key before it begins.

    A claim is a RUNNING trial that has the key; of several the lowest number counts. Whoever finds one waits until it has ended.
    The claim of a process that died is given up: in a journal at once, for nobody else can have it open; in a database when the
    heartbeats that Optuna gives while a trial runs have stayed away. ``where`` it lies, for errors; ``turn``: the file at which
    processes of this machine queue up, in a study that is shared.
    """

    def __init__(self, study: Study, where: str, turn: Path | None) -> None:
        self._study, self._where, self._turn = study, where, turn
        self._mine: int | None = None  # the trial that this process runs

    def find(self, key: str) -> dict[str, Any] | None:
        """What was measured under ``key``, or None."""
        return next((dict(t.user_attrs[_RESULT]) for t in self._of(key) if _RESULT in t.user_attrs), None)

    def known(self, key: str) -> bool:
        """Whether ``key`` was measured or failed for good, or another machine is at it.

        Then asking for it measures nothing, unless that machine dies.
        """
        self._bury()
        return any(_final(trial) or trial.state is TrialState.RUNNING for trial in self._of(key))

    def results(self) -> list[tuple[str, dict[str, Any]]]:
        """(key, result) of everything measured, in the order it was begun."""
        found: dict[str, dict[str, Any]] = {}
        for trial in self._study.get_trials(deepcopy=False):
            if _RESULT in trial.user_attrs:
                found.setdefault(_key(trial), dict(trial.user_attrs[_RESULT]))
        return list(found.items())

    def measure(
        self,
        key: str,
        run: Callable[[], Mapping[str, Any]],
        stop: Callable[[], bool],
        params: Mapping[str, float],
        value: Callable[[Mapping[str, Any]], float],
    ) -> dict[str, Any]:
        """See :meth:`SweepStudy.measured`."""
        begun, too_late = time.monotonic(), 0
        while True:
            self._bury(key if time.monotonic() - begun > _LONGEST_S else None)
            known = self._of(key)
            if (found := next(filter(_final, known), None)) is not None:
                if _RESULT in found.user_attrs:
                    return dict(found.user_attrs[_RESULT])
                raise EvaluationError(str(found.user_attrs[_CAUSE]))
            if any(trial.state is TrialState.RUNNING for trial in known):
                _rest(stop)
                continue
            with _in_turn(self._turn, stop):
                late_s = self._attempt(key, run, stop, params, value)
            if late_s is None:
                continue
            if stop():
                raise Interrupted("interrupted")
            too_late += 1
            if too_late == _CLAIMS:
                raise InputError(
                    f"{self._where}: answers too slowly ({late_s:.3g} s for a claim; it must be within "
                    f"{_CLAIMED_WITHIN_S / 2:g} s); use a database nearer to this machine"
                )

    def _attempt(
        self,
        key: str,
        run: Callable[[], Mapping[str, Any]],
        stop: Callable[[], bool],
        params: Mapping[str, float],
        value: Callable[[Mapping[str, Any]], float],
    ) -> float | None:
        """Claim ``key`` and measure it, unless somebody else was first. Seconds of a claim that came too late to hold, else None.
        Raises what ``run`` raises."""
        ran, late_s = False, None

        def objective(trial: Trial) -> float:
            nonlocal ran, late_s
            self._mine = trial.number
            trial.set_user_attr(_KEY, key)
            if self._turn is not None:
                claimed_s = _age(trial)
                if claimed_s > _CLAIMED_WITHIN_S / 2:
                    late_s = claimed_s
                    raise TrialPruned
                if not self._first(trial, key, stop):
                    raise TrialPruned
            for name, given in params.items():
                if isinstance(given, int):
                    trial.suggest_int(name, given, given)
                else:
                    trial.suggest_float(name, given, given)
            try:
                result = dict(run())
                ran = True
            except Interrupted:
                raise
            except EvaluationError as error:
                ran = True
                trial.set_user_attr(_CAUSE, str(error))
                if not key.startswith(RUN):  # of the machine's state, and not of a setting
                    trial.set_user_attr(_AGAIN, True)
                raise
            trial.set_user_attr(_RESULT, result)
            return float(value(result))

        try:
            self._study.optimize(objective, n_trials=1)  # which gives a database its signs of life
        except InputError:
            raise
        except (AssertionError, UnboundLocalError) as error:  # Optuna trips over a storage that fails as a trial ends
            raise error.__context__ or error from None
        except (UpdateFinishedTrialError, ValueError):
            # So long was nothing heard of this process that others held it for dead and measured anew. Theirs counts.
            if not ran or self._turn is None:
                raise
        finally:
            self._mine = None
        return late_s

    def _first(self, trial: Trial, key: str, stop: Callable[[], bool]) -> bool:
        """Whether nobody claimed ``key`` before us. Who began before us and has not said what it measures may yet."""
        until = time.monotonic() + _CLAIMED_WITHIN_S
        while True:
            others = [t for t in self._study.get_trials(deepcopy=False) if t.number != trial.number]
            before = [t for t in others if t.number < trial.number and t.state is TrialState.RUNNING]
            if any(_key(t) == key for t in before):
                return False
            if all(_KEY in t.user_attrs for t in before) or time.monotonic() > until:
                return not any(_key(t) == key and _final(t) for t in others)
            _rest(stop)

    def _of(self, key: str) -> list[FrozenTrial]:
        return [t for t in self._study.get_trials(deepcopy=False) if _key(t) == key]

    def _bury(self, suspect: str | None = None) -> None:
        """Tell the trials FAIL whose process died, and that which claims the ``suspect`` key."""
        if self._turn is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                fail_stale_trials(self._study)
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            lost = self._turn is None or (suspect is not None and _key(trial) == suspect)
            if lost and trial.number != self._mine:
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def _age(trial: Trial) -> float:
    """Seconds since others may see ``trial``. Optuna keeps the time of its beginning by this machine's clock, without a zone."""
    assert trial.datetime_start is not None
    return (datetime.now() - trial.datetime_start).total_seconds()


def _key(trial: FrozenTrial) -> str:
    """What a trial measures, "" where it has not said so yet."""
    return str(trial.user_attrs.get(_KEY, ""))


def _always_said(identity: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Its facts but those of ``_WHERE_SAID``."""
    names = {key: f"{name}.{key}".lstrip(".") for key in identity}
    return {
        key: _always_said(identity[key], full) if isinstance(identity[key], Mapping) else identity[key]
        for key, full in names.items()
        if full not in _WHERE_SAID
    }


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """What differs between two identities: ``slo was ttft=500ms, is now ttft=1s``."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = {key: f"{name}.{key}".lstrip(".") for key in sorted(old.keys() | new.keys())}
        return [
            text
            for key, full in names.items()
            if full not in _WHERE_SAID or (key in old and key in new)
            for text in differences(old.get(key), new.get(key), full)
        ]
    if old == new or (name == "machine.cpu" and same_cpu(old, new, platform.machine())):
        return []
    return [f"{name} was {_plain(old)}, is now {_plain(new)}"]


def _final(trial: FrozenTrial) -> bool:
    """Whether it has a result, or failed for a reason that trying again would not change; its process may have died since."""
    return _RESULT in trial.user_attrs or (_CAUSE in trial.user_attrs and _AGAIN not in trial.user_attrs)


def _discard(storage: BaseStorage, name: str) -> None:
    if name in optuna.get_all_study_names(storage):
        optuna.delete_study(storage=storage, study_name=name)


@contextmanager
def _in_turn(path: Path | None, stop: Callable[[], bool]) -> Iterator[None]:
    """Hold ``path``: two loads on one machine at the same time would measure each other."""
    if path is None:
        yield
        return
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unwritable(path, error) from None
    try:
        while not locked(file, path, "set TMPDIR to a folder on a local disk"):
            _rest(stop)
        yield
    finally:
        os.close(file)


def _turn_of(name: str) -> Path:
    """The file at which the processes of one user on this machine queue up to measure for the study ``name``."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]  # a study may be called anything, at any length
    return Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}-{digest}.turn"


def _rest(stop: Callable[[], bool]) -> None:
    if stop():
        raise Interrupted("interrupted")
    time.sleep(_POLL_S)


def _no_wider(requested: float | None, before: float | None) -> bool:
    return before is None if requested is None else before is None or requested <= before


def _plain(value: Any) -> str:
    return "not given" if value is None else str(value)


def _never() -> bool:
    return False


def _nothing(result: Mapping[str, Any]) -> float:
    return 0.0
