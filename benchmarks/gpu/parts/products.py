"""What products of few rows take by our kernel and by PyTorch's library, by tile: where ``linear_tile`` of ``cuda/tiles.py``
comes from."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.place import Place, seconds_of
from runtime.torch_backend.cuda.activation import gated
from runtime.torch_backend.cuda.linear import linear
from runtime.torch_backend.cuda.tiles import FEW_ROWS, LinearTile, architecture_of, linear_tile, next_power_of_2

_COLD: Final = 256 << 20
"""Bytes of weights that are read in turn, so that none is still in the cache."""

_SHARED: Final = 200 << 10
"""Most bytes of tiles in flight."""


class Product(NamedTuple):
    """``gated``: of the outputs there are twice as many weights."""

    inputs: int
    outputs: int
    gated: bool = False

    def __str__(self) -> str:
        return f"{self.inputs} to {self.outputs}{' gated' * self.gated}"


PRODUCTS: Final = (
    Product(4096, 6144),
    Product(4096, 4096),
    Product(4096, 14336, True),
    Product(14336, 4096),
    Product(1024, 4096),
    Product(2048, 1024),
    Product(1024, 3072, True),
    Product(3072, 1024),
)
ROWS: Final = (1, 8, 32, 64)


def tiles(product: Product, rows: int, dry: bool) -> list[LinearTile]:
    """Those tried."""
    if dry:
        return [LinearTile(16, 32, 2, 4, 2)]
    block, found = max(FEW_ROWS, next_power_of_2(rows)), []
    wide, deep = ((16, 32, 64), ((128, 4), (256, 4), (512, 3))) if block < 64 else ((32, 64, 128), ((128, 4), (256, 3)))
    for outputs, (inputs, stages), programs in itertools.product(wide, deep, (1, 264, 528)):
        if product.outputs % outputs or product.inputs % inputs:
            continue
        parts = max(1, min(product.inputs // inputs, round(programs / (product.outputs // outputs))))
        each = inputs * 2 * (outputs * (1 + product.gated) + block)
        tile = LinearTile(outputs, inputs, parts, 4, stages)
        if each * stages <= _SHARED and tile not in found:
            found.append(tile)
    return found


def run(place: Place, argument: str) -> None:
    """Compiles in several processes first, then times one tile after the other."""
    device, dtype = torch.device(place.device), torch.bfloat16
    products = (Product(64, 32), Product(64, 32, True)) if place.dry else PRODUCTS
    cases = [(product, rows) for product in products for rows in ((3,) if place.dry else ROWS)]
    if not place.dry:
        blocks = {(product, max(FEW_ROWS, next_power_of_2(rows))) for product, rows in cases}
        jobs = [(product, rows, tile) for product, rows in blocks for tile in tiles(product, rows, False)]
        with multiprocessing.get_context("spawn").Pool(14) as pool:
            pool.starmap(_compiled, jobs, chunksize=4)
    for product, rows in cases:
        _product(place, product, rows, device, dtype)


def _product(place: Place, product: Product, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    x, weights = _inputs(product, rows, device, dtype)
    library = functools.partial(_in_turn, weights, lambda weight: _library(x, weight, product.gated))
    found = {"library": seconds_of(device, library, 10) / len(weights) * 1e6}
    today = linear_tile(architecture_of(device), rows, product.inputs, product.outputs, product.gated)
    if today is not None:
        found["today"] = _timed(product, x, weights, today, device)
    for tile in tiles(product, rows, place.dry):
        try:
            found[_name(tile)] = _timed(product, x, weights, tile, device)
        except Exception as error:  # shared memory that a chip does not have
            if isinstance(error, torch.AcceleratorError):
                raise
    fastest = sorted(found, key=found.__getitem__)[:3]
    shown = {name: round(found[name], 2) for name in dict.fromkeys([*fastest, "today", "library"]) if name in found}
    place.keep(f"{product}, {rows} rows", {"best": shown, "bytes_per_s": weights[0].nbytes / found[fastest[0]] * 1e6})
    place.keep(f"{product}, {rows} rows, all", {name: round(us, 2) for name, us in found.items()})


def _timed(product: Product, x: Tensor, weights: Sequence[Tensor], tile: LinearTile, device: torch.device) -> float:
    """µs of one product."""
    ours = functools.partial(_in_turn, weights, lambda weight: linear(x, weight, None, tile, silu_gated=product.gated))
    return seconds_of(device, ours, 10) / len(weights) * 1e6


def _name(tile: LinearTile) -> str:
    return f"{tile.outputs} × {tile.inputs}, {tile.parts} parts, {tile.stages} stages"


def _library(x: Tensor, weight: Tensor, silu_gated: bool) -> Tensor:
    found = torch.nn.functional.linear(x, weight)
    return gated(found) if silu_gated else found


def _in_turn(weights: Sequence[Tensor], work: Callable[[Tensor], Tensor]) -> None:
    for weight in weights:
        work(weight)


def _inputs(product: Product, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    outputs = product.outputs * (2 if product.gated else 1)
    size = outputs * product.inputs * dtype.itemsize
    count = 2 if device.type == "cpu" else max(3, min(32, -(-_COLD // size)))
    weights = [torch.randn(outputs, product.inputs, device=device, dtype=dtype) for _ in range(count)]
    return torch.randn(rows, product.inputs, device=device, dtype=dtype), weights


def _compiled(product: Product, rows: int, tile: LinearTile) -> None:
    """Once, for the cache on disk."""
    device = torch.device("cuda")
    outputs = product.outputs * (2 if product.gated else 1)
    weight = torch.zeros(outputs, product.inputs, device=device, dtype=torch.bfloat16)
    try:
        linear(torch.zeros(rows, product.inputs, device=device, dtype=torch.bfloat16), weight, None, tile,
               silu_gated=product.gated)  # fmt: skip
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{product} {tile}: {type(error).__name__}: {str(error)[:200]}", flush=True)
