"""Trials of a study as slots: the n-th setting to be tried, however many attempts it takes.

A process that dies leaves its trial RUNNING. It is told FAIL and its setting queued again as another trial, a *retry*,
which carries the number of the first attempt (Optuna's ``failed_trial``). A slot is the rank of that first attempt among
first attempts. What is proposed for a slot depends on the slot, the seed and the results so far, never on how often
somebody died; with one worker a study that was killed and taken up again therefore has the same settings and values, in
the same order, as one that was left in peace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

CAUSE = "cause"
AGAIN = "again"  # failed for no reason of its own: to be tried again
RESULT, VALUE = "result", "value"
_PASSING = (CAUSE, AGAIN)

LIVE = (TrialState.WAITING, TrialState.RUNNING)


def first_attempt(trial: FrozenTrial) -> int:
    """The number of the trial that first tried this setting."""
    return int(trial.system_attrs.get("failed_trial", trial.number))


def slot_of(trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> int:
    """``trials``: all of the study, in order of number."""
    first = first_attempt(trial)
    return sum(1 for t in trials[:first] if "failed_trial" not in t.system_attrs)


def settled(trial: FrozenTrial) -> bool:
    """Whether it has a result, or failed for a reason that trying again would not change."""
    return trial.state is TrialState.COMPLETE or (
        trial.state is TrialState.FAIL and CAUSE in trial.user_attrs and AGAIN not in trial.user_attrs
    )


def by_slot(trials: Sequence[FrozenTrial]) -> list[list[FrozenTrial]]:
    """Every slot's attempts, oldest first; ``trials``: all of the study, in order of number."""
    groups: dict[int, list[FrozenTrial]] = {}
    for trial in trials:
        groups.setdefault(first_attempt(trial), []).append(trial)
    return [groups[first] for first in sorted(groups)]


class Retry(RetryHeartbeatStaleTrialCallback):
    """Queues a failed trial's setting again: same parameters, its first attempt's number, and nothing of how it failed.

    A result that was stored but not yet told stays with it, so that it need not be measured again.
    """

    def __init__(self) -> None:
        super().__init__(max_retry=None, inherit_intermediate_values=False)

    def __call__(self, study: Study, trial: FrozenTrial) -> None:
        kept = {name: value for name, value in trial.user_attrs.items() if name not in _PASSING}
        clean = optuna.create_trial(
            state=TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs=kept,
            system_attrs=dict(trial.system_attrs),
        )
        clean.number = trial.number
        super().__call__(study, clean)


class SlotSampler(BaseSampler):
    """The given starting points first, then TPE seeded by the slot.

    All knobs are drawn at once, before any is stored: a death between two of them changes nothing.
    Source: Bergstra et al. 2011, multivariate as in Falkner et al. 2018; Optuna's ``TPESampler``.
    """

    def __init__(
        self,
        space: Mapping[str, BaseDistribution],
        seed: int,
        *,
        starting: Sequence[Mapping[str, float]] = (),
        random_trials: int = 10,
        several: bool = False,
    ) -> None:
        self._space, self._seed, self._starting = space, seed, starting
        self._random_trials, self._several = random_trials, several

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {name: d for name, d in self._space.items() if not d.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if search_space.keys() <= trial.params.keys():
            return {}  # a retry
        slot = slot_of(trial, study.get_trials(deepcopy=False))
        if slot < len(self._starting):
            return {name: self._starting[slot][name] for name in search_space}
        sampler = TPESampler(
            seed=(self._seed * 1_000_003 + slot) % 2**32,
            n_startup_trials=self._random_trials,
            constant_liar=self._several,  # keep away from what others are trying just now
        )
        drawn = sampler.sample_relative(study, trial, search_space)
        if drawn:
            return drawn
        return {name: sampler.sample_independent(study, trial, name, d) for name, d in search_space.items()}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise ValueError(f"{param_name} is not in the search space")
