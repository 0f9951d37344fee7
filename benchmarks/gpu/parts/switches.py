"""What our products of few rows and kernels that begin early earn in a decode step: the same steps with each switched off."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple
from unittest import mock

import torch

from benchmarks.gpu.parts.anatomy import BLOCK, Known, fitting, layer_parameters, measured, weight_bytes
from benchmarks.gpu.parts.ceilings import copy_rate
from benchmarks.gpu.place import Place
from benchmarks.gpu_projection.steps import Step
from runtime.torch_backend.cuda import backend, launch, tiles
from runtime.torch_backend.cuda.tiles import LinearTile
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.kv_pool import default_kv_blocks
from runtime.torch_backend.loading import load_model

_MOST: Final = 256
_SHAPES: Final = ((1, 128), (8, 1024), (32, 128), (64, 128), (64, 1024), (256, 128))


class Switches(NamedTuple):
    """``early``: kernels begin while those before them end. ``ours``: products of few rows by our kernel. ``ahead``: how many
    times its inputs' width of weights a program of it brings to the cache beforehand."""

    early: bool
    ours: bool
    ahead: int = tiles.AHEAD

    def __str__(self) -> str:
        ahead = f", {self.ahead} ahead" if self.early and self.ours else ""
        return (
            f"{'early' if self.early else 'one after the other'}, {'our' if self.ours else 'library'} products{ahead}"
        )


SETTINGS: Final = (
    Switches(False, False), Switches(False, True), Switches(True, False), Switches(True, True, 0), Switches(True, True),
    Switches(True, True, 16),
)  # fmt: skip


def run(place: Place, model: str) -> None:
    """Milliseconds of a step, the next one launched before the last is collected, and what that is over the memory floor."""
    loaded = load_model(place.model(model), dtype=place.dtype(), device=place.device)
    rate = place.earlier("ceilings", "copy_bytes_per_s") or copy_rate(loaded.device, 4 << 20 if place.dry else 4 << 30)
    known = Known(weight_bytes(loaded), layer_parameters(loaded), loaded.kv_bytes_per_token, rate, None)
    shapes = ((2, 20),) if place.dry else _SHAPES
    steps = {f"{batch} × {context}": Step.decodes(*[context] * batch) for batch, context in shapes}
    steps, blocks = fitting(place, steps, default_kv_blocks(loaded, BLOCK))
    most = None if place.dry else _MOST
    for switches in SETTINGS[-2:-1] if place.dry else SETTINGS:
        with _switched(switches):
            executor = TorchExecutor(loaded, kv_blocks=blocks, block_size=BLOCK, max_batch_size=most)
            found = dict[str, float]()
            for name, step in steps.items():
                one = measured(executor, known, step, 2 if place.dry else 20)
                ms = one.get("overlapped_ms", one["ms"])
                found |= {f"{name}, ms": ms, f"{name}, over floor": round(ms / one["floor_ms"], 3)}
        place.keep(str(switches), found)
        del executor  # and with it the graphs, before there are others
        gc.collect()
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _switched(switches: Switches) -> Iterator[None]:
    tile: Callable[..., LinearTile | None] = tiles.linear_tile if switches.ours else lambda *_: None
    with (
        mock.patch.object(launch, "EARLY", switches.early),
        mock.patch.object(launch, "_known", {}),  # binaries that were compiled for the other way
        mock.patch.object(tiles, "AHEAD", switches.ahead),
        mock.patch.object(backend, "linear_tile", tile),
    ):
        yield
