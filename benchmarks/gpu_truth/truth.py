"""What one step of a serving engine takes on a real GPU, composed from tables of measured kernels.

::

    truth = load("h100-llama3-8b")                                     # names(): all there are
    truth.step_seconds(64, 64 * 1500, [(0, 512)])                      # 64 decodes that read 96,000 tokens, a fresh chunk of 512
    truth = load("h100-llama3-8b", Flags(host_s=1e-3, pad=LADDER, mixed_s=4e-3))

A step is composed as Vidur (Agrawal et al., MLSys 2024) and AIConfigurator do::

    layers × (operations of the step's tokens + attention + 2 all-reduces) + embedding, head and sampler + host

``benchmarks/gpu_truth/README.md`` says whose figures the tables hold, under which licence, and how far they can be trusted. A
:class:`Truth` has ``predict`` and ``predict_run``, so it is a :class:`runtime.step_model.StepModel`.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import InputError
from runtime.step_model import StepFeatures, StepGraphs, next_size

TABLES = Path(__file__).parent / "tables"
LADDER = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Batch sizes that vLLM (V1) captures graphs of by default."""

PROMPTS = (*range(16, 128, 16), *range(128, 256, 32), *range(256, 513, 64))
"""Token counts that our own engine records steps with prompts of, for a model of 8 billion parameters."""

COARSE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Powers of two: a ladder that pads by up to half."""

SEQUENCES = 256
"""Of a recorded step with chunks, at most."""

Chunks = Sequence[tuple[int, int]]
"""(tokens computed before, tokens computed now) of each prompt in a step."""

_TOKENS = 8704  # of the first table of tokens; it grows when a step holds more
_ROWS = 1025  # sequences up to which head and sampler are looked up
_TILED = 100  # measured token counts from which a grid marked ``round_up`` is that of the kernels' tiles


@dataclass(frozen=True)
class Flags:
    """What the host and the graphs add to the kernels; all off. Raises :class:`InputError` for a value out of bounds.

    ``host_s``, ``host_seq_s``: seconds of the host in each step, and for each of its sequences. ``pad``: batch sizes that
    graphs were captured of, in ascending order; a step of decodes alone is as wide as the next of them. ``pad_prompts``: token
    counts, likewise, of steps with chunks, of up to ``SEQUENCES`` sequences. ``mixed_s``: seconds more for a step that holds a
    chunk and runs without a graph; ``mixed_floor_s``: none that holds a chunk is shorter.
    ``mixed_kv``: how many times as long decodes attend beside a chunk (in the measured tables this is included already).
    ``eager_comm``: all-reduces of steps with chunks as measured without graphs. ``kv_split``: attention of a chunk behind a long
    prefix is spread over the GPU by keys; otherwise one tile of queries reads all of its keys in a row.
    """

    host_s: float = 0.0
    host_seq_s: float = 0.0
    pad: tuple[int, ...] = ()
    pad_prompts: tuple[int, ...] = ()
    mixed_s: float = 0.0
    mixed_floor_s: float = 0.0
    mixed_kv: float = 1.0
    eager_comm: bool = False
    kv_split: bool = False

    def __post_init__(self) -> None:
        for name in ("host_s", "host_seq_s", "mixed_s", "mixed_floor_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is {value}; it must be a number of seconds of at least 0")
        if not (math.isfinite(self.mixed_kv) and self.mixed_kv >= 1):
            raise InputError(f"mixed_kv is {self.mixed_kv}; it must be a number of at least 1")
        for name in ("pad", "pad_prompts"):
            sizes = getattr(self, name)
            if list(sizes) != sorted(set(sizes)) or any(size < 1 for size in sizes):
                raise InputError(f"{name} is {sizes}; it must be batch sizes of at least 1 in ascending order")

    @property
    def graphs(self) -> StepGraphs:
        """The same as a fact of an engine."""
        return StepGraphs(self.pad, self.pad_prompts, SEQUENCES if self.pad_prompts else 0)


BASE = Flags(host_s=1e-3)
"""The kernels and the millisecond of the host that served GPUs ask for."""

ALL = Flags(host_s=1e-3, pad=LADDER, mixed_s=4e-3, mixed_kv=1.6)
"""Graph padding and steps with chunks that run without full graphs, beside it."""

RECORDED = replace(ALL, pad_prompts=PROMPTS)
"""The same where steps with chunks are recorded as well, up to 512 tokens."""


def names() -> list[str]:
    """Of all truths there are."""
    return sorted(path.stem for path in TABLES.glob("*.npz"))


def load(name: str, flags: Flags = BASE) -> Truth:
    """The truth called ``name``. Raises :class:`InputError` that lists all names."""
    path = TABLES / f"{name}.npz"
    if name not in names():
        raise InputError(f"truth is {name!r}; it must be one of {', '.join(names())}")
    with np.load(path) as data:
        arrays = {key: data[key] for key in data.files}
    meta = json.loads(str(arrays.pop("meta")))
    return (KernelTables if meta["kind"] == "tables" else BatchTables)(meta, arrays, flags)


class Truth:
    """Seconds of a step on one GPU (or group of them) with one model.

    ``kv_tokens``: tokens that the KV pool holds beside the weights. ``layers``, ``sources`` and the like are in ``meta``.
    """

    def __init__(self, meta: dict[str, Any], data: dict[str, NDArray[Any]], flags: Flags) -> None:
        self.meta, self.flags = meta, flags
        self.name: str = meta["name"]
        self.kv_tokens: int = meta["kv_tokens"]
        self._layers: int = meta["layers"]
        self._data = data
        self._graph: list[float] = []  # ms of all layers' operations, by the tokens of a step
        self._eager: list[float] = []
        self._rows = self._by_count(data["rows"], data["rows_ms"], _ROWS).tolist()
        self._grow(_TOKENS)

    def step_seconds(self, decodes: int, decode_context: int, chunks: Chunks = ()) -> float:
        """Seconds of a step of ``decodes`` that read ``decode_context`` tokens in all, and of ``chunks``."""
        flags = self.flags
        sequences = decodes + len(chunks)
        tokens = decodes + sum(count for _, count in chunks)
        rows = sequences
        recorded = (
            0 if chunks and sequences > SEQUENCES else next_size(flags.pad_prompts if chunks else flags.pad, tokens)
        )
        if recorded:
            tokens = recorded
            rows = rows if chunks else tokens
        if tokens >= len(self._graph):
            self._grow(2 * tokens)
        milliseconds = (self._eager if chunks and not recorded else self._graph)[tokens] + self._rows[min(rows, _ROWS)]
        milliseconds += self._layers * self._attention(decodes, decode_context, chunks)
        seconds: float = milliseconds / 1e3 + flags.host_s + flags.host_seq_s * sequences
        return max(seconds + flags.mixed_s * (not recorded), flags.mixed_floor_s) if chunks else seconds

    def predict(self, step: StepFeatures) -> float:
        """The same of counts: one chunk is known from them exactly, several are taken to be alike, and drafted tokens to be rows
        that read nothing."""
        decodes, context, tokens, reads, _, count, drafted = step
        return self.step_seconds(decodes + drafted, context, alike(tokens, reads, count))

    def predict_run(self, decodes: int, context: int, count: int) -> list[float]:
        """Of ``count`` steps of ``decodes`` decodes alone, whose context grows by a token each."""
        return [self.step_seconds(decodes, context + i * decodes) for i in range(count)]

    def _attention(self, decodes: int, context: int, chunks: Chunks) -> float:
        """Milliseconds of one layer."""
        raise NotImplementedError

    def _by_count(self, grid: NDArray[Any], values: NDArray[Any], most: int) -> NDArray[Any]:
        """``values`` at 0, 1, …, ``most``: linear between measured counts (or that of the next one, where the grid is the
        tiles'), and along the slope of the last half beyond them."""
        counts = np.arange(most + 1, dtype=float)
        if self.meta["round_up"] and len(grid) > _TILED:
            found = values[np.minimum(np.searchsorted(grid, counts), len(grid) - 1)]
        else:
            found = np.interp(counts, grid, values)
        half = int(np.searchsorted(grid, grid[-1] / 2))
        slope = (values[-1] - values[half]) / (grid[-1] - grid[half])
        return np.where(counts > grid[-1], values[-1] + slope * (counts - grid[-1]), found)

    def _grow(self, most: int) -> None:
        """Have tables of steps of up to ``most`` tokens."""
        data, layers = self._data, self._layers
        graph = layers * (self._by_count(data["tokens"], data["ops_ms"].sum(axis=1), most) + self._experts(most))
        graph = graph + self._by_count(data["tokens"], data["once_ms"], most)
        eager = graph
        if "comm_bytes" in data:
            sizes = np.arange(most + 1) * self.meta["hidden"] * 2.0
            with_graphs, without = (
                2 * layers * np.interp(sizes, data["comm_bytes"], data[key])
                for key in ("comm_graph_ms", "comm_eager_ms")
            )
            graph, eager = graph + with_graphs, eager + (without if self.flags.eager_comm else with_graphs)
        self._graph, self._eager = graph.tolist(), eager.tolist()

    def _experts(self, most: int) -> NDArray[Any]:
        """Milliseconds of one layer's experts; none where the model is dense."""
        data = self._data
        if "moe_ms" in data:
            return self._by_count(data["moe_tokens"], data["moe_ms"], most)
        if "moe_table_ms" not in data:
            return np.zeros(most + 1)
        counts = np.arange(most + 1, dtype=float)
        experts, topk = self.meta["experts"], self.meta["topk"]
        touched = experts * (1 - (1 - topk / experts) ** counts)  # by tokens that are routed evenly
        columns, table = data["moe_experts"], data["moe_table_ms"]
        by_touched = np.column_stack(
            [self._by_count(data["moe_tokens"], table[:, i], most) for i in range(len(columns))]
        )
        at = np.clip(np.searchsorted(columns, touched, side="right") - 1, 0, len(columns) - 2)
        share = np.clip((touched - columns[at]) / (columns[at + 1] - columns[at]), 0, 1)
        rows = np.arange(most + 1)
        return np.asarray(by_touched[rows, at] * (1 - share) + by_touched[rows, at + 1] * share)


class KernelTables(Truth):
    """Kernels measured one by one (Vidur, AIConfigurator): what is in a step adds up."""

    def __init__(self, meta: dict[str, Any], data: dict[str, NDArray[Any]], flags: Flags) -> None:
        self._decode = Plane(data["decode_batch"], data["decode_kv"], data["decode_ms"])
        self._prefill = Plane(data["prefill_count"], data["prefill_length"], data["prefill_ms"])
        self._serial = data["serial_ms"].tolist()
        super().__init__(meta, data, flags)

    def _attention(self, decodes: int, context: int, chunks: Chunks) -> float:
        found = 0.0
        if decodes:
            found = self._decode(decodes, context / decodes) * (self.flags.mixed_kv if chunks else 1.0)
        return found + self._of_chunks(chunks) if chunks else found

    def _of_chunks(self, chunks: Chunks) -> float:
        """Each costs its share of a batch of as many prompts as long, less what had been computed (as in AIConfigurator).

        None is shorter than its new tokens alone, nor, without ``kv_split``, than one tile of queries that reads all keys.
        """
        found = least = longest = 0.0
        for start, count in chunks:
            whole = start + count
            found += self._prefill(len(chunks), whole) / len(chunks) * (1 - (start / whole) ** 2)
            if start:
                longest = max(longest, whole)
                least = max(least, self._prefill.along(0, count))
        if longest and not self.flags.kv_split:
            at, share = place(self._prefill.columns, longest)
            least = max(least, (1 - share) * self._serial[at] + share * self._serial[at + 1])
        return max(found, least)


class BatchTables(Truth):
    """Attention measured as it is served, decodes and a chunk in one launch (LLMServingSim's profiler, inside vLLM)."""

    def __init__(self, meta: dict[str, Any], data: dict[str, NDArray[Any]], flags: Flags) -> None:
        self._decode = Plane(data["decode_batch"], data["decode_kv"], data["decode_ms"])
        self._alone = Plane(data["chunk"], data["prefix"], data["alone_ms"])
        self._batches = data["decode_batch"].tolist()[:-1]  # the largest was measured without chunks only
        self._beside = [
            [Plane(data["decode_batch"][:-1], data["decode_kv"], table) for table in row] for row in data["mixed_ms"]
        ]
        self._idle = float(data["alone_ms"][0, 0])
        super().__init__(meta, data, flags)

    def _attention(self, decodes: int, context: int, chunks: Chunks) -> float:
        """That of the heaviest chunk beside the decodes as measured; every other chunk adds what it takes by itself."""
        if not chunks:
            return self._decode(decodes, context / decodes) if decodes else 0.0
        alone = [self._alone(count, start) for start, count in chunks]
        heaviest = max(range(len(chunks)), key=alone.__getitem__)
        others = sum(max(0.0, ms - self._idle) for i, ms in enumerate(alone) if i != heaviest)
        if not decodes:
            return alone[heaviest] + others
        start, count = chunks[heaviest]
        i, a = place(self._alone.rows, count)
        j, b = place(self._alone.columns, start)
        found, each = 0.0, context / decodes
        for at, weight in ((i, 1 - a), (i + 1, a)):
            for behind, share in ((j, 1 - b), (j + 1, b)):
                if weight * share:
                    found += weight * share * self._beside[at][behind](decodes, each)
        return found + others


class Plane:
    """``values[row, column]`` between and beyond what was measured: bilinear; below the first as at the first."""

    def __init__(self, rows: NDArray[Any], columns: NDArray[Any], values: NDArray[Any]) -> None:
        self.rows: list[float] = rows.tolist()
        self.columns: list[float] = columns.tolist()
        self._values: list[list[float]] = values.astype(float).tolist()

    def __call__(self, row: float, column: float) -> float:
        i, a = place(self.rows, row)
        j, b = place(self.columns, column)
        low, high = self._values[i], self._values[i + 1]
        return (1 - a) * ((1 - b) * low[j] + b * low[j + 1]) + a * ((1 - b) * high[j] + b * high[j + 1])

    def along(self, row: int, column: float) -> float:
        """In one measured row."""
        j, b = place(self.columns, column)
        values = self._values[row]
        return (1 - b) * values[j] + b * values[j + 1]


def place(grid: Sequence[float], value: float) -> tuple[int, float]:
    """The cell of ``grid`` that ``value`` is in or beyond, and its share of that cell; 0 below the first."""
    if value <= grid[0]:
        return 0, 0.0
    at = min(bisect_right(grid, value) - 1, len(grid) - 2)
    return at, (value - grid[at]) / (grid[at + 1] - grid[at])


def alike(tokens: int, reads: int, count: int) -> list[tuple[int, int]]:
    """``count`` chunks of ``tokens`` in all, whose prompts hold ``reads`` up to their ends, as like each other as can be."""
    if not tokens:
        return []
    size, more = divmod(tokens, max(1, count))
    start = max(0, reads - tokens) // max(1, count)
    return [(start, size + (i < more)) for i in range(max(1, count)) if size + (i < more)]
