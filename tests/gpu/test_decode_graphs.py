"""Recorded decode steps, and steps that overlap, on a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from typing import Any

import pytest
import torch

from runtime.knobs import Knobs
from runtime.llm.plan import StepPlan
from runtime.records import StepRecord
from runtime.step_model import StepGraphs
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.loading import load_model
from tests.unit.executor_harness import Oracle, prompts, run

KNOBS = Knobs(max_batch_size=6, token_budget=48, chunk_size=24)
REQUESTS = list(zip(prompts([5, 40, 9, 30, 12, 60, 1, 25]), [30, 12, 40, 8, 1, 20, 33, 2], strict=True))


def executor(loaded: Any, **options: Any) -> TorchExecutor:
    return TorchExecutor(loaded, kv_blocks=60, block_size=8, **options)


def test_recorded_and_overlapping_steps_give_the_tokens_of_plain_ones() -> None:
    loaded = load_model("tiny", dtype="float32", device="cuda")
    expected, failures, _ = run(executor(loaded, overlaps=False), REQUESTS, KNOBS)
    assert not failures
    for overlaps in (False, True):
        fast = executor(loaded, max_batch_size=6, overlaps=overlaps)
        assert fast.graphs == StepGraphs((1, 2, 4, 6))
        assert run(fast, REQUESTS, KNOBS)[:2] == (expected, {})
    assert executor(loaded).overlaps


def test_recorded_steps_with_prompts_give_the_tokens_of_plain_ones() -> None:
    loaded = load_model("tiny", dtype="float32", device="cuda")
    expected, failures, _ = run(executor(loaded, overlaps=False), REQUESTS, KNOBS)
    assert not failures
    for overlaps in (False, True):
        fast = executor(loaded, max_batch_size=6, token_budget=40, overlaps=overlaps)
        assert fast.graphs.prompts == (16, 32, 40)  # a step of 48 runs beside
        assert run(fast, REQUESTS, KNOBS)[:2] == (expected, {})


def test_steps_with_drafts_give_the_tokens_of_plain_ones() -> None:
    """Between recorded steps that overlap: drafts come and go every third step."""
    loaded = load_model("tiny", dtype="float32", device="cuda")
    expected, failures, _ = run(executor(loaded, overlaps=False), REQUESTS, KNOBS)
    assert not failures
    drafter, heard = Oracle({str(at): tokens for at, tokens in enumerate(expected)}), list[StepRecord]()
    knobs = (KNOBS.with_(draft_tokens=at // 3 % 2 * 3) for at in count())
    fast = executor(loaded, max_batch_size=6)
    assert run(fast, REQUESTS, knobs, drafter=drafter, heard=heard)[:2] == (expected, {})
    assert sum(step.accepted for step in heard) > 20


@pytest.mark.parametrize("tokens", [None, 48], ids=["decodes-recorded", "all-recorded"])
def test_a_launch_waits_for_nothing(tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch raises at whatever makes the host wait."""
    loaded = load_model("tiny", dtype="bfloat16", device="cuda")
    fast = executor(loaded, max_batch_size=6, token_budget=tokens)
    run(fast, REQUESTS, KNOBS)  # kernels are compiled, work lists allocated
    launch, strict = fast.launch, []

    def watched(plan: StepPlan) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not fast.in_trouble, fast._launched[-1].cause
        strict.append(plan)

    monkeypatch.setattr(fast, "launch", watched)
    _, failures, _ = run(fast, REQUESTS, KNOBS)
    assert not failures and len(strict) > 20


FAILING = """
import torch
from runtime.torch_backend.cuda.graphs import CUDACapture

x = torch.zeros(8, device="cuda")

def looks():
    x.add_(1)
    x.sum().item()

def looks_at_last():
    x.add_(1)
    if torch.cuda.is_current_stream_capturing():
        x.sum().item()

for call, said in ((looks, "called a synchronizing"), (looks_at_last, "captur")):
    try:
        CUDACapture(x.device).record(call)
    except RuntimeError as error:
        assert said in str(error), error
    else:
        raise SystemExit("it was recorded")
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.rand(8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
before = x.clone()
replay = CUDACapture(x.device).record(lambda: x.add_(1))
replay()
assert (x - before == 3).all(), x  # twice to warm up
"""


def test_what_cannot_be_recorded_leaves_the_allocator_whole() -> None:
    """In a process of its own, which a capture that fails may spoil."""
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
