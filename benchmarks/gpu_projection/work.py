"""Bytes and floating-point operations of one call, from the shapes of what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from benchmarks.gpu_projection.steps import Step
from runtime.torch_backend.cuda.attention_plan import PlanSizes, work_list


class Work(NamedTuple):
    """``read`` and ``written``: bytes of device memory; ``flops``: on matrix units, of padded tiles where there is padding."""

    read: int
    written: int
    flops: int = 0
    known: bool = True


def touched(tensor: Tensor) -> int:
    """Bytes of ``tensor``, those of an expanded dimension once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.dtype.itemsize if tensor.numel() else 0


_PICKS = {"embedding", "index_select", "gather"}  # of the first tensor, only what comes out
_OVERWRITES = {"copy_", "fill_", "zero_", "zeros", "full", "arange", "ones"}


def of_operation(name: str, given: Sequence[Tensor], produced: Sequence[Tensor]) -> Work:
    """Of PyTorch's operation ``name``: each input is read once, each output written once."""
    written = sum(map(touched, produced))
    if name in _PICKS:
        return Work(written + sum(map(touched, given[1:])), written)
    if name in ("index_copy", "index_copy_"):
        moved = sum(map(touched, given[1:]))
        return Work(moved, touched(given[-1]))
    if name in _OVERWRITES:
        return Work(sum(map(touched, given[1:])), written)
    read = sum(map(touched, given))
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        left, right = given[-2:]
        return Work(read, written, 2 * left.numel() * right.shape[-1])
    return Work(read, written)


def of_kernel(name: str, given: Mapping[str, Any], grid: Sequence[int], step: Step) -> Work:
    """Of our Triton kernel ``name`` launched with ``given`` over ``grid`` in ``step``; all its tensors once where none of these
    functions knows it."""
    known = KERNELS.get(name)
    if known is not None:
        return known(given, grid, step)
    tensors = {id(x): x for x in given.values() if isinstance(x, Tensor)}
    return Work(sum(map(touched, tensors.values())), 0, 0, False)


def _rms_norm(given: Mapping[str, Any], grid: Sequence[int], step: Step) -> Work:
    row = given["WIDTH"] * given["x"].element_size()
    added = grid[0] * row if given["ADD"] else 0
    return Work(grid[0] * row + added + touched(given["weight"]), grid[0] * row + added)


def _gated(given: Mapping[str, Any], grid: Sequence[int], step: Step) -> Work:
    out = touched(given["out"])
    return Work(2 * out, out)


def _rope_write(given: Mapping[str, Any], grid: Sequence[int], step: Step) -> Work:
    query, moved = touched(given["query"]), touched(given["key"]) + touched(given["value"])
    stored = (given["key"].numel() + given["value"].numel()) * given["keys"].element_size()
    return Work(query + moved + touched(given["cos"]) + touched(given["sin"]) + touched(given["slots"]), query + stored)


class _Tiles(NamedTuple):
    """The items of an attention launch: positions that each reads, its tokens, and whether its result is merged later.

    ``unique``: positions that are read at all; ``merged``: tokens whose parts are merged.
    """

    positions: Any
    tokens: Any
    partial: Any
    unique: int
    merged: int


def _tiles(step: Step, tile: int, splits: int, window: int) -> _Tiles:
    new, context = np.array(step.new, np.int32), np.array(step.context, np.int32)
    sizes = PlanSizes(len(new), int(new.sum()), int(new.max()), tile, 0, splits)
    items, merges = work_list(new, context, sizes)
    sequence, first, low, high, place = items.T.astype(np.int64)
    before = (context - new)[sequence]
    tokens = np.minimum(tile, new[sequence] - first)
    last = np.minimum(high, before + first + tokens)
    if window:
        low = np.maximum(low, before + first - window + 1)
    seen = np.maximum(0, context - np.maximum(0, context - new - window + 1)) if window else context
    merged = np.minimum(tile, new[merges[:, 0]] - merges[:, 1])
    return _Tiles(np.maximum(0, last - low), tokens, place >= 0, int(seen.sum()), int(merged.sum()))


def _attend(given: Mapping[str, Any], grid: Sequence[int], step: Step) -> Work:
    """Keys and values of a sequence are read once: tiles of the same sequence find in the cache what another has read."""
    heads, value_dim, dim = given["HEADS"], given["VALUE_DIM"], given["DIM"]
    kv_heads, partial = heads // given["GROUP"], given["partial"]
    splits = 0 if partial.dim() == 1 else partial.shape[0] // 2  # one dimension: nothing is merged
    tiles = _tiles(step, given["TILE"], splits, given["WINDOW"])
    keys, query, out = given["keys"].element_size(), given["query"].element_size(), given["out"].element_size()
    read = tiles.unique * kv_heads * (dim + value_dim) * keys + int(tiles.tokens.sum()) * heads * dim * query
    read += tiles.unique // given["BLOCK_SIZE"] * given["table"].element_size()
    whole, parts = int(tiles.tokens[~tiles.partial].sum()), int(tiles.tokens[tiles.partial].sum())
    written = heads * (whole * value_dim * out + parts * (value_dim + 1) * 4)
    flops = 2 * int(tiles.positions.sum()) * kv_heads * given["BLOCK_M"] * (given["BLOCK_D"] + given["BLOCK_V"])
    return Work(read, written, flops)


def _merge(given: Mapping[str, Any], grid: Sequence[int], step: Step) -> Work:
    tiles = _tiles(step, given["TILE"], grid[0], 0)
    parts, heads, value_dim = int(tiles.tokens[tiles.partial].sum()), given["HEADS"], given["VALUE_DIM"]
    return Work(parts * heads * (value_dim + 1) * 4, tiles.merged * heads * value_dim * given["out"].element_size())


def _greedy(given: Mapping[str, Any], grid: Sequence[int], step: Step) -> Work:
    return Work(touched(given["logits"]), touched(given["out"]))


KERNELS: dict[str, Callable[[Mapping[str, Any], Sequence[int], Step], Work]] = {
    "_rms_norm": _rms_norm, "_gated": _gated, "_rope_write": _rope_write, "_attend": _attend, "_merge": _merge,
    "_greedy": _greedy,
}  # fmt: skip
