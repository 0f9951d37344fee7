"""Steps with prompts whose forward is recorded, against the same steps launched one kernel after the other: greedy tokens,
request by request, and what a step takes, for models of two sizes."""

from __future__ import annotations

import gc
from typing import Any, Final

import torch

from benchmarks.gpu.parts.anatomy import BLOCK, Known, fitting, layer_parameters, measured, weight_bytes
from benchmarks.gpu.parts.ceilings import copy_rate
from benchmarks.gpu.parts.graphs import ALIKE, tokens_of
from benchmarks.gpu.place import LeftOutError, Place
from benchmarks.gpu_projection.steps import Step
from runtime.torch_backend.backends import backend_for
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.kv_pool import default_kv_blocks
from runtime.torch_backend.loading import load_model
from runtime.torch_backend.recorded_steps import prompt_ladder

_MOST: Final = 2048
_STEPS: Final = {
    "prompt of 32": Step((32,), (32,)),
    "8 decodes and 128": Step((1,) * 8 + (128,), (1024,) * 8 + (128,)),
    "prompt of 256": Step((256,), (256,)),
    "64 decodes and 448": Step((1,) * 64 + (448,), (1024,) * 64 + (448,)),
    "64 decodes and 512": Step((1,) * 64 + (512,), (1024,) * 64 + (512,)),
    "prompt of 512 behind 4096": Step((512,), (4608,)),
    "prompt of 1024": Step((1024,), (1024,)),
    "prompt of 2048": Step((2048,), (2048,)),
}


def run(place: Place, model: str) -> None:
    loaded = load_model(place.model(model), dtype=place.dtype(), device=place.device)
    batch, output = (3, 5) if place.dry else (37, 64)
    eager = tokens_of(loaded, batch, output, max_batch_size=batch)
    recorded = tokens_of(loaded, batch, output, max_batch_size=batch, token_budget=_MOST)
    alike = sum(a == b for a, b in zip(eager, recorded, strict=True))
    place.keep("tokens", {"requests": batch, "alike": alike, "tokens_each": output})
    if alike < ALIKE * batch:
        raise RuntimeError(f"{batch - alike} of {batch} requests have other tokens where prompts are recorded")
    rate = place.earlier("ceilings", "copy_bytes_per_s") or copy_rate(loaded.device, 4 << 20 if place.dry else 4 << 30)
    known = Known(weight_bytes(loaded), layer_parameters(loaded), loaded.kv_bytes_per_token, rate, None)
    steps = {"prompt of 32": Step((32,), (32,))} if place.dry else _STEPS
    gc.collect()  # executors whose parts hold each other, with their pools
    steps, blocks = fitting(place, steps, default_kv_blocks(loaded, BLOCK))
    whole = backend_for(loaded.device)._replace(prompt_ladder=lambda most, parameters: prompt_ladder(most, 1))
    for name, tokens in (("one by one", None), ("recorded", _MOST)):
        made: dict[str, Any] = {} if place.dry else {"max_batch_size": 1024, "token_budget": tokens, "backend": whole}
        executor = TorchExecutor(loaded, kv_blocks=blocks, block_size=BLOCK, **made)
        if made and tokens and not executor.graphs.prompts:
            raise LeftOutError("no step with prompts was recorded")
        found = {}
        for step, given in steps.items():
            one = measured(executor, known, given, 2 if place.dry else 20)
            found[step] = {key: one[key] for key in ("ms", "launch_ms", "overlapped_ms", "kernels_ms") if key in one}
        place.keep(name, found)
        del executor
        gc.collect()
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()
