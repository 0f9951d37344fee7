"""PyTorch's own attention runs without cuDNN on a GPU, and the process's switch is as it was behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from runtime.knobs import Knobs
from runtime.torch_backend import sdpa
from runtime.torch_backend.backends import PLAIN
from runtime.torch_backend.encoder import PackedEncoder
from runtime.torch_backend.executor import TorchExecutor
from tests.unit.executor_harness import prompts, run, tiny
from tests.unit.test_encoder import bert

SWITCHES: Any = torch.backends.cuda  # whose functions have no types
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def allowed() -> Iterator[None]:
    """cuDNN's attention is allowed, as PyTorch for CUDA has it from the start."""
    before = SWITCHES.cudnn_sdp_enabled()
    SWITCHES.enable_cudnn_sdp(True)
    yield
    SWITCHES.enable_cudnn_sdp(before)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of PyTorch's attention that is ours, not the model's own, whether cuDNN was allowed."""
    found: list[bool] = []

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        found.append(SWITCHES.cudnn_sdp_enabled())
        return F.scaled_dot_product_attention(*args, **options)

    monkeypatch.setattr(sdpa, "F", SimpleNamespace(scaled_dot_product_attention=noted))
    return found


def engine() -> None:
    executor = TorchExecutor(tiny(), kv_blocks=24, block_size=8, backend=PLAIN)
    knobs = Knobs(max_batch_size=5, token_budget=24, chunk_size=9)
    _, failures, _ = run(executor, list(zip(prompts([3, 19]), [4, 3], strict=True)), knobs)
    assert not failures


def embeddings() -> None:
    PackedEncoder(bert(), pack=False).encode([[3, 4], [5]])


@pytest.mark.parametrize("part", [engine, embeddings])
@pytest.mark.parametrize("device", [CUDA, CPU], ids=str)
def test_steps_and_embeddings_attend_without_cudnn_on_a_gpu(
    part: Callable[[], None], device: torch.device, allowed: None, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, whose tensors are taken for those of ``device``."""
    chosen = sdpa.chosen
    monkeypatch.setattr(sdpa, "chosen", lambda where: chosen(device))
    part()
    assert seen and set(seen) == {device is CPU}
    assert SWITCHES.cudnn_sdp_enabled()


@pytest.mark.parametrize("before", [True, False])
def test_the_switch_is_as_it_was_even_behind_a_fault(before: bool, allowed: None) -> None:
    SWITCHES.enable_cudnn_sdp(before)
    with pytest.raises(RuntimeError), sdpa.chosen(CUDA):
        raise RuntimeError("out of memory")
    assert SWITCHES.cudnn_sdp_enabled() is before


def test_threads_that_overlap_leave_it_off_until_the_last_is_done(allowed: None) -> None:
    inside, go = threading.Event(), threading.Event()

    def other() -> None:
        with sdpa.chosen(CUDA):
            inside.set()
            go.wait(10)

    thread = threading.Thread(target=other)
    with sdpa.chosen(CUDA):
        thread.start()
        assert inside.wait(10)
    assert not SWITCHES.cudnn_sdp_enabled(), "the other thread is inside"
    go.set()
    thread.join()
    assert SWITCHES.cudnn_sdp_enabled()
