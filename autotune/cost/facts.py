"""What is known of a machine's step times, as files hold it: points measured, the fitted model, its error, the learner's start.

A profile holds :class:`CostFacts`, its sidecar a line for each :class:`StepPoint`.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import AliasChoices, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from autotune.cost.fields import Amount, Count, Matrix, Number, Part, Positive, Row, Rows, Share, Text, check_order
from autotune.cost.shape import EXPERT_TOKENS, Shape
from runtime.step_model import Piece, StepGraphs, learned_terms

_MOST_EXPERT_TOKENS = 1e6
_LEAST: dict[Piece, int] = {piece: sum(term.required for term in learned_terms(piece)) for piece in ("decode", "mixed")}
"""Coefficients of each piece of the learner; a profile may hold more, those of terms that came later."""
_GRAPHS = ("graph_sizes", "prompt_sizes", "prompt_sequences")


class StepPoint(Part):
    """One kind of step, measured by the calibration: a line of the sidecar."""

    region: Text = Field(description="part of the plan it belongs to: decode, prefill, mixed, …")
    decodes: Count = Field(description="sequences that decode")
    decode_context: Count = Field(description="tokens they read, their new ones included")
    prefill_tokens: Count = Field(description="prompt tokens computed")
    prefill_context: Count = Field(description="tokens of the prompts up to the ends of their chunks")
    prefill_attention: Count = Field(description="(query, key) pairs of the chunks")
    chunks: Count = Field(default=0, description="prompts they belong to")
    drafted: Count = Field(default=0, description="drafted tokens computed beside the decodes")
    seconds: float = Field(gt=0, le=1e9, description="median of the repeats")
    spread: Amount = Field(description="interquartile range of the repeats over their median")
    repeats: Positive
    predicted: Amount | None = Field(default=None, description="s, by a model fitted without this point")


class RegionError(Part):
    """Cross-validated error of the cost model in one region: |predicted − measured| / measured."""

    region: Text
    points: Count
    median: Amount
    p90: Amount

    @model_validator(mode="after")
    def _ordered(self) -> RegionError:
        check_order(self, ("median", "p90"))
        return self


class LearnerFacts(Part):
    """What warm-starts the online learner: coefficients of its two pieces, of inputs without unit, and their covariances."""

    unit_s: float = Field(gt=0, le=1e9, description="its unit of time, s")
    decode: Row = Field(min_length=_LEAST["decode"])
    decode_covariance: Matrix
    mixed: Row = Field(min_length=_LEAST["mixed"])
    mixed_covariance: Matrix

    @model_validator(mode="after")
    def _of_the_terms_there_are(self) -> LearnerFacts:
        pieces: tuple[tuple[Piece, Row], ...] = (("decode", self.decode), ("mixed", self.mixed))
        for piece, row in pieces:
            if len(row) > (most := len(learned_terms(piece))):
                raise ValueError(f".{piece} has {len(row)} coefficients; this version knows {most} terms of that piece")
        check_covariance(".decode_covariance", self.decode_covariance, len(self.decode))
        check_covariance(".mixed_covariance", self.mixed_covariance, len(self.mixed))
        return self


class JitterFacts(Part):
    """How the times of served steps scatter around what the cost model and the serving overhead say: autocorrelated
    factors of mean 1.

    Drawn from ranks of a Gaussian process: so much of its variance (``persistent``) is a first-order autoregression with
    ``memory`` from one step to the next, the rest is new in each step.
    """

    quantiles: Row = Field(
        min_length=2,
        max_length=256,
        description="of the factor: means over equal shares of the time, in ascending order; their mean is 1",
    )
    persistent: Share = Field(description="share of the variance that is autocorrelated; the rest is new in each step")
    memory: Share = Field(description="correlation of that part from one step to the next")

    def four_in_five(self) -> tuple[float, float]:
        """Factors between which about four fifths of the time lie."""
        tenth = len(self.quantiles) // 10
        return self.quantiles[tenth], self.quantiles[-1 - tenth]

    @model_validator(mode="after")
    def _factors(self) -> JitterFacts:
        if min(self.quantiles) <= 0 or list(self.quantiles) != sorted(self.quantiles):
            raise ValueError(".quantiles are not in ascending order, or not all above 0")
        mean = sum(self.quantiles) / len(self.quantiles)
        if abs(mean - 1) > 1e-3:
            raise ValueError(
                f".quantiles have a mean of {mean:.4g}; it must be 1: how slow steps are is not theirs to say"
            )
        return self


class CostFacts(Part):
    """The cost model: what predicts the time of a step on this machine."""

    family: Text
    coefficients: dict[str, Number] = Field(min_length=1, description="by name, in SI units")
    covariance: Matrix = Field(description="of the coefficients, in the same order")
    points: Count = Field(description="kinds of steps measured")
    seconds: Amount = Field(description="what measuring them took, s")
    error: Amount = Field(description="median of the cross-validated relative error over all points")
    regions: tuple[RegionError, ...]
    learner: LearnerFacts | None
    planned: CostFacts | None = Field(
        default=None,
        description="the same fitted to planned steps alone, which cost less than served ones: what `autotune check` goes by",
    )
    serving_overhead_s: float = Field(
        default=0.0,
        validation_alias=AliasChoices(
            "serving_overhead_s", "excess_s"
        ),  # as profiles and studies before version 3 call it
        ge=0,
        le=1e3,
        description="that serving adds to a step beyond what the coefficients say, as short steps tell it, s",
    )
    jitter: JitterFacts | None = Field(default=None, description="of served steps; null: not known, none is simulated")
    graph_sizes: tuple[Rows, ...] = Field(
        default=(),
        max_length=4096,
        description="for how many rows the engine records steps of decodes alone (CUDA graphs), in ascending order: a step of "
        "fewer is padded to the next of them; left out where it records none",
    )
    prompt_sizes: tuple[Rows, ...] = Field(
        default=(),
        max_length=4096,
        description="for how many tokens, those of decodes among them, it records steps with prompts, likewise; left out where "
        "it records none",
    )
    prompt_sequences: Count = Field(
        default=0, description="the most sequences of a recorded step with prompts; left out where there are none"
    )

    @model_validator(mode="after")
    def _consistent(self) -> CostFacts:
        try:
            shape = Shape.of(self.family, self.coefficients, self.graphs)
        except ValueError as error:
            raise ValueError(f".{error}") from None
        most = shape.most | {EXPERT_TOKENS: _MOST_EXPERT_TOKENS}
        for name, value in self.coefficients.items():
            if value > most[name]:
                raise ValueError(f".coefficients.{name} is {value:g}; it must be at most {most[name]:g}")
        check_covariance(".covariance", self.covariance, len(self.coefficients))
        names = [r.region for r in self.regions]
        if len(set(names)) < len(names):
            raise ValueError(f".regions are {', '.join(names)}; each may be there once")
        for name, sizes in (("graph_sizes", self.graph_sizes), ("prompt_sizes", self.prompt_sizes)):
            if list(sizes) != sorted(set(sizes)):
                raise ValueError(f".{name} are {', '.join(map(str, sizes))}; each must be above the one before")
        if bool(self.prompt_sizes) != bool(self.prompt_sequences):
            raise ValueError(
                f".prompt_sequences is {self.prompt_sequences} with {len(self.prompt_sizes)} prompt_sizes; "
                "there must be both or neither"
            )
        for name in _GRAPHS:
            if self.planned is not None and getattr(self.planned, name) != getattr(self, name):
                raise ValueError(f".planned.{name} must be those of the cost model: it is the same engine's")
        if self.planned is not None and self.planned.planned is not None:
            raise ValueError(".planned.planned must be null: planned steps have no others among them")
        return self

    @model_serializer(mode="wrap")
    def _as_known(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A file says nothing of graphs where there are none, so that versions that know of none read it."""
        data: dict[str, Any] = dump(self)
        for name in _GRAPHS:
            if not getattr(self, name):
                data.pop(name, None)
        return data

    @property
    def graphs(self) -> StepGraphs:
        """The steps that the engine has recorded."""
        return StepGraphs(self.graph_sizes, self.prompt_sizes, self.prompt_sequences)

    def region_error(self, region: str) -> float:
        """The median error of ``region``, of all points where it has none of its own."""
        return next((r.median for r in self.regions if r.region == region), self.error)


def check_covariance(where: str, matrix: Matrix, size: int) -> None:
    """Raise ``ValueError`` unless ``matrix`` is ``size`` × ``size``, symmetric, and its diagonal not negative."""
    lengths = {len(row) for row in matrix}
    if len(matrix) != size or lengths - {size}:
        shape = f"{len(matrix)} rows of {' or '.join(map(str, sorted(lengths))) or 0}"
        raise ValueError(f"{where} has {shape}; it must be {size} × {size}, a row and a column for each coefficient")
    rounding = 1e-9 * max((abs(row[i]) for i, row in enumerate(matrix)), default=0.0)
    for i, row in enumerate(matrix):
        if row[i] < -rounding:
            raise ValueError(f"{where} has a variance of {row[i]:g} in row {i + 1}; none is negative")
        for j in range(i):
            scale = math.sqrt(abs(row[i])) * math.sqrt(abs(matrix[j][j]))
            if abs(row[j] - matrix[j][i]) > 1e-6 * max(scale, abs(row[j]), abs(matrix[j][i])) + rounding:
                raise ValueError(f"{where} is not symmetric in row {i + 1}, column {j + 1}")
