"""Machines that :mod:`benchmarks.sweep` tunes for: step times by formulas that a fitted cost model does not contain.

Each begins with the roofline of SCENARIOS' kind (weights and KV over bandwidth, FLOPs over peak) and adds what real machines
do and a fit with a handful of smooth terms leaves out: steps at tile boundaries, graphs padded to a ladder of batch sizes,
a host that falls behind, collectives that change protocol, caches that overflow, clocks that throttle, stalls. Rates are
what such a part reaches in practice, not data-sheet peaks. All times in seconds, sizes in bytes.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime.clock import Clock, VirtualClock
from runtime.step_model import StepFeatures

_TILE = 128  # rows a GEMM kernel computes at once
_LADDER: tuple[int, ...] = (1, 2, 4, *range(8, 257, 8), *range(272, 1025, 16))
"""Batch sizes that decode graphs are captured for: a batch in between is padded to the next."""


class Roofline(NamedTuple):
    """A model on a part. ``kv_token``: bytes of K and V a token; ``pair_flop``: FLOPs of attention a (query, key) pair."""

    peak: float
    bandwidth: float
    weights: float
    flop_token: float
    kv_token: float
    pair_flop: float
    overhead: float


LLAMA_8B_H200 = Roofline(643e12, 3.84e12, 15e9, 16e9, 131072, 4 * 32 * 32 * 128, 0.75e-3)
LLAMA_8B_A100 = LLAMA_8B_H200._replace(peak=187e12, bandwidth=1.244e12)
LLAMA_8B_L4 = LLAMA_8B_H200._replace(peak=72.6e12, bandwidth=0.24e12)
MOE_30B_H200 = Roofline(495e12, 3.84e12, 60e9, 6.6e9, 98304, 4 * 48 * 32 * 128, 1.0e-3)
QWEN_06B_H200 = Roofline(520e12, 3.7e12, 1.2e9, 1.2e9, 114688, 4 * 28 * 16 * 128, 0.4e-3)
LLAMA_70B_4H100 = Roofline(4 * 560e12, 4 * 2.7e12, 140e9, 140e9, 327680, 4 * 80 * 64 * 128, 1.2e-3)


def tokens_of(step: StepFeatures) -> int:
    return step.decodes + step.prefill_tokens


def kv_bytes(part: Roofline, step: StepFeatures) -> float:
    return part.kv_token * (step.decode_context + step.prefill_context)


def pairs_of(step: StepFeatures) -> int:
    return step.decode_context + step.prefill_attention


@dataclass(frozen=True)
class Additive:
    """Nothing overlaps; decode attention reads at full bandwidth only from ``saturating`` sequences on."""

    part: Roofline
    saturating: float = 4.0

    def predict(self, step: StepFeatures) -> float:
        part = self.part
        reading = 1.0 + self.saturating / (1.0 + step.decodes + step.prefill_tokens / 64)
        memory = (part.weights + kv_bytes(part, step) * reading) / part.bandwidth
        compute = (part.flop_token * tokens_of(step) + part.pair_flop * pairs_of(step)) / part.peak
        return part.overhead + memory + compute


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: weights read grow with the experts hit, and the fullest expert determines the time of its GEMM.

    ``shared``: bytes every step reads. A token hits ``active`` of ``experts``. The fullest of them holds
    mean + 2·sqrt(mean) tokens, rounded up to a tile of 16. A step with prompts runs without graphs: ``eager`` more.
    """

    part: Roofline
    shared: float = 3e9
    experts: int = 128
    active: int = 8
    eager: float = 1.8e-3

    def predict(self, step: StepFeatures) -> float:
        part, tokens = self.part, tokens_of(step)
        hit = 1.0 - math.exp(tokens * math.log1p(-self.active / self.experts))
        memory = (self.shared + (part.weights - self.shared) * hit + kv_bytes(part, step)) / part.bandwidth
        mean = tokens * self.active / self.experts
        fullest = 16 * math.ceil((mean + 2 * math.sqrt(mean)) / 16)
        compute = part.flop_token * (0.35 * tokens + 0.65 * fullest * self.experts / self.active) / part.peak
        attention = part.pair_flop * pairs_of(step) / part.peak
        return part.overhead + (self.eager if step.prefill_tokens else 0.0) + max(memory, compute) + attention


class Stalling:
    """An overlapped roofline that stops now and then: one step in ``every`` takes ten times as long, at least 30 ms more."""

    def __init__(self, part: Roofline, every: float = 400.0, seed: int = 0) -> None:
        self.part, self._every = part, every
        self._dice = random.Random(seed)

    def predict(self, step: StepFeatures) -> float:
        part = self.part
        memory = (part.weights + kv_bytes(part, step)) / part.bandwidth
        compute = (part.flop_token * tokens_of(step) + part.pair_flop * pairs_of(step)) / part.peak
        seconds = part.overhead + max(memory, compute)
        return seconds + max(9 * seconds, 0.03) if self._dice.random() * self._every < 1 else seconds


@dataclass(frozen=True)
class Tiled:
    """GEMMs compute whole tiles of rows, decode graphs are padded to a ladder, mixed steps run without a graph.

    Past ``wave`` rows tiles are computed in twos. ``chunk``: launching the attention of one more prompt.
    """

    part: Roofline
    wave: int = 1024
    eager: float = 2.5e-3
    chunk: float = 6e-5

    def predict(self, step: StepFeatures) -> float:
        part = self.part
        if step.prefill_tokens:
            tile = _TILE if tokens_of(step) <= self.wave else 2 * _TILE
            rows, launch = tile * math.ceil(tokens_of(step) / tile), self.eager + self.chunk * step.chunks
        else:
            rows, launch = _padded(step.decodes), 0.0
        memory = (part.weights + kv_bytes(part, step)) / part.bandwidth
        compute = part.flop_token * rows / part.peak + part.pair_flop * pairs_of(step) / (0.6 * part.peak)
        return part.overhead + launch + max(memory, compute)


@dataclass(frozen=True)
class Throttled:
    """Memory and compute overlap in part (a ``power`` norm), and the clock falls as the step gets denser.

    A step of ``dense`` tokens runs at 1 − ``sag`` / 2 of the clock, a much larger one at 1 − ``sag``.
    """

    part: Roofline
    power: float = 2.2
    dense: float = 1024.0
    sag: float = 0.3

    def predict(self, step: StepFeatures) -> float:
        part, tokens = self.part, tokens_of(step)
        clock = 1.0 - self.sag * tokens / (tokens + self.dense)
        memory = (part.weights + kv_bytes(part, step)) / part.bandwidth
        compute = (part.flop_token * tokens + part.pair_flop * pairs_of(step)) / (part.peak * clock)
        return part.overhead + float((memory**self.power + compute**self.power) ** (1 / self.power))


@dataclass(frozen=True)
class HostBound:
    """A small model on a large part: the host prepares a step while the device computes the last, and is often slower.

    The host takes ``fixed`` and ``per_sequence``, and ``per_token`` for prompts; past ``roomy`` sequences each costs
    twice as much (its tables no longer fit the host's cache).
    """

    part: Roofline
    fixed: float = 2.2e-3
    per_sequence: float = 14e-6
    per_token: float = 0.35e-6
    roomy: int = 192

    def predict(self, step: StepFeatures) -> float:
        part = self.part
        memory = (part.weights + kv_bytes(part, step)) / part.bandwidth
        compute = (part.flop_token * tokens_of(step) + part.pair_flop * pairs_of(step)) / part.peak
        extra = max(0, step.decodes - self.roomy)
        host = self.fixed + self.per_sequence * (step.decodes + extra) + self.per_token * step.prefill_tokens
        return max(part.overhead + max(memory, compute), host) + 2e-6 * step.decodes


@dataclass(frozen=True)
class TensorParallel:
    """Four parts and two all-reduces a layer: latency-bound when small, another protocol with a dearer start when large."""

    part: Roofline
    layers: int = 80
    width: int = 8192
    small: float = 9e-6
    large: float = 34e-6
    link: float = 300e9
    switch: float = 2**20

    def predict(self, step: StepFeatures) -> float:
        part, tokens = self.part, tokens_of(step)
        message = 2 * self.width * tokens
        start, efficiency = (self.small, 0.45) if message <= self.switch else (self.large, 0.67)
        reduce = start + message / (efficiency * self.link)
        memory = (part.weights + kv_bytes(part, step)) / part.bandwidth
        compute = part.flop_token * tokens / part.peak
        attention = part.pair_flop * step.prefill_attention / (0.55 * part.peak)
        return part.overhead + max(memory, compute) + attention + 2 * self.layers * reduce


@dataclass(frozen=True)
class Cpu:
    """A small model on a few cores: all terms add; GEMMs are poor below 16 rows; KV past the last cache is read slower."""

    base: float = 3.2e-3
    row: float = 1.35e-4
    context: float = 1.9e-7
    pair: float = 1.1e-8
    cached: int = 9000
    spill: float = 2.6
    mixed: float = 2.0e-3

    def predict(self, step: StepFeatures) -> float:
        tokens = tokens_of(step)
        rows = tokens + 6.0 * (1.0 - math.exp(-tokens / 4.0))
        context = step.decode_context + step.prefill_context
        read = context + (self.spill - 1.0) * max(0, context - self.cached)
        seconds = self.base + self.row * rows + self.context * read + self.pair * step.prefill_attention
        return seconds + (self.mixed if step.prefill_tokens else 0.0)


class Drifting:
    """``machine``, as a machine that others share: each step takes a factor longer, which is drawn anew every ``every_s`` seconds
    (log-normal, of that ``deviation``). ``clock``: that of its engine, which is made with it.

    Equal seeds draw equal factors for equal times. Steps that an engine plans at once all have the factor of the first.
    """

    def __init__(self, machine: Any, deviation: float, every_s: float, seed: int) -> None:
        self._machine, self._deviation, self._every_s, self._seed = machine, deviation, every_s, seed
        self._drawn: dict[int, float] = {}
        self.clock: Clock = VirtualClock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def predict(self, step: StepFeatures) -> float:
        return self._factor() * float(self._machine.predict(step))

    def predict_run(self, decodes: int, context: int, count: int) -> list[float]:
        """Of ``count`` steps of ``decodes`` decodes alone, whose context grows by a token each."""
        return [self.predict(StepFeatures(decodes, context + i * decodes, 0, 0, 0)) for i in range(count)]

    def step_seconds(self, *step: Any) -> float:
        """Of a machine that is asked by the very chunks of a step."""
        return self._factor() * float(self._machine.step_seconds(*step))

    def _factor(self) -> float:
        place = int(self.clock.now() / self._every_s)
        if place not in self._drawn:
            self._drawn[place] = math.exp(random.Random(f"{self._seed}/{place}").gauss(0, self._deviation))
        return self._drawn[place]


def _padded(decodes: int) -> int:
    place = bisect_left(_LADDER, decodes)
    return _LADDER[place] if place < len(_LADDER) else decodes
