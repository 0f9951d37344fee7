"""Sequences in a block pool and what attention over them is, by its definition in float64."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.unit.kernels import DEVICE, randn

from runtime.torch_backend.cuda.attention import paged_attention  # isort: skip
from runtime.torch_backend.cuda.attention_plan import AttentionPlan, plan_sizes  # isort: skip


class Case(NamedTuple):
    """``keys`` and ``values [sequence][context, kv_heads, dim]`` as they were put in; the pool holds NaN wherever no
    sequence is."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    key_pool: Tensor
    value_pool: Tensor
    table: Tensor
    new: list[int]
    contexts: list[int]
    block_size: int


def case(
    sequences: Seq[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    value_dim: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    index: torch.dtype = torch.int32,
    seed: int = 0,
) -> Case:
    """``sequences``: (new tokens, context with them). ``padding``: rows of the table, and tokens of the query, that belong
    to nobody."""
    value_dim = dim if value_dim is None else value_dim
    new, contexts = [n for n, _ in sequences], [c for _, c in sequences]
    counts = [-(-c // block_size) for c in contexts]
    blocks = sum(counts)
    order = np.random.default_rng(seed).permutation(blocks)
    table = np.full((len(sequences) + padding, max([1, *counts])), blocks)  # the last block pads
    key_pool = torch.full(((blocks + 1) * block_size, kv_heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    value_pool = torch.full(((blocks + 1) * block_size, kv_heads, value_dim), float("nan"), dtype=dtype, device=DEVICE)
    keys, values, taken = [], [], 0
    for at, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        mine = order[taken : taken + count]
        taken += count
        table[at, :count] = mine
        slots = torch.from_numpy((mine[:, None] * block_size + np.arange(block_size)).reshape(-1)[:context]).to(DEVICE)
        keys.append(randn(context, kv_heads, dim, seed=seed * 999 + 2 * at, dtype=dtype))
        values.append(randn(context, kv_heads, value_dim, seed=seed * 999 + 2 * at + 1, dtype=dtype))
        key_pool[slots], value_pool[slots] = keys[-1], values[-1]
    query = randn(sum(new) + padding, heads, dim, seed=seed + 77, dtype=dtype)
    return Case(
        query, keys, values, key_pool, value_pool, torch.from_numpy(table).to(DEVICE, index), new, contexts, block_size
    )  # fmt: skip


def planned(given: Case, *, splits: int = 0, tokens: int | None = None) -> AttentionPlan:
    """A plan for ``given``; ``tokens``: what it is sized for, when that is not what the query has."""
    tokens = tokens or len(given.query)
    heads, kv_heads = given.query.shape[1], given.key_pool.shape[1]
    sizes = plan_sizes(len(given.table), tokens, heads, kv_heads, 8, each=max(1, *given.new, 0), splits=splits)
    plan = AttentionPlan(sizes, DEVICE)
    plan.update(given.new, given.contexts)
    return plan


def attended(given: Case, plan: AttentionPlan, scale: float, out: Tensor, **terms: Any) -> Tensor:
    return paged_attention(
        given.query,
        given.key_pool,
        given.value_pool,
        given.table,
        plan,
        block_size=given.block_size,
        scale=scale,
        out=out,
        **terms,
    )


def by_definition(
    given: Case,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Rows of no sequence are NaN."""
    tokens, heads, _ = given.query.shape
    kv_heads, value_dim = given.value_pool.shape[1:]
    out = torch.full((tokens, heads, value_dim), float("nan"), dtype=torch.float64)
    begun = 0
    for new, context, k, v in zip(given.new, given.contexts, given.keys, given.values, strict=True):
        if new:
            wide = [x.double().cpu().repeat_interleave(heads // kv_heads, 1) for x in (k, v)]
            q = given.query[begun : begun + new].double().cpu()
            scores = torch.einsum("thd,chd->htc", q, wide[0]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            row, column = torch.arange(context - new, context)[:, None], torch.arange(context)[None, :]
            hidden = column > row
            if window is not None:
                hidden |= column <= row - window
            scores.masked_fill_(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().cpu()[:, None, None].expand(heads, new, 1)], -1)
            weights = torch.softmax(scores, -1)[..., :context]
            out[begun : begun + new] = torch.einsum("htc,chd->thd", weights, wide[1])
            begun += new
    return out
