"""The simulated stage: hundreds of settings tried at one rate, under the same arrivals."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Generic

from autotune.measure.evaluate import EvaluationError
from autotune.measure.score import Score
from autotune.profiling.findings import Findings
from autotune.profiling.kinds import CostT, SettingT, SetupT, SpaceT
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run
from autotune.profiling.search import Outcome, search
from autotune.profiling.stages.context import Context
from autotune.profiling.target import Proposals, Simulates
from autotune.profiling.timing import RATE, TRIALS, TRIALS_AGAIN


@dataclass(frozen=True)
class Trial(Generic[SettingT]):
    """A simulated trial: what ``objective`` says a setting is worth at one rate, under one seed."""

    objective: Objective
    simulator: Simulates[SettingT]
    rate: float
    seed: int

    def __call__(self, setting: SettingT, stop: Callable[[], bool]) -> Outcome:
        begun = time.process_time()
        score = self.simulator.long(setting, self.rate, self.seed, stop=stop)
        spent = {"cpu_s": time.process_time() - begun}
        return Outcome(self.objective.value(score), {"score": score.model_dump(mode="json"), **spent})


def simulate(context: Context[SettingT, SetupT, CostT, SpaceT], setup: SetupT) -> None:
    """The target's proposals, as many as were asked or as there is time for, into ``context.found.simulated``.

    All meet the same arrivals, drawn by the first of the simulated seeds.
    """
    found, seconds = context.found, context.schedule.simulate_s
    if seconds is not None:  # what is left of it, or its share where a session that was cut short spent that
        seconds = max(seconds - context.meter.simulating_s, seconds * TRIALS / (RATE + TRIALS))
    proposals = _as_many_as_ever(context, setup, "", seconds)
    if not found.simulated:
        causes = [cause for _, cause in found.failures]
        raise EvaluationError(causes[0] if causes else "no setting could be simulated in the time there is")
    objective = Objective.under(setup)
    top = max(found.simulated, key=lambda run: objective.value(run.score)).score
    done = len(found.simulated)
    context.reporter.stage_done(
        f"{done} trials" if proposals.space else f"{done}/{proposals.trials}",
        objective.said(top, context.target.unit),
    )


def simulate_again(context: Context[SettingT, SetupT, CostT, SpaceT], setup: SetupT, why: str) -> None:
    """The trials anew, by a cost model that measurements have changed: what was found by another may be far from the best.

    They take the place of the former ones in ``context.found.simulated``, unless none can be simulated. ``why``: what sets
    this search apart from others of the study.
    """
    found, seconds = context.found, context.schedule.simulate_s
    if seconds is not None:
        seconds *= TRIALS_AGAIN / (RATE + TRIALS)
    before = found.simulated, found.failures
    _as_many_as_ever(context, setup, f"/{why}", seconds)
    if not found.simulated:
        found.simulated, found.failures = before


def _as_many_as_ever(
    context: Context[SettingT, SetupT, CostT, SpaceT], setup: SetupT, which: str, seconds: float | None
) -> Proposals[SettingT]:
    """A search of ``seconds``, and what was proposed for it. How many trials there was time for is kept in the study under
    ``which`` search it is: whoever takes it up comes to the same trials."""
    found, schedule = context.found, context.schedule
    assert found.cost is not None
    proposals = context.target.proposals(context.question, setup, found.cost)
    key = f"trials/{proposals.trials}/{schedule.simulate_s}/{setup.rate:g}{which}"
    known = context.study.measurements.find(key)
    if known is None:
        with context.meter.simulating():
            _search(context, setup, proposals, seconds=seconds)
        tried = _tried(found)
        known = context.study.measured(key, lambda: {"trials": tried}, stop=context.stop)
        context.keep_time()
        if known["trials"] == tried:
            return proposals
    _search(context, setup, proposals, most=known["trials"])  # as an earlier session, or a machine that was first
    return proposals


def _search(
    context: Context[SettingT, SetupT, CostT, SpaceT],
    setup: SetupT,
    proposals: Proposals[SettingT],
    *,
    seconds: float | None = None,
    most: int | None = None,
) -> None:
    """As many as proposed; at most so many, or those there are ``seconds`` for."""
    found, question = context.found, context.question
    found.simulated, found.failures = [], []
    begun, objective = context.host.now(), Objective.under(setup)
    best: Score | None = None
    tried = search(
        Trial(objective, context.simulator(setup), setup.rate, setup.simulated_seeds[0]),
        proposals.space,
        starting=proposals.starting,
        trials=proposals.trials,
        seed=question.seed,
        workers=question.workers,
        stop=context.stop,
    )
    with closing(tried):
        for trial in tried:
            if trial.outcome is None:
                found.failures.append((trial.number, str(trial.failed)))
                context.reporter.note(f"trial {trial.number} failed ({trial.setting}): {trial.failed}")
            else:
                score = Score.model_validate(trial.outcome.result["score"])
                found.simulated.append(Run.of(trial.setting, "simulation", trial.label, score, trial=trial.number))
                if not trial.again:
                    found.cpu_s += float(trial.outcome.result["cpu_s"])
                if best is None or objective.value(score) > objective.value(best):
                    best = score
            done, spent = trial.number + 1, context.host.now() - begun
            share = max(done / (most or proposals.trials), 0.0 if not seconds else min(1.0, spent / seconds))
            note = "" if best is None else objective.said(best, context.target.unit, offered=False)
            context.reporter.progress(share, f"{done} trials", note, spent * (1 - share) / share)
            if done == most or (seconds is not None and spent > seconds and done >= proposals.least):
                return


def _tried(found: Findings[SettingT, SetupT, CostT, SpaceT]) -> int:
    return len(found.simulated) + len(found.failures)
