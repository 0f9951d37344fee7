"""The capacity: the highest rate at which the recommended setting keeps the SLO's share, simulated first, then measured."""

from __future__ import annotations

from autotune.profile.parts import Capacity
from autotune.profiling.choice import highest_held, refuted
from autotune.profiling.points import point
from autotune.profiling.setup import Setup, balanced_seeds, rounded
from autotune.profiling.stages.context import Asked, Context
from autotune.profiling.timing import CALIBRATION, CAPACITY, SIMULATION, TARGET_OF_CAPACITY, VALIDATION
from runtime.knobs import Knobs

_CHECKS = 3
_PRECISION = 1.03
_SEEDS, _APART = 101, 100  # beyond the seeds of validation
_RANGE = 12.0  # the capacity is looked for down to that fraction of the comparison's rate


def find_capacity(context: Context, setup: Setup) -> None:
    """Into ``context.found.capacity``."""
    found, question = context.found, context.question
    choice = found.settings()["balanced"]
    if question.rate is not None:
        kept = None if refuted(choice.point, setup.slo) else choice.point.rate
        found.capacity = Capacity(knobs=choice.knobs, rate=kept, tried=(choice.point,))
        return
    context.reporter.stage("capacity")
    tried = [choice.point]
    held, rate = highest_held(tried, setup.slo)
    found.capacity = Capacity(knobs=choice.knobs, rate=None if held is None else held.rate, tried=tuple(tried))
    rate = _expected(context, setup, choice.knobs) or rate
    end = context.schedule.until(CALIBRATION, SIMULATION, VALIDATION, CAPACITY)
    for number in range(_CHECKS):
        rate = rounded(min(max(rate, setup.rate / _RANGE), setup.most_rate))
        if any(p.rate == rate for p in tried):
            break
        asked = Asked("capacity", choice.knobs, rate, _seed(context, setup, rate, number))
        if not context.in_time(end, asked) and (number or context.meter.late(context.schedule.budget_s)):
            break  # a first one is worth what is left of the budget
        run = context.measured(asked, setup, choice.point.label)
        if run is None:
            break
        tried.append(point([run]))
        held, rate = highest_held(tried, setup.slo)
        found.capacity = Capacity(knobs=choice.knobs, rate=None if held is None else held.rate, tried=tuple(tried))
        note = f"{tried[-1].attainment:.0%} in SLO at {tried[-1].offered_rate:.3g} req/s"
        context.reporter.progress((number + 1) / _CHECKS, f"{number + 1}/{_CHECKS}", note, None)
    context.reporter.stage_done(
        f"{len(tried) - 1} rate{'' if len(tried) == 2 else 's'}",
        "" if held is None else f"about {held.offered_rate:.3g} req/s",
    )


def _expected(context: Context, setup: Setup, knobs: Knobs) -> float | None:
    """The capacity in simulation, from the study if it was looked for before."""

    def simulated() -> dict[str, float | None]:
        with context.meter.simulating():
            return {"rate": simulated_capacity(context, setup, knobs)}

    key = f"capacity/{knobs}/{setup.rate:g}/{setup.speed:.6f}"
    found: float | None = context.study.measured(key, simulated, stop=context.stop)["rate"]
    return found


def _seed(context: Context, setup: Setup, rate: float, number: int) -> int:
    """One whose window brings about the rate asked for, of candidates that no other check shares."""
    load = setup.model_copy(update={"rate": rate}).apply(context.question.workload)
    first = context.question.seed + _SEEDS + number * _APART
    return balanced_seeds(load, first, 1, setup.warmup_s, setup.window_s)[0]


def simulated_capacity(context: Context, setup: Setup, knobs: Knobs) -> float | None:
    """The highest rate, to 3% if there is time, at which ``knobs`` keep the SLO's share in simulation; None: at none in reach."""
    simulator, seed = context.simulator(setup), context.question.seed + 2001
    late = context.within(TARGET_OF_CAPACITY)

    def kept(rate: float) -> bool:
        context.check()
        return simulator.long(knobs, rate, seed).attainment >= setup.slo.attainment

    low, high = setup.rate / _RANGE, min(setup.rate * 1.3, setup.most_rate)
    if kept(high):
        return high
    if not kept(low):
        return None
    while high / low > _PRECISION and not late():
        middle = (low * high) ** 0.5
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low
