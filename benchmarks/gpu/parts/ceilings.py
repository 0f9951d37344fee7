"""What the device reaches by itself: bytes, products, launches. All other figures are held against these."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import Place, seconds_of, synchronized

# the products of a layer of an 8B model, in and out
_LAYER = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))


def run(place: Place, argument: str) -> None:
    device = torch.device(place.device)
    dtype = torch.float32 if place.dry else torch.bfloat16
    place.keep("copy_bytes_per_s", copy_rate(device, 4 << 20 if place.dry else 4 << 30))
    side = 64 if place.dry else 8192
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    place.keep("matmul_flops", 2 * side**3 / seconds_of(device, lambda: a @ b))
    for rows in (1, 16, 64) if place.dry else (1, 8, 16, 32, 64, 128, 256, 2048):
        place.keep(f"products_{rows}_rows", _products(device, dtype, rows, 64 if place.dry else 1))
    place.keep("launch_host_us", _host_us(device))
    if device.type == "cuda":
        place.keep("launch_graph_us", _graph_us())


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes/s, read and written, of copying ``size`` bytes from one tensor to another."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(device, lambda: target.copy_(source))


def _products(device: torch.device, dtype: torch.dtype, rows: int, less: int) -> dict[str, float]:
    """One layer's products: µs of each, and the bytes/s of their weights. ``less``: divides their width."""
    found, weights = {}, 0
    for inputs, outputs in _LAYER:
        inputs, outputs = inputs // less, outputs // less
        # several weights in turn, so that none is still in the cache
        several = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(1 if less > 1 else 6)]
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        found[f"{inputs}x{outputs}_us"] = round(seconds_of(device, _in_turn(x, several)) / len(several) * 1e6, 2)
        weights += inputs * outputs * dtype.itemsize
    found["weight_bytes_per_s"] = weights / (sum(found.values()) / 1e6)
    return found


def _in_turn(x: Tensor, weights: list[Tensor]) -> Callable[[], None]:
    def work() -> None:
        for weight in weights:
            torch.nn.functional.linear(x, weight)

    return work


def _host_us(device: torch.device, count: int = 2000) -> float:
    """CPU time that PyTorch takes to launch one small operation."""
    x = torch.zeros(16, device=device)
    for _ in range(100):
        x.add_(1)
    synchronized(device)
    begun = time.process_time()
    for _ in range(count):
        x.add_(1)
    spent = time.process_time() - begun
    synchronized(device)
    return round(spent / count * 1e6, 2)


def _graph_us(count: int = 1000) -> float:
    """From one small kernel to the next in a CUDA graph."""
    x = torch.zeros(16, device="cuda")
    cuda: Any = torch.cuda
    stream = cuda.Stream()
    with cuda.stream(stream):
        x.add_(1)
    stream.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for _ in range(count):
            x.add_(1)
    return round(seconds_of(torch.device("cuda"), graph.replay) / count * 1e6, 3)
