"""Predicting the time of a step: the protocol, and the learner that needs to be told nothing about the hardware.

:class:`StepLearner` fits two linear pieces to the steps it sees and predicts their maximum::

    decode piece   a0 + a1·decodes + a2·context
    mixed piece    b0 + b1·prefill tokens + b2·decodes + b3·context + b4·attention pairs

Where memory and compute overlap, a step takes the longer of two times, and each piece becomes one of them; where they
add up, the mixed piece holds the sum. A step without prompts belongs to the decode piece; any other to the piece that
comes closer to it. Each is fitted by recursive least squares with directional forgetting (Cao and Schwartz, Automatica
36, 2000): only what a new step speaks about is forgotten, so the covariance cannot wind up while the inputs stand still,
and a change of speed is followed even then. Residuals are relative and clipped (Huber); coefficients never go below zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

DOUBT = 0.3
"""How far off a machine may be, relatively, from what a profile of it said."""

_NOISE = 0.05  # deviation of a step from what can be predicted at all, relative: the unit of covariances


class StepFeatures(NamedTuple):
    """What a step's time depends on; the same numbers as in :class:`runtime.records.StepRecord`."""

    decodes: int
    decode_context: int
    prefill_tokens: int
    prefill_context: int
    prefill_attention: int
    chunks: int = 0


class StepModel(Protocol):
    """Predicts how long a step takes."""

    def predict(self, step: StepFeatures) -> float: ...


class Knowledge(NamedTuple):
    """What a learner has learned: unit-free coefficients of its two pieces, their covariances, and its unit of time, s."""

    unit_s: float
    decode: Sequence[float]
    decode_covariance: Sequence[Sequence[float]]
    mixed: Sequence[float]
    mixed_covariance: Sequence[Sequence[float]]


class RecursiveLeastSquares:
    """Non-negative coefficients of ``n`` inputs, all of them expected to be of order one.

    Each sample is divided by its own result, so that relative errors are what is made small; a stall ten times too long
    then speaks with a tenth of the weight. ``forgetting`` is the weight that old knowledge keeps in the direction of each new
    input. ``clip`` bounds a relative residual to that many times the usual one (a running mean, at least 1%).
    """

    __slots__ = ("_clip", "_cov", "_forgetting", "_free", "_info", "coefficients", "samples", "spread")

    def __init__(self, n: int, *, forgetting: float = 0.98, prior: float = 100.0, clip: float = 4.0) -> None:
        self.coefficients = [0.0] * n
        self._free = [0.0] * n  # the same without the bound at zero: the recursion needs it undisturbed
        self.samples = 0
        self.spread = 0.0
        self._forgetting = forgetting
        self._clip = clip
        self._cov = [[prior if i == j else 0.0 for j in range(n)] for i in range(n)]
        self._info = [[1 / prior if i == j else 0.0 for j in range(n)] for i in range(n)]

    def predict(self, x: Sequence[float]) -> float:
        return sum(map(float.__mul__, self.coefficients, x))

    def believe(self, coefficients: Sequence[float], covariance: Sequence[Sequence[float]], doubt: float) -> None:
        """Begin at ``coefficients``, which may be off by about ``doubt`` all together, and by a fifth of that each.

        ``covariance`` is that of relative residuals of variance 1; what it says of how they go together is kept.
        """
        scale = (doubt / _NOISE) ** 2
        own = [0.04 * scale * max(c * c, 1e-4) for c in coefficients]
        self._cov = [
            [covariance[i][j] + scale * a * b + (own[i] if i == j else 0.0) for j, b in enumerate(coefficients)]
            for i, a in enumerate(coefficients)
        ]
        self._info = _inverse(self._cov)
        self.coefficients, self._free = list(coefficients), list(coefficients)
        self.samples = 4 * len(coefficients)
        self.spread = doubt

    def covariance(self) -> list[list[float]]:
        return [row[:] for row in self._cov]

    def update(self, x: Sequence[float], y: float) -> float:
        """Learn that inputs ``x`` gave ``y`` > 0; returns the relative residual before, (y − predicted) / y."""
        mul = float.__mul__
        cov, info, keep = self._cov, self._info, self._forgetting
        x = [v / y for v in x]
        residual = 1.0 - sum(map(mul, self._free, x))
        rx = [sum(map(mul, row, x)) for row in info]
        known = sum(map(mul, rx, x))
        px = [sum(map(mul, row, x)) for row in cov]
        # Forget in the direction of x only: cov grows by a multiple of x·xᵀ, info shrinks by the matching term.
        # Where hardly anything is known there is nothing to forget.
        if known > 1.0:
            grow = (1 - keep) / (keep * known)
            shrink = (1 - keep) / known
            xx = sum(map(mul, x, x))
            px = [p + grow * xx * v for p, v in zip(px, x, strict=True)]
            for i, xi in enumerate(x):
                cov[i] = [c + grow * xi * xj for c, xj in zip(cov[i], x, strict=True)]
                info[i] = [c - shrink * rx[i] * rj + xi * xj for c, rj, xj in zip(info[i], rx, x, strict=True)]
        else:
            for i, xi in enumerate(x):
                info[i] = [c + xi * xj for c, xj in zip(info[i], x, strict=True)]
        gain_of = 1.0 + sum(map(mul, px, x))
        step = residual
        if self.samples > 2 * len(x):
            most = self._clip * max(self.spread, 0.01)
            step = min(max(residual, -most), most)
        self.samples += 1
        weight = max(0.05, 1 / self.samples)
        self.spread += weight * (min(abs(residual), 1.0) - self.spread)
        scale = step / gain_of
        self._free = [c + scale * p for c, p in zip(self._free, px, strict=True)]
        for i, pi in enumerate(px):
            share = pi / gain_of
            cov[i] = [c - share * pj for c, pj in zip(cov[i], px, strict=True)]
        self.coefficients = self._free[:] if min(self._free) >= 0 else self._non_negative()
        return residual

    def _non_negative(self) -> list[float]:
        """The non-negative coefficients nearest to the free ones in the metric of what is known.

        Coordinate descent on the non-negative least-squares problem, a few sweeps from where the last one ended.
        """
        mul = float.__mul__
        info, found = self._info, self.coefficients[:]
        wanted = [sum(map(mul, row, self._free)) for row in info]
        for _ in range(4):
            moved = 0.0
            for i, row in enumerate(info):
                before = found[i]
                found[i] = after = max(0.0, before + (wanted[i] - sum(map(mul, row, found))) / row[i])
                moved = max(moved, abs(after - before))
            if moved < 1e-5:  # of coefficients of order one: far below what a step can teach
                break
        return found


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of a symmetric positive definite matrix: Gauss–Jordan, which needs no pivoting there."""
    n = len(matrix)
    rows = [[*map(float, row), *(float(i == j) for j in range(n))] for i, row in enumerate(matrix)]
    for i, row in enumerate(rows):
        rows[i] = row = [v / row[i] for v in row]
        for j, other in enumerate(rows):
            if j != i:
                rows[j] = [v - other[i] * w for v, w in zip(other, row, strict=True)]
    return [row[n:] for row in rows]


class StepLearner:
    """Learns step times online. ``observe`` costs some 20 µs and neither grows nor slows with the number of steps.

    The first ``warm_up`` steps are left out (caches, lazy initialisation). ``ready`` says that enough has been seen to
    predict. Times are learned relative to the first ones seen, so hardware of any speed looks alike.
    """

    __slots__ = ("_decode", "_mixed", "_seen", "_unit", "_warm_up", "error")

    # What counts as one unit of each input, so that all are of order one.
    _TOKENS, _DECODES, _CONTEXT, _PAIRS = 1 / 256, 1 / 64, 1 / 32768, 1 / 262144

    def __init__(self, *, forgetting: float = 0.98, warm_up: int = 4) -> None:
        self._decode = RecursiveLeastSquares(3, forgetting=forgetting)
        self._mixed = RecursiveLeastSquares(5, forgetting=forgetting)
        self._unit = 0.0
        self._seen = 0
        self._warm_up = warm_up
        self.error = 1.0
        """Running mean of the relative error of predictions made before each step was learned."""

    @classmethod
    def warm_start(cls, known: Knowledge, *, doubt: float = DOUBT, forgetting: float = 0.98) -> StepLearner:
        """A learner that predicts from the start, by what another has learned of this hardware, perhaps long ago.

        ``doubt``: how far off, relatively, all of it may be together; a machine 1.8 times slower is followed within a few
        steps, and what each coefficient is by itself is learned as it shows. Raises ``ValueError`` for what is no knowledge.
        """
        learner = cls(forgetting=forgetting)
        for piece, values, covariance in (
            (learner._decode, known.decode, known.decode_covariance),
            (learner._mixed, known.mixed, known.mixed_covariance),
        ):
            size = len(piece.coefficients)
            if len(values) != size or [len(row) for row in covariance] != [size] * size:
                raise ValueError(
                    f"{len(values)} coefficients with {len(covariance)} rows of covariance; {size} are needed"
                )
            if not all(map(math.isfinite, [*values, *(v for row in covariance for v in row)])) or min(values) < 0:
                raise ValueError(
                    f"coefficients are {values}; they must be numbers of at least 0, as must be their variances"
                )
            if any(values):  # a piece that never saw a step has nothing to tell
                piece.believe(values, covariance, doubt)
        if not (math.isfinite(known.unit_s) and known.unit_s > 0):
            raise ValueError(f"unit_s is {known.unit_s}; it must be above 0")
        learner._unit = known.unit_s
        learner.error = 0.1
        return learner

    @property
    def knowledge(self) -> Knowledge:
        """What :meth:`warm_start` begins with."""
        decode, mixed = self._decode, self._mixed
        return Knowledge(self._unit, decode.coefficients, decode.covariance(), mixed.coefficients, mixed.covariance())

    @property
    def ready(self) -> bool:
        return self._decode.samples + self._mixed.samples >= 12

    @property
    def samples(self) -> int:
        """Steps learned from."""
        return self._decode.samples + self._mixed.samples

    def _inputs(self, step: StepFeatures) -> tuple[list[float], list[float]]:
        decodes = step.decodes * self._DECODES
        context = (step.decode_context + step.prefill_context) * self._CONTEXT
        mixed = [1.0, step.prefill_tokens * self._TOKENS, decodes, context, step.prefill_attention * self._PAIRS]
        return [1.0, decodes, context], mixed

    def predict(self, step: StepFeatures) -> float:
        """Seconds; 0 before anything was learned."""
        decode, mixed = self._inputs(step)
        if step.prefill_tokens == 0 and self._decode.samples:
            return self._unit * self._decode.predict(decode)
        if not self._decode.samples:
            return self._unit * self._mixed.predict(mixed)
        return self._unit * max(self._decode.predict(decode), self._mixed.predict(mixed))

    def observe(self, step: StepFeatures, seconds: float, predicted: float | None = None) -> None:
        """Learn from a step. A time that is not a positive finite number is ignored.

        ``predicted``: what :meth:`predict` says of it, if the caller has just asked.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self._seen += 1
        if self._seen <= self._warm_up:
            return
        if not self._unit:
            self._unit = seconds
        y = seconds / self._unit
        decode, mixed = self._inputs(step)
        if self.ready:
            predicted = self.predict(step) if predicted is None else predicted
            self.error += 0.05 * (min(1.0, abs(predicted / seconds - 1)) - self.error)
        if step.prefill_tokens == 0:
            self._decode.update(decode, y)
            return
        below = self._decode.predict(decode) if self._decode.samples > 3 else 0.0
        above = self._mixed.predict(mixed)
        if self._mixed.samples > 5 and below > above and abs(below - y) < abs(above - y):
            self._decode.update(decode, y)
        else:
            self._mixed.update(mixed, y)

    def rescale(self, factor: float) -> None:
        """The machine takes ``factor``, above 0, times as long as it did, whatever a step holds."""
        self._unit *= factor

    def most_prefill(self, decodes: int, context: int, seconds: float) -> float:
        """The most prompt tokens that a step may hold beside ``decodes`` (reading ``context`` tokens) to take ``seconds``.

        Negative when the decodes alone take longer, inf when prompts cost nothing that has been seen. The tokens are taken
        as one fresh chunk, whose attention costs the most.
        """
        if not self._unit:
            return math.inf
        room = seconds / self._unit
        if decodes and self._decode.samples:
            d0, d1, d2 = self._decode.coefficients
            over = d0 + d1 * decodes * self._DECODES + d2 * context * self._CONTEXT - room
            if over > 0:
                return -over * self._unit
        if not self._mixed.samples:
            return math.inf
        m0, m1, m2, m3, m4 = self._mixed.coefficients
        left = room - m0 - m2 * decodes * self._DECODES - m3 * context * self._CONTEXT
        if left <= 0:
            return 0.0
        linear = m1 * self._TOKENS + m3 * self._CONTEXT
        square = m4 * self._PAIRS / 2
        if square > 0:
            return (math.sqrt(linear * linear + 4 * square * left) - linear) / (2 * square)
        return left / linear if linear > 0 else math.inf
