"""Decode steps replayed as CUDA graphs against the same steps launched call by call: greedy tokens, request by request; and what
a ladder of graphs takes at the start of an engine."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

from benchmarks.gpu.place import Place
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.core import EngineCore
from runtime.llm.output import OutputProcessor
from runtime.llm.scheduler import Scheduler
from runtime.request import Request, SamplingParams
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.kv_pool import free_bytes
from runtime.torch_backend.loading import LoadedModel, load_model
from runtime.torch_backend.pool_size import largest_step, pool_blocks

_BLOCK = 16
ALIKE = 0.95
"""Of the requests at least so many must agree: padding to a graph's size may choose another product kernel, whose roundings let
two tokens that are nearly as likely change places."""


def run(place: Place, model: str) -> None:
    _start(place, load_model(place.model(model), dtype=place.dtype(), device=place.device))
    gc.collect()  # an executor's parts hold each other, and its pool
    batch, output = (3, 5) if place.dry else (37, 64)
    for dtype in ("float32",) if place.dry else ("float32", "bfloat16"):
        loaded = load_model(place.model(model), dtype=dtype, device=place.device)
        eager = tokens_of(loaded, batch, output)
        replayed = tokens_of(loaded, batch, output, max_batch_size=batch)
        alike = sum(a == b for a, b in zip(eager, replayed, strict=True))
        place.keep(dtype, {"requests": batch, "alike": alike, "tokens_each": output})
        if alike < ALIKE * batch:
            raise RuntimeError(f"{batch - alike} of {batch} requests have other tokens with graphs, in {dtype}")
    if place.dry:
        place.keep("note", "a CPU records no graphs: both ran call by call")


def _start(place: Place, loaded: LoadedModel) -> None:
    """Seconds that sizing the KV pool and making an executor take, and what they leave of the device's memory."""
    limits = KnobLimits(max_batch_size=4, token_budget=64, chunk_size=64) if place.dry else KnobLimits()
    begun = time.perf_counter()
    blocks = pool_blocks(loaded, limits, _BLOCK)
    sized = time.perf_counter()
    blocks = min(blocks, 64) if place.dry else blocks
    executor = TorchExecutor(
        loaded,
        kv_blocks=blocks,
        block_size=_BLOCK,
        max_batch_size=limits.max_batch_size,
        token_budget=limits.token_budget,
    )
    found = {
        "sizing_s": round(sized - begun, 2),
        "executor_s": round(time.perf_counter() - sized, 2),
        "graphs": len(executor.graphs.decodes),
        "graphs_with_prompts": len(executor.graphs.prompts),
        "kv_tokens": blocks * _BLOCK,
        "free_gib": round(free_bytes(loaded) / 2**30, 3),
    }
    parted = executor.execute(largest_step(limits, loaded.max_model_len, _BLOCK, blocks), 0.0, 0.0).oom
    found |= {"largest_step_in_parts": bool(parted), "free_gib_behind_it": round(free_bytes(loaded) / 2**30, 3)}
    place.keep("start", found)


def tokens_of(loaded: LoadedModel, batch: int, output: int, **options: Any) -> list[list[int]]:
    """Of requests that begin together and end one after the other, so that the batch shrinks through all sizes."""
    blocks = batch * (-(-(100 + 2 * output) // 16) + 1)
    executor = TorchExecutor(loaded, kv_blocks=blocks, **options)
    if options and loaded.device.type == "cuda" and not getattr(executor, "graphs", ()):
        raise RuntimeError("no step was recorded")
    knobs, limits = Knobs(batch, 0, 4096, 4096), KnobLimits(max_batch_size=batch, token_budget=4096, chunk_size=4096)
    core = EngineCore(Scheduler(kv_blocks=blocks), executor, knobs=knobs, limits=limits, output=OutputProcessor())
    rng, sequences = random.Random(5), []
    for number in range(batch):
        prompt = tuple(rng.randrange(300, 2000) for _ in range(rng.randint(5, 100)))
        most = output + number % output
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        sequences.append(core.add(Request(f"r{number}", prompt, params, most, 0.0)))
    now = 1.0
    while core.has_work:
        now = max(core.step(now).end, now) + 1e-3
    return [list(sequence.output) for sequence in sequences]
