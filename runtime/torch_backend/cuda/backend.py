"""The packed step on a CUDA GPU: attention over the block pool and the operations of fused layers, by kernels of our own."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from runtime.errors import UnsupportedModelError
from runtime.torch_backend.attention import Terms
from runtime.torch_backend.backends import Backend
from runtime.torch_backend.cuda.activation import gated
from runtime.torch_backend.cuda.attention import paged_attention
from runtime.torch_backend.cuda.attention_plan import AttentionPlan, PlanSizes, plan_sizes
from runtime.torch_backend.cuda.graphs import record_decode
from runtime.torch_backend.cuda.memory import CUDAMemory
from runtime.torch_backend.cuda.norm import rms_norm
from runtime.torch_backend.cuda.rope import rope_and_write
from runtime.torch_backend.cuda.sampler import KernelSampler
from runtime.torch_backend.cuda.tiles import multiprocessors_of, next_power_of_2
from runtime.torch_backend.inputs import Ints, PackedBatch
from runtime.torch_backend.kv_pool import KVPool, LayerKV
from runtime.torch_backend.operations import HeadNorm, Operations
from runtime.torch_backend.padded import PaddedAttention, PaddedStep
from runtime.torch_backend.transfer import to_device

_MAX_DIM: Final = 256
_MAX_GROUP: Final = 128  # query heads of a KV head; both are what the attention kernel takes


class CUDAOperations(Operations):
    """One kernel each."""

    def norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        return rms_norm(x, scale, eps)

    def add_norm(self, x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return rms_norm(x, scale, eps, residual=residual, out=x), residual

    def rope_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, norm: HeadNorm | None, layer: LayerKV, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(qkv.shape[0], -1, cos.shape[-1])
        query, key, value = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
        query = rope_and_write(
            query, key, value, cos, sin, layer.keys, layer.values, slots,
            query_norm=None if norm is None else norm.query, key_norm=None if norm is None else norm.key,
            eps=0.0 if norm is None else norm.eps,
        )  # fmt: skip
        return query, key, value

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up)


class PagedStep:
    """What :class:`PagedAttention` plans: block tables on the device, and a work list for each shape of heads."""

    def __init__(self, owner: PagedAttention, batch: PackedBatch) -> None:
        self._owner = owner
        self._batch = batch
        rows = batch.rows
        decoding = len(rows.sequences)
        self.new: Ints = np.array([*[1] * decoding, *(chunk.count for chunk in batch.chunks)], np.int64)
        ends = np.array([chunk.start + chunk.count for chunk in batch.chunks], np.int64)
        self.context: Ints = np.concatenate([rows.positions + 1, ends])
        # powers of two, so that few plans and few compiled kernels serve all steps
        self.sequences = next_power_of_2(len(self.new))
        self.each = next_power_of_2(int(self.new.max()))
        self.tokens = next_power_of_2(int(self.new.sum()))
        size = owner.pool.block_size
        table = np.full((self.sequences, -(-int(self.context.max()) // size)), owner.pool.pad_block, np.int64)
        if decoding:
            known = rows.table(int(self.context[:decoding].max()))
            table[:decoding, : known.shape[1]] = known
        for row, (chunk, end) in enumerate(zip(batch.chunks, ends.tolist(), strict=True), decoding):
            blocks = chunk.sequence.blocks[: -(-end // size)]
            table[row, : len(blocks)] = blocks
        [self.table] = to_device([table], owner.device)
        self._plans: dict[tuple[int, int], AttentionPlan] = {}
        self._padded: PaddedStep | None = None

    def plan(self, heads: int, kv_heads: int) -> AttentionPlan:
        found = self._plans.get((heads, kv_heads))
        if found is None:
            found = self._plans[heads, kv_heads] = self._owner.work_list(self, heads, kv_heads)
        return found

    def padded(self) -> PaddedStep:
        if self._padded is None:
            self._padded = self._owner.plain.plan(self._batch)
        return self._padded


class FixedRows:
    """Decode rows in tensors that stay where they are, and a work list for each shape of heads, which stays as well.

    Rows that are nobody's have one token of context, their own."""

    def __init__(self, owner: PagedAttention, table: Tensor) -> None:
        self.table = table
        self._owner = owner
        self._new: Ints = np.ones(len(table), np.int64)
        self._context: Ints = np.ones(len(table), np.int64)
        self._plans: dict[tuple[int, int], AttentionPlan] = {}

    def plan(self, heads: int, kv_heads: int) -> AttentionPlan:
        found = self._plans.get((heads, kv_heads))
        if found is None:
            found = self._plans[heads, kv_heads] = AttentionPlan(
                self._owner.sizes(len(self.table), len(self.table), 1, heads, kv_heads), self._owner.device
            )
            found.update(self._new, self._context)
        return found

    def refresh(self, context: Ints) -> None:
        self._context[: len(context)], self._context[len(context) :] = context, 1
        for plan in self._plans.values():
            plan.update(self._new, self._context)

    def padded(self) -> PaddedStep:
        raise UnsupportedModelError("a head that the attention kernel does not take attends in no recorded step")


class PagedAttention:
    """An :class:`~runtime.torch_backend.attention.AttentionBackend` of one launch for any mixture of decode rows and chunks.

    Heads larger than the kernel takes, or more of them on one KV head, attend in plain PyTorch. ``splits``: parts that contexts
    may be split into beyond one a tile; None: as many as fill the device.
    """

    def __init__(self, pool: KVPool, device: torch.device, splits: int | None = None) -> None:
        self.pool = pool
        self.device = device
        self.plain = PaddedAttention(pool, device)
        self._splits = splits
        self._shapes: dict[tuple[int, int], None] = {}  # of heads, that layers have asked for
        self._kept: dict[PlanSizes, tuple[AttentionPlan, AttentionPlan]] = {}
        self._turn = 0

    def plan(self, batch: PackedBatch) -> PagedStep:
        self._turn ^= 1  # the step before may still read its lists
        step = PagedStep(self, batch)
        for heads, kv_heads in self._shapes:
            step.plan(heads, kv_heads)
        return step

    def work_list(self, step: PagedStep, heads: int, kv_heads: int) -> AttentionPlan:
        self._shapes[heads, kv_heads] = None
        sizes = self.sizes(step.sequences, step.tokens, step.each, heads, kv_heads)
        kept = self._kept.get(sizes)
        if kept is None:
            kept = self._kept[sizes] = AttentionPlan(sizes, self.device), AttentionPlan(sizes, self.device)
        found = kept[self._turn]
        found.update(step.new, step.context)
        return found

    def sizes(self, sequences: int, tokens: int, each: int, heads: int, kv_heads: int) -> PlanSizes:
        processors = multiprocessors_of(self.device)
        return plan_sizes(sequences, tokens, heads, kv_heads, processors, each=each, splits=self._splits)

    def fixed(self, table: Tensor, positions: Tensor) -> FixedRows:
        return FixedRows(self, table)

    def refresh(self, state: FixedRows, context: Ints) -> None:
        state.refresh(context)

    def run(
        self, state: PagedStep | FixedRows, layer: LayerKV, query: Tensor, key: Tensor, value: Tensor, terms: Terms
    ) -> Tensor:
        _, heads, dim = query.shape
        _, kv_heads, value_dim = layer.values.shape
        if max(dim, value_dim) > _MAX_DIM or heads // kv_heads > _MAX_GROUP:
            return self.plain.run(state.padded(), layer, query, key, value, terms)
        if query.stride(2) != 1:
            query = query.contiguous()
        return paged_attention(
            query, layer.keys, layer.values, state.table, state.plan(heads, kv_heads),
            block_size=self.pool.block_size, scale=terms.scale, window=terms.window, softcap=terms.softcap, sinks=terms.sinks,
        )  # fmt: skip


CUDA = Backend(
    CUDAOperations(),
    lambda pool, loaded: PagedAttention(pool, loaded.device),
    lambda model: None,
    sampler=KernelSampler,
    record=record_decode,
    overlaps=True,
    memory=CUDAMemory,
)
