"""A capture that must fail is not begun, and one that fails leaves PyTorch's allocator whole; by what stands in for CUDA."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from runtime.knobs import KnobLimits
from runtime.request import SamplingParams, Sequence
from runtime.torch_backend.backends import PLAIN
from runtime.torch_backend.cuda import graphs
from runtime.torch_backend.cuda.graphs import CUDACapture, record_decode
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.loading import from_model
from runtime.torch_backend.pool_size import pool_blocks
from runtime.torch_backend.sampling import Columns, Sampler
from tests.unit import loading_models

CPU = torch.device("cpu")


class Graph:
    def replay(self) -> None: ...


class CUDA:
    """What of CUDA a capture meets. ``leaks``: as PyTorch 2.11, which does not end a capture that fails."""

    def __init__(self, leaks: bool = True) -> None:
        self.leaks = leaks
        self.mode: int | str = 0
        self.captures = 0
        self.capturing = self.spoilt = False
        self.underway: list[Any] = []

    def look(self) -> None:
        """As ``Tensor.item`` of a tensor on the device."""
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.capturing:
            self.spoilt = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def empty_cache(self) -> None:
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def set_sync_debug_mode(self, mode: int | str) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        self.mode = mode

    def end(self, device: int, pool: object) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def graph(self, graph: Graph, *, pool: object, **options: object) -> AbstractContextManager[None]:
        cuda = self

        class Recording(AbstractContextManager[None]):
            def __enter__(self) -> None:
                cuda.empty_cache()
                cuda.captures += 1
                cuda.capturing, cuda.spoilt = True, False
                cuda.underway.append(pool)

            def __exit__(self, *error: object) -> None:
                cuda.capturing = False
                if not (cuda.spoilt and cuda.leaks):
                    cuda.underway.remove(pool)
                if cuda.spoilt:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

        return Recording()


class Stream:
    cuda_stream = 7

    def wait_stream(self, other: Stream) -> None: ...


def installed(cuda: CUDA, patch: pytest.MonkeyPatch) -> CUDA:
    handles = iter((0, n) for n in range(1, 99))
    replaced: dict[str, Callable[..., Any]] = {
        "Stream": lambda device: Stream(), "current_stream": Stream, "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(), "current_device": lambda: 0, "CUDAGraph": Graph, "graph": cuda.graph,
        "graph_pool_handle": lambda: next(handles), "empty_cache": cuda.empty_cache, "get_sync_debug_mode": lambda: cuda.mode,
        "set_sync_debug_mode": cuda.set_sync_debug_mode,
    }  # fmt: skip
    for name, made in replaced.items():
        patch.setattr(torch.cuda, name, made)
    patch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end, raising=False)
    patch.setattr(graphs, "_abandoned", [], raising=False)
    return cuda


class Looking(Sampler):
    """Greedy, and looks at a value, as the rotary embedding of some models does."""

    cuda: CUDA

    def choose_from(self, logits: torch.Tensor, columns: Columns, out: torch.Tensor) -> torch.Tensor:
        self.cuda.look()
        return out.copy_(logits.argmax(1))

    def seed_of(self, sequence: Sequence) -> int:
        return 0

    def top_k_of(self, params: SamplingParams) -> int:
        return 0


def test_a_model_that_looks_at_values_is_sized_and_runs_launch_by_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = installed(CUDA(), monkeypatch)

    class Memory:
        def __init__(self, device: torch.device) -> None: ...

        def free(self) -> int:
            cuda.empty_cache()
            return 1 << 24

        def peak(self, call: Callable[[], object]) -> int:
            cuda.empty_cache()
            call()
            return 1 << 20

    monkeypatch.setattr(Looking, "cuda", cuda, raising=False)
    loaded = from_model(loading_models.tiny())
    backend = PLAIN._replace(sampler=Looking, memory=Memory, record=record_decode)
    assert pool_blocks(loaded, KnobLimits(max_batch_size=4, token_budget=8, chunk_size=8), 16, backend=backend) > 0
    assert "decode steps of llama are not recorded" in caplog.text and "a synchronizing CUDA operation" in caplog.text
    assert not TorchExecutor(loaded, kv_blocks=4, backend=backend, max_batch_size=4).graphs.decodes
    assert not cuda.captures and not cuda.underway and cuda.mode == 0


def test_only_the_last_call_before_a_recording_may_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first may: it has kernels compiled. What was set before is set again."""
    cuda = installed(CUDA(), monkeypatch)
    cuda.mode = 1
    seen: list[tuple[int | str, bool]] = []
    capture = CUDACapture(CPU)
    replay = capture.record(lambda: seen.append((cuda.mode, cuda.capturing)))
    assert seen == [(1, False), ("error", False), (1, True)] and cuda.mode == 1
    assert isinstance(getattr(replay, "__self__", None), Graph) and not graphs._abandoned
    seen.clear()
    capture.record(lambda: seen.append((cuda.mode, cuda.capturing)))
    assert seen == [(1, False), (1, False), (1, True)], "what follows is alike: no other thread is disturbed for it"

    with pytest.raises(RuntimeError, match="synchronizing"):
        CUDACapture(CPU).record(cuda.look)
    assert cuda.mode == 1 and cuda.captures == 2


@pytest.mark.parametrize("leaks", [True, False])
def test_a_capture_that_fails_leaves_the_allocator_whole(leaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that PyTorch has not ended outlives it: an allocator may still ask it. Another may go, with its memory."""
    cuda = installed(CUDA(leaks), monkeypatch)
    made: list[weakref.ref[Graph]] = []

    def graph() -> Graph:
        found = Graph()
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)

    def fails() -> None:
        if cuda.capturing:
            cuda.look()

    capture = CUDACapture(CPU)
    with pytest.raises(RuntimeError, match="during capture"):
        capture.record(fails)
    torch.cuda.empty_cache()
    assert (made[0]() is not None) == leaks
    capture.record(lambda: None)
    assert cuda.captures == 2 and not cuda.underway


def test_without_the_function_that_ends_a_capture_the_error_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = installed(CUDA(), monkeypatch)
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    with pytest.raises(RuntimeError, match="during capture"):
        CUDACapture(CPU).record(lambda: cuda.look() if cuda.capturing else None)
    assert len(graphs._abandoned) == 1
