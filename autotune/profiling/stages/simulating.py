"""The simulated stage: hundreds of settings tried at one rate, under the same arrivals."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from autotune.measure.evaluate import EvaluationError
from autotune.measure.score import Score
from autotune.profiling.findings import Findings
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run
from autotune.profiling.search import Outcome, search
from autotune.profiling.setup import Setup
from autotune.profiling.space import SearchSpace, starting_points
from autotune.profiling.stages.candidates import NEAR_BEST
from autotune.profiling.stages.context import Context
from autotune.profiling.target import Simulates
from autotune.profiling.timing import RATE, TRIALS, TRIALS_AGAIN
from runtime.knobs import Knobs

_LEAST = 4  # trials beside the starting points


@dataclass(frozen=True)
class Trial:
    """A simulated trial: what ``objective`` says a setting is worth at one rate, under one seed."""

    objective: Objective
    simulator: Simulates
    rate: float
    seed: int

    def __call__(self, knobs: Knobs, stop: Callable[[], bool]) -> Outcome:
        begun = time.process_time()
        score = self.simulator.long(knobs, self.rate, self.seed, stop=stop)
        spent = {"cpu_s": time.process_time() - begun}
        return Outcome(self.objective.value(score), {"score": score.model_dump(mode="json"), **spent})


def simulate(context: Context, setup: Setup, space: SearchSpace) -> None:
    """Optuna's trials, as many as were asked or as there is time for, into ``context.found.simulated``."""
    seconds = context.schedule.simulate_s
    if seconds is not None:  # what is left of it, or its share where a session that was cut short spent that
        seconds = max(seconds - context.meter.simulating_s, seconds * TRIALS / (RATE + TRIALS))
    _as_many_as_ever(context, setup, space, "", seconds)
    found = context.found
    if not found.simulated:
        causes = [cause for _, cause in found.failures]
        raise EvaluationError(causes[0] if causes else "no setting could be simulated in the time there is")
    top = max(found.simulated, key=lambda run: run.score.goodput).score
    context.reporter.stage_done(
        f"{len(found.simulated)} trials", f"best {top.goodput:.1f} of {top.offered_rate:.1f} req/s in SLO"
    )


def simulate_again(context: Context, setup: Setup, space: SearchSpace) -> None:
    """The trials anew, by a cost model that measurements have changed: what was found by another may be far from the best.

    They take the place of the former ones in ``context.found.simulated``, unless none can be simulated.
    """
    found, seconds = context.found, context.schedule.simulate_s
    if seconds is not None:
        seconds *= TRIALS_AGAIN / (RATE + TRIALS)
    before = found.simulated, found.failures
    _as_many_as_ever(context, setup, space, f"/{setup.speed:.6f}/{context.cost_name}", seconds)
    if not found.simulated:
        found.simulated, found.failures = before


def _as_many_as_ever(context: Context, setup: Setup, space: SearchSpace, which: str, seconds: float | None) -> None:
    """A search of ``seconds``. How many trials there was time for is kept in the study under ``which`` search it is: whoever
    takes it up comes to the same trials."""
    key = f"trials/{context.question.sim_trials}/{context.schedule.simulate_s}/{setup.rate:g}{which}"
    known = context.study.measurements.find(key)
    if known is None:
        with context.meter.simulating():
            _search(context, setup, space, seconds=seconds)
        tried = _tried(context.found)
        known = context.study.measured(key, lambda: {"trials": tried}, stop=context.stop)
        context.keep_time()
        if known["trials"] == tried:
            return
    _search(context, setup, space, most=known["trials"])  # as an earlier session, or another machine that was first


def _search(
    context: Context, setup: Setup, space: SearchSpace, *, seconds: float | None = None, most: int | None = None
) -> None:
    """As many as asked for; at most so many, or those there are ``seconds`` for, but always a few beside the starting points."""
    found, question = context.found, context.question
    found.simulated, found.failures = [], []
    starting = starting_points(space, setup.fitted)
    known = {knobs for _, knobs in starting}
    starting += [(NEAR_BEST, knobs) for knobs in setup.candidates if knobs not in known]
    begun, best = context.host.now(), 0.0
    tried = search(
        Trial(Objective(setup.slo), context.simulator(setup), setup.rate, setup.simulated_seeds[0]),
        space,
        starting=starting,
        trials=question.sim_trials,
        seed=question.seed,
        workers=question.workers,
        stop=context.stop,
    )
    with closing(tried):
        for trial in tried:
            if trial.outcome is None:
                found.failures.append((trial.number, str(trial.failed)))
                context.reporter.note(f"trial {trial.number} failed ({trial.knobs}): {trial.failed}")
            else:
                score = Score.model_validate(trial.outcome.result["score"])
                found.simulated.append(Run(stage="simulation", label=trial.label, trial=trial.number, score=score))
                found.cpu_s += float(trial.outcome.result["cpu_s"])
                best = max(best, score.goodput)
            done, spent = trial.number + 1, context.host.now() - begun
            share = max(done / (most or question.sim_trials), 0.0 if not seconds else min(1.0, spent / seconds))
            left, note = spent * (1 - share) / share, f"best {best:.1f} req/s in SLO"
            context.reporter.progress(share, f"{done} trials", note, left)
            if done == most or (seconds is not None and spent > seconds and done >= len(starting) + _LEAST):
                return


def _tried(found: Findings) -> int:
    return len(found.simulated) + len(found.failures)
