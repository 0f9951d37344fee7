"""Measurements on the hardware, each made once: keyed by what it measures, claimed before it begins, kept when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profiling.slots import CAUSE, LIVE, RESULT, VALUE, settled
from autotune.profiling.trials import Trials

_KEY = "key"
_POLL_S = 0.2


class Measurements(Trials):
    """Every measurement is a trial without parameters, so that heartbeats and retries work on it as on any other."""

    def find(self, key: str) -> dict[str, Any] | None:
        """What was measured under ``key``, or None."""
        done = next((t for t in self._of(key) if t.state is TrialState.COMPLETE), None)
        return None if done is None else dict(done.user_attrs[RESULT])

    def known(self, key: str) -> bool:
        """Whether ``key`` was measured or failed for good, or another machine is at it.

        Then asking for it measures nothing, unless that machine dies.
        """
        self._watch.bury(self._study)
        return any(settled(t) or t.state is TrialState.RUNNING for t in self._of(key))

    def measure(
        self,
        key: str,
        run: Callable[[], Mapping[str, Any]],
        *,
        stop: Callable[[], bool] | None = None,
        one_at_a_time: Path | None = None,
    ) -> dict[str, Any]:
        """What ``run`` gives, or gave before. ``one_at_a_time``: a file this machine's processes queue up at.

        Raises what ``run`` raises: an :class:`EvaluationError` is kept and raised again next time, being stopped is not.
        While another machine measures the same thing, it is waited for.
        """
        stop = stop or (lambda: False)
        while True:
            self._watch.bury(self._study)
            known = self._of(key)
            if (found := next((t for t in known if settled(t)), None)) is not None:
                if found.state is TrialState.COMPLETE:
                    return dict(found.user_attrs[RESULT])
                raise EvaluationError(str(found.user_attrs[CAUSE]))
            if any(t.state is TrialState.RUNNING for t in known):
                _rest(stop)
                continue
            with _turn(one_at_a_time, stop):
                trial = self._claim(key, known)
                if trial is not None and (result := self._run(trial, run)) is not None:
                    return result

    def results(self) -> list[tuple[str, dict[str, Any]]]:
        """(key, result) of everything measured, in the order it was begun."""
        done = [(t.user_attrs[_KEY], t.user_attrs[RESULT]) for t in self.all() if t.state is TrialState.COMPLETE]
        return list({key: (key, result) for key, result in reversed(done)}.values())[::-1]

    def _run(self, trial: Trial, run: Callable[[], Mapping[str, Any]]) -> dict[str, Any] | None:
        """None: so long was nothing heard of this process that others hold it for dead and measure anew. Theirs counts."""
        try:
            result = dict(run())
        except Interrupted:
            self.failed(trial, "interrupted", again=True)
            raise
        except EvaluationError as error:
            self.failed(trial, str(error))
            raise
        except BaseException as error:
            self.failed(trial, f"{type(error).__name__}: {error}", again=True)
            raise
        return result if self.done(trial, 0.0, result) else None

    def _of(self, key: str) -> list[FrozenTrial]:
        return [t for t in self.all() if t.user_attrs.get(_KEY) == key]

    def _claim(self, key: str, known: list[FrozenTrial]) -> Trial | None:
        """A RUNNING trial of ours for ``key``, or None if somebody else has one: the lowest number has it."""
        storage = self._study._storage
        waiting = next((t for t in known if t.state is TrialState.WAITING), None)
        if waiting is None:
            made = optuna.create_trial(state=TrialState.RUNNING, user_attrs={_KEY: key})
            trial_id = storage.create_new_trial(self._study._study_id, template_trial=made)
        else:
            trial_id = waiting._trial_id
            try:
                if not storage.set_trial_state_values(trial_id, state=TrialState.RUNNING):
                    return None
            except optuna.exceptions.UpdateFinishedTrialError:
                return None
        trial = Trial(self._study, trial_id)
        others = [t for t in self._of(key) if t.number != trial.number]
        if any(settled(t) or (t.state in LIVE and t.number < trial.number) for t in others):
            self._drop(trial)
            return None
        mine = storage.get_trial(trial_id)
        if RESULT in mine.user_attrs and VALUE in mine.user_attrs:  # its process died between measuring and telling
            self._study.tell(trial, mine.user_attrs[VALUE])
            return None
        self._watch.began(self._study, trial_id)
        return trial


@contextlib.contextmanager
def _turn(path: Path | None, stop: Callable[[], bool]) -> Iterator[None]:
    """Hold ``path``: two loads on one machine at the same time would measure each other."""
    if path is None:
        yield
        return
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                _rest(stop)
        yield
    finally:
        os.close(file)


def turns(name: str) -> Path:
    """The file at which the processes of one user on this machine queue up to measure for the study ``name``."""
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    return Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}-{safe}.turn"


def _rest(stop: Callable[[], bool]) -> None:
    if stop():
        raise Interrupted("interrupted")
    time.sleep(_POLL_S)
