"""Machines that controllers are compared on: rooflines, as cost models, whose speed and steadiness change while they run.

``step = overhead + combine(bytes / bandwidth, flops / peak)``, where ``combine`` is the longer of the two (all overlaps) or
their sum (nothing does). Which of the two real silicon is like is not known; a controller must do well on both. The rates and
sizes of each part are those of :mod:`benchmarks.sweep.hardware`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

from autotune.cost.model import CostModel
from autotune.profile.parts import CostFacts
from autotune.simulate.executor import CostExecutor
from benchmarks.gpu_truth import BASE, Flags, Truth, load
from benchmarks.gpu_truth.engine import ChunkExecutor
from benchmarks.sweep import hardware as parts
from benchmarks.sweep.hardware import Roofline
from runtime.step_model import StepFeatures, StepModel

STALL = 10.0
"""How many times as long a step takes that stalls."""


@dataclass(frozen=True)
class Hardware:
    """A model on a machine: ``cost`` makes its step times, ``kv_tokens`` is its KV pool."""

    name: str
    about: str
    cost: Callable[[], StepModel]
    kv_tokens: int


def roofline(part: Roofline, *, overlapped: bool = True, experts: tuple[float, float] | None = None) -> CostModel:
    """The cost model of ``part``. ``experts``: bytes that every step reads, and the share of experts that a token needs;
    the rest of the weights are read as far as the tokens of a step need them."""
    always, share = (part.weights, 0.0) if experts is None else experts
    named = {
        "overhead_s": part.overhead, "decode_s": 0.0, "chunk_s": 0.0,
        "weights_s": always / part.bandwidth,
        "decode_kv_s": part.kv_token / part.bandwidth, "prefill_kv_s": part.kv_token / part.bandwidth,
        "token_s@0": part.flop_token / part.peak, "pair_s": part.pair_flop / part.peak,
    }  # fmt: skip
    family = "max" if overlapped else "sum"
    if not overlapped:  # nothing tells them apart there
        named["overhead_s"] += named.pop("weights_s")
    if experts is not None:
        family += "+experts"
        named["experts_s"] = (part.weights - always) / part.bandwidth
        named["expert_tokens"] = -1 / math.log1p(-share)
    zeros = ((0.0,) * len(named),) * len(named)
    return CostModel(
        CostFacts(
            family=family, coefficients=named, covariance=zeros, points=0, seconds=0.0, error=0.0, regions=(), learner=None
        )
    )  # fmt: skip


class Weather(StepModel):
    """Step times of ``cost`` as they come on a machine that is not always itself.

    ``slow``: how many times as long every step takes at present. ``stalls``: share of steps that take :data:`STALL` times as
    long, drawn from ``seed``.
    """

    def __init__(self, cost: StepModel, *, stalls: float = 0.0, seed: int = 0) -> None:
        self.slow = 1.0
        self._cost = cost
        self._stalls = stalls
        self._dice = random.Random(seed)
        self._run: Callable[[int, int, int], list[float]] | None = getattr(cost, "predict_run", None)

    def predict(self, step: StepFeatures) -> float:
        return self._cost.predict(step) * self._factor()

    def predict_run(self, decodes: int, context: int, count: int) -> list[float]:
        """As many steps of ``decodes`` decodes alone."""
        if self._run is None:
            reads = range(context, context + decodes * count, decodes)
            return [self.predict(StepFeatures(decodes, n, 0, 0, 0)) for n in reads]
        seconds = self._run(decodes, context, count)
        if not self._stalls and self.slow == 1.0:
            return seconds
        return [one * self._factor() for one in seconds]

    def _factor(self) -> float:
        if self._stalls and self._dice.random() < self._stalls:
            return self.slow * STALL
        return self.slow

    def step_seconds(self, decodes: int, decode_context: int, chunks: Sequence[tuple[int, int]] = ()) -> float:
        """The same of a step whose chunks are known one by one, for a machine that is asked by them (:class:`Truth`)."""
        assert isinstance(self._cost, Truth)
        return self._cost.step_seconds(decodes, decode_context, chunks) * self._factor()

    def executor(self, *, noise: float, seed: int) -> CostExecutor:
        """What makes steps on this machine."""
        if isinstance(self._cost, Truth):
            return ChunkExecutor(cast(Truth, self), noise=noise, seed=seed)  # it is asked for no more than this has
        return CostExecutor(self, noise=noise, seed=seed)


def h200() -> CostModel:
    """Llama-8B in bfloat16: 15 GB of weights, 16 GFLOP and 128 KiB of KV a token, memory and compute overlapped."""
    return roofline(parts.LLAMA_8B_H200)


H200 = Hardware("H200", "8B on H200, memory and compute overlap", h200, 760_000)
H200_ADD = Hardware(
    "H200add", "8B on H200, nothing overlaps", lambda: roofline(parts.LLAMA_8B_H200, overlapped=False), 760_000
)
A100 = Hardware("A100", "8B on A100-40", lambda: roofline(parts.LLAMA_8B_A100), 150_000)
L4 = Hardware("L4", "8B on L4", lambda: roofline(parts.LLAMA_8B_L4), 40_000)
MOE = Hardware(
    "MoE", "30B mixture of experts on H200", lambda: roofline(parts.MOE_30B_H200, experts=(3e9, 8 / 128)), 600_000
)
B200 = Hardware(
    "B200", "8B in fp8 on B200, memory and compute overlap",
    lambda: roofline(Roofline(3.0e15, 6.8e12, 8e9, 16e9, 65536, 4 * 32 * 32 * 128, 0.6e-3)), 2_000_000,
)  # fmt: skip
DENSE = Hardware(
    "32B", "32B on H200, memory and compute overlap",
    lambda: roofline(Roofline(643e12, 3.84e12, 65e9, 65e9, 262144, 4 * 64 * 64 * 128, 1.2e-3)), 220_000,
)  # fmt: skip
TENSOR = Hardware(
    "70Bx4", "70B on four H100, all-reduces that change protocol", lambda: parts.TensorParallel(parts.LLAMA_70B_4H100),
    400_000,
)  # fmt: skip
TILED = Hardware(
    "A100tiled", "8B on A100-40, whole tiles and padded decode graphs", lambda: parts.Tiled(parts.LLAMA_8B_A100), 150_000
)  # fmt: skip
MOE_IMBALANCED = Hardware(
    "MoEpaced", "30B mixture of experts on H200, the fullest expert sets the pace",
    lambda: parts.Experts(parts.MOE_30B_H200), 600_000,
)  # fmt: skip


_truth = cache(load)


def measured(name: str, flags: Flags = BASE) -> Hardware:
    """A GPU and a model whose step times are composed from public measurements; its pool in whole blocks of 16 tokens."""
    suffix, kind = ("", "kernels and the host") if flags == BASE else ("+graphs", "graph padding, slow mixed steps")
    pool = _truth(name, flags).kv_tokens // 16 * 16
    return Hardware(name + suffix, f"{name}, measured: {kind}", lambda: _truth(name, flags), pool)
