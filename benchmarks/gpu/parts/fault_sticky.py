"""A device that is lost in mid-run: the engine closes, everybody is told why, and nothing hangs."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import Place
from runtime.clock import MonotonicClock
from runtime.errors import DeviceError, EngineClosedError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.engine import Engine
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.loading import load_model


class Losing(TorchExecutor):
    """Stands for a GPU on a CPU: its steps fail as those of a lost device do once it is ``lost``."""

    lost = False

    def _forward(self, prepared: Any) -> Tensor:
        if self.lost:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered (pretended)")
        return super()._forward(prepared)


def run(place: Place, argument: str) -> None:
    loaded = load_model(place.model("qwen3-0.6b"), dtype=place.dtype(), device=place.device)
    clock = MonotonicClock()
    executor = Losing(loaded, kv_blocks=512, clock=clock)
    limits = KnobLimits(max_batch_size=8, token_budget=512, chunk_size=512)
    engine = Engine(loaded, executor=executor, kv_tokens=8192, clock=clock, limits=limits, knobs=Knobs(8, 0, 512, 512))
    streams = [engine.submit([5] * 8, max_tokens=900, ignore_eos=True) for _ in range(2)]
    give_up = time.monotonic() + 60
    while not all(stream.token_ids for stream in streams):
        if time.monotonic() > give_up:
            raise RuntimeError("no token came within a minute")
        time.sleep(0.01)
    begun = time.monotonic()
    _lose(executor, place)
    ends = [_end_of(stream) for stream in streams]
    seconds = round(time.monotonic() - begun, 2)
    error = engine.error
    place.keep("requests", ends)
    place.keep("engine", {"closed": engine.closed, "error": None if error is None else str(error), "seconds": seconds})
    if not (engine.closed and isinstance(error, DeviceError)) or not all(
        end.startswith("EngineClosedError") for end in ends
    ):
        raise RuntimeError("the engine did not close with a DeviceError, or a request was not told")


def _lose(executor: Losing, place: Place) -> None:
    """An index out of bounds in a kernel: every later call of this process on the device fails."""
    if place.dry:
        executor.lost = True
        return
    there, at = torch.zeros(4, device="cuda"), torch.tensor([9], device="cuda")
    with contextlib.suppress(RuntimeError):  # which of the two threads hears of it first is open
        there[at]


def _end_of(stream: Any) -> str:
    try:
        stream.result(timeout=60)
    except EngineClosedError as error:
        return f"EngineClosedError: {' '.join(str(error).split())[:200]}"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "done"
