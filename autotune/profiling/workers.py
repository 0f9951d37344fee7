"""The simulated trials of a study: as many processes as asked, on as many machines as share it, each setting tried once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from typing import Any

from optuna.trial import FrozenTrial, Trial

from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profiling.pool import Objective, Outcome, Pool, Tried
from autotune.profiling.slots import CAUSE, RESULT, SlotSampler, by_slot, settled, slot_of
from autotune.profiling.space import SearchSpace
from autotune.profiling.study import SweepStudy
from autotune.profiling.trials import Trials
from runtime.errors import InputError
from runtime.knobs import Knobs

SEARCH_LABEL = "search"
_FEWEST_RANDOM, _MOST_RANDOM = 10, 48  # tried before TPE models the results, starting points included
_TICK_S = 0.1
_POLL_S = 0.5


@dataclass(frozen=True)
class SimulatedTrial:
    """A setting tried in simulation. ``number``: its place in the study, whatever was killed on the way.

    ``value`` and ``result`` are the objective's, None where the trial ``failed`` for the cause given there.
    """

    number: int
    label: str
    knobs: Knobs
    value: float | None
    result: Mapping[str, Any] | None
    failed: str | None = None


Progress = Callable[[int, SimulatedTrial | None], None]
"""Called with how many trials are settled and the one just settled; None when others were, before or on another machine."""


def simulate_trials(
    study: SweepStudy,
    objective: Objective,
    space: SearchSpace,
    *,
    identity: Mapping[str, Any],
    starting: Sequence[tuple[str, Knobs]],
    trials: int,
    seed: int,
    workers: int = 1,
    name: str = "simulation",
    stop: Callable[[], bool] | None = None,
    enough: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> list[SimulatedTrial]:
    """Try ``starting`` and then what TPE proposes until ``trials`` settings are settled; all of them, in order.

    ``identity``: plain data that says what ``objective`` computes; a study under this ``name`` with another identity,
    space, seed or other starting points is refused (:class:`InputError`). A starting point outside the space is tried as it
    is, and taught to TPE as the nearest point inside. ``enough``: no new trials once it says so, those begun are finished.
    ``stop``: what is being tried is put back, and :class:`Interrupted` raised.

    With one worker, and no other machine at it, the settings and values are the same whenever and however often the
    process is killed and started again.
    """
    if trials < 1 or workers < 1:
        raise InputError(f"trials is {trials} and workers is {workers}; each must be at least 1")
    run = _Run(study, space, identity, starting, trials, seed, name, workers > 1 or study.shared)
    run.work(objective, workers, stop or _never, enough or _never, progress or _silent)
    return run.found()


class _Run:
    def __init__(
        self,
        study: SweepStudy,
        space: SearchSpace,
        identity: Mapping[str, Any],
        starting: Sequence[tuple[str, Knobs]],
        trials: int,
        seed: int,
        name: str,
        several: bool,
    ) -> None:
        self._space, self._starting, self._limit = space, starting, trials
        question = {
            "objective": dict(identity),
            "space": space.as_dict(),
            "starting": [[label, knobs.as_dict()] for label, knobs in starting],
            "seed": seed,
        }
        self._trials = Trials(*study.part(name, question))
        self._distributions = space.distributions()
        self._sampler = SlotSampler(
            self._distributions,
            seed,
            starting=[space.params(knobs) for _, knobs in starting],
            random_trials=min(_MOST_RANDOM, max(_FEWEST_RANDOM, trials // 5)),
            several=several,
        )
        self._begun: dict[int, Trial] = {}
        self._knobs: dict[int, Knobs] = {}

    def work(
        self,
        objective: Objective,
        workers: int,
        stop: Callable[[], bool],
        enough: Callable[[], bool],
        progress: Progress,
    ) -> None:
        if told := self._settled():
            progress(told, None)
        with ExitStack() as stack:
            pool: Pool | None = None
            try:
                while True:
                    if stop():
                        raise Interrupted("interrupted")
                    while not enough() and (pool is None or pool.room) and (trial := self._next()) is not None:
                        if workers == 1:
                            self._inline(trial, objective, stop, progress)
                            break
                        pool = pool or stack.enter_context(Pool(objective, workers))
                        pool.submit(trial.number, self._knobs[trial.number])
                    else:
                        if pool is not None and pool.busy:
                            for tried in pool.finished(_TICK_S):
                                self._tell(tried, progress)
                        elif enough() or not self._trials.running():
                            return
                        else:  # the last ones are being tried on other machines
                            time.sleep(_POLL_S)
                            if told != (told := self._settled()):
                                progress(told, None)
            finally:
                for trial in list(self._begun.values()):
                    self._trials.failed(trial, "interrupted", again=True)

    def found(self) -> list[SimulatedTrial]:
        groups = by_slot(self._trials.all())[: self._limit]
        made = []
        for slot, group in enumerate(groups):
            last = next((t for t in group if settled(t)), None)
            if last is not None:
                made.append(self._shown(slot, last))
        return made

    def _next(self) -> Trial | None:
        found = self._trials.next(self._distributions, self._sampler, limit=self._limit)
        if found is None:
            return None
        trial, slot = found
        self._begun[trial.number] = trial
        self._knobs[trial.number] = self._setting(slot, trial.params)
        return trial

    def _inline(self, trial: Trial, objective: Objective, stop: Callable[[], bool], progress: Progress) -> None:
        try:
            outcome: Outcome | None = objective(self._knobs[trial.number], stop)
            cause = ""
        except Interrupted:
            raise
        except EvaluationError as error:
            outcome, cause = None, str(error)
        self._tell(Tried(trial.number, outcome, cause), progress)

    def _tell(self, tried: Tried, progress: Progress) -> None:
        trial = self._begun[tried.task]
        if tried.outcome is None:
            self._trials.failed(trial, tried.cause)
        elif not isfinite(tried.outcome.value):
            self._trials.failed(trial, f"its value is {tried.outcome.value}")
        else:
            self._trials.done(trial, float(tried.outcome.value), tried.outcome.result)
        del self._begun[tried.task], self._knobs[tried.task]
        trials = self._trials.all()
        frozen = trials[trial.number]
        progress(sum(map(settled, trials)), self._shown(slot_of(frozen, trials), frozen))

    def _setting(self, slot: int, params: Mapping[str, Any]) -> Knobs:
        return self._starting[slot][1] if slot < len(self._starting) else self._space.knobs(params)

    def _shown(self, slot: int, trial: FrozenTrial) -> SimulatedTrial:
        label = self._starting[slot][0] if slot < len(self._starting) else SEARCH_LABEL
        knobs = self._setting(slot, trial.params)
        if trial.value is None:
            return SimulatedTrial(slot, label, knobs, None, None, str(trial.user_attrs.get(CAUSE, "")))
        return SimulatedTrial(slot, label, knobs, trial.value, trial.user_attrs[RESULT])

    def _settled(self) -> int:
        return sum(map(settled, self._trials.all()))


def _never() -> bool:
    return False


def _silent(settled_trials: int, trial: SimulatedTrial | None) -> None:
    pass
