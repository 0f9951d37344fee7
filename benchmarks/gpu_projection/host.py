"""What the host does in a step, the model's computation left out: scheduling, inputs, the attention's work list, output.

An engine core with its scheduler and the executor of the CUDA backend run as they do in service, on the CPU. Steps are recorded,
and a replay does nothing but count: what a graph holds is the device's. Or they are launched call by call, as where nothing is
recorded; then only the forward is left out, and the logits it would yield are eight columns of zeros. CPU time of the process.
Not in it: what a GPU's driver takes (copies from pinned memory, launching a graph or kernels), the engine's thread with its
queues and streams, HTTP, a controller.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_projection.calls import BLOCK
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.core import EngineCore
from runtime.llm.output import OutputProcessor
from runtime.llm.scheduler import Scheduler
from runtime.request import Request, SamplingParams
from runtime.torch_backend.backends import Backend
from runtime.torch_backend.cuda.backend import CUDA, PagedAttention
from runtime.torch_backend.cuda.graphs import DecodeGraphs
from runtime.torch_backend.cuda.sampler import KernelSampler
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.loading import load_model
from runtime.torch_backend.operations import Operations
from runtime.torch_backend.sampling import Columns

_VOCABULARY, _HEADS, _KV_HEADS = 8, 32, 8
_WARM = 20  # steps
_RUNS = 5


class WithoutForward(TorchExecutor):
    """Does all of a step but the forward."""

    def _forward(self, prepared: Any) -> Tensor:
        # as the first layer does: the list is made in every step from then on
        prepared.step.state.plan(_HEADS, _KV_HEADS)
        rows = max(1, len(prepared.sampling))
        return torch.zeros(rows, _VOCABULARY)[: len(prepared.sampling)]

    def _forward_fixed(self, ids: Tensor, positions: Tensor, slots: Tensor, state: Any) -> Tensor:
        state.plan(_HEADS, _KV_HEADS)
        return torch.zeros(len(ids), _VOCABULARY)


class _WithoutKernel(KernelSampler):
    """Samples token 0."""

    def _choose(self, logits: Tensor, *args: Any) -> Tensor:
        return torch.zeros(len(logits), dtype=torch.int64)

    def choose_from(self, logits: Tensor, columns: Columns, out: Tensor) -> Tensor:
        return out.zero_()


class _Counted:
    """A ``Capture`` whose replays do nothing: the rows' tensors stay as they are, and the host looks at none but the tokens."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        return self._replay

    def _replay(self) -> None:
        self.replays += 1

    def graphs(self, sizes: tuple[int, ...], step: Callable[[int], None], device: torch.device) -> DecodeGraphs:
        return DecodeGraphs(sizes, step, self)


def host_us(batch: int, context: int = 1024, steps: int = 200, *, recorded: bool = True) -> float:
    """Median µs of CPU of a step of ``batch`` decodes that read ``context`` tokens and more; of five runs of ``steps`` each.

    ``recorded``: whether steps are replayed, one recording each; else they are launched call by call.
    """
    most = steps * (_RUNS + 1) + _WARM + batch  # tokens of a request; the first decode while the last are computed
    blocks = batch * -(-(context + most) // BLOCK) + 1
    loaded = dataclasses.replace(
        load_model("nano", dtype="float32", device="cpu"), kv_layers=(), vocab_size=_VOCABULARY
    )
    counted = _Counted()
    backend = Backend(Operations(), lambda pool, loaded: PagedAttention(pool, loaded.device), lambda model: 0)
    if recorded:
        backend = backend._replace(sampler=_WithoutKernel, record=counted.graphs, overlaps=CUDA.overlaps)
    executor = WithoutForward(
        loaded, kv_blocks=blocks, block_size=BLOCK, backend=backend, max_batch_size=batch if recorded else None
    )
    knobs = Knobs(max_batch_size=batch, token_budget=max(8192, batch), chunk_size=8192)
    limits = KnobLimits(max_batch_size=batch, token_budget=max(8192, batch), chunk_size=8192)
    core = EngineCore(
        Scheduler(kv_blocks=blocks, block_size=BLOCK), executor, knobs=knobs, limits=limits, output=OutputProcessor()
    )
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for number in range(batch):
        core.add(Request(f"r{number}", (1,) * context, params, most, 0.0))
    now = 1.0
    while True:  # until all prompts are computed
        outcome = core.step(now)
        now += 1.0
        assert outcome.result is None or not outcome.result.failed, outcome.result
        if outcome.record is not None and outcome.record.decodes == batch:
            break
    for _ in range(_WARM):
        core.step(now := now + 1.0)
    found, before = [], counted.replays
    for _ in range(_RUNS):
        begun = time.process_time()
        for _ in range(steps):
            outcome = core.step(now := now + 1.0)
            assert outcome.record is not None and outcome.record.decodes == batch
        found.append((time.process_time() - begun) / steps * 1e6)
    assert counted.replays - before == (steps * _RUNS if recorded else 0)
    return statistics.median(found)
