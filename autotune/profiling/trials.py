"""Ask and tell with nothing lost in between: what every study of a profiling run has in common."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.profiling.slots import AGAIN, CAUSE, LIVE, RESULT, VALUE, Retry, by_slot, first_attempt, settled, slot_of
from runtime.errors import InputError

_LOST = (optuna.exceptions.UpdateFinishedTrialError, ValueError)  # what Optuna raises for a trial already finished


class Watch(Protocol):
    """Who runs which trial, and which of them have died."""

    several: bool  # whether other processes may be at work on the same study

    def began(self, study: Study, trial_id: int) -> None:
        """This process runs the trial from now on."""

    def ended(self, trial_id: int) -> None: ...

    def bury(self, study: Study, *, now: bool = False) -> int:
        """Tell trials whose process died FAIL and queue them again; how many. ``now``: look, however recent the last look."""


class SoleOwner:
    """Of a journal, which one process has open: when it opens it, whoever ran a trial there is dead."""

    several = False

    def __init__(self) -> None:
        self._mine: set[int] = set()

    def began(self, study: Study, trial_id: int) -> None:
        self._mine.add(trial_id)

    def ended(self, trial_id: int) -> None:
        self._mine.discard(trial_id)

    def bury(self, study: Study, *, now: bool = False) -> int:
        stale = [
            trial
            for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if trial._trial_id not in self._mine
        ]
        for trial in stale:
            fail_and_retry(study, trial)
        return len(stale)


class Trials:
    """A study's trials, by slot (:mod:`autotune.profiling.slots`)."""

    def __init__(self, study: Study, watch: Watch) -> None:
        self._study, self._watch = study, watch
        self.revive()

    def all(self) -> list[FrozenTrial]:
        """In order of number. They are Optuna's own: not to be changed."""
        return self._study.get_trials(deepcopy=False)

    def revive(self) -> int:
        """Queue again what dead processes left behind; how many trials that were."""
        with quiet():
            return self._watch.bury(self._study, now=True) + self._adopt()

    def next(
        self, space: Mapping[str, BaseDistribution], sampler: BaseSampler, *, limit: int | None = None
    ) -> tuple[Trial, int] | None:
        """The next trial and its slot; what is queued comes first. None: the first ``limit`` slots are settled or being run."""
        self._study.sampler = sampler
        while True:
            with quiet():
                self._watch.bury(self._study)
                if limit is not None and not self._room(limit):
                    return None
                trial = self._study.ask(dict(space))
            trials = self.all()
            frozen = trials[trial.number]
            slot = slot_of(frozen, trials)
            if limit is not None and slot >= limit:
                self._drop(trial)  # another process took the last slot at the same moment
                return None
            if any(
                first_attempt(t) == first_attempt(frozen)
                and t.number != frozen.number
                and (settled(t) or (t.state in LIVE and t.number < frozen.number))
                for t in trials
            ):
                self._drop(trial)  # queued twice, by two processes that found the same trial dead
                continue
            if RESULT in frozen.user_attrs and VALUE in frozen.user_attrs:
                self._study.tell(trial, frozen.user_attrs[VALUE])  # its process died between measuring and telling
                continue
            self._watch.began(self._study, trial._trial_id)
            return trial, slot

    def done(self, trial: Trial, value: float, result: Mapping[str, Any]) -> bool:
        """COMPLETE, with its result. False: it took so long to be heard of that others were given it."""
        try:
            trial.set_user_attr(VALUE, value)
            trial.set_user_attr(RESULT, dict(result))
            self._study.tell(trial, value)
        except InputError:  # a place that cannot be written is no sign of others
            raise
        except _LOST:
            return False
        finally:
            self._watch.ended(trial._trial_id)
        return True

    def failed(self, trial: Trial, cause: str, *, again: bool = False) -> None:
        """FAIL with its cause, never a bad score; ``again``: put the same setting back into the queue."""
        try:
            trial.set_user_attr(CAUSE, cause)
            if again:
                trial.set_user_attr(AGAIN, True)
            self._study.tell(trial, state=TrialState.FAIL)
        except InputError:
            raise
        except _LOST:
            return
        finally:
            self._watch.ended(trial._trial_id)
        if again:
            with quiet():
                Retry()(self._study, self.all()[trial.number])

    def running(self) -> int:
        """Trials somebody runs at this moment, or died in not long ago."""
        return len(self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)))

    def _room(self, limit: int) -> bool:
        groups = by_slot(self.all())
        if len(groups) < limit:
            return True
        live = [any(t.state is TrialState.WAITING for t in group) for group in groups[:limit]]
        return any(live) or self._adopt(limit) > 0

    def _adopt(self, limit: int | None = None) -> int:
        """Queue again what failed for no reason of its own and is queued nowhere: who failed it died before queueing it."""
        lost = [
            group[-1] for group in by_slot(self.all())[:limit] if not any(settled(t) or t.state in LIVE for t in group)
        ]
        for trial in lost:
            Retry()(self._study, trial)
        return len(lost)

    def _drop(self, trial: Trial) -> None:
        with contextlib.suppress(*_LOST):
            trial.set_user_attr(CAUSE, "another process was faster")
            trial.set_user_attr(AGAIN, True)
            self._study.tell(trial, state=TrialState.FAIL)


def fail_and_retry(study: Study, trial: FrozenTrial) -> None:
    """Whoever fails it first queues it again; the others do nothing."""
    with contextlib.suppress(*_LOST), quiet():
        if study._storage.set_trial_state_values(trial._trial_id, state=TrialState.FAIL):
            Retry()(study, trial)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's warnings that heartbeats and retries may change, and are meant for its own loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed")
        yield
