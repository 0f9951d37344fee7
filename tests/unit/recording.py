"""What stands in for CUDA graphs where there is no GPU: a recording is the call itself, which each replay really runs again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from runtime.torch_backend.cuda.graphs import DecodeGraphs


class Recorder:
    """A ``Capture`` that runs what it records, as CUDA does to warm up, and counts what is recorded and replayed."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replayed: list[int] = []

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        assert isinstance(call, partial)
        [size] = call.args
        call()
        self.recorded.append(size)

        def replay() -> None:
            self.replayed.append(size)
            call()

        return replay

    def graphs(self, sizes: tuple[int, ...], step: Callable[[int], None], device: torch.device) -> DecodeGraphs:
        """What a backend's ``record`` is."""
        return DecodeGraphs(sizes, step, self)
