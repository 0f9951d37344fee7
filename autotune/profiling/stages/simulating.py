"""The simulated stage: the rate to compare settings at, hundreds of trials, and the finalists worth measuring."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.evaluate import EvaluationError, Interrupted
from autotune.profile.parts import Point
from autotune.profiling.choice import alike, latency
from autotune.profiling.points import Run, point, points
from autotune.profiling.pool import Outcome
from autotune.profiling.setup import Setup, balanced_seeds, rounded
from autotune.profiling.simulator import Simulator, requests_of
from autotune.profiling.space import VLLM_LABEL, SearchSpace, is_yardstick, starting_points
from autotune.profiling.stages.context import Context
from autotune.profiling.stages.rate import Attained, knee, neighbours, panel
from autotune.profiling.workers import SimulatedTrial, simulate_trials
from autotune.score import Score
from runtime.knobs import Knobs

FINALISTS = 20
"""Settings simulated again under seeds that the search has not seen: whoever was best among hundreds was also lucky."""

FRESH_SEEDS = 2
VALIDATION_SEEDS = 6
_REFINEMENTS = 3
_TO_RAISE = 10
_LEAST = 4  # trials that TPE proposes, at least


@dataclass(frozen=True)
class Finalist:
    """A setting worth measuring. ``point``: its simulation under fresh seeds, all runs together; ``tokens``, ``running``:
    in a step, on average."""

    label: str
    knobs: Knobs
    point: Point
    tokens: float
    running: float


def settle_rate(context: Context, setup: Setup, space: SearchSpace) -> Setup:
    """``setup`` at the rate where settings are compared, and with the seeds that simulation and hardware will meet."""
    question = context.question
    load = setup.apply(question.workload)
    count = requests_of(load, question.sim_trials, context.schedule.simulate_s)
    setup = setup.model_copy(update={"simulated_requests": count})
    warmup, window = context.simulator(setup).window(setup.rate)
    seeds = balanced_seeds(load, question.seed + 1001, 1 + FRESH_SEEDS, warmup, window)
    setup = setup.model_copy(update={"simulated_seeds": tuple(seeds)})
    if question.rate is None:
        attained = _attained(context, setup)
        best = knee(panel(space, setup.fitted), attained, setup.rate, setup.most_rate)
        before, left = None, _REFINEMENTS
        while best is not None and best != before and left:
            before, left = best, left - 1
            best = knee(neighbours(space, best.knobs), attained, best.rate, setup.most_rate, best)
        if best is not None:
            rate = rounded(min(best.rate, setup.most_rate))
            setup = setup.model_copy(update={"rate": rate, "at_knee": best.knobs})
    setup = moved(context, setup)
    context.study.put("setup", setup.model_dump(mode="json"))
    return setup


def to_knee(context: Context, setup: Setup) -> Setup:
    """``setup`` at the rate up to which the best of the trials keep their promise, by what is known now."""
    if context.question.rate is not None:
        return setup
    best = shortlist(points(context.found.simulated), setup, _TO_RAISE)
    with context.meter.simulating():
        found = knee(best, _attained(context, setup), setup.rate, setup.most_rate)
    rate = setup.rate if found is None else rounded(min(found.rate, setup.most_rate))
    return setup if rate == setup.rate else moved(context, setup.model_copy(update={"rate": rate}))


def moved(context: Context, setup: Setup) -> Setup:
    """``setup``, whose rate has changed, with what it brings into a window, and seeds to validate under that suit it."""
    question = context.question
    setup = setup.at(setup.rate, question.workload, question.seed)
    load = setup.apply(question.workload)
    seeds = balanced_seeds(load, question.seed + 1, VALIDATION_SEEDS, setup.warmup_s, setup.window_s)
    return setup.model_copy(update={"validation_seeds": tuple(seeds)})


def _attained(context: Context, setup: Setup) -> Attained:
    simulator, seed = context.simulator(setup), setup.simulated_seeds[0]

    def attained(knobs: Knobs, rate: float) -> float:
        context.check()
        context.reporter.progress(0.0, "", f"looking for the rate, {rate:.3g} req/s", None)
        return simulator.long(knobs, rate, seed).attainment

    return attained


@dataclass(frozen=True)
class GoodputObjective:
    """What a simulated trial is worth: the goodput at one rate, under one seed."""

    simulator: Simulator
    rate: float
    seed: int

    def __call__(self, knobs: Knobs, stop: Callable[[], bool]) -> Outcome:
        begun = time.process_time()
        score = self.simulator.long(knobs, self.rate, self.seed, stop=stop)
        return Outcome(score.goodput, {"score": score.model_dump(mode="json"), "cpu_s": time.process_time() - begun})


def simulate(context: Context, setup: Setup, space: SearchSpace) -> None:
    """Optuna's trials, as many as were asked or as there is time for, into ``context.found.simulated``."""
    found, question, schedule = context.found, context.question, context.schedule
    objective = GoodputObjective(context.simulator(setup), setup.rate, setup.simulated_seeds[0])
    before = context.meter.simulating_s
    since = context.host.now()
    best: Run | None = None
    starting = starting_points(space, setup.fitted)
    if setup.at_knee is not None and all(setup.at_knee != knobs for _, knobs in starting):
        starting.append(("at the knee", setup.at_knee))
    settled, least = 0, len(starting) + _LEAST  # however slow the machine

    def spent() -> float:
        return before + context.host.now() - since

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
            objective,
            space,
            identity={"rate": setup.rate, "window": objective.simulator.window(setup.rate)},
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


def _keep(context: Context, trials: Sequence[SimulatedTrial]) -> None:
    found = context.found
    found.simulated = [_run(trial) for trial in trials if trial.failed is None]
    found.failures = [(trial.number, trial.failed) for trial in trials if trial.failed is not None]
    found.cpu_s = sum(float(trial.result["cpu_s"]) for trial in trials if trial.result is not None)


def _run(trial: SimulatedTrial) -> Run:
    assert trial.result is not None
    score = Score.model_validate(trial.result["score"])
    return Run(stage="simulation", label=trial.label, trial=trial.number, score=score)


def finalists(context: Context, setup: Setup) -> list[Finalist]:
    """The settings worth measuring, simulated under fresh seeds: the best of several kinds, no two alike, and the yardsticks."""
    trials = context.found.simulated
    labels = {run.knobs: run.label for run in reversed(trials)}
    chosen = shortlist(points(trials), setup, FINALISTS)
    chosen += [knobs for knobs, label in labels.items() if is_yardstick(label) and knobs not in chosen]
    simulator = context.simulator(setup)
    made = []
    with context.meter.simulating():
        for knobs in chosen:
            context.check()
            made.append(finalist(labels[knobs], knobs, simulator, setup))
    context.found.finalists = [final.point for final in made]
    return made


def shortlist(trials: Sequence[Point], setup: Setup, count: int) -> list[Knobs]:
    """Up to ``count`` settings that are not alike: by goodput, by throughput and by headroom in turn."""
    best = max((p.goodput.mean for p in trials), default=0.0)
    good = [p for p in trials if p.goodput.mean >= 0.85 * best]
    rankings = (
        sorted(trials, key=lambda p: (-p.goodput.mean, latency(p, setup.slo))),
        sorted(trials, key=lambda p: (-p.throughput.mean, -p.goodput.mean)),
        sorted(good, key=lambda p: latency(p, setup.slo)),
    )
    chosen: list[Knobs] = []
    for place in range(len(trials)):
        for ranking, every in zip(rankings, (1, 6, 6), strict=True):  # mostly by goodput: the choice is by that
            if place % every:
                continue
            knobs = ranking[place // every].knobs if place // every < len(ranking) else None
            if knobs is not None and not any(alike(knobs, known) for known in chosen):
                chosen.append(knobs)
            if len(chosen) == count:
                return chosen
    return chosen


def baseline_of(finals: Sequence[Finalist]) -> Finalist | None:
    return next((f for f in finals if f.label == VLLM_LABEL), None)


def finalist(label: str, knobs: Knobs, simulator: Simulator, setup: Setup) -> Finalist:
    """One setting under the fresh seeds."""
    runs = [
        Run(stage="simulation", label=label, trial=-1, score=simulator.long(knobs, setup.rate, fresh))
        for fresh in setup.simulated_seeds[1:]
    ]
    return Finalist(
        label=label,
        knobs=knobs,
        point=point(runs),
        tokens=sum(run.score.steps.mean_tokens for run in runs) / len(runs),
        running=sum(run.score.steps.mean_running for run in runs) / len(runs),
    )
