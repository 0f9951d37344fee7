"""The rate at which settings are compared, in three steps: found, put right by the trials, and found again at another speed.

What is settled is kept in the study: it hangs on how much time there was, and a run taken up again, or another machine, is to
go on with the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profiling.choice import alike
from autotune.profiling.points import points
from autotune.profiling.setup import Setup, balanced_seeds, in_window, rounded, spread_seeds
from autotune.profiling.simulator import requests_of
from autotune.profiling.space import SearchSpace
from autotune.profiling.stages.context import Context
from autotune.profiling.stages.finalists import shortlist
from autotune.profiling.stages.rate import Attained, Knee, knee, neighbours, panel
from autotune.profiling.timing import FINALISTS, KNEE, RATE
from runtime.errors import InputError
from runtime.knobs import Knobs

SETTLED = "rate"
FRESH_SEEDS = (6, 3, 2)  # as many as there is time for
VALIDATION_SEEDS = 6
_FRESH = 1101  # the first of them
_REFINEMENTS = 3
_TO_RAISE = 10
_CLIMBS, _CANDIDATES = 8, 4
_MANY = 8  # finalists


def settle_rate(context: Context, setup: Setup, space: SearchSpace) -> Setup:
    """``setup`` at the rate where settings are compared, and with the seeds that simulation and hardware will meet."""
    return context.settled(SETTLED, lambda: _settle(context, setup, space))


def to_knee(context: Context, setup: Setup, space: SearchSpace) -> Setup:
    """``setup`` at the rate up to which the best of the trials keep their promise; at a rate given, those near them are tried."""
    around = None if context.question.rate is None else space
    return context.settled("knee", lambda: _raised(context, setup, _best(context, setup), KNEE, around))


def at_speed(context: Context, setup: Setup, speed: float) -> Setup:
    """``setup`` for hardware of another ``speed``, at the rate where settings are to be compared there.

    The settings that were best at the old speed need not be: others around the guess, and around the best, are asked too.
    """

    def settle() -> Setup:
        moved = setup.model_copy(update={"speed": speed})
        if context.question.rate is None:
            rate = rounded(min(setup.rate * speed / setup.speed, setup.most_rate))
            moved = moved.model_copy(update={"rate": rate})
        space = context.question.space.narrowed(setup.fitted)
        return _raised(context, moved, [*_best(context, setup), *panel(space, setup.fitted)], KNEE, space)

    return context.settled(knee_key(setup, speed), settle)


def knee_key(setup: Setup, speed: float) -> str:
    """What the study keeps the move from ``setup`` to another ``speed`` under."""
    return f"knee/{setup.rate:g}/{speed:.6f}"


def with_seeds(context: Context, setup: Setup) -> Setup:
    """``setup``, whose rate or speed has changed, with seeds to validate under that suit it."""
    load = setup.apply(context.question.workload)
    window = setup.warmup_s, setup.window_s
    seeds = balanced_seeds(load, context.question.seed + 1, VALIDATION_SEEDS, *window)
    if not all(in_window(load, seed, *window) for seed in seeds):
        raise InputError(
            f"{load.name}: at {setup.rate:g} requests/s none falls into the window, {setup.warmup_s:g} to {sum(window):g} s "
            "after the start; give a longer --budget for longer windows, another --rate, or a longer trace"
        )
    return setup.model_copy(update={"validation_seeds": tuple(seeds)})


def _settle(context: Context, setup: Setup, space: SearchSpace) -> Setup:
    question = context.question
    load = setup.apply(question.workload)
    count = requests_of(load, question.sim_trials, context.schedule.simulate_s)
    setup = setup.model_copy(update={"simulated_requests": count})
    warmup, window = context.simulator(setup).window(setup.rate)
    first = balanced_seeds(load, question.seed + 1001, 1, warmup, window)
    setup = setup.model_copy(update={"simulated_seeds": tuple(first)})
    settings = panel(space, setup.fitted)
    fresh = spread_seeds(load, question.seed + _FRESH, _loads(context, setup, settings[0]), warmup, window)
    setup = setup.model_copy(update={"simulated_seeds": (*first, *fresh)})
    return _raised(context, setup, settings, RATE, space)


def _loads(context: Context, setup: Setup, knobs: Knobs) -> int:
    """Under how many fresh loads eight finalists can be simulated in their share of the budget, by how long one takes."""
    budget, begun = context.schedule.budget_s, context.host.now()
    if budget is None:
        return FRESH_SEEDS[0]
    _attained(context, setup)(knobs, setup.rate)
    took, room = context.host.now() - begun, FINALISTS * budget / _MANY
    return next((n for n in FRESH_SEEDS if n * took <= room), FRESH_SEEDS[-1])


def _raised(
    context: Context, setup: Setup, settings: Sequence[Knobs], share: float, space: SearchSpace | None = None
) -> Setup:
    """``setup`` at the highest rate that one of ``settings`` (and, given a ``space``, of those around the best) keeps.

    ``share``: of the budget, to look for it. Where the rate was given, with the settings that serve the most at it.
    """
    late = context.within(share)
    if context.question.rate is None:
        found = _highest(context, setup, settings, late, space)
        if found is not None:
            rate = rounded(min(found.rate, setup.most_rate))
            setup = setup.model_copy(update={"rate": rate, "candidates": (found.knobs,)})
    elif space is not None:
        setup = setup.model_copy(update={"candidates": _climbed(context, setup, settings, late, space)})
    return with_seeds(context, setup)


def _highest(
    context: Context, setup: Setup, settings: Sequence[Knobs], late: Callable[[], bool], space: SearchSpace | None
) -> Knee | None:
    """The knee of ``settings``, then of those a small step from the best, as long as that raises it."""
    attained = _attained(context, setup)
    best = knee(settings, attained, setup.rate, setup.most_rate, late=late)
    before, left = None, _REFINEMENTS if space is not None else 0
    while best is not None and best != before and left:
        before, left = best, left - 1
        assert space is not None
        best = knee(neighbours(space, best.knobs), attained, best.rate, setup.most_rate, best, late=late)
    return best


def _climbed(
    context: Context, setup: Setup, settings: Sequence[Knobs], late: Callable[[], bool], space: SearchSpace
) -> tuple[Knobs, ...]:
    """The best few of ``settings``, and of those around the best as long as one there is better, at ``setup.rate``."""
    attained, known = _attained(context, setup), dict[Knobs, float]()

    def ask(settings: Sequence[Knobs]) -> Knobs:
        for knobs in settings:
            if known and late():
                break
            if knobs not in known:
                known[knobs] = attained(knobs, setup.rate)
        return max(known, key=lambda knobs: known[knobs])

    if not settings:
        return ()
    best = ask(settings)
    for _ in range(_CLIMBS):
        before, best = best, ask(neighbours(space, best))
        if best == before:
            break
    chosen: list[Knobs] = []
    for knobs in sorted(known, key=lambda knobs: -known[knobs]):
        if not any(alike(knobs, other) for other in chosen):
            chosen.append(knobs)
    return tuple(chosen[:_CANDIDATES])


def _best(context: Context, setup: Setup) -> list[Knobs]:
    """The best trials of what was asked for: yardsticks may lie outside of pins and ranges."""
    allowed = [run for run in context.found.simulated if context.question.space.allows(run.knobs)]
    return shortlist(points(allowed), setup, _TO_RAISE)


def _attained(context: Context, setup: Setup) -> Attained:
    simulator, seed = context.simulator(setup), setup.simulated_seeds[0]

    def attained(knobs: Knobs, rate: float) -> float:
        context.check()
        context.reporter.progress(0.0, "", f"looking for the rate, {rate:.3g} req/s", None)
        try:
            return simulator.long(knobs, rate, seed).attainment
        except Interrupted:
            raise
        except EvaluationError as error:
            context.reporter.note(f"{knobs} cannot be simulated: {error}")
            return 0.0

    return attained
