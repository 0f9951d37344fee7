"""The search in simulation: Optuna in memory, seeded, by as many processes as asked; the trials are the same for any number.

A setting is proposed when all trials but the last few before it have been told, in their order, however quick or slow any of
them was. So nothing of it needs to be kept: whoever does it again comes to the same trials, and doing fewer of them
gives the first of these.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.trial import Trial, TrialState

from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profiling.kinds import SettingT, SettingT_contra
from runtime.errors import InputError

PENDING = 8
"""Trials that may be in progress while the next is proposed; more processes than that do not help."""

SEARCH_LABEL = "search"
_FEWEST_RANDOM, _MOST_RANDOM = 10, 48  # tried before TPE models the results, starting points included
_ATTEMPTS = 3
_TICK_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """What a setting came to: the objective's ``value`` (higher is better) and plain data that belongs to it."""

    value: float
    result: Mapping[str, Any]


class Space(Protocol[SettingT]):
    """Where settings are proposed: by their parameters, which Optuna knows."""

    def distributions(self) -> Mapping[str, BaseDistribution]: ...

    def params(self, setting: SettingT, /) -> dict[str, float]:
        """Of the nearest point inside."""
        ...

    def knobs(self, params: Mapping[str, float], /) -> SettingT:
        """What the parameters stand for."""
        ...


class ObjectiveFunction(Protocol[SettingT_contra]):
    """Picklable, and the same setting gives the same outcome in any process: a frozen dataclass of plain facts.

    ``stop`` may be asked now and then. Raises :class:`EvaluationError` where a setting cannot be tried, and its subclass
    ``Interrupted`` after ``stop``.
    """

    def __call__(self, setting: SettingT_contra, stop: Callable[[], bool], /) -> Outcome: ...


@dataclass(frozen=True)
class SimulatedTrial(Generic[SettingT]):
    """A setting tried. ``outcome``: None where it ``failed`` for the cause given there; ``again``: an earlier trial had the same
    setting, and what came of that is taken."""

    number: int
    label: str
    setting: SettingT
    outcome: Outcome | None = None
    failed: str | None = None
    again: bool = False


class WorkerError(InputError):
    """Worker processes cannot be started."""


def search(
    objective: ObjectiveFunction[SettingT],
    space: Space[SettingT] | None,
    *,
    starting: Sequence[tuple[str, SettingT]],
    trials: int,
    seed: int,
    workers: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> Generator[SimulatedTrial[SettingT]]:
    """Try ``starting`` and then what TPE proposes in ``space``, ``trials`` settings; each in its turn, as soon as it is done.

    ``space`` None: there is nothing beyond ``starting``, a grid say.

    A setting that is proposed again is told to TPE again, but not tried again: it would come to the same. A starting point
    outside the space is tried as it is, and taught to TPE as the nearest point inside. More ``workers`` than one are processes,
    which end when the generator is closed or this process ends. Raises :class:`Interrupted` after ``stop``.

    Source: Bergstra et al. 2011, multivariate as in Falkner et al. 2018; Optuna's ``TPESampler`` with constant liar.
    """
    if trials < 1 or workers < 1:
        raise InputError(f"trials is {trials} and workers is {workers}; each must be at least 1")
    if space is None:
        trials = min(trials, len(starting))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    random = min(_MOST_RANDOM, max(_FEWEST_RANDOM, trials // 5))
    study = optuna.create_study(direction="maximize", sampler=TPESampler(seed=seed, n_startup_trials=random))
    for _, setting in starting:
        study.enqueue_trial({} if space is None else space.params(setting))
    distributions, proposed = dict({} if space is None else space.distributions()), 0
    pending: deque[tuple[Trial, SimulatedTrial[SettingT], Callable[[], Outcome] | None]] = deque()
    begun: set[SettingT] = set()
    tried_as: dict[SettingT, SimulatedTrial[SettingT]] = {}
    with InProcesses(objective, min(workers, PENDING), stop) if workers > 1 else _Here(objective) as tried:
        while proposed < trials or pending:
            while proposed < trials and len(pending) < PENDING:
                trial = study.ask(distributions)
                if proposed < len(starting):
                    label, setting = starting[proposed]
                else:
                    assert space is not None
                    label, setting = SEARCH_LABEL, space.knobs(trial.params)
                outcome = None if setting in begun else tried.begun(setting, stop)
                begun.add(setting)
                pending.append((trial, SimulatedTrial(proposed, label, setting), outcome))
                proposed += 1
            trial, made, outcome = pending.popleft()
            if outcome is None:  # trials are told in their order, so the one it repeats has been
                former = tried_as[made.setting]
                made = replace(made, outcome=former.outcome, failed=former.failed, again=True)
            else:
                made = tried_as[made.setting] = _with_outcome(made, outcome)
            if made.outcome is None:
                study.tell(trial, state=TrialState.FAIL)
            else:
                study.tell(trial, made.outcome.value)
            yield made


def _with_outcome(trial: SimulatedTrial[SettingT], outcome: Callable[[], Outcome]) -> SimulatedTrial[SettingT]:
    try:
        found = outcome()
    except Interrupted:
        raise
    except EvaluationError as error:
        return replace(trial, failed=str(error))
    if not isfinite(found.value):
        return replace(trial, failed=f"its value is {found.value}")
    return replace(trial, outcome=found)


class _Here(Generic[SettingT]):
    """Settings are tried in this process, when they are asked for."""

    def __init__(self, objective: ObjectiveFunction[SettingT]) -> None:
        self._objective = objective

    def __enter__(self) -> _Here[SettingT]:
        return self

    def __exit__(self, *_: object) -> None: ...

    def begun(self, setting: SettingT, stop: Callable[[], bool]) -> Callable[[], Outcome]:
        return partial(self._objective, setting, stop)


class InProcesses(Generic[SettingT]):
    """Settings are tried in ``count`` processes. Leaving it ends them at once, whatever they are at; so does this process' end.

    What kills the processes three times, the last two of them with nothing else beside it, is given up with that cause.
    """

    def __init__(
        self, objective: ObjectiveFunction[SettingT], count: int, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._objective, self._count, self._stop = objective, count, stop
        self._context = multiprocessing.get_context("spawn")

    def __enter__(self) -> InProcesses[SettingT]:
        self._lifeline, self._ours = self._context.Pipe(duplex=False)
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._executor.shutdown(cancel_futures=True)
        self._lifeline.close()

    def begun(self, setting: SettingT, stop: Callable[[], bool]) -> Callable[[], Outcome]:
        """Hand a setting out; the outcome is waited for by calling what is returned."""
        return partial(self._outcome, setting, stop, *self._submitted(setting))

    def _outcome(
        self, setting: SettingT, stop: Callable[[], bool], executor: ProcessPoolExecutor, future: Future[Outcome]
    ) -> Outcome:
        deaths = 0
        while True:
            while not wait([future], _TICK_S).done:
                if stop():
                    raise Interrupted("interrupted")
            try:
                return future.result()
            except BrokenProcessPool:
                if executor is self._executor:  # or others of it have seen to that
                    self._start()
                    deaths += 1
            if deaths == _ATTEMPTS:
                raise EvaluationError(f"its worker process died {_ATTEMPTS} times")
            executor, future = self._submitted(setting)

    def _submitted(self, setting: SettingT) -> tuple[ProcessPoolExecutor, Future[Outcome]]:
        try:
            return self._executor, self._executor.submit(_try, setting)
        except BrokenProcessPool:
            self._start()
            return self._executor, self._executor.submit(_try, setting)

    def _start(self) -> None:
        """New processes, with one of them at work.

        Raises :class:`WorkerError` where there cannot be any, and :class:`Interrupted` where Ctrl-C, which reaches them as well,
        came before they could ignore it.
        """
        self._executor = ProcessPoolExecutor(self._count, self._context, _begin, (self._objective, self._lifeline))
        try:
            self._executor.submit(os.getpid).result()
        except BrokenProcessPool:
            if self._stop():
                raise Interrupted("interrupted") from None
            raise WorkerError("worker processes end before they begin; --workers 1 does without them") from None


_objective: ObjectiveFunction[Any]  # of this worker process


def _begin(objective: ObjectiveFunction[Any], lifeline: Connection) -> None:
    global _objective
    _objective = objective
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all of the terminal's processes; the parent decides
    threading.Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)  # nothing is ever sent: it ends when the parent has closed it, or is gone
    os._exit(1)


def _try(setting: Any) -> Outcome:
    return _objective(setting, lambda: False)
