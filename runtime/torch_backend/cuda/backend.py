"""The packed step on a CUDA GPU: attention over the block pool and the operations of fused layers, by kernels of our own."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from runtime.errors import UnsupportedModelError
from runtime.torch_backend.attention import Terms
from runtime.torch_backend.backends import Backend
from runtime.torch_backend.cuda.activation import gated
from runtime.torch_backend.cuda.attention import attend, paged_attention
from runtime.torch_backend.cuda.attention_plan import AttentionPlan, PlanSizes, plan_sizes
from runtime.torch_backend.cuda.graphs import record_decode
from runtime.torch_backend.cuda.linear import multiply
from runtime.torch_backend.cuda.memory import CUDAMemory
from runtime.torch_backend.cuda.norm import normed, rms_norm
from runtime.torch_backend.cuda.rope import rope_and_write, rotate
from runtime.torch_backend.cuda.sampler import KernelSampler
from runtime.torch_backend.cuda.tiles import (
    MOST_ROWS,
    architecture_of,
    linear_tile,
    multiprocessors_of,
    next_power_of_2,
)
from runtime.torch_backend.inputs import Ints, PackedBatch, listed
from runtime.torch_backend.kv_pool import KVPool, LayerKV
from runtime.torch_backend.operations import HeadNorm, Operations
from runtime.torch_backend.padded import PaddedAttention, PaddedStep
from runtime.torch_backend.transfer import to_device

_MAX_DIM: Final = 256
_MAX_GROUP: Final = 128  # query heads of a KV head; both are what the attention kernel takes


class CUDAOperations(Operations):
    """One kernel each. Shapes are checked when they first come: the checks take the host longer than a launch."""

    def __init__(self) -> None:
        self._checked: set[tuple[Any, ...]] = set()

    def norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        return rms_norm(x, scale, eps)

    def add_norm(self, x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        shapes = (x.shape[1], residual.shape[1], scale.shape, x.stride(1), residual.stride(1))
        if shapes in self._checked and len(x) == len(residual) > 0:
            normed(x, scale, eps, residual, x)
        else:
            rms_norm(x, scale, eps, residual=residual, out=x)
            self._checked.add(shapes)
        return x, residual

    def rope_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int, norm: HeadNorm | None, layer: LayerKV, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(qkv.shape[0], -1, cos.shape[-1])
        query, key, value = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
        keys, values = layer.keys, layer.values
        eps = 0.0 if norm is None else norm.eps
        query_norm, key_norm = (None, None) if norm is None else (norm.query, norm.key)
        shapes = (*query.shape[1:], kv_heads, keys.shape, values.shape, keys.dtype, norm is None)
        if shapes in self._checked and len(query):
            rotate(
                query, key, value, cos, sin, keys, values, slots, query_norm=query_norm, key_norm=key_norm, eps=eps, out=query,
                key_scale=layer.key_scale, value_scale=layer.value_scale,
            )  # fmt: skip
        else:
            rope_and_write(
                query, key, value, cos, sin, keys, values, slots, query_norm=query_norm, key_norm=key_norm, eps=eps,
                key_scale=layer.key_scale, value_scale=layer.value_scale,
            )  # fmt: skip
            self._checked.add(shapes)
        return query, key, value

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return gated(gate_up)

    def linear(self, layer: Any, x: Tensor) -> Tensor:
        found = _multiplied(layer, x, False)
        return layer(x) if found is None else found

    def silu_mul_linear(self, layer: Any, x: Tensor) -> Tensor:
        found = _multiplied(layer, x, True)
        return gated(layer(x)) if found is None else found


def _multiplied(layer: Any, x: Tensor, silu_gated: bool) -> Tensor | None:
    """By our own kernel, if ``layer`` is no more than a product and that is faster for so many rows."""
    rows = x.shape[0]
    if not 0 < rows <= MOST_ROWS or x.dtype not in (torch.bfloat16, torch.float16) or type(layer) is not nn.Linear:
        return None
    weight, bias = layer.weight, layer.bias
    outputs, inputs = weight.shape
    outputs = outputs // 2 if silu_gated else outputs
    tile = linear_tile(architecture_of(x.device), rows, inputs, outputs, silu_gated)
    if tile is None or layer._forward_hooks or layer._forward_pre_hooks or weight.dtype != x.dtype:
        return None
    if not weight.is_contiguous() or x.stride(1) != 1:
        return None
    out = x.new_empty(rows, outputs)
    multiply(x, weight, bias, tile, silu_gated, out)
    return out


class PagedStep:
    """What :class:`PagedAttention` plans: block tables on the device, and a work list for each shape of heads."""

    def __init__(self, owner: PagedAttention, batch: PackedBatch) -> None:
        self._owner = owner
        self._batch = batch
        size, pad_block = owner.pool.block_size, owner.pool.pad_block
        self.new, self.context, known = listed(batch, size, pad_block)
        # powers of two, so that few plans and few compiled kernels serve all steps
        self.sequences = next_power_of_2(len(self.new))
        self.each = next_power_of_2(int(self.new.max()))
        self.tokens = next_power_of_2(int(self.new.sum()))
        table = np.full((self.sequences, known.shape[1]), pad_block, np.int64)
        table[: len(known)] = known
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
            found = AttentionPlan(self._sizes(heads, kv_heads), self._owner.device, recorded=True)
            self._plans[heads, kv_heads] = found
            found.update(self._new, self._context)
        return found

    def _sizes(self, heads: int, kv_heads: int) -> PlanSizes:
        return self._owner.sizes(len(self.table), len(self.table), 1, heads, kv_heads)

    def refresh(self, context: Ints) -> None:
        self._context[: len(context)], self._context[len(context) :] = context, 1
        for plan in self._plans.values():
            plan.update(self._new, self._context)

    def padded(self) -> PaddedStep:
        raise UnsupportedModelError("a head that the attention kernel does not take attends in no recorded step")


class FixedStep(FixedRows):
    """As :class:`FixedRows`, for steps of up to ``tokens`` new tokens in any sequences. Until it is refreshed its first sequence
    has all of them."""

    def __init__(self, owner: PagedAttention, table: Tensor, tokens: int) -> None:
        super().__init__(owner, table)
        self._tokens = tokens
        self._new = self._context = np.array([min(tokens, table.shape[1] * owner.pool.block_size)], np.int64)

    def _sizes(self, heads: int, kv_heads: int) -> PlanSizes:
        return self._owner.sizes(len(self.table), self._tokens, self._tokens, heads, kv_heads)

    def refresh_step(self, new: Ints, context: Ints) -> None:
        self._new, self._context = new, context
        for plan in self._plans.values():
            plan.update(new, context)


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
        self._checked: set[tuple[Any, ...]] = set()
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

    def fixed_step(self, table: Tensor, tokens: int) -> FixedStep:
        return FixedStep(self, table, tokens)

    def refresh_step(self, state: FixedStep, new: Ints, context: Ints) -> None:
        state.refresh_step(new, context)

    def run(
        self, state: PagedStep | FixedRows, layer: LayerKV, query: Tensor, key: Tensor, value: Tensor, terms: Terms
    ) -> Tensor:
        _, heads, dim = query.shape
        _, kv_heads, value_dim = layer.values.shape
        if max(dim, value_dim) > _MAX_DIM or heads // kv_heads > _MAX_GROUP:
            if self.pool.fp8:
                raise UnsupportedModelError(
                    f"model with {heads} heads of {max(dim, value_dim)} on {kv_heads} KV heads: kv_cache_dtype is 'fp8'; it must "
                    f"be auto: the kernel takes heads of at most {_MAX_DIM}, and {_MAX_GROUP} on a KV head"
                )
            return self.plain.run(state.padded(), layer, query, key, value, terms)
        if (
            query.stride(2) != 1 or query.stride(1) != dim
        ):  # strides are constants of the kernel: none may follow the tokens
            query = query.contiguous()
        keys, values, plan = layer.keys, layer.values, state.plan(heads, kv_heads)
        out = query.new_empty(len(query), heads, value_dim)
        shapes = (
            heads, dim, query.dtype, keys.shape, values.shape, keys.dtype, terms.window, terms.softcap, terms.sinks is None
        )  # fmt: skip
        attention = attend if shapes in self._checked else paged_attention
        attention(
            query, keys, values, state.table, plan, block_size=self.pool.block_size, scale=terms.scale, window=terms.window,
            softcap=terms.softcap, sinks=terms.sinks, key_scale=layer.key_scale, value_scale=layer.value_scale, out=out,
        )  # fmt: skip
        self._checked.add(shapes)
        return out


CUDA = Backend(
    CUDAOperations(),
    lambda pool, loaded: PagedAttention(pool, loaded.device),
    lambda model: 0,
    sampler=KernelSampler,
    record=record_decode,
    overlaps=True,
    fp8=True,
    memory=CUDAMemory,
)
