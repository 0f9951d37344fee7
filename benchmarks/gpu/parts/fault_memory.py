"""A step that runs out of memory: it is done in parts, the engine lowers its limits, and nobody else notices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import Place
from runtime.clock import MonotonicClock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.engine import Engine
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.loading import load_model

_EXTRA_BYTES = 64 << 20  # beside what the engine holds


class Starved(TorchExecutor):
    """Stands for a small device on a CPU, whose memory is not so easily used up: no step of more than ``most`` tokens fits."""

    most: int | None = None

    def _forward(self, prepared: Any) -> Tensor:
        if self.most is not None and prepared.tokens.shape[1] > self.most:
            raise torch.OutOfMemoryError(f"a step of {prepared.tokens.shape[1]} tokens (pretended)")
        return super()._forward(prepared)


def run(place: Place, argument: str) -> None:
    loaded = load_model(place.model("qwen3-0.6b"), dtype=place.dtype(), device=place.device)
    tokens, long = (2048, 200) if place.dry else (65_536, 16_384)
    clock = MonotonicClock()
    executor = Starved(loaded, kv_blocks=tokens // 16, clock=clock)
    limits = KnobLimits(max_batch_size=64, token_budget=long, chunk_size=long)
    with Engine(
        loaded, executor=executor, kv_tokens=tokens, clock=clock, limits=limits, knobs=Knobs(64, 0, long, long)
    ) as engine:
        before = engine.generate([[5] * 8], max_tokens=4, ignore_eos=True)[0].token_ids
        _starve(executor, place, True)
        shared = [
            engine.submit([5] * 8, max_tokens=4, ignore_eos=True),
            engine.submit([7] * long, max_tokens=2, ignore_eos=True),
        ]
        done = [_ended(stream) for stream in shared]
        lowered = engine.effective_limits
        place.keep("under_memory_pressure", {"short": done[0], "long": done[1], "limits": lowered.as_dict()})
        _starve(executor, place, False)
        after = engine.generate([[5] * 8], max_tokens=4, ignore_eos=True)[0].token_ids
        place.keep("engine", {"lives": not engine.closed, "same_tokens_as_before": list(before) == list(after)})
        if engine.closed or list(before) != list(after) or done[0] != "done":
            raise RuntimeError("a request beside the one that ran out of memory was harmed, or the engine has died")
        if lowered.token_budget >= long:
            raise RuntimeError(f"the limits were not lowered: {lowered.as_dict()}; perhaps memory did not run out")


def _starve(executor: Starved, place: Place, on: bool) -> None:
    if place.dry:
        executor.most = 64 if on else None
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, (torch.cuda.memory_reserved() + _EXTRA_BYTES) / total) if on else 1.0
    )


def _ended(stream: Any) -> str:
    try:
        stream.result(timeout=120)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "done"
