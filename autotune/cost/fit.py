"""Fits cost models to measured steps: bounded, relative, robust, and of the shape that predicts best what it has not seen.

The time of a step is homogeneous of degree one in the coefficients (:meth:`~autotune.cost.shape.Shape.times`), so a
Gauss–Newton step is a non-negative least-squares problem in the coefficients themselves (Lawson and Hanson, 1974), and bounds
at zero cost nothing. Those above (:attr:`~autotune.cost.shape.Shape.most`) matter on slow machines, where terms that rise
together (tokens, context) may take each other's time; where the solution without them exceeds one, the problem is solved within
them. Residuals are relative and weighted by how well each point was measured; Huber's weights keep what does not belong (a stall
that survived the median) from pulling. Sums are convex; the other norms start from the sum's solution, one norm after the other.

Other shapes than sums without experts have to beat them by a standard error of the cross-validated loss (the rule of Breiman et
al., CART, 1984, here of paired differences). Where the points do not tell one from the other, the one that lets memory time hide
behind compute time, or has it saturate, says too little of steps that hold more of both than any that was measured.

Points of the region ``served`` are means over steps of live serving. Where prompts are computed beside decodes they count for
most, and planned steps of that kind for little: there serving costs more than clean steps do (prompts arrive, and caches
are never as warm). Where nothing but decodes is in a step the planned ones are the better measured.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from scipy.optimize import lsq_linear, nnls

from autotune.cost.facts import StepPoint
from autotune.cost.shape import Floats, Shape, as_floats, candidates
from runtime.step_model import NO_GRAPHS, TERMS, StepFeatures, StepGraphs

FOLDS = 5
FEWEST = 8
_FLOOR = 0.02  # relative error below which no point counts as better measured than another
_RIDGE = 1e-4
SERVED = "served"
_SERVED_STEPS = 100  # below that they count like all others
_COUNT = {"mixed": 0.3, "prefix": 0.3}  # of planned steps, where served ones are to be had
_COUNT_SERVED = 4.0, 0.3  # with prompts, without
_WORSE = 1.5  # times the error of the best sum in a region: what is worse there is not taken,
_AS_GOOD = 0.01  # unless the errors differ by no more than this
_WORTH = 0.004  # share of the cross-validated error that one more coefficient must win


@dataclass(frozen=True)
class Fitted:
    """``held_out``: seconds of each point as predicted by a fit that did not see it."""

    shape: Shape
    coefficients: Floats
    covariance: Floats
    held_out: Floats


@dataclass(frozen=True)
class PointArrays:
    """Points as arrays: ``steps`` as in StepFeatures, ``seconds``, ``weights``, ``folds``."""

    steps: Floats
    seconds: Floats
    weights: Floats
    folds: Floats
    _known: dict[tuple[object, ...], Floats] = field(default_factory=dict)

    def where(self, mask: Floats) -> PointArrays:
        return PointArrays(self.steps[mask], self.seconds[mask], self.weights[mask], self.folds[mask])

    def columns(self, shape: Shape) -> Floats:
        """Those of the steps in ``shape``, to be read only: alike for all shapes that overlap and differ in the norm only."""
        key = shape.norm == 1, shape.knots, shape.experts, shape.graphs
        if key not in self._known:
            self._known[key] = shape.columns(self.steps)
        return self._known[key]


def measured(points: Sequence[StepPoint]) -> PointArrays:
    """Raises ``ValueError`` when there are too few points, or one has no positive time."""
    if len(points) < FEWEST:
        raise ValueError(f"{len(points)} points are too few for a cost model; it takes {FEWEST}")
    for p in points:
        if not 0 < p.seconds < float("inf"):
            raise ValueError(f"seconds is {p.seconds} at {p}; it must be above 0")
    steps = [[getattr(p, name) for name in StepFeatures._fields] for p in points]
    # the standard error of a median of normal samples, from their interquartile range
    errors = np.array([p.spread / 1.35 * 1.25 / max(1, p.repeats) ** 0.5 for p in points])
    return PointArrays(
        as_floats(steps),
        np.array([p.seconds for p in points]),
        _counts(points) * _FLOOR / np.hypot(_FLOOR, errors),
        _folds(points),
    )


def _folds(points: Sequence[StepPoint]) -> Floats:
    """The fold of each point: every region is spread over all of them."""
    rng = random.Random(0)
    order = sorted(range(len(points)), key=lambda i: (points[i].region, rng.random()))
    folds = np.zeros(len(points))
    for at, i in enumerate(order):
        folds[i] = at % FOLDS
    return folds


def fit(points: Sequence[StepPoint], graphs: StepGraphs = NO_GRAPHS) -> Fitted:
    """The shape of least cross-validated error, a sum where none is better by a standard error, fitted to all points.

    ``graphs``: the steps that the engine has recorded. The latest fits are kept: a profiling run asks
    for that of the calibration's points again and again. Their arrays are to be read only.
    """
    plain = tuple(p if p.predicted is None else p.model_copy(update={"predicted": None}) for p in points)
    return _fit(plain, graphs, tuple(TERMS))


@lru_cache(maxsize=16)
def _fit(points: tuple[StepPoint, ...], graphs: StepGraphs, terms: tuple[str, ...]) -> Fitted:
    """``terms``: the names of those there are. Another set is another fit."""
    data = measured(points)
    tokens = [p.decodes + p.prefill_tokens + p.drafted for p in points]
    predicted: dict[Shape, Floats] = {}
    folds = [
        (data.where(data.folds != fold), data.where(data.folds == fold), data.folds == fold) for fold in range(FOLDS)
    ]
    for shapes in _chains(candidates(tokens, graphs), data):
        held_out = {shape: np.zeros(len(points)) for shape in shapes}
        for inside, outside, there in folds:
            for shape, coefficients in _solve_chain(shapes, inside):
                held_out[shape][there] = shape.times(outside.columns(shape), coefficients)[0]
        predicted |= held_out
    shape = _chosen(
        {shape: _losses(each, data) * (1 + _WORTH * len(shape.names)) for shape, each in predicted.items()},
        data,
        [p.region for p in points],
    )
    coefficients = dict(_solve_chain(_norms_up_to(shape), data))[shape]
    return Fitted(shape, coefficients, _covariance(shape, coefficients, data), predicted[shape])


def _counts(points: Sequence[StepPoint]) -> Floats:
    """How much each point counts, by its region."""
    if sum(p.repeats for p in points if p.region == SERVED) < _SERVED_STEPS:
        return np.ones(len(points))
    mixed, alone = _COUNT_SERVED
    most = max((_context(p) for p in points if p.region == SERVED and p.chunks), default=0)
    return np.array(
        [
            (mixed if p.chunks else alone)
            if p.region == SERVED
            else (_COUNT.get(p.region, 1.0) if _context(p) <= most else 1.0)
            for p in points
        ]
    )


def _context(point: StepPoint) -> int:
    """KV entries that it reads."""
    return point.decode_context + point.prefill_context


def _losses(predicted: Floats, data: PointArrays) -> Floats:
    """|log(predicted ÷ measured)| of each point, capped."""
    losses: Floats = np.minimum(np.abs(np.log(np.maximum(predicted, 1e-9) / data.seconds)), 0.5)
    return losses


def _loss(predicted: Floats, data: PointArrays) -> float:
    return float(np.average(_losses(predicted, data), weights=data.weights))


def _chosen(losses: Mapping[Shape, Floats], data: PointArrays, regions: Sequence[str]) -> Shape:
    """The best by ``losses``, of each point; the best sum unless it loses by more than a standard error of the difference.

    What is much worse than that sum in one of the ``regions`` is not taken, however good it is elsewhere: served steps may be of
    another region than most of what was measured.
    """
    weights = data.weights / data.weights.sum()
    mean = {shape: float(each @ weights) for shape, each in losses.items()}
    plain = min((shape for shape in mean if shape.norm == 1 and not shape.experts), key=mean.__getitem__)
    named = np.array(regions)
    known = [named == region for region in set(regions) if (named == region).sum() >= FEWEST]

    def even(shape: Shape) -> bool:
        pairs = ((losses[shape][there].mean(), losses[plain][there].mean()) for there in known)
        return all(mine <= max(_WORSE * its, its + _AS_GOOD) for mine, its in pairs)

    best = min(filter(even, mean), key=mean.__getitem__, default=plain)
    gain = mean[plain] - mean[best]
    error = np.linalg.norm(weights * (losses[plain] - losses[best] - gain))
    return best if gain > error else plain


def _chains(shapes: Sequence[Shape], data: PointArrays) -> list[list[Shape]]:
    """Shapes that differ in the norm only, together; of those with experts the scale that fits best."""
    chains: dict[tuple[tuple[int, ...], float | None], list[Shape]] = {}
    for shape in shapes:
        chains.setdefault((shape.knots, shape.experts), []).append(shape)
    plain = [chain for (_, experts), chain in chains.items() if experts is None]
    scaled = [chain for (_, experts), chain in chains.items() if experts is not None]
    losses = [
        min(_loss(s.times(data.columns(s), c)[0], data) for s, c in _solve_chain(chain, data)) for chain in scaled
    ]
    return [*plain, scaled[int(np.argmin(losses))]] if scaled else plain


def _norms_up_to(shape: Shape) -> list[Shape]:
    norms = [n for n in (1.0, 2.0, 4.0, float("inf")) if n <= shape.norm]
    return [replace(shape, norm=norm) for norm in norms]


def _solve_chain(shapes: Sequence[Shape], data: PointArrays) -> list[tuple[Shape, Floats]]:
    """Solves of rising norm, each begun at the one before. A sum has no ``weights_s``: it begins at half the overhead."""
    found: list[tuple[Shape, Floats]] = []
    before: dict[str, float] = {}
    for shape in shapes:
        start = before
        if before and "weights_s" in shape.names and "weights_s" not in before:
            half = before["overhead_s"] / 2
            start = before | {"weights_s": half, "overhead_s": half}
        solution = _solve(shape, data, np.array([start[name] for name in shape.names]) if start else None)
        before = dict(zip(shape.names, solution.tolist(), strict=True))
        found.append((shape, solution))
    return found


def _solve(shape: Shape, data: PointArrays, start: Floats | None) -> Floats:
    columns = data.columns(shape)
    scale = np.sqrt(np.mean((columns / data.seconds[:, None]) ** 2, axis=0))
    scale[scale == 0] = 1.0
    columns = columns / scale
    bounds = np.array([shape.most[name] for name in shape.names])
    most = bounds * scale
    coefficients = _weighted(columns / data.seconds[:, None], data.weights, most) if start is None else start * scale
    for _ in range(2):
        predicted, _ = shape.times(columns, coefficients)
        usual = 1.4826 * np.median(np.abs(predicted / data.seconds - 1) * data.weights)
        coefficients = _descend(shape, columns, data, coefficients, 2 * max(float(usual), 0.005), most)
    found: Floats = np.minimum(coefficients / scale, bounds)  # which rounding may exceed
    return found


def _descend(
    shape: Shape, columns: Floats, data: PointArrays, coefficients: Floats, clip: float, most: Floats
) -> Floats:
    """Gauss–Newton on Huber's loss with halved steps; no coefficient rises above ``most``."""
    predicted, derivatives = shape.times(columns, coefficients)
    loss = _huber(predicted, data, clip)
    for _ in range(40):
        residual = np.abs(predicted / data.seconds - 1) * data.weights
        robust = np.sqrt(np.minimum(1.0, clip / np.maximum(residual, 1e-12)))
        wanted = _weighted(derivatives / data.seconds[:, None], data.weights * robust, most)
        share, before = 1.0, loss
        while share > 0.02:
            tried = coefficients + share * (wanted - coefficients)
            predicted_there, derivatives_there = shape.times(columns, tried)
            loss_there = _huber(predicted_there, data, clip)
            if loss_there < loss:
                coefficients, predicted, derivatives, loss = tried, predicted_there, derivatives_there, loss_there
                break
            share /= 2
        if loss > before * (1 - 1e-5):
            break
    return coefficients


def _weighted(relative: Floats, weights: Floats, most: Floats) -> Floats:
    """Least squares of ``relative · x ≈ 1`` within 0 … ``most``, with a trace of a ridge so that equal columns share alike."""
    width = relative.shape[1]
    ridge = _RIDGE * np.sqrt(len(relative)) * np.eye(width)
    rows, wanted = np.vstack([relative * weights[:, None], ridge]), np.concatenate([weights, np.zeros(width)])
    solution: Floats = nnls(rows, wanted, maxiter=50 * width)[0]
    if (solution > most).any():
        found = lsq_linear(rows, wanted, bounds=(0.0, most), method="bvls", max_iter=50 * width).x
        solution = np.clip(found, 0.0, most)  # it is within the bounds to rounding
    return solution


def _huber(predicted: Floats, data: PointArrays, clip: float) -> float:
    residual = np.abs(predicted / data.seconds - 1) * data.weights
    return float(np.mean(np.where(residual <= clip, residual**2, 2 * clip * residual - clip**2)))


def _covariance(shape: Shape, coefficients: Floats, data: PointArrays) -> Floats:
    """Of the coefficients above zero; those at zero are held there, with none."""
    columns = data.columns(shape)
    predicted, derivatives = shape.times(columns, coefficients)
    free = coefficients > 0
    residual = (predicted / data.seconds - 1) * data.weights
    usual = max(1.4826 * float(np.median(np.abs(residual))), 1e-4)
    rows = (derivatives / data.seconds[:, None] * data.weights[:, None])[:, free] * coefficients[free]
    _, scales, directions = np.linalg.svd(rows, full_matrices=False)
    known = scales > 1e-6 * scales.max(initial=0.0)  # along the others the points say nothing
    wide = directions[known] / scales[known, None] * usual
    relative = wide.T @ wide  # so that rounding makes no variance negative
    relative = (relative + relative.T) / 2  # an inverse is symmetric only to rounding
    covariance = np.zeros((len(coefficients), len(coefficients)))
    covariance[np.ix_(free, free)] = relative * np.outer(coefficients[free], coefficients[free])
    return covariance
