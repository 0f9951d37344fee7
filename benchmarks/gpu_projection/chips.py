"""Published figures of GPUs, and what a call takes on one.

Peaks are those of NVIDIA's data sheets, dense, without sparsity. What kernels reach of them, and what each costs beside its
bytes, is fitted to kernels that others have measured one by one and published (``benchmarks/gpu_truth/tables``): the products of
Llama 3 8B with up to 64 rows, and vLLM's attention of decodes. :func:`fitted` makes these figures again from the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from benchmarks.gpu_projection.calls import Call
from benchmarks.gpu_truth.truth import TABLES

GRAPH_GAP_S: Final = 1.3e-6
"""From the end of a kernel to the begin of the next in a CUDA graph, on an H100: Spector et al., "Look Ma, No Bubbles! Designing
a Low-Latency Megakernel for Llama-1B", Hazy Research, May 2025."""

HOST_LAUNCH_S: Final = 5e-6
"""Of the host for one launch without a graph, the driver's call alone: 4 to 6 µs are reported."""


class Slack(NamedTuple):
    """Beside the peaks: shares of them that kernels reach, and seconds that a kernel takes whatever it moves (its launch from a
    graph, filling the chip, the last wave).

    ``product``: a matrix product's share of the bandwidth, and seconds; ``matmul``: its share of the matrix units' peak;
    ``attention``: the share and seconds of all of a layer's attention of decodes; ``small_s``: of any other kernel.
    """

    product: float
    product_s: float
    matmul: float
    attention: float
    attention_s: float
    small_s: float


HOPPER: Final = Slack(0.84, 3.1e-6, 0.80, 0.94, 11.4e-6, 3.1e-6)
AMPERE: Final = Slack(0.77, 4.2e-6, 0.68, 0.80, 12.5e-6, 4.0e-6)
"""See :func:`fitted`. ``small_s`` is the tables' norm of few rows, the time of a kernel that does next to nothing."""


@dataclass(frozen=True, slots=True)
class Chip:
    """``bandwidth``: bytes/s of its memory; ``flops``: a second, bfloat16 on matrix units; ``memory``: bytes; ``slack_of``: where
    its slack comes from."""

    name: str
    bandwidth: float
    flops: float
    multiprocessors: int
    memory: float
    slack: Slack
    slack_of: str


CHIPS: Final = (
    Chip("A100", 2.039e12, 312e12, 108, 80e9, AMPERE, "measured on A100"),
    Chip("H100", 3.35e12, 989.4e12, 132, 80e9, HOPPER, "measured on H100"),
    Chip("H200", 4.8e12, 989.4e12, 132, 141e9, HOPPER, "assumed as on H100, the same chip with faster memory"),
    Chip("L4", 300e9, 121e12, 58, 24e9, AMPERE, "assumed as on A100; no public table of its kernels is in the tree"),
)
"""NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200 SXM, L4."""


def slowest_s(chip: Chip, calls: Iterable[Call]) -> float:
    """Seconds of ``calls`` one after the other at what kernels reach, each with its slack."""
    slack, found = chip.slack, 0.0
    for call in calls:
        moved, computed = call.bytes / chip.bandwidth, call.flops / (slack.matmul * chip.flops)
        if call.kind == "product":
            found += max(moved / slack.product, computed) + slack.product_s
        elif call.kind == "attention":
            found += max(moved / slack.attention, computed) + (slack.attention_s if call.name == "_attend" else 0.0)
        else:
            found += moved / slack.product + slack.small_s
    return found


def fastest_s(chip: Chip, calls: Iterable[Call]) -> float:
    """Seconds that no engine with these calls can go below: each at the peaks, with a graph's gap between them."""
    return sum(max(call.bytes / chip.bandwidth, call.flops / chip.flops) + GRAPH_GAP_S for call in calls)


_PRODUCTS: Final = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))  # of a layer of Llama 3 8B, in and out
# columns of the tables' operations that are these, and norms
_MEASURED: Final = {"h100-llama3-8b": ((0, 1, 2, 3), (4, 5)), "a100-llama3-8b": ((1, 3, 5, 7), (0, 4))}
_FEW, _MANY = 64, (1024, 4096)  # rows of products that stream weights, and of those that compute


def fitted(name: str) -> Slack:
    """The slack by least squares from the table ``name`` (that of an H100 or A100 with Llama 3 8B, bfloat16).

    Products: seconds = bytes / (share · peak) + fixed, over those of up to 64 rows; their share of the matrix units' peak: the
    median from 1,024 to 4,096 rows. Attention: the shortest measured, and the median share of the peak where 16 to 128 sequences
    read 8,192 tokens or more each. A norm: the median up to 64 rows.
    """
    columns, norms = _MEASURED[name]
    chip = next(c for c in CHIPS if c.name.lower() == name.partition("-")[0])
    with np.load(TABLES / f"{name}.npz") as data:
        rows, operations = data["tokens"], data["ops_ms"] / 1e3
        batch, context, attention = data["decode_batch"], data["decode_kv"], data["decode_ms"] / 1e3
    sizes = np.array([a * b * 2 for a, b in _PRODUCTS]) + rows[:, None] * np.array([2 * (a + b) for a, b in _PRODUCTS])
    work = rows[:, None] * np.array([2 * a * b for a, b in _PRODUCTS])
    products = operations[:, list(columns)]
    few, many = rows <= _FEW, (rows >= _MANY[0]) & (rows <= _MANY[1])
    moved = np.stack([sizes[few].reshape(-1), np.ones(sizes[few].size)], 1)
    slope, fixed = np.linalg.lstsq(moved, products[few].reshape(-1), rcond=None)[0]
    read = batch[:, None] * context[None, :] * 2 * 8 * 128 * 2.0  # keys and values of 8 heads of 128
    wide = ((batch >= 16) & (batch <= 128))[:, None] & (context >= 8192)[None, :]
    return Slack(
        float(1 / slope / chip.bandwidth),
        float(fixed),
        float(np.median(work[many] / products[many]) / chip.flops),
        float(np.median((read / attention)[wide]) / chip.bandwidth),
        float(attention[0].min()),
        float(np.median(operations[few][:, list(norms)])),
    )
