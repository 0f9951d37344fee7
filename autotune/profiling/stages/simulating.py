"""The simulated stage: hundreds of settings tried at one rate, under the same arrivals."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.measure.score import Score
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run
from autotune.profiling.pool import Outcome
from autotune.profiling.setup import Setup
from autotune.profiling.space import SearchSpace, starting_points
from autotune.profiling.stages.candidates import NEAR_BEST
from autotune.profiling.stages.context import Context
from autotune.profiling.target import Simulates
from autotune.profiling.workers import SimulatedTrial, simulate_trials
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
    found, question, schedule = context.found, context.question, context.schedule
    trial = Trial(Objective(setup.slo), context.simulator(setup), setup.rate, setup.simulated_seeds[0])
    best: Run | None = None
    starting = starting_points(space, setup.fitted)
    known = {knobs for _, knobs in starting}
    starting += [(NEAR_BEST, knobs) for knobs in setup.candidates if knobs not in known]
    settled, least = 0, len(starting) + _LEAST  # however slow the machine

    def spent() -> float:
        return context.meter.simulating_s

    def enough() -> bool:
        return schedule.simulate_s is not None and spent() > schedule.simulate_s and settled >= least

    def show(done: int, trial: SimulatedTrial | None) -> None:
        nonlocal best, settled
        settled = done
        if trial is not None and trial.failed is not None:
            context.reporter.note(f"trial {trial.number} failed ({trial.knobs}): {trial.failed}")
        elif trial is not None:
            run = _run(trial)
            best = run if best is None or run.score.goodput > best.score.goodput else best
        share = done / question.sim_trials
        if schedule.simulate_s is not None:
            share = max(share, spent() / schedule.simulate_s)
        left = spent() * (1 - share) / share if share > 0 else None
        note = "" if best is None else f"best {best.score.goodput:.1f} req/s in SLO"
        context.reporter.progress(min(1.0, share), f"{done} trials", note, left)

    def trials(stop: Callable[[], bool] | None, enough: Callable[[], bool]) -> list[SimulatedTrial]:
        return simulate_trials(
            context.study,
            trial,
            space,
            identity=_identity(trial),
            starting=starting,
            trials=question.sim_trials,
            seed=question.seed,
            workers=question.workers,
            stop=stop,
            enough=enough,
            progress=show,
        )

    with context.meter.simulating():
        try:
            made = trials(context.stop, enough)
        except Interrupted:
            _keep(context, trials(None, lambda: True))  # what there is already
            raise
    _keep(context, made)
    if not found.simulated:
        causes = [cause for _, cause in found.failures]
        raise EvaluationError(causes[0] if causes else "no setting could be simulated in the time there is")
    top = max(found.simulated, key=lambda run: run.score.goodput).score
    context.reporter.stage_done(
        f"{len(found.simulated)} trials", f"best {top.goodput:.1f} of {top.offered_rate:.1f} req/s in SLO"
    )


def _identity(trial: Trial) -> dict[str, Any]:
    """What tells its values from those of another machine or load."""
    return {"rate": trial.rate, "window": trial.simulator.window(trial.rate), **trial.simulator.identity}


def _keep(context: Context, trials: Sequence[SimulatedTrial]) -> None:
    found = context.found
    found.simulated = [_run(trial) for trial in trials if trial.failed is None]
    found.failures = [(trial.number, trial.failed) for trial in trials if trial.failed is not None]
    found.cpu_s = sum(float(trial.result["cpu_s"]) for trial in trials if trial.result is not None)


def _run(trial: SimulatedTrial) -> Run:
    assert trial.result is not None
    score = Score.model_validate(trial.result["score"])
    return Run(stage="simulation", label=trial.label, trial=trial.number, score=score)
