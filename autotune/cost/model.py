"""The cost model: how long a step takes on a machine that was measured, of a physical shape (:mod:`autotune.cost.shape`).

Fitted once to a few dozen kinds of steps (:func:`fit_cost_model`), kept in the profile, and used by the simulator for every
step it simulates. It stands behind the same protocol as the online learner (:class:`runtime.step_model.StepModel`), which
its :class:`~autotune.cost.facts.LearnerFacts` give a warm start.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import numpy as np

from autotune.cost.facts import CostFacts, JitterFacts, LearnerFacts, RegionError, StepPoint
from autotune.cost.fit import FEWEST, SERVED, Fitted, fit
from autotune.cost.shape import EXPERT_TOKENS, TOKEN, Shape, as_run
from runtime.records import percentile
from runtime.step_model import NO_GRAPHS, TERMS, StepFeatures, StepGraphs, StepLearner, further_rows, padding_rows

WRITTEN_OUT = frozenset(
    (
        "step",
        "decodes",
        "chunks",
        "weights",
        "experts",
        "decode_context",
        "prefill_context",
        "tokens",
        "pairs",
        "prompts",
        "mixed_context",
        "tiles_128",
        "tiles_256",
        "eager",
        "padding_128",
        "padding_256",
    )
)
"""The terms that :meth:`CostModel.predict` names; those that came after them it takes from the table."""

_NOTHING = StepFeatures(0, 0, 0, 0, 0)  # a term of which even this holds some is the overhead itself
_FIRST_TABLE = 1024
_FROM_TABLE = 0.0  # in place of the norm: it is met last, so that models without further terms do not wait for it
_PASSES = 3  # over the points, by the learner: the first decides which of its two pieces a step belongs to


class CostModel:
    """Seconds of a step by a fitted formula. ``facts`` are all there is to it: equal facts, equal predictions.

    Raises ``ValueError`` for facts of no known family or with a coefficient below zero.
    """

    __slots__ = (
        "_chunk",
        "_compute",
        "_decode",
        "_decode_kv",
        "_eager",
        "_memory",
        "_mixed_kv",
        "_more",
        "_norm",
        "_overhead",
        "_pair",
        "_prefill_kv",
        "_prompt",
        "_prompt_rows",
        "_recorded",
        "_rows",
        "_sequences",
        "_shape",
        "_values",
        "facts",
    )

    def __init__(self, facts: CostFacts) -> None:
        values = facts.coefficients
        try:
            self._shape = Shape.of(facts.family, values, facts.graphs)
        except ValueError as error:
            raise ValueError(f"cost_model.{error}") from None
        self.facts = facts
        self._values = values
        self._overhead, self._decode, self._chunk = values["overhead_s"], values["decode_s"], values["chunk_s"]
        self._decode_kv, self._prefill_kv, self._pair = values["decode_kv_s"], values["prefill_kv_s"], values["pair_s"]
        self._prompt, self._mixed_kv = values.get("prompt_s", 0.0), values.get("mixed_kv_s", 0.0)
        self._eager = values.get("eager_s", 0.0)
        self._more = [
            (term, values[term.coefficient])
            for term in self._shape.terms
            if term.name not in WRITTEN_OUT and values.get(term.coefficient)
        ]
        self._norm = _FROM_TABLE if self._more else self._shape.norm
        self._rows = facts.graphs.rows_by_decodes()  # computed in a step of so many decodes and no prompts
        self._prompt_rows, self._sequences = facts.graphs.rows_by_tokens(), facts.graphs.sequences
        self._recorded = len(self._prompt_rows) - 1  # tokens of the largest step with prompts that is recorded
        self._memory: list[float] = []  # by tokens: what does not depend on context
        self._compute: list[float] = []
        self._grow(max(_FIRST_TABLE, len(self._rows), len(self._prompt_rows)))

    def __reduce__(self) -> tuple[type[CostModel], tuple[CostFacts]]:
        return CostModel, (self.facts,)

    def predict(self, step: StepFeatures) -> float:
        """Seconds of ``step``."""
        decodes, context, prefill, prefix, pairs, chunks, drafted = step
        tokens = decodes + prefill + drafted
        if tokens >= len(self._rows):
            self._grow(tokens + 1)
        outside = self._overhead + self._decode * decodes + self._chunk * chunks
        if tokens == decodes:
            tokens = self._rows[tokens]
        else:
            if prefill:
                outside += self._prompt
                outside += self._mixed_kv * context
            if tokens <= self._recorded and decodes + chunks <= self._sequences and not drafted:
                tokens = self._prompt_rows[tokens]
            else:
                outside += self._eager
        memory = self._memory[tokens] + (self._decode_kv * context + self._prefill_kv * prefix)
        compute = self._compute[tokens] + self._pair * (context + pairs)
        norm = self._norm
        if norm == 1.0:
            return outside + (memory + compute)
        if norm == math.inf:
            return outside + (memory if memory > compute else compute)
        if norm == 2.0:
            return outside + math.sqrt(memory * memory + compute * compute)
        if norm == 4.0:
            memory, compute = memory * memory, compute * compute
            return outside + math.sqrt(math.sqrt(memory * memory + compute * compute))
        more = {"outside": outside, "memory": memory, "compute": compute}
        rows, eager = as_run(step, self.facts.graphs)
        for term, each in self._more:
            amount = float(term.amount(rows if term.padded else step))
            more[term.group] += each * amount * (bool(eager) if term.unrecorded_only else 1)
        memory, compute, norm = more["memory"], more["compute"], self._shape.norm
        if norm == math.inf:
            return more["outside"] + max(memory, compute)
        both: float = (memory**norm + compute**norm) ** (1 / norm)
        return more["outside"] + both

    def uncertainty(self, step: StepFeatures) -> float:
        """The relative error to expect of ``predict(step)``: that of the step's region, and what the points leave open there.

        The first is the cross-validated median where steps were measured; the second is the covariance of the coefficients, to
        first order, which grows with the distance from them. 0 for a model that no points stand behind.
        """
        region = "decode" if not step.prefill_tokens else "mixed" if step.decodes else "prefill"
        if step.prefill_context > step.prefill_tokens and not step.decodes:
            region = "prefix"
        names = list(self._values)
        at = [names.index(name) if name in self._values else -1 for name in self._shape.names]
        known = np.array([self._values.get(name, 0.0) for name in self._shape.names])
        seconds, derivatives = self._shape.times(self._shape.columns(np.array([step], dtype=float)), known)
        covariance = np.array(self.facts.covariance)[np.ix_(at, at)] * np.outer(known > 0, known > 0)
        open_ = math.sqrt(max(0.0, float(derivatives[0] @ covariance @ derivatives[0]))) / max(float(seconds[0]), 1e-12)
        return math.hypot(self.facts.region_error(region), open_)

    def predict_run(self, decodes: int, context: int, count: int) -> list[float]:
        """Seconds of each of ``count`` steps of ``decodes`` decodes alone, whose context grows by one token each.

        ``context`` is what the first of them reads. The same bits as ``count`` calls of :meth:`predict`.
        """
        if decodes < 1:
            raise ValueError(f"decodes is {decodes}; it must be at least 1")
        if decodes >= len(self._rows):
            self._grow(decodes + 1)
        rows = self._rows[decodes]
        m, c = self._memory[rows], self._compute[rows]
        kv, pair, norm, root = self._decode_kv, self._pair, self._norm, math.sqrt
        outside = self._overhead + self._decode * decodes
        reads = range(context, context + decodes * count, decodes)
        if self._more:
            return [self.predict(StepFeatures(decodes, n, 0, 0, 0)) for n in reads]
        if norm == 1.0:
            return [outside + ((m + kv * n) + (c + pair * n)) for n in reads]
        if norm == math.inf:
            return [outside + (a if (a := m + kv * n) > (b := c + pair * n) else b) for n in reads]
        if norm == 2.0:
            return [outside + root((a := m + kv * n) * a + (b := c + pair * n) * b) for n in reads]
        squares = [((a := m + kv * n) * a, (b := c + pair * n) * b) for n in reads]
        return [outside + root(root(a * a + b * b)) for a, b in squares]

    def serving(self) -> CostModel:
        """What a step takes while requests come and go: ``facts.serving_overhead_s`` more than when nothing does."""
        if not self.facts.serving_overhead_s:
            return self
        coefficients = self._values | {"overhead_s": self._overhead + self.facts.serving_overhead_s}
        return CostModel(self.facts.model_copy(update={"coefficients": coefficients, "serving_overhead_s": 0.0}))

    def even(self) -> CostModel:
        """The same machine without its jitter: for comparing settings, whose steps would draw unlike factors."""
        return CostModel(self.facts.model_copy(update={"jitter": None}))

    def scaled(self, *, compute: float = 1.0, bandwidth: float = 1.0, overhead: float = 1.0) -> CostModel:
        """The model of a machine so many times as fast: ``compute=0.5`` takes twice as long to compute.

        The warm start is left out: it is of the machine that was measured. Raises ``ValueError`` for a factor not above 0.
        """
        speeds = {"compute": compute, "memory": bandwidth, "outside": overhead}
        for name, factor in (("compute", compute), ("bandwidth", bandwidth), ("overhead", overhead)):
            if not (math.isfinite(factor) and factor > 0):
                raise ValueError(f"{name} is {factor}; it must be above 0")
        factors = [1 / speeds[group] for _, group in self._shape.groups]
        named = dict(zip(self._shape.names, factors, strict=True))
        coefficients = {name: value * named.get(name, 1.0) for name, value in self._values.items()}
        factors = [named.get(name, 1.0) for name in coefficients]
        covariance = tuple(
            tuple(value * a * b for value, b in zip(row, factors, strict=True))
            for row, a in zip(self.facts.covariance, factors, strict=True)
        )
        update: dict[str, object] = {"coefficients": coefficients, "covariance": covariance, "learner": None}
        update["serving_overhead_s"] = self.facts.serving_overhead_s / overhead
        if (planned := self.facts.planned) is not None:
            faster = CostModel(planned).scaled(compute=compute, bandwidth=bandwidth, overhead=overhead)
            update["planned"] = faster.facts
        return CostModel(self.facts.model_copy(update=update))

    def _grow(self, least: int) -> None:
        """Lengthen the tables to ``least`` entries or more."""
        shape, values = self._shape, self._values
        weights, experts = values.get("weights_s", 0.0), values.get("experts_s", 0.0)
        scale = shape.experts or 1.0
        ends = (*shape.knots[1:], math.inf)
        segments = [(knot, end, values[f"{TOKEN}{knot}"]) for knot, end in zip(shape.knots, ends, strict=True)]
        begin, end = len(self._memory), max(least, 2 * len(self._memory))
        self._rows += range(len(self._rows), end)
        if experts:
            self._memory += [weights + experts * (1 - math.exp(-n / scale)) for n in range(begin, end)]
        else:
            self._memory += [weights] * (end - begin)
        tiles = [
            (rows, tile, each)
            for rows, name in ((further_rows, "tile"), (padding_rows, "padding"))
            for tile in (128, 256)
            if (each := values.get(f"{name}{tile}_s", 0.0))
        ]
        counts = np.arange(begin, end)
        found = np.zeros(end - begin)
        for start, to, each in segments:
            found += each * (np.clip(counts, start, to) - start)
        compute: list[float] = found.tolist()
        if tiles:
            for n, seconds in enumerate(compute, begin):
                compute[n - begin] = seconds + sum([each * rows(n, tile) for rows, tile, each in tiles])
        self._compute += compute


def fit_cost_model(
    points: Sequence[StepPoint],
    *,
    seconds: float = 0.0,
    serving_overhead_s: float = 0.0,
    jitter: JitterFacts | None = None,
    graphs: StepGraphs = NO_GRAPHS,
) -> CostModel:
    """The cost model of measured ``points``, its shape chosen by cross-validation.

    ``seconds``: what measuring them took; ``serving_overhead_s``, ``jitter``: by how much served steps take longer, and how they
    scatter; ``graphs``: the steps that the engine has recorded. All are kept with it. Raises ``ValueError`` for
    too few points to tell anything.
    """
    planned = [p for p in points if p.region != SERVED]
    of_planned = _fit(planned, seconds, None, graphs).facts if FEWEST <= len(planned) < len(points) else None
    found = _fit(points, seconds, of_planned, graphs)
    return CostModel(found.facts.model_copy(update={"serving_overhead_s": serving_overhead_s, "jitter": jitter}))


def _fit(points: Sequence[StepPoint], seconds: float, planned: CostFacts | None, graphs: StepGraphs) -> CostModel:
    fitted = fit(points, graphs)
    values = dict(zip(fitted.shape.names, fitted.coefficients.tolist(), strict=True))
    covariance, off = fitted.covariance.tolist(), errors(points, fitted)
    if fitted.shape.experts:
        values[EXPERT_TOKENS] = fitted.shape.experts
        covariance = [[*row, 0.0] for row in covariance] + [[0.0] * len(values)]
    return CostModel(
        CostFacts(
            family=fitted.shape.family,
            coefficients=values,
            covariance=tuple(map(tuple, covariance)),
            points=len(points),
            seconds=seconds,
            error=statistics.median(off),
            regions=region_errors(points, off),
            learner=_learner(points, graphs),
            planned=planned,
            graph_sizes=graphs.decodes,
            prompt_sizes=graphs.prompts,
            prompt_sequences=graphs.sequences,
        )
    )


def with_predictions(points: Sequence[StepPoint], graphs: StepGraphs = NO_GRAPHS) -> list[StepPoint]:
    """``points``, each with what a model fitted without it says of it. Raises as :func:`fit_cost_model`."""
    predicted = fit(points, graphs).held_out.tolist()
    return [p.model_copy(update={"predicted": float(t)}) for p, t in zip(points, predicted, strict=True)]


def errors(points: Sequence[StepPoint], fitted: Fitted) -> list[float]:
    """|predicted − measured| / measured of each point, predicted without it."""
    return [abs(predicted / p.seconds - 1) for p, predicted in zip(points, fitted.held_out.tolist(), strict=True)]


def region_errors(points: Sequence[StepPoint], errors: Sequence[float]) -> tuple[RegionError, ...]:
    """The relative ``errors`` of ``points``, region by region."""
    by_region: dict[str, list[float]] = {}
    for point, error in zip(points, errors, strict=True):
        by_region.setdefault(point.region, []).append(error)
    return tuple(
        RegionError(region=name, points=len(e), median=statistics.median(e), p90=percentile(e, 90) or 0.0)
        for name, e in by_region.items()
    )


def _learner(points: Sequence[StepPoint], graphs: StepGraphs) -> LearnerFacts:
    """What the online learner knows once it has met every point, in an order of no meaning, and forgotten none."""
    learner = StepLearner(forgetting=1.0, warm_up=0, graphs=graphs)
    order = random.Random(0).sample(points, len(points))
    for point in order * _PASSES:
        learner.observe(features_of(point), point.seconds)
    known = learner.knowledge
    return LearnerFacts(
        unit_s=known.unit_s,
        decode=tuple(known.decode),
        decode_covariance=_symmetric(known.decode_covariance),
        mixed=tuple(known.mixed),
        mixed_covariance=_symmetric(known.mixed_covariance),
    )


def undetermined_terms(points: Sequence[StepPoint]) -> list[str]:
    """The terms of which all ``points`` hold as much, so that no fit can tell what they cost.

    Of the terms there are none is among them where the plan had its time; a new one is until the plan makes steps for it. Tiles
    do not count, and neither does what is of steps that no recording holds: an engine may make no such step.
    """
    steps = [features_of(point) for point in points]
    return [
        term.name
        for term in TERMS.values()
        if term.coefficient
        and term.curve != "tiles"
        and not term.unrecorded_only
        and float(term.amount(_NOTHING)) == 0
        and len({float(term.amount(s)) for s in steps}) < 2
    ]


def features_of(point: StepPoint) -> StepFeatures:
    """The features of a measured step."""
    return StepFeatures(*(getattr(point, name) for name in StepFeatures._fields))


def _symmetric(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """Rid of what rounding has done to it."""
    size = range(len(rows))
    return tuple(tuple(max(0.0, rows[i][i]) if i == j else (rows[i][j] + rows[j][i]) / 2 for j in size) for i in size)
