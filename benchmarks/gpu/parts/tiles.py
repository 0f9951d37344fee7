"""What the attention kernel takes by tile size, warps and pipeline stages: where the numbers of ``cuda/tiles.py`` come from."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.place import Place, seconds_of
from runtime.torch_backend.cuda import attention, attention_plan
from runtime.torch_backend.cuda.attention_plan import AttentionPlan, plan_sizes
from runtime.torch_backend.cuda.tiles import FEW_ROWS, MANY_ROWS, AttentionTile, multiprocessors_of

_BLOCK: Final = 16


class Heads(NamedTuple):
    """Of a model: query heads, KV heads and their size."""

    heads: int
    kv_heads: int
    dim: int


class Setting(NamedTuple):
    """``rows``: of a tile, where there are as many; ``waves``: programs a multiprocessor that splitting aims at; ``whole``: tiles
    of keys that all rows see go first."""

    rows: int
    tile: AttentionTile
    waves: int = 2
    whole: bool = False

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, {self.tile.keys} keys, {self.tile.warps} warps, {self.tile.stages} stages, {self.waves} waves"
            + ", whole tiles first" * self.whole
        )


Sequences = Sequence[tuple[int, int]]
MODELS: Final = {
    "32/8 heads of 128": Heads(32, 8, 128),
    "16/8 heads of 128": Heads(16, 8, 128),
    "32/8 heads of 64": Heads(32, 8, 64),
    "8/4 heads of 256": Heads(8, 4, 256),
}
DECODES: Final[dict[str, Sequences]] = {
    "1 × 129": [(1, 129)],
    "64 × 129": [(1, 129)] * 64,
    "256 × 129": [(1, 129)] * 256,
    "1 × 8k": [(1, 8192)],
    "8 × 1k": [(1, 1024)] * 8,
    "64 × 1k": [(1, 1024)] * 64,
    "256 × 1k": [(1, 1024)] * 256,
    "skewed": [(1, 8192)] + [(1, 100 + i) for i in range(63)],
}
PROMPTS: Final[dict[str, Sequences]] = {
    "prompt 2k": [(2048, 2048)],
    "prompt 512 behind 4k": [(512, 4608)],
    "64 decodes and 512": [(1, 1024)] * 64 + [(512, 512)],
}


def settings(many: bool, dim: int, dry: bool) -> list[Setting]:
    """Those tried for decodes, or for prompts (``many`` rows)."""
    if dry:
        return [Setting(MANY_ROWS if many else FEW_ROWS, AttentionTile(16, 4, 1), whole=many)]
    if many:
        grid = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
        return [
            Setting(rows, AttentionTile(*tile), whole=True)
            for rows, *tile in grid
            if dim < 256 or rows * tile[0] <= 64 * 64
        ]
    tiles = itertools.product((32, 64, 128), (1, 2, 4), (2, 3, 4))
    found = [Setting(FEW_ROWS, AttentionTile(*tile)) for tile in tiles if dim < 256 or tile[0] <= 64]
    usual = AttentionTile(64, 4, 2)
    return [*found, *(Setting(FEW_ROWS, usual, waves) for waves in (1, 4)), Setting(FEW_ROWS, usual, whole=True)]


def run(place: Place, argument: str) -> None:
    """Compiles in several processes first, then times one setting after the other. ``best`` has, of each model and load, the
    three fastest settings and today's."""
    models = dict(list(MODELS.items())[:1]) if place.dry else MODELS
    work = [(name, many) for name in models for many in (False, True)]
    if not place.dry:
        with multiprocessing.get_context("spawn").Pool(12) as pool:
            pool.starmap(_compiled, [(MODELS[name], many, each) for name, many in work
                                     for each in settings(many, MODELS[name].dim, False)], chunksize=2)  # fmt: skip
    for name, many in work:
        loads = PROMPTS if many else DECODES
        if place.dry:
            loads = {"tiny": [(9, 20), (1, 7)] if many else [(1, 20), (1, 7)]}
        _model(place, name, MODELS[name], many, loads)


def _model(place: Place, name: str, heads: Heads, many: bool, loads: dict[str, Sequences]) -> None:
    device, dtype = torch.device(place.device), torch.float32 if place.dry else torch.bfloat16
    tried = settings(many, heads.dim, place.dry)
    for load, sequences in loads.items():
        inputs = _inputs(heads, sequences, device, dtype)
        found: dict[str, float] = {"today": seconds_of(device, _call(heads, sequences, inputs, None), warm_up=30) * 1e6}
        for each in tried:
            try:
                found[str(each)] = seconds_of(device, _call(heads, sequences, inputs, each)) * 1e6
            except Exception as error:  # shared memory that a chip does not have
                if isinstance(error, torch.AcceleratorError):
                    raise
        fastest = sorted(found, key=found.__getitem__)[:3]
        moved = 2 * sum(context for _, context in sequences) * heads.kv_heads * heads.dim * dtype.itemsize
        shown = {each: round(found[each], 2) for each in [*fastest, "today"]}
        place.keep(
            f"{name}, {load}", {"best": shown, "bytes_per_s": moved / found[fastest[0]] * 1e6, "tried": len(found)}
        )
        place.keep(f"{name}, {load}, all", {each: round(us, 2) for each, us in found.items()})


def _compiled(heads: Heads, many: bool, setting: Setting) -> None:
    """Once, for the cache on disk."""
    device = torch.device("cuda")
    sequences = [(64, 200), (1, 100)] if many else [(1, 500), (1, 100)]
    try:
        _call(heads, sequences, _inputs(heads, sequences, device, torch.bfloat16), setting)()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{heads} {setting}: {type(error).__name__}: {str(error)[:200]}", flush=True)


class _Inputs(NamedTuple):
    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor


def _inputs(heads: Heads, sequences: Sequences, device: torch.device, dtype: torch.dtype) -> _Inputs:
    counts = [-(-context // _BLOCK) for _, context in sequences]
    order = np.random.default_rng(0).permutation(sum(counts))
    table = np.zeros((len(counts), max(counts)), np.int32)
    taken = 0
    for at, count in enumerate(counts):
        table[at, :count] = order[taken : taken + count]
        taken += count
    keys, values = (
        torch.randn(sum(counts) * _BLOCK, heads.kv_heads, heads.dim, device=device, dtype=dtype) for _ in range(2)
    )
    query = torch.randn(sum(new for new, _ in sequences), heads.heads, heads.dim, device=device, dtype=dtype)
    return _Inputs(query, keys, values, torch.from_numpy(table).to(device))


def _call(heads: Heads, sequences: Sequences, inputs: _Inputs, setting: Setting | None) -> Callable[[], Tensor]:
    """The attention of one layer under ``setting``; None: as the engine runs it."""
    new, context = [n for n, _ in sequences], [c for _, c in sequences]
    device = inputs.query.device
    shape = (len(new), sum(new), heads.heads, heads.kv_heads, multiprocessors_of(device))
    if setting is None:
        sizes = plan_sizes(*shape, each=max(new))
    else:
        with mock.patch.multiple(attention_plan, MANY_ROWS=max(setting.rows, FEW_ROWS), WAVES=setting.waves):
            sizes = plan_sizes(*shape, each=max(new))
    plan = AttentionPlan(sizes, device)
    plan.update(new, context)
    call = functools.partial(
        attention.paged_attention,
        *inputs,
        plan,
        block_size=_BLOCK,
        scale=heads.dim**-0.5,
        out=torch.empty_like(inputs.query),
    )
    if setting is None:
        return call
    tile = setting.tile

    def under() -> Tensor:
        with mock.patch.multiple(attention, attention_tile=lambda *_: tile, whole_first=lambda *_: setting.whole):
            return call()

    return under
