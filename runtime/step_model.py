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
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, Self

from runtime.least_squares import RecursiveLeastSquares
from runtime.records import StepRecord

__all__ = ["DOUBT", "Knowledge", "RecursiveLeastSquares", "StepFeatures", "StepLearner", "StepModel"]

DOUBT = 0.3
"""How far off a machine may be, relatively, from what a profile of it said."""


class StepFeatures(NamedTuple):
    """What a step's time depends on; the same numbers as in :class:`runtime.records.StepRecord`."""

    decodes: int
    decode_context: int
    prefill_tokens: int
    prefill_context: int
    prefill_attention: int
    chunks: int = 0

    @classmethod
    def of(cls, record: StepRecord) -> Self:
        """Those of a step that was made."""
        return cls(
            record.decodes,
            record.decode_context,
            record.prefill_tokens,
            record.prefill_context,
            record.prefill_attention,
            record.chunks,
        )


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

    def _decode_inputs(self, step: StepFeatures) -> list[float]:
        context = (step.decode_context + step.prefill_context) * self._CONTEXT
        return [1.0, step.decodes * self._DECODES, context]

    def _mixed_inputs(self, step: StepFeatures, decode: list[float]) -> list[float]:
        _, decodes, context = decode
        return [1.0, step.prefill_tokens * self._TOKENS, decodes, context, step.prefill_attention * self._PAIRS]

    def predict(self, step: StepFeatures) -> float:
        """Seconds; 0 before anything was learned."""
        decode = self._decode_inputs(step)
        if step.prefill_tokens == 0 and self._decode.samples:
            a0, a1, a2 = self._decode.coefficients
            _, decodes, context = decode
            return self._unit * (a0 + a1 * decodes + a2 * context)
        mixed = self._mixed_inputs(step, decode)
        if not self._decode.samples:
            return self._unit * self._mixed.predict(mixed)
        return self._unit * max(self._decode.predict(decode), self._mixed.predict(mixed))

    def observe(self, step: StepFeatures, seconds: float, predicted: float | None = None) -> None:
        """Learn from a step. A time that is not a positive finite number is ignored.

        ``predicted``: what :meth:`predict` says of it, if the caller has just asked.
        """
        if not 0 < seconds < math.inf:
            return
        self._seen += 1
        if self._seen <= self._warm_up:
            return
        if not self._unit:
            self._unit = seconds
        y = seconds / self._unit
        decode = self._decode_inputs(step)
        if self.ready:
            predicted = self.predict(step) if predicted is None else predicted
            self.error += 0.05 * (min(1.0, abs(predicted / seconds - 1)) - self.error)
        if step.prefill_tokens == 0:
            self._decode.update(decode, y)
            return
        mixed = self._mixed_inputs(step, decode)
        below = self._decode.predict(decode) if self._decode.samples > 3 else 0.0
        above = self._mixed.predict(mixed)
        if self._mixed.samples > 5 and below > above and abs(below - y) < abs(above - y):
            self._decode.update(decode, y)
        else:
            self._mixed.update(mixed, y)

    def rescale(self, factor: float) -> None:
        """The machine takes ``factor``, above 0, times as long as it did, whatever a step holds."""
        self._unit *= factor

    def most_prefill(
        self, decodes: int, context: int, seconds: float, in_progress: Iterable[tuple[int, int]] = ()
    ) -> float:
        """The most prompt tokens that a step may hold beside ``decodes`` (reading ``context`` tokens) to take ``seconds``.

        Negative when the decodes alone take longer, inf when prompts cost nothing that has been seen. ``in_progress``: (tokens
        computed, tokens that this step may compute) of prompts that come first; their attention reads what was computed. What
        is left of the time goes to one fresh chunk.
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
        read, pair = m3 * self._CONTEXT, m4 * self._PAIRS
        linear, square = m1 * self._TOKENS + read, pair / 2
        first = 0
        for start, count in in_progress:
            left -= read * start
            each = linear + pair * start
            cost = count * (each + square * count)
            if cost >= left:
                return first + (_positive_root(square, each, left) if left > 0 else 0.0)
            left -= cost
            first += count
        return first + _positive_root(square, linear, left)


def _positive_root(square: float, linear: float, value: float) -> float:
    """The n at which ``square·n² + linear·n`` is ``value`` > 0; inf if it never is."""
    if square > 0:
        return (math.sqrt(linear * linear + 4 * square * value) - linear) / (2 * square)
    return value / linear if linear > 0 else math.inf
