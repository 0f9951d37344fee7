"""How each kind of device runs the packed step: one decoder, and what of it a device computes in its own way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from runtime.errors import InputError, MissingTritonError
from runtime.torch_backend.attention import AttentionBackend
from runtime.torch_backend.contract import Loaded
from runtime.torch_backend.cpu.attention import PagedAttention
from runtime.torch_backend.cpu.linear import pack_linears, padded_rows
from runtime.torch_backend.cpu.operations import CPUOperations
from runtime.torch_backend.kv_pool import KVPool
from runtime.torch_backend.memory import DeviceMemory, return_free_pages
from runtime.torch_backend.operations import Operations
from runtime.torch_backend.padded import PaddedAttention
from runtime.torch_backend.recorded_steps import prompt_ladder
from runtime.torch_backend.resident import Graphs, batch_ladder
from runtime.torch_backend.sampling import Sampler
from runtime.tunable import KV_CACHE_DTYPES

log = logging.getLogger(__name__)


class Backend(NamedTuple):
    """``operations``: of fused layers. ``attention``: makes what attends over a pool. ``lay_out``: brings the weights of a model
    whose layers are fused into the layout that suits the device, and returns how many layers have it. ``padded``: the rows that a
    step of so many runs with where some have; the others are dummies. ``sampler``: makes what samples, of the size of the
    vocabulary, the device and a seed. ``record``: records decode steps of these numbers of rows on the device, where that is
    possible; ``ladder``: which ones, up to so many; ``prompt_ladder``: for how many tokens steps with prompts are recorded, up to
    so many, of a model of so many parameters. ``overlaps``: whether the host gains by launching a step before it has read the
    last one. ``fp8``: whether operations and attention take a KV pool of 8 bits. ``memory``: makes what tells the device's
    memory, where a KV pool is sized by that. ``tidy``: called behind a step twice a minute."""

    operations: Operations
    attention: Callable[[KVPool, Loaded], AttentionBackend]
    lay_out: Callable[[nn.Module], int]
    padded: Callable[[int], int] | None = None
    sampler: Callable[[int, torch.device, int], Sampler] = Sampler
    record: Callable[[tuple[int, ...], Callable[[int], None], torch.device], Graphs] | None = None
    ladder: Callable[[int], tuple[int, ...]] = batch_ladder
    prompt_ladder: Callable[[int, int], tuple[int, ...]] = prompt_ladder
    overlaps: bool = False
    fp8: bool = False
    memory: Callable[[torch.device], DeviceMemory] | None = None
    tidy: Callable[[], object] | None = None


PLAIN = Backend(Operations(), lambda pool, loaded: PaddedAttention(pool, loaded.device), lambda model: 0)
"""PyTorch's own operations, on any device."""


CPU = Backend(
    CPUOperations(),
    lambda pool, loaded: PagedAttention(pool, loaded.device),
    pack_linears,
    padded=padded_rows,
    tidy=return_free_pages,
)


def backend_for(device: torch.device) -> Backend:
    """The fastest that ``device`` has: on CUDA our kernels, or PyTorch's own operations where there is no Triton, or none that
    starts, and on GPUs that are older than the kernels are made for."""
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        return PLAIN
    from runtime.torch_backend.cuda.tiles import architecture_of

    return _cuda(architecture_of(device))


@cache
def _cuda(architecture: int) -> Backend:
    """For the life of the process, and what is missing is said once."""
    from runtime.torch_backend.cuda.tiles import OLDEST

    if architecture < OLDEST:
        log.warning(
            "the GPU has compute capability %.1f, and the GPU kernels need %.1f or newer; PyTorch's own operations run, at "
            "several times the cost",
            architecture / 10,
            OLDEST / 10,
        )
        return PLAIN
    try:
        from runtime.torch_backend.cuda.backend import CUDA
        from runtime.torch_backend.cuda.language import need_driver

        need_driver()
    except MissingTritonError as error:
        log.warning("%s; until then PyTorch's own operations run, at several times the cost", error)
        return PLAIN
    return CUDA


def check_kv_cache_dtype(requested: str, device: torch.device, backend: Backend | None = None) -> None:
    """Raise :class:`InputError` for what no KV pool on ``device`` can be kept in. ``backend``: None takes the device's."""
    if requested not in KV_CACHE_DTYPES:
        raise InputError(f"kv_cache_dtype is {requested!r}; it must be {' or '.join(KV_CACHE_DTYPES)}")
    if requested == "fp8" and not (backend or backend_for(device)).fp8:
        raise InputError(
            f"kv_cache_dtype is 'fp8'; on {device} it must be auto: only the Triton kernels, on CUDA, read a KV pool of 8 bits"
        )
