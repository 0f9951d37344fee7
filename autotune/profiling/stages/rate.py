"""The rate at which settings are compared, and settings near the best there.

Far below its capacity every setting meets every SLO, far above it none does. So settings are compared at the highest rate that
the best of them serves with an attainment of :data:`TARGET`: its goodput there is about the highest at any rate. It is looked
for among a few settings before the trials, again among the best trials, and again when the machine turns out to serve at another
speed. Where the user gave the rate, the settings that serve the most at it are looked for instead.

What is found is kept in the study: it depends on how much time there was, and a run taken up again, or another machine, is to
go on with the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.measure.score import Score
from autotune.profiling.objective import Objective
from autotune.profiling.points import points
from autotune.profiling.setup import Setup, alike_under, balanced_seeds, in_window, rounded, spread_seeds
from autotune.profiling.simulator import requests_of
from autotune.profiling.space import SearchSpace, alike, around_guess, neighbours
from autotune.profiling.stages.candidates import FASTEST, SLOWEST, shortlist, trials_name
from autotune.profiling.stages.context import Context
from autotune.profiling.timing import CANDIDATES, LONGEST_WINDOW_S, RATE, RATE_AGAIN
from autotune.simulate.capacity import Search, uphill
from runtime.errors import InputError
from runtime.knobs import Knobs

FOUND = "rate"
TARGET = 0.9
FRESH_SEEDS = (6, 3, 2)  # as many as there is time for
VALIDATION_SEEDS = 6
_FRESH = 1101  # the first of them
_BEST_TRIALS = 10
_STEPS_UP, _STEPS_UP_AT_RATE = 3, 8
_FEW = 4  # candidates
_MANY = 8  # candidates to simulate
_PRECISION, _FIRST_STEP = 0.03, 1.1
_LOWEST = 1 / 64  # of the first guess: below it, nobody meets the SLO at any rate worth serving


def find_rate(context: Context, setup: Setup, space: SearchSpace) -> Setup:
    """``setup`` at the rate where settings are compared, and with the seeds that simulation and hardware will meet."""

    def find() -> Setup:
        seeded = _with_simulated_seeds(context, setup, space)
        return _at_best(context, seeded, around_guess(space, seeded.fitted), RATE, space)

    return context.stored(FOUND, setup, find)


def raise_rate(context: Context, setup: Setup, space: SearchSpace) -> Setup:
    """The same once the trials are known: the best of them may serve a higher rate."""
    around = None if context.question.rate is None else space
    return context.stored(
        "rate after trials", setup, lambda: _at_best(context, setup, _best(context, setup), RATE_AGAIN, around)
    )


def at_speed(context: Context, setup: Setup, speed: float) -> Setup:
    """``setup`` for a machine of another ``speed``, at the rate where settings are to be compared there.

    The settings that were best at the old speed need not be: others around the guess, and around the best, are asked too.
    """

    def find() -> Setup:
        moved = setup.model_copy(update={"speed": speed})
        if context.question.rate is None:
            rate = rounded(min(setup.rate * speed / setup.speed, setup.most_rate))
            moved = moved.model_copy(update={"rate": rate})
        return _again(context, moved)

    return context.stored(moved_key(context, setup, speed), setup, find)


def with_candidates(context: Context, setup: Setup, speed: float) -> Setup:
    """``setup`` at its rate and another ``speed``, with the settings that now serve the most at it."""
    moved = setup.model_copy(update={"speed": speed})
    key = f"near the best/{trials_name(context)}/{setup.rate:g}/{speed:.6f}/{context.cost_name}"
    return context.stored(key, setup, lambda: _again(context, moved, fixed=True))


def moved_key(context: Context, setup: Setup, speed: float) -> str:
    """What the study keeps the move from ``setup`` to another ``speed`` under."""
    return f"rate/{setup.rate:g}/{speed:.6f}/{context.cost_name}"


def _again(context: Context, setup: Setup, *, fixed: bool = False) -> Setup:
    space = context.question.space.narrowed(setup.fitted)
    settings = [*_best(context, setup), *around_guess(space, setup.fitted)]
    return _at_best(context, setup, settings, RATE_AGAIN, space, fixed=fixed)


def _with_simulated_seeds(context: Context, setup: Setup, space: SearchSpace) -> Setup:
    question = context.question
    load = setup.apply(question.workload)
    count = requests_of(load, question.sim_trials, context.schedule.simulate_s)
    setup = setup.model_copy(update={"simulated_requests": count})
    warmup, window = context.simulator(setup).window(setup.rate)
    first = balanced_seeds(load, question.seed + 1001, 1, warmup, window)
    setup = setup.model_copy(update={"simulated_seeds": tuple(first)})
    loads = _loads(context, setup, around_guess(space, setup.fitted)[0])
    fresh = spread_seeds(load, question.seed + _FRESH, loads, warmup, window)
    return setup.model_copy(update={"simulated_seeds": (*first, *fresh)})


def _loads(context: Context, setup: Setup, knobs: Knobs) -> int:
    """Under how many fresh loads eight candidates can be simulated in their share of the budget, by how long one takes."""
    budget, begun = context.schedule.budget_s, context.host.now()
    if budget is None:
        return FRESH_SEEDS[0]
    _simulated(context, setup)(knobs, setup.rate, setup.simulated_seeds[0])
    took, share = context.host.now() - begun, CANDIDATES * budget / _MANY
    return next((n for n in FRESH_SEEDS if n * took <= share), FRESH_SEEDS[-1])


def _at_best(
    context: Context,
    setup: Setup,
    settings: Sequence[Knobs],
    share: float,
    space: SearchSpace | None,
    *,
    fixed: bool = False,
) -> Setup:
    """``setup`` at the highest rate that one of ``settings`` (and, given a ``space``, of those around the best) serves.

    ``share``: of the budget, to look for it. Where the rate is ``fixed`` or was given, with those that serve the most at it: half
    of the requests at each end of the speeds that the hardware may have. At one speed alone the best may be next to overload.
    """
    late = context.within(share)
    simulate, seed = _simulated(context, setup), setup.simulated_seeds[0]

    def around(knobs: Knobs) -> Iterable[Knobs]:
        return [] if space is None else neighbours(space, knobs)

    if context.question.rate is None and not fixed:
        search = Search(
            simulate, lambda score: score.weighted_attainment >= TARGET, (seed,), _PRECISION,
            lowest=setup.rate * _LOWEST, highest=setup.most_rate, step=_FIRST_STEP, late=late,
        )  # fmt: skip
        others = {str(knobs): knobs for knobs in settings}
        found = search.best({}, others, around=around, start=setup.rate, steps=_STEPS_UP).setting
        if rate := found.seeds[0].rate:
            setup = setup.model_copy(update={"rate": rounded(rate), "candidates": (found.knobs,)})
    elif space is not None:
        half = setup.model_copy(update={"simulated_requests": max(1, setup.simulated_requests // 2)})
        objective = Objective.under(setup)
        sides = [_simulated(context, half.model_copy(update={"speed": f * setup.speed})) for f in (SLOWEST, FASTEST)]

        def worth(knobs: Knobs, best: float) -> float:
            scores = [simulate(knobs, setup.rate, seed) for simulate in sides]
            return sum(0.0 if score is None else objective.worth(score) for score in scores) / len(scores)

        known = uphill(settings, worth, around, steps=_STEPS_UP_AT_RATE, late=late)
        setup = setup.model_copy(update={"candidates": _few(known)})
    return _with_validation_seeds(context, setup)


def _few(known: dict[Knobs, float]) -> tuple[Knobs, ...]:
    """The best few, no two alike."""
    chosen: list[Knobs] = []
    for knobs in sorted(known, key=known.__getitem__, reverse=True):
        if not any(alike(knobs, other) for other in chosen):
            chosen.append(knobs)
    return tuple(chosen[:_FEW])


def _with_validation_seeds(context: Context, setup: Setup) -> Setup:
    """``setup``, whose rate or speed has changed, with seeds to validate under that suit it."""
    load = setup.apply(context.question.workload)
    window = setup.warmup_s, setup.window_s
    seeds = balanced_seeds(load, context.question.seed + 1, VALIDATION_SEEDS, *window)
    if alike_under(load, seeds, *window):  # a replayed trace: met six times, its requests are no six samples
        seeds = seeds[:1]
    if (empty := next((seed for seed in seeds if not in_window(load, seed, *window)), None)) is not None:
        ways = "another --rate or a longer trace" if load.finite else "a higher --rate"
        later = not load.finite or any(a.time >= sum(window) for a in load.arrivals(empty))
        if setup.window_s < LONGEST_WINDOW_S and later:
            others = "another --rate, or a longer trace" if load.finite else "or a higher --rate"
            ways = f"a longer --budget with --fresh for longer windows, {others}"
        raise InputError(
            f"{load.name}: at {setup.rate:g} requests/s none falls into the window, {setup.warmup_s:g} to {sum(window):g} s "
            f"after the start; give {ways}"
        )
    return setup.model_copy(update={"validation_seeds": tuple(seeds)})


def _best(context: Context, setup: Setup) -> list[Knobs]:
    """The best trials of what was requested: baselines may lie outside of pins and ranges."""
    allowed = [run for run in context.found.simulated if context.question.space.allows(run.knobs)]
    return shortlist(points(allowed), setup, _BEST_TRIALS)


def _simulated(context: Context, setup: Setup) -> Callable[[Knobs, float, int], Score | None]:
    """A setting in the long load at a rate; None where it cannot be simulated."""
    simulator = context.simulator(setup)

    def simulate(knobs: Knobs, rate: float, seed: int) -> Score | None:
        context.check()
        context.reporter.progress(0.0, "", f"looking for the rate, {rate:.3g} req/s", None)
        try:
            return simulator.long(knobs, rate, seed)
        except Interrupted:
            raise
        except EvaluationError as error:
            context.reporter.note(f"{knobs} cannot be simulated: {error}")
            return None

    return simulate
