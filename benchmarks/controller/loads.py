"""Requests of the controllers' benchmark: whose lengths, when they come, and under which SLO.

Lengths of conversations and of code completions, and the arrivals of both where a scenario replays them, are those of the Azure
2023 traces when their folder is given, drawn as pairs; else those of the presets fitted to them. Long prompts (``moon``) and long
answers (``reason``) are drawn from distributions.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autotune.workload.fitted import load_fitted
from autotune.workload.lengths import Independent, Ints, LengthModel, Lognormal, QuantileTable
from autotune.workload.processes import Gamma, poisson
from autotune.workload.randomness import Floats, Stream, generator
from autotune.workload.readers import read_azure
from autotune.workload.spec import Arrival
from autotune.workload.synthetic import Synthetic
from autotune.workload.traces import TraceRow
from runtime.errors import InputError
from runtime.slo import SLO

TRACES = {"conv": "AzureLLMInferenceTrace_conv.csv", "code": "AzureLLMInferenceTrace_code.csv"}

SLOS = {
    "mlperf": SLO(ttft_ms=2000, tpot_ms=100),
    "inter": SLO(ttft_ms=500, tpot_ms=30),
    "strict": SLO(ttft_ms=250, tpot_ms=15),
    "long": SLO(ttft_ms=10_000, tpot_ms=200),
    "gap": SLO(ttft_ms=500, itl_ms=25),
    "whole": SLO(ttft_ms=2000, e2e_ms=20_000),
    "answer": SLO(e2e_ms=30_000),
    "page": SLO(ttft_ms=1000, tpot_ms=100, e2e_ms=15_000),
}
"""The SLOs, by name: MLPerf's server target and interactive ones, long prompts', a bound on gaps, three on whole answers."""


def slo_of(name: str) -> SLO:
    """The SLO called ``name``; ``inter*3,2`` is ``inter`` with three times its TTFT and twice its TPOT target."""
    base, _, factors = name.partition("*")
    slo = SLOS[base]
    if not factors:
        return slo
    ttft, tpot = map(int, factors.split(","))
    return replace(slo, ttft_ms=slo.ttft_ms and ttft * slo.ttft_ms, tpot_ms=slo.tpot_ms and tpot * slo.tpot_ms)


class Part(NamedTuple):
    """One kind of request: lengths by name, its SLO by name (see :func:`slo_of`), its share of the requests, and its class."""

    lengths: str
    slo_name: str
    share: float = 1.0
    request_class: str = "default"

    @property
    def slo(self) -> SLO:
        return slo_of(self.slo_name)


class Pattern(NamedTuple):
    """When requests come: ``poisson``, ``gamma`` (bursts of a coefficient of variation ``cv``), or ``trace``, replayed."""

    kind: str = "poisson"
    cv: float = 1.0


POISSON = Pattern()


@dataclass(frozen=True)
class Pairs:
    """Lengths that occurred together, drawn with equal chances."""

    prompts: Ints
    outputs: Ints

    def draw(self, prompt_u: Floats, output_u: Floats) -> tuple[Ints, Ints]:
        chosen = (prompt_u * len(self.prompts)).astype(np.intp)
        return self.prompts[chosen], self.outputs[chosen]


@dataclass(frozen=True)
class Capped:
    """Lengths of ``model`` of which none is longer than ``prompt`` and ``output`` tokens."""

    model: LengthModel
    prompt: int
    output: int

    def draw(self, prompt_u: Floats, output_u: Floats) -> tuple[Ints, Ints]:
        prompts, outputs = self.model.draw(prompt_u, output_u)
        return np.minimum(prompts, self.prompt), np.minimum(outputs, self.output)


DRAWN: dict[str, LengthModel] = {
    # median 6.9k, mean 12k and so a 95% quantile of 39k, before the cap; answers of about 350 tokens
    "moon": Independent(Lognormal(6900, 1.052), QuantileTable((0.0, 0.5, 1.0), (50.0, 350.0, 622.0))),
    "reason": Independent(Lognormal.of_mean_cv(646, 1.0), Lognormal.of_mean_cv(1613, 0.8)),
    "brief": Independent(Lognormal.of_mean_cv(220, 1.2), Lognormal.of_mean_cv(60, 0.7)),
    "digest": Independent(Lognormal.of_mean_cv(3500, 0.6), Lognormal.of_mean_cv(180, 0.5)),
    "agent": Independent(Lognormal.of_mean_cv(2600, 0.9), Lognormal.of_mean_cv(90, 1.2)),
    "story": Independent(Lognormal.of_mean_cv(120, 0.8), Lognormal.of_mean_cv(900, 0.6)),
}


def lengths_of(name: str, kv_tokens: int, traces: str | None) -> LengthModel:
    """The lengths called ``name``, so that each fits a pool of ``kv_tokens``: prompts in a third of it, at most 32k."""
    if name in DRAWN:
        model = DRAWN[name]
    elif traces is None:
        model = load_fitted(f"azure-{name}").lengths
    else:
        rows = trace_rows(traces, name)
        model = Pairs(np.array([r.prompt_tokens for r in rows]), np.array([max(1, r.output_tokens) for r in rows]))
    return Capped(model, min(32_768, kv_tokens // 3), min(16_384, kv_tokens // 3))


@cache
def trace_rows(traces: str, name: str) -> list[TraceRow]:
    """The rows of a trace in the folder ``traces``. Raises :class:`InputError` if there is none."""
    path = Path(traces) / TRACES[name]
    if not path.is_file():
        raise InputError(f"--traces is {traces}; it must be a folder that holds {' and '.join(TRACES.values())}")
    return read_azure(path)


def arrivals(
    parts: tuple[Part, ...],
    pattern: Pattern,
    rate: float,
    seconds: float,
    seed: tuple[int, ...],
    *,
    kv_tokens: int,
    traces: str | None,
) -> Iterator[Arrival]:
    """Requests of ``parts`` at ``rate`` in all, from time 0 to ``seconds``, in order of time."""
    kinds = [
        _one(part, pattern, rate * part.share, seconds, (*seed, number), kv_tokens, traces)
        for number, part in enumerate(parts)
    ]
    return heapq.merge(*kinds, key=lambda arrival: arrival.time)


def _one(
    part: Part, pattern: Pattern, rate: float, seconds: float, seed: tuple[int, ...], kv_tokens: int, traces: str | None
) -> Iterator[Arrival]:
    lengths = lengths_of(part.lengths, kv_tokens, traces)
    if pattern.kind == "trace":
        if traces is not None:
            yield from _window(trace_rows(traces, part.lengths), rate, seconds, seed, part, kv_tokens)
            return
        process = load_fitted(f"azure-{part.lengths}").process.at_rate(rate)
        source = Synthetic(process, lengths, part.request_class)
    elif pattern.kind == "gamma":
        source = Synthetic(Gamma(rate, pattern.cv), lengths, part.request_class)
    else:
        source = Synthetic(poisson(rate), lengths, part.request_class)
    for arrival in source.generate(seed):
        if arrival.time >= seconds:
            return
        yield arrival


def _window(
    rows: list[TraceRow], rate: float, seconds: float, seed: tuple[int, ...], part: Part, kv_tokens: int
) -> Iterator[Arrival]:
    """``seconds`` of a trace whose mean rate over its whole length has been made ``rate``, from a place drawn by ``seed``."""
    first, span = rows[0].time, rows[-1].time - rows[0].time
    scale = len(rows) / rate / span
    start = generator(seed, Stream.TIMES).random() * max(0.0, span * scale - seconds)
    most = min(32_768, kv_tokens // 3)
    for number, row in enumerate(rows):
        time = (row.time - first) * scale - start
        if time >= seconds:
            return
        if time >= 0:
            prompt = min(row.prompt_tokens, most)
            yield Arrival(time, prompt, max(1, row.output_tokens), ((number, prompt),), part.request_class)
