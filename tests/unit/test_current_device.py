"""Steps run with the executor's own device current, whatever the caller's is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from runtime.torch_backend import executor as module
from runtime.torch_backend.current_device import made_current
from runtime.torch_backend.executor import TorchExecutor
from tests.unit.executor_harness import prompts, run, tiny
from tests.unit.test_fused_layer import KNOBS


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two GPUs, of which the first is current; the devices that were made current."""
    found: list[torch.device] = []

    def guard(device: torch.device) -> AbstractContextManager[None]:
        found.append(device)
        return nullcontext()

    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.device", guard)
    return found


def test_only_another_device_is_made_current(guarded: list[torch.device]) -> None:
    for name in ("cpu", "cuda", "cuda:0", "cuda:1"):
        with made_current(torch.device(name)):
            pass
    assert guarded == [torch.device("cuda:1")]


def test_a_step_and_what_it_is_set_up_with_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    def made(device: torch.device) -> AbstractContextManager[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(module, "made_current", made)
    monkeypatch.setattr("runtime.torch_backend.current_device.made_current", made)
    executor = TorchExecutor(tiny("llama"), kv_blocks=20, block_size=8)
    assert len(entered) == 1
    run(executor, [(p, 3) for p in prompts([5])], KNOBS)
    assert len(entered) >= 1 + 2 * 3, "a launch and a collect for each step"
