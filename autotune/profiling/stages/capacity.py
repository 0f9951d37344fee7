"""The capacity: the highest rate at which the recommended setting meets the SLO, simulated first, then measured."""

from __future__ import annotations

from autotune.measure.score import Score
from autotune.profile.parts import Capacity
from autotune.profiling.objective import Objective
from autotune.profiling.points import point
from autotune.profiling.setup import Setup, balanced_seeds, rounded
from autotune.profiling.stages.context import Context, MeasurementRequest
from autotune.profiling.timing import CALIBRATION, CAPACITY, SIMULATED_CAPACITY, SIMULATION, VALIDATION
from autotune.simulate.capacity import RateSearch, Search
from runtime.knobs import Knobs
from runtime.slo import attained, in_percent, share_met

_CHECKS = 3
_PRECISION = 0.03
_SEEDS, _APART = 101, 100  # beyond the seeds of validation
_RANGE = 12.0  # the capacity is looked for down to that fraction of the comparison's rate
_FURTHER = 1.3  # and up to that many times it, in simulation
_STEP = 1.2  # on the hardware, where the simulation was wrong


def find_capacity(context: Context, setup: Setup) -> None:
    """Into ``context.found.capacity``."""
    found, question, objective = context.found, context.question, Objective.under(setup)
    choice = found.settings()["balanced"]
    tried = [choice.point]

    def so_far() -> Capacity:
        best = objective.capacity(tried)
        return Capacity(knobs=choice.knobs, rate=None if best is None else best.rate, tried=tuple(tried))

    found.capacity = so_far()
    if question.rate is not None:
        return
    context.reporter.stage("capacity")
    expected = _expected(context, setup, choice.knobs)
    search = RateSearch(
        expected or choice.point.offered_rate, precision=_PRECISION, lowest=setup.rate / _RANGE, highest=setup.most_rate,
        step=_STEP,
    )  # fmt: skip
    rate = search.ask() if expected else None
    search.tell(choice.point.offered_rate, not objective.refuted(choice.point))
    rate = rate or search.ask()
    end, late = context.schedule.until(CALIBRATION, SIMULATION, VALIDATION, CAPACITY), False
    for number in range(_CHECKS):
        if rate is None or any(p.rate == (rate := rounded(rate)) for p in tried):
            break
        request = MeasurementRequest("capacity", choice.knobs, rate, _seed(context, setup, rate, number))
        if not context.in_time(end, request) and (number or context.meter.late(context.schedule.budget_s)):
            late = True
            break  # a first one is worth what is left of the budget
        run = context.measured(request, setup, choice.point.label)
        if run is None:
            break
        tried.append(point([run]))
        search.tell(tried[-1].offered_rate, not objective.refuted(tried[-1]))
        rate, found.capacity = search.ask(), so_far()
        share = in_percent(share_met(tried[-1]), 0, target=None if setup.classes else setup.slo.attainment)
        note = f"{share} attainment at {tried[-1].offered_rate:.3g} req/s"
        context.reporter.progress((number + 1) / _CHECKS, f"{number + 1}/{_CHECKS}", note, None)
    best = objective.capacity(tried)
    if late and len(tried) == 1:
        context.reporter.stage_done("", "no time left to look for it")
        return
    context.reporter.stage_done(
        f"{len(tried) - 1} rate{'' if len(tried) == 2 else 's'}",
        "" if best is None else f"about {best.offered_rate:.3g} req/s",
    )


def _expected(context: Context, setup: Setup, knobs: Knobs) -> float:
    """The capacity in simulation, 0 where no rate in reach meets the SLO; from the study if it was looked for before."""

    def simulated() -> dict[str, float]:
        simulator = context.simulator(setup)

        def simulate(knobs: Knobs, rate: float, seed: int) -> Score:
            context.check()
            return simulator.long(knobs, rate, seed)

        search = Search(
            simulate,
            lambda score: attained(score, setup.slo, setup.classes), (context.question.seed + 2001,), _PRECISION,
            lowest=setup.rate / _RANGE, highest=min(_FURTHER * setup.rate, setup.most_rate),
            late=context.within(SIMULATED_CAPACITY),
        )  # fmt: skip
        with context.meter.simulating():
            return {"rate": search.capacity("", knobs, setup.rate).seeds[0].rate}

    key = f"capacity/{knobs}/{setup.rate:g}/{setup.speed:.6f}/{context.cost_name}"
    return float(context.study.measured(key, simulated, stop=context.stop)["rate"])


def _seed(context: Context, setup: Setup, rate: float, number: int) -> int:
    """One whose window brings about the requested rate, of candidates that no other check shares."""
    load = setup.model_copy(update={"rate": rate}).apply(context.question.workload)
    first = context.question.seed + _SEEDS + number * _APART
    return balanced_seeds(load, first, 1, setup.warmup_s, setup.window_s)[0]
