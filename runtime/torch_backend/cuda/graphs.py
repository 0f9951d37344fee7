"""CUDA graphs: a decode step is recorded once for each size of a ladder, and from then on queued by one call.

Launching some ten kernels a layer takes the host longer than a small batch takes the device. A graph holds all launches of
a step, logits and sampling included, with the addresses they were recorded with; so everything that changes lies in tensors
that stay where they are (:mod:`runtime.torch_backend.resident`). Larger graphs are recorded first and all share one memory
pool, so that the smaller ones find room in what the largest has taken. Recording is part of the start: no knob, batch size
or request triggers one later. Steps with prompts are recorded likewise, up to what the head reads
(:mod:`runtime.torch_backend.recorded_steps`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Protocol

import torch

from runtime.torch_backend.cuda.counters import renew_counters


class Capture(Protocol):
    """What records a call: the piece of CUDA that this module needs."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """Run ``call`` as often as it takes to record it, and return what queues again all that it queued."""
        ...


_debugging: Final = threading.Lock()  # PyTorch's debug mode is one for the process
_abandoned: Final[list[Any]] = []  # graphs whose capture PyTorch has not ended: its allocators may still ask them


@contextmanager
def synchronization_forbidden() -> Iterator[None]:
    """PyTorch raises ``RuntimeError`` before an operation that makes the host wait for the device: a value looked at, a copy from
    pageable memory. It does so in every thread of the process, and does not know all such operations."""
    with _debugging:
        before = torch.cuda.get_sync_debug_mode()
        try:
            _set_sync_debug_mode("error")
            yield
        finally:
            _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():  # PyTorch warns that the mode is a prototype
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)


class CUDACapture:
    """A :class:`Capture` of ``device``, whose recordings share one memory pool.

    A first call that makes the host wait for the device raises ``RuntimeError`` before its recording begins: after a capture that
    fails, ``torch.cuda.empty_cache()`` of PyTorch 2.11 raises until the process ends. Those that follow are taken to be alike:
    while one is tried, no thread of the process may wait for a device.
    """

    WARM_UP = 2
    """Calls before the recording: kernels are compiled and libraries take their workspaces, which cannot be recorded. In the last
    one of the first recording no operation may wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._tried = False  # whether a call has been found to wait for nothing
        self._stream = torch.cuda.Stream(device)  # recordings are not made on the default one
        # PyTorch hands out 32 streams again and again: what is recorded here shares no counters with what was recorded before
        renew_counters(device, self._stream.cuda_stream)

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(self.WARM_UP - 1):
                    call()
                with nullcontext() if self._tried else synchronization_forbidden():
                    call()
            self._tried = True
            graph = torch.cuda.CUDAGraph()
            # what other threads do on the device meanwhile is no part of it, and no fault
            recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
            try:
                with torch.cuda.stream(current), recording:  # which leaves its own stream in place where it fails
                    call()
            except BaseException:
                self._end(graph)
                raise
            current.wait_stream(self._stream)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End what is left of the failed capture of ``graph``, where PyTorch has not: allocations no longer go to its pool."""
        end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)  # no public function does this alone
        try:
            if end is not None:
                end(torch.cuda.current_device(), self._pool)
        except RuntimeError:  # it has been ended
            return
        _abandoned.append(graph)


class DecodeGraphs:
    """``step(size)``, recorded for each of ``sizes`` by ``capture``, largest first, here and never again."""

    def __init__(self, sizes: tuple[int, ...], step: Callable[[int], None], capture: Capture) -> None:
        self.sizes = tuple(sorted(sizes))
        self._replays = {size: capture.record(partial(step, size)) for size in reversed(self.sizes)}

    def replay(self, size: int) -> None:
        """Queue the step of ``size`` rows, one of :attr:`sizes`."""
        self._replays[size]()


def record_decode(sizes: tuple[int, ...], step: Callable[[int], None], device: torch.device) -> DecodeGraphs:
    """Graphs of ``step`` on ``device`` for ``sizes``."""
    return DecodeGraphs(sizes, step, CUDACapture(device))
