"""How long requests are: prompt and output tokens, drawn jointly.

A :class:`LengthModel` turns uniforms into pairs by inverse transform, two uniforms a request, so that changing a
distribution does not shift the draws of the requests after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from autotune.workload.randomness import BLOCK, Floats
from autotune.workload.spec import positive

Ints = NDArray[np.int64]


class Marginal(Protocol):
    """One distribution of lengths, as its quantile function."""

    def quantile(self, u: Floats) -> Floats:
        """Tokens (not rounded) at each of ``u`` in [0, 1)."""
        ...


@dataclass(frozen=True)
class Constant:
    """Always ``tokens``."""

    tokens: int

    def __post_init__(self) -> None:
        positive("tokens", self.tokens)

    def quantile(self, u: Floats) -> Floats:
        return np.full_like(u, float(self.tokens))


@dataclass(frozen=True)
class Uniform:
    """Whole numbers from ``low`` to ``high``, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        positive("low", self.low)
        if self.high < self.low:
            raise ValueError(f"high is {self.high}; it must be at least low, {self.low}")

    def quantile(self, u: Floats) -> Floats:
        return np.floor(self.low + u * (self.high - self.low + 1))


@dataclass(frozen=True)
class Lognormal:
    """Lognormal with this median and log-scale deviation ``sigma``: the usual shape of text lengths."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        positive("median", self.median)
        positive("sigma", self.sigma)

    @classmethod
    def of_mean_cv(cls, mean: float, cv: float) -> Lognormal:
        """The lognormal with this mean and coefficient of variation."""
        positive("mean", mean)
        positive("cv", cv)
        variance = math.log1p(cv**2)
        return cls(median=mean / math.exp(variance / 2), sigma=math.sqrt(variance))

    def quantile(self, u: Floats) -> Floats:
        scores: Floats = ndtri(np.clip(u, 1e-12, 1 - 1e-12))
        return self.median * np.exp(self.sigma * scores)


@dataclass(frozen=True)
class QuantileTable:
    """A distribution as its quantiles at ``levels`` (ascending, from 0 to 1), straight lines between them."""

    levels: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.levels) != len(self.values) or len(self.levels) < 2:
            raise ValueError(
                f"{len(self.levels)} levels and {len(self.values)} values; there must be as many, at least 2"
            )
        if self.levels[0] != 0 or self.levels[-1] != 1 or any(np.diff(self.levels) <= 0):
            raise ValueError("levels must ascend from 0 to 1")
        if any(np.diff(self.values) < 0):
            raise ValueError("values must not descend")

    @classmethod
    def fit(cls, data: Floats | Ints, levels: Floats) -> QuantileTable:
        """Quantiles of ``data`` that occurred (no interpolation: lengths that are often met stay often met)."""
        values = np.quantile(data, levels, method="inverted_cdf")
        return cls(tuple(levels.tolist()), tuple(float(v) for v in values))

    def quantile(self, u: Floats) -> Floats:
        return np.interp(u, self.levels, self.values)


class LengthModel(Protocol):
    """Joint distribution of prompt and output tokens."""

    def draw(self, prompt_u: Floats, output_u: Floats) -> tuple[Ints, Ints]:
        """Prompt and output tokens, each at least 1, from uniforms of the same shape [n]."""
        ...


@dataclass(frozen=True)
class Independent:
    """Prompt and output lengths that know nothing of each other."""

    prompt: Marginal
    output: Marginal

    def draw(self, prompt_u: Floats, output_u: Floats) -> tuple[Ints, Ints]:
        return _tokens(self.prompt.quantile(prompt_u)), _tokens(self.output.quantile(output_u))


@dataclass(frozen=True)
class Conditional:
    """Output lengths that depend on the prompt: one output distribution for each of ``len(outputs)`` equally likely
    bands of prompt lengths.

    A checkerboard on the copula scale. A Gaussian copula has one number for the dependence and only a monotone one; in
    chat traffic short, middle and long prompts have short, long and short answers, and their rank correlation is near 0.
    """

    prompt: Marginal
    outputs: tuple[Marginal, ...]

    def __post_init__(self) -> None:
        if not self.outputs:
            raise ValueError("outputs is empty; there must be at least one band")

    def draw(self, prompt_u: Floats, output_u: Floats) -> tuple[Ints, Ints]:
        band = np.minimum((prompt_u * len(self.outputs)).astype(np.intp), len(self.outputs) - 1)
        output = np.empty_like(output_u)
        for i, marginal in enumerate(self.outputs):
            output[band == i] = marginal.quantile(output_u[band == i])
        return _tokens(self.prompt.quantile(prompt_u)), _tokens(output)


def pairs(model: LengthModel, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """(prompt, output) tokens of ``model`` without end."""
    while True:
        uniforms = rng.random((BLOCK, 2))
        prompts, outputs = model.draw(uniforms[:, 0], uniforms[:, 1])
        yield from zip(prompts.tolist(), outputs.tolist(), strict=True)


def _tokens(values: Floats) -> Ints:
    return np.maximum(np.rint(values), 1).astype(np.int64)
