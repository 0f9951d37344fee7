"""What a cost model may look like: its terms by name, in three groups, and how memory and compute time combine.

The terms are the rows of :data:`runtime.step_model.TERMS` that have a coefficient. A step takes ``outside + combine(memory,
compute)`` seconds. Every group is a sum of non-negative coefficients times what a step holds (roofline: Williams et al., CACM
52(4), 2009)::

    outside   overhead_s + decode_s·decodes + chunk_s·chunks + [chunks > 0]·(prompt_s + mixed_kv_s·decode context)
              + [not recorded]·eager_s
    memory    weights_s + experts_s·(1 − e^(−tokens/expert_tokens)) + decode_kv_s·decode context + prefill_kv_s·prefill context
    compute   Σ token_s@k·(tokens beyond k, up to the next k) + pair_s·(decode context + prefill attention)
              + padding128_s·empty₁₂₈ + padding256_s·empty₂₅₆

``combine`` is the p-norm (m^p + c^p)^(1/p): the sum at p = 1 (nothing overlaps), the longer of the two at p = ∞ (all
overlaps), and in between for what overlaps in part. ``experts_s`` is for mixtures of experts: few tokens touch few of them, many
touch all. The segments of ``token_s`` may have any slopes that are not negative, so small batches on a CPU, whose products
cost the same up to some number of rows, are followed too; one segment is a cost linear in tokens.

An engine that records steps (CUDA graphs) does so for a few sizes, and runs a step of n decodes, or one with prompts that holds n
tokens, as the next of them. So in such a step, tokens are that many: dummies are computed as others are. They read no context and
mean nothing to the host. A step that no recording holds runs launch by launch and is not padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.step_model import NO_GRAPHS, TERMS, Group, StepFeatures, StepGraphs, Term, computed

Floats = NDArray[np.float64]
TOKEN = f"{TERMS['tokens'].coefficient}@"
EXPERT_TOKENS = "expert_tokens"
_FORMER = {term.coefficient for term in TERMS.values() if term.former}
_WIDE = 1.5  # how far beyond its beginning the last segment must have been seen


@dataclass(frozen=True)
class Shape:
    """``knots``: token counts where the cost of one more token may change, from 0. ``experts``: ``expert_tokens``, if any.
    ``graphs``: the steps that are recorded. ``former``: of an earlier version's fit, with the terms that it had."""

    norm: float
    knots: tuple[int, ...] = (0,)
    experts: float | None = None
    graphs: StepGraphs = NO_GRAPHS
    former: bool = False

    @property
    def family(self) -> str:
        """``max``, ``sum`` or ``norm2``, with ``+experts`` and ``+segments``: reads back by :meth:`read`."""
        name = "sum" if self.norm == 1 else "max" if self.norm == math.inf else f"norm{self.norm:g}"
        return name + ("+experts" if self.experts else "") + ("+segments" if len(self.knots) > 1 else "")

    @classmethod
    def read(cls, family: str, names: Sequence[str], experts: float | None, graphs: StepGraphs = NO_GRAPHS) -> Shape:
        """The shape of ``family`` with the coefficients ``names``. Raises ``ValueError`` if there is none."""
        head = family.split("+")[0]
        try:
            norm = {"sum": 1.0, "max": math.inf}[head] if head in ("sum", "max") else float(head.removeprefix("norm"))
            knots = tuple(sorted(int(name.removeprefix(TOKEN)) for name in names if name.startswith(TOKEN)))
            shape = cls(norm, knots, experts, graphs, former=not _FORMER.isdisjoint(names))
        except ValueError:
            raise ValueError(
                f"family is {family!r}; it must be sum, max or norm2, with +experts or +segments"
            ) from None
        if norm not in (1.0, 2.0, 4.0, math.inf) or knots[:1] != (0,) or shape.family != family:
            raise ValueError(f"family is {family!r}, which does not go with the coefficients {', '.join(names)}")
        missing = set(shape.required) - set(names)
        if missing:
            raise ValueError(f"family is {family!r}; its coefficients {', '.join(sorted(missing))} are missing")
        if more := set(names) - set(shape.names):
            raise ValueError(f"family is {family!r}; it has no coefficients {', '.join(sorted(more))}")
        return shape

    @classmethod
    def of(cls, family: str, coefficients: Mapping[str, float], graphs: StepGraphs = NO_GRAPHS) -> Shape:
        """That of a whole set of coefficients. Raises ``ValueError``, a field's name first, for a set that makes no sense."""
        for name, value in coefficients.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"coefficients.{name} is {value:g}; it must be a number of at least 0")
        if coefficients.get(EXPERT_TOKENS) == 0:
            raise ValueError(f"coefficients.{EXPERT_TOKENS} is 0; it must be above 0")
        names = [name for name in coefficients if name != EXPERT_TOKENS]
        return cls.read(family, names, coefficients.get(EXPERT_TOKENS), graphs)

    @property
    def terms(self) -> list[Term]:
        """The rows of the table that it holds."""
        return [
            term
            for term in TERMS.values()
            if term.coefficient
            and not (term.overlap_only and self.norm == 1)
            and not (term.curve == "saturating" and not self.experts)
            and not (term.unrecorded_only and not self.graphs.prompts)
            and not (term.former and not self.former)
        ]

    @cached_property
    def groups(self) -> list[tuple[str, Group]]:
        """The coefficients, in order, and the group of each."""
        return [(name, term.group) for term in self.terms for name in self._names(term)]

    @cached_property
    def _masks(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Of the coefficients, which belong to memory and which to compute."""
        groups = np.array([group for _, group in self.groups])
        return groups == "memory", groups == "compute"

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.groups]

    @property
    def required(self) -> list[str]:
        """The coefficients without which a profile holds no such model."""
        return [name for term in self.terms if term.required for name in self._names(term)]

    @property
    def most(self) -> dict[str, float]:
        """What no coefficient is above, s."""
        return {name: term.most for term in self.terms for name in self._names(term)}

    def _names(self, term: Term) -> list[str]:
        if term.curve == "segments":
            return [f"{term.coefficient}@{knot}" for knot in self.knots]
        return [term.coefficient]

    def columns(self, steps: Floats) -> Floats:
        """What each coefficient is multiplied by: ``[steps, coefficients]`` of ``[steps, 7]`` (as in StepFeatures)."""
        counts = StepFeatures(*steps.T)
        rows, eager = as_run(counts, self.graphs)
        made: list[Floats] = []
        for term in self.terms:
            count = term.amount(rows if term.padded else counts)
            amount = np.broadcast_to(np.asarray(count, dtype=float), len(steps))
            if term.unrecorded_only:
                amount = amount * eager
            if term.curve == "saturating":
                made.append(1 - np.exp(-amount / (self.experts or 1.0)))
            elif term.curve == "segments":
                ends = (*self.knots[1:], math.inf)
                made += [np.clip(amount - knot, 0, end - knot) for knot, end in zip(self.knots, ends, strict=True)]
            else:
                made.append(amount)
        return np.column_stack(made)

    def times(self, columns: Floats, coefficients: Floats) -> tuple[Floats, Floats]:
        """(seconds of each step, their derivatives ``[steps, coefficients]``).

        The time is homogeneous of degree one in the coefficients, so that derivatives · coefficients gives it back (Euler).
        """
        if self.norm == 1:
            return columns @ coefficients, columns
        in_memory, in_compute = self._masks
        memory = columns[:, in_memory] @ coefficients[in_memory]
        compute = columns[:, in_compute] @ coefficients[in_compute]
        if self.norm == math.inf:
            by_memory = (memory >= compute).astype(float)
            by_compute = 1 - by_memory
        else:
            both = (memory**self.norm + compute**self.norm) ** (1 / self.norm)
            both[both == 0] = 1.0
            by_memory, by_compute = (memory / both) ** (self.norm - 1), (compute / both) ** (self.norm - 1)
        derivatives = columns.copy()
        derivatives[:, in_memory] *= by_memory[:, None]
        derivatives[:, in_compute] *= by_compute[:, None]
        return derivatives @ coefficients, derivatives


def as_run(steps: StepFeatures, graphs: StepGraphs) -> tuple[StepFeatures, Any]:
    """``steps`` (one, or arrays of many) as they are computed, dummies among the decodes; and which of them run launch by
    launch."""
    tokens, sequences = np.asarray(computed(steps)), np.asarray(steps.decodes + steps.chunks)
    alone = tokens == steps.decodes
    with_prompts = ~alone & (np.asarray(steps.drafted) == 0) & (sequences <= graphs.sequences)
    rows = np.where(alone, _next(graphs.decodes, tokens), np.where(with_prompts, _next(graphs.prompts, tokens), 0))
    dummies = np.where(rows > 0, rows - tokens, 0)
    rows_and_dummies: Any = steps.decodes + dummies
    return steps._replace(decodes=rows_and_dummies), rows == 0


def _next(sizes: Sequence[int], counts: Any) -> Any:
    """The least of ``sizes`` that is no less than each of ``counts``; 0 where there is none, and of nothing."""
    return np.append(np.asarray(sizes, dtype=int), 0)[np.searchsorted(sizes, counts)] * (counts > 0)


def candidates(tokens: Sequence[int], graphs: StepGraphs = NO_GRAPHS) -> list[Shape]:
    """The shapes worth trying on steps of so many tokens, simple ones first; ``graphs`` as in :class:`Shape`."""
    norms = (1.0, 2.0, 4.0, math.inf)
    knots = list(dict.fromkeys(_knots(tokens, ratio) for ratio in (4, 2)))
    shapes = [Shape(norm) for norm in norms]
    shapes += [Shape(norm, experts=scale) for scale in (4.0, 8.0, 16.0, 32.0, 64.0, 128.0) for norm in norms]
    shapes += [Shape(norm, at) for at in knots if len(at) > 1 for norm in norms]
    return [replace(shape, graphs=graphs) for shape in shapes]


def _knots(tokens: Sequence[int], ratio: int) -> tuple[int, ...]:
    """0 and powers of ``ratio``, so that each segment holds at least two of the counts seen and the last one three.

    The last one goes on for ever: what is seen of it must be wide enough for a slope, or noise makes large steps free.
    """
    seen = sorted(set(tokens))
    knots, knot = [0], ratio
    while seen and sum(knot < t for t in seen) >= 3 and seen[-1] >= _WIDE * knot:
        if sum(knots[-1] < t <= knot for t in seen) >= 2:
            knots.append(knot)
        knot *= ratio
    return tuple(knots)


def as_floats(rows: Sequence[Sequence[Any]]) -> Floats:
    return np.array(rows, dtype=float).reshape(len(rows), -1)
