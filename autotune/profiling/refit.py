"""What measurements teach about the machine: its speed while it serves, and a cost model that has seen their steps."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence

from scipy.optimize import minimize_scalar

from autotune.cost.model import CostModel, features_of, fit_cost_model
from autotune.profile.parts import StepPoint
from autotune.profiling.points import Run
from autotune.profiling.serving_overhead import overhead_of
from autotune.profiling.steps import served_kind
from runtime.step_model import StepFeatures, StepGraphs

_SPEED_KNOWN = 0.01  # to so much, as a share
_FITS = 3  # beside those at either end and at 1
_SLOWEST, _FASTEST = 0.01, 100.0  # beyond that, what was calibrated says nothing of the machine


WRONG_BY = 0.02
"""Share by which speeds of runs may differ: calibrations are no better than that."""


def speed_in(cost: CostModel, run: Run) -> float | None:
    """Σ predicted ÷ Σ actual seconds over the steps of ``run``: 0.8 is a machine slower than ``cost`` says.

    None without steps: whatever has none tells nothing, not a step of no length.
    """
    actual = sum(p.seconds * p.repeats for p in run.steps)
    if not actual:
        return None
    serving = cost.serving()
    predicted = sum(serving.predict(features_of(p)) * p.repeats for p in run.steps)
    return min(_FASTEST, max(_SLOWEST, predicted / actual))


def speed_of(cost: CostModel, runs: Sequence[Run]) -> float | None:
    """Of the machine over several measurements: their median, for one of them may have met it in a bad minute."""
    found = [speed for run in runs if (speed := speed_in(cost, run)) is not None]
    return statistics.median(found) if found else None


def refitted(cost: CostModel, steps: Sequence[StepPoint], runs: Sequence[Run]) -> CostModel:
    """``cost``, which was fitted to ``steps``, fitted to those of ``runs`` as well, as if the machine had a speed of 1.

    The speeds that ``runs`` show are part the machine's, which is the same for all steps, and part what ``cost`` is wrong by
    for these. So the machine's is the one at which a single model fits ``steps`` and those of ``runs`` best (cross-validated).
    Were all of what the runs show taken for the machine's, the fit would not see it. ``cost`` itself where all runs show about
    the same speed by it, or a fit shows speeds even less alike.
    """
    if unlike(cost, runs) <= WRONG_BY:
        return cost
    served, fits = merged([p for run in runs for p in run.steps], cost.facts.graphs), []

    def error(log_speed: float) -> float:
        fits.append(_fitted(cost, steps, served, math.exp(log_speed)))
        return _misfit(fits[-1])

    shown = [math.log(speed) for run in runs if (speed := speed_in(cost, run)) is not None]
    low, high = min(0.0, *shown), max(0.0, *shown)
    if high - low > _SPEED_KNOWN:
        minimize_scalar(error, bounds=(low, high), method="bounded", options={"maxiter": _FITS, "xatol": _SPEED_KNOWN})
    for edge in {low, 0.0, high}:
        error(edge)
    found = min(fits, key=_misfit)
    return found if unlike(found, runs) < unlike(cost, runs) else cost


def _misfit(cost: CostModel) -> float:
    """The cross-validated error that nine in ten points stay below, over all regions. The median says nothing of a run in the
    minority: a model that fits the calibration and one of two runs, and not the other, has a median of 0."""
    regions = cost.facts.regions
    return sum(r.p90 * r.points for r in regions) / sum(r.points for r in regions)


def _fitted(cost: CostModel, steps: Sequence[StepPoint], served: Sequence[StepPoint], speed: float) -> CostModel:
    """Fitted to ``steps`` and to what ``served`` would take at a speed of 1."""
    served = [p.model_copy(update={"seconds": p.seconds * speed}) for p in served]
    facts = cost.facts
    fitted = fit_cost_model([*steps, *served], seconds=facts.seconds, jitter=facts.jitter, graphs=facts.graphs)
    load = [(fitted.predict(features_of(p)), p.seconds) for p in served for _ in range(p.repeats)]
    return CostModel(fitted.facts.model_copy(update={"serving_overhead_s": overhead_of([load])}))


def unlike(cost: CostModel, runs: Sequence[Run]) -> float:
    """By how much the speeds that ``runs`` show lie from their median at most, as a share: a machine has one, the rest is what
    ``cost`` is wrong by."""
    speeds = [speed for run in runs if (speed := speed_in(cost, run)) is not None]
    middle = statistics.median(speeds) if speeds else 1.0
    return max((abs(speed / middle - 1) for speed in speeds), default=0.0)


def merged(points: Sequence[StepPoint], graphs: StepGraphs) -> list[StepPoint]:
    """Points of the same kind of served step as one, at their means."""
    kinds: dict[tuple[int, ...], list[StepPoint]] = {}
    for p in points:
        kinds.setdefault(served_kind(features_of(p), graphs), []).append(p)
    return [found[0] if len(found) == 1 else _mean(found) for found in kinds.values()]


def _mean(points: Sequence[StepPoint]) -> StepPoint:
    weights = [p.repeats for p in points]

    def mean(name: str) -> float:
        return statistics.fmean((getattr(p, name) for p in points), weights)

    features = {name: round(mean(name)) for name in StepFeatures._fields}
    return points[0].model_copy(
        update={**features, "seconds": mean("seconds"), "spread": mean("spread"), "repeats": sum(weights)}
    )


def cost_name(cost: CostModel) -> str:
    """Equal for equal cost models: what is simulated by one is kept in the study under its name."""
    known: list[object] = [cost.facts.coefficients, cost.facts.serving_overhead_s]
    graphs = cost.facts.graphs  # without, it keeps the name it had in earlier versions' studies
    known += [each for each in (graphs.decodes, graphs.prompts and [graphs.prompts, graphs.sequences]) if each]
    facts = json.dumps(known, sort_keys=True)
    return f"{cost.facts.family} {hashlib.sha256(facts.encode()).hexdigest()[:12]}"
