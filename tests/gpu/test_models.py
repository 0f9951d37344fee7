"""Models, their self-test and the sampler on a CUDA device."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from runtime.errors import StepFailedError
from runtime.llm.plan import Token
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend.loading import load_model
from runtime.torch_backend.presets import PRESETS
from runtime.torch_backend.sampling import Sampler
from runtime.torch_backend.self_test import self_test

PARAMS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1, "logprobs": 4},
    {"logprobs": 2},
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tiny_passes_the_self_test(dtype: str) -> None:
    loaded = load_model("tiny", dtype=dtype, device="cuda")
    assert loaded.device.type == "cuda"
    self_test(loaded)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b"])
def test_large_presets_are_made_on_the_device_and_quickly(name: str) -> None:
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    loaded = load_model(name, device="cuda")
    assert loaded.dtype == torch.bfloat16 and loaded.parameters == PRESETS[name].parameters
    self_test(loaded)
    assert time.monotonic() - started < 60
    assert torch.cuda.max_memory_allocated() < 1.2 * 2 * loaded.parameters  # never a float32 copy


def test_the_sampler_draws_as_on_a_cpu() -> None:
    logits = 3 * torch.randn(len(PARAMS), 5000, generator=torch.Generator().manual_seed(0))
    logits[0, 7] = float("nan")
    rows = []
    for i, params in enumerate(PARAMS):
        row = Sequence(Request(f"r{i}", (1, 2, 3), SamplingParams(**params), 64, 0.0))
        row.output = [4, 5]
        rows.append(row)
    here = Sampler(5000, "cpu").sample(logits, rows)
    there = Sampler(5000, "cuda").sample(logits.cuda(), rows)
    assert isinstance(here[0], StepFailedError) and isinstance(there[0], StepFailedError)
    for a, b in zip(here[1:], there[1:], strict=True):
        assert isinstance(a, Token) and isinstance(b, Token)
        assert a.id == b.id
        assert [i for i, _ in a.top] == [i for i, _ in b.top]
        assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)
