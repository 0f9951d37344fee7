"""A KV pool of 8 bits beside one of the model's own dtype: whether self-tests pass and recorded steps have the tokens of steps
launched call by call, how many tokens it holds, what steps take, and how soon greedy texts differ."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.parts.anatomy import BLOCK, Known, fitting, layer_parameters, measured, weight_bytes
from benchmarks.gpu.parts.ceilings import copy_rate
from benchmarks.gpu.parts.graphs import ALIKE, tokens_of
from benchmarks.gpu.parts.self_tests import ARCHITECTURES, tested
from benchmarks.gpu.place import Place
from benchmarks.gpu_projection.steps import Step
from runtime.knobs import KnobLimits
from runtime.torch_backend import backends, executor, pool_size
from runtime.torch_backend.cuda.backend import CUDA, PagedAttention
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.loading import LoadedModel, from_model, load_model
from runtime.torch_backend.pool_size import pool_blocks
from runtime.torch_backend.self_test import self_test

_MOST: Final = 64
_STEPS: Final = {
    "decode 1 × 1024": Step.decodes(1024),
    "decode 8 × 8192": Step.decodes(*[8192] * 8),
    "decode 64 × 1024": Step.decodes(*[1024] * 64),
    "decode 64 × 4096": Step.decodes(*[4096] * 64),
    "prompt of 2048": Step((2048,), (2048,)),
    "64 decodes and 512 of a prompt": Step((1,) * 64 + (512,), (1024,) * 64 + (512,)),
}
_DRY_STEPS: Final = {"decode 2 × 20": Step.decodes(20, 20)}
_DRY_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def run(place: Place, model: str) -> None:
    """All self-tests are tried, and one that fails fails the part at its end."""
    with _kernels(place):
        texts = {kept: _tried(place, model, kept) for kept in ("auto", "fp8")}
        same = [next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
                for pair in zip(*texts.values(), strict=True)]  # fmt: skip
        place.keep("greedy tokens before the first that differs", {"mean": round(sum(same) / len(same), 1), "of": same})
        failed = []
        for kind, fields in list(ARCHITECTURES.items())[: 0 if place.dry else None]:
            for dtype in ("float32", "bfloat16", "float16"):
                try:
                    place.keep(f"{kind} {dtype}", tested(kind, fields, dtype, place, kv_cache_dtype="fp8"))
                except Exception as error:
                    failed.append(f"{kind} {dtype}")
                    place.keep(failed[-1], {"failed": f"{type(error).__name__}: {error}"})
    if failed:
        raise RuntimeError(f"self-tests failed: {', '.join(failed)}")


def _tried(place: Place, model: str, kept: str) -> list[list[int]]:
    """The greedy texts of a model whose KV pool is kept so."""
    loaded = _loaded(place, model, kept)
    self_test(loaded)
    blocks = pool_blocks(loaded, KnobLimits(max_batch_size=4, token_budget=64) if place.dry else KnobLimits(), BLOCK)
    place.keep(
        f"{kept}, pool",
        {"kv_tokens": blocks * BLOCK, "bytes_per_token": loaded.kv_bytes_per_token, "self_test": "passed"},
    )
    gc.collect()  # what sizing left behind
    rate = place.earlier("ceilings", "copy_bytes_per_s") or copy_rate(loaded.device, 4 << 20 if place.dry else 4 << 30)
    known = Known(weight_bytes(loaded), layer_parameters(loaded), loaded.kv_bytes_per_token, rate, None)
    steps = _DRY_STEPS if place.dry else _STEPS
    steps, needed = fitting(place, steps, blocks, f"{kept}, ")
    made = TorchExecutor(loaded, kv_blocks=needed, block_size=BLOCK, max_batch_size=None if place.dry else _MOST)
    for name, step in steps.items():
        one = measured(made, known, step, 1 if place.dry else 20)
        shown = ("ms", "overlapped_ms", "kernels_ms", "floor_ms", "over_floor")
        place.keep(f"{kept}, {name}", {key: one[key] for key in shown if key in one})
    del made
    gc.collect()
    batch, output = (2, 2) if place.dry else (37, 64)
    eager = tokens_of(loaded, batch, output)
    recorded = eager if place.dry else tokens_of(loaded, batch, output, max_batch_size=batch)
    alike = sum(a == b for a, b in zip(eager, recorded, strict=True))
    place.keep(f"{kept}, recorded", {"requests": batch, "alike": alike, "tokens_each": output})
    if alike < ALIKE * batch:
        raise RuntimeError(f"{batch - alike} of {batch} requests have other tokens with graphs, KV kept in {kept}")
    return eager


def _loaded(place: Place, model: str, kept: str) -> LoadedModel:
    if not place.dry:
        return load_model(place.model(model), dtype=place.dtype(), device=place.device, kv_cache_dtype=kept)
    torch.manual_seed(0)
    tiny = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **_DRY_SHAPE), dtype=torch.float32)
    return from_model(tiny, kv_cache_dtype=kept)


@contextlib.contextmanager
def _kernels(place: Place) -> Iterator[None]:
    """On a CPU, which keeps no pool of 8 bits, within: our kernels, interpreted, over few parts of contexts."""
    if not place.dry:
        yield
        return
    ours = backends.Backend(
        CUDA.operations, lambda pool, loaded: PagedAttention(pool, loaded.device, splits=3), CUDA.lay_out, fp8=True
    )
    with contextlib.ExitStack() as stack:
        for module in (backends, executor, pool_size):
            stack.enter_context(mock.patch.object(module, "backend_for", lambda device: ours))
        yield
