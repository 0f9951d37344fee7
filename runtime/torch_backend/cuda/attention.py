"""Attention over the block pool for any mixture of decode rows and prompt chunks, in one launch.

A program computes one item of an :class:`~.attention_plan.AttentionPlan` for one KV head: the query heads that share the KV
head are rows of the same tile, so each key and value is loaded once for all of them. It walks the context by the online
softmax of Milakov and Gimelshein 2018, as FlashAttention does (Dao et al. 2022), finds keys through the block table (Kwon et
al. 2023), and computes causality and the sliding window from positions: no mask is ever stored, and blocks outside the
window are never read. Where a context is in parts (Flash-Decoding, Dao et al. 2023), a second kernel merges their results by
their log-sum-exp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.torch_backend.cuda.attention_plan import AttentionPlan
from runtime.torch_backend.cuda.fp8 import decoded
from runtime.torch_backend.cuda.language import LOG2_E, dot, let_next_begin, scalar, tanh, tl, triton, wait_for_previous
from runtime.torch_backend.cuda.launch import launch
from runtime.torch_backend.cuda.tiles import FEW_ROWS, architecture_of, attention_tile, next_power_of_2

NOTHING = tl.constexpr(-1.0e30)
"""Of a row that has seen no key yet: below every score, and finite, since −∞ − (−∞) is NaN."""

FP8_OFF, FP8_NATIVE, FP8_BITS = 0, 1, 2


@triton.jit
def _loaded(place, inside, dtype: tl.constexpr, MASKED: tl.constexpr, FP8: tl.constexpr):
    """Keys or values from the pool, in the dtype of the products."""
    if MASKED:
        x = tl.load(place, mask=inside, other=0)
    else:
        x = tl.load(place)
    if FP8 != 0:
        x = decoded(x, FP8 == 1).to(dtype)
    return x


@triton.jit
def _attend_keys(
    q, acc, total, highest, row_position, keys, values, blocks, begin, end, kv_head, before_scale, after_scale,
    key_stride: tl.constexpr, key_head_stride: tl.constexpr, value_stride: tl.constexpr, value_head_stride: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FP8: tl.constexpr, EDGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Take positions ``begin … end`` into the running softmax. ``EDGE``: not every row sees all of them."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    for at in tl.range(scalar(begin), scalar(end), BLOCK_N):
        position = at + tl.arange(0, BLOCK_N)
        if EDGE:
            block = tl.load(blocks + position // BLOCK_SIZE, mask=position < end, other=0)
        else:
            block = tl.load(blocks + position // BLOCK_SIZE)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        k = _loaded(
            keys + kv_head * key_head_stride + slot[None, :] * key_stride + d[:, None],
            (d[:, None] < DIM) & (position[None, :] < end),
            q.dtype, EDGE or BLOCK_D != DIM, FP8,
        )  # fmt: skip
        scores = dot(q, k, tl.zeros([q.shape[0], BLOCK_N], tl.float32)) * before_scale
        if SOFTCAP:
            scores = tanh(scores) * after_scale
        if EDGE:
            seen = (position[None, :] <= row_position[:, None]) & (position[None, :] < end)
            if WINDOW > 0:
                seen = seen & (position[None, :] > row_position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        fade = tl.exp2(highest - now)
        total = total * fade + tl.sum(weights, 1)
        v = _loaded(
            values + kv_head * value_head_stride + slot[:, None] * value_stride + dv[None, :],
            (dv[None, :] < VALUE_DIM) & (position[:, None] < end),
            q.dtype, EDGE or BLOCK_V != VALUE_DIM, FP8,
        )  # fmt: skip
        acc = dot(weights.to(q.dtype), v, acc * fade[:, None])
        highest = now
    return acc, total, highest


@triton.jit(do_not_specialize=["table_stride"])  # a wider table must not compile anything
def _attend(
    query, keys, values, table, items, starts, lengths, sinks, key_scale, value_scale, out, partial, partial_lse,
    before_scale, after_scale, table_stride,
    query_stride: tl.constexpr, query_head_stride: tl.constexpr, key_stride: tl.constexpr, key_head_stride: tl.constexpr,
    value_stride: tl.constexpr, value_head_stride: tl.constexpr, out_stride: tl.constexpr, out_head_stride: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FP8: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_begin(EARLY)
    item = items + tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    # the plan is older than the kernels that this one may overlap
    sequence = tl.load(item)
    if sequence < 0:
        if tl.program_id(0) == 0:  # nobody has anything to do; else it is enough that those wait who have
            wait_for_previous(EARLY)
        return
    first = tl.load(item + 1)
    part_begin = tl.load(item + 2)
    part_end = tl.load(item + 3)
    place = tl.load(item + 4)
    begun = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - begun
    before = tl.load(lengths + sequence) - new
    wait_for_previous(EARLY)

    row = tl.arange(0, BLOCK_M)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    valid = (row < TILE * GROUP) & (token < new)
    row_position = before + token
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    q = tl.load(
        query + (begun + token).to(tl.int64)[:, None] * query_stride + head[:, None] * query_head_stride + d[None, :],
        mask=valid[:, None] & (d[None, :] < DIM), other=0.0,
    )  # fmt: skip

    begin = part_begin
    end = tl.minimum(part_end, before + tl.minimum(first + TILE, new))
    if WINDOW > 0:
        begin = tl.maximum(begin, before + first - WINDOW + 1)
    highest = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        here = part_begin == 0  # a tile's first part, which alone counts the sink
        highest = tl.where(here, sink, highest)
        total = tl.where(here, 1.0, total)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if FP8 != 0:
        before_scale = before_scale * tl.load(key_scale + kv_head)
    blocks = table + sequence.to(tl.int64) * table_stride
    edge = begin
    if WHOLE:  # whole tiles of keys that the first row sees, and with it all others
        edge = begin + tl.maximum(tl.minimum(end, before + first + 1) - begin, 0) // BLOCK_N * BLOCK_N
        acc, total, highest = _attend_keys(
            q, acc, total, highest, row_position, keys, values, blocks, begin, edge, kv_head, before_scale, after_scale,
            key_stride, key_head_stride, value_stride, value_head_stride,
            DIM, VALUE_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, FP8, False, BLOCK_N, BLOCK_D, BLOCK_V,
        )  # fmt: skip
    acc, total, highest = _attend_keys(
        q, acc, total, highest, row_position, keys, values, blocks, edge, end, kv_head, before_scale, after_scale,
        key_stride, key_head_stride, value_stride, value_head_stride,
        DIM, VALUE_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, FP8, True, BLOCK_N, BLOCK_D, BLOCK_V,
    )  # fmt: skip

    some = tl.where(total > 0.0, total, 1.0)
    found = acc / some[:, None]
    if FP8 != 0:
        found = found * tl.load(value_scale + kv_head)
    written = valid[:, None] & (dv[None, :] < VALUE_DIM)
    if place >= 0:
        at = (place.to(tl.int64) * TILE + row // GROUP) * HEADS + head
        tl.store(partial + at[:, None] * VALUE_DIM + dv[None, :], found, mask=written)
        tl.store(partial_lse + at, tl.where(total > 0.0, highest + tl.log2(some), NOTHING), mask=valid)
    else:
        at = (begun + token).to(tl.int64) * out_stride + head * out_head_stride
        tl.store(out + at[:, None] + dv[None, :], found.to(out.dtype.element_ty), mask=written)


@triton.jit
def _merge(
    partial, partial_lse, merges, starts, out, out_stride: tl.constexpr, out_head_stride: tl.constexpr,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of ``TOKENS`` tokens of a tile, ``PARTS`` of their parts at once."""
    let_next_begin(EARLY)
    merge = merges + tl.program_id(0) * 4
    sequence = tl.load(merge)
    if sequence < 0:
        if tl.program_id(0) == 0:  # as in _attend
            wait_for_previous(EARLY)
        return
    first = tl.load(merge + 1) + tl.program_id(1) * TOKENS
    begun = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - begun
    if first >= new:
        return
    place = tl.load(merge + 2)
    count = tl.load(merge + 3)
    wait_for_previous(EARLY)
    head = tl.program_id(2)
    nth = tl.arange(0, TOKENS)
    row = tl.program_id(1) * TOKENS + nth  # of the tile
    token = first + nth
    written = (token < new) & (row < TILE)
    dv = tl.arange(0, BLOCK_V)
    highest = tl.full([TOKENS], NOTHING, tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    acc = tl.zeros([TOKENS, BLOCK_V], tl.float32)
    for done in tl.range(0, scalar(count), PARTS):
        part = done + tl.arange(0, PARTS)
        here = written[:, None] & (part < count)[None, :]
        at = ((place + part).to(tl.int64)[None, :] * TILE + row[:, None]) * HEADS + head
        lse = tl.load(partial_lse + at, mask=here, other=float("-inf"))
        found = tl.load(
            partial + at[:, :, None] * VALUE_DIM + dv[None, None, :],
            mask=here[:, :, None] & (dv < VALUE_DIM)[None, None, :], other=0.0,
        )  # fmt: skip
        now = tl.maximum(highest, tl.max(lse, 1))
        weights = tl.exp2(lse - now[:, None])
        fade = tl.exp2(highest - now)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * found, 1)
        highest = now
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    at = (begun + token).to(tl.int64) * out_stride + head * out_head_stride
    tl.store(
        out + at[:, None] + dv[None, :], acc.to(out.dtype.element_ty), mask=written[:, None] & (dv < VALUE_DIM)[None, :]
    )


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    plan: AttentionPlan,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of every new token over its sequence's context, which the pool holds already.

    ``query [tokens, heads, dim]``: the new tokens, packed in the order of ``plan``; ``keys [slots, kv_heads, dim]`` and
    ``values [slots, kv_heads, value_dim]``: one layer of the pool, block b being slots b·block_size …; ``table [sequences,
    blocks]`` (int32 or int64): the blocks of each sequence from position 0. ``scale``, ``window`` (positions seen, the
    token's own included), ``softcap`` and ``sinks [heads]`` as in :class:`runtime.torch_backend.attention.Terms`. A pool of
    bytes (uint8 or float8_e4m3fn) holds e4m3 numbers; ``key_scale`` and ``value_scale [kv_heads]`` (float32) are what they
    are multiplied by.

    Returns ``out [tokens, heads, value_dim]``, by default new, in the dtype of ``query``. Rows of no sequence are not
    written. A sequence may attend to less context than the plan knows of, never more: contexts are read from
    ``plan.lengths`` on the device. Raises ``ValueError`` for shapes or dtypes that do not fit.
    """
    tokens, heads, _ = query.shape
    _, kv_heads, value_dim = values.shape
    fp8 = keys.dtype in (torch.uint8, torch.float8_e4m3fn)
    _check(query, keys, values, table, plan, block_size, window, softcap, sinks, key_scale, value_scale, fp8)
    sizes = plan.sizes
    if sizes.tile * (heads // kv_heads) > sizes.rows:
        raise ValueError(
            f"the plan has tiles of {sizes.tile} tokens in {sizes.rows} rows, too few for {heads} heads over {kv_heads}"
        )
    if out is None:
        out = query.new_empty(tokens, heads, value_dim)
    elif out.shape != (tokens, heads, value_dim) or out.stride(2) != 1:
        raise ValueError(
            f"out has shape {tuple(out.shape)}; it must be {(tokens, heads, value_dim)} with contiguous heads"
        )
    if fp8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    return attend(
        query, keys, values, table, plan, block_size=block_size, scale=scale, window=window, softcap=softcap, sinks=sinks,
        key_scale=key_scale, value_scale=value_scale, out=out,
    )  # fmt: skip


def attend(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, plan: AttentionPlan, *, block_size: int, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, key_scale: Tensor | None = None,
    value_scale: Tensor | None = None, out: Tensor,
) -> Tensor:  # fmt: skip
    """:func:`paged_attention` without its checks, which take the host longer than the launch. A pool of bytes must be uint8
    here."""
    _, heads, dim = query.shape
    _, kv_heads, value_dim = values.shape
    sizes = plan.sizes
    architecture = architecture_of(query.device)
    size, fp8 = max(dim, value_dim), key_scale is not None
    tile = attention_tile(architecture, size, query.element_size(), sizes.rows, sizes.sequences, fp8)
    partial, lse = plan.unused, plan.unused  # of the dtype that they have else: one binary for both
    if plan.merging:
        shape = (sizes.partials, sizes.tile, heads)
        partial = torch.empty(*shape, value_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    base2 = LOG2_E.value
    block_v = max(16, next_power_of_2(value_dim))
    launch(
        _attend, (sizes.items, kv_heads, 1),
        (
            query, keys, values, table, plan.items, plan.starts, plan.lengths,
            query if sinks is None else sinks, query if key_scale is None else key_scale,
            query if value_scale is None else value_scale, out, partial, lse,
        ),
        (
            scale * base2 if softcap is None else scale / softcap, 1.0 if softcap is None else softcap * base2,
            table.stride(0),
        ),
        (
            *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2], *out.stride()[:2],
            heads, heads // kv_heads, dim, value_dim, block_size, sizes.tile, window or 0, softcap is not None,
            sinks is not None, FP8_OFF if key_scale is None else pool_format(architecture), whole_first(sizes.rows, window),
            sizes.rows, tile.keys, max(16, next_power_of_2(dim)), block_v,
        ),
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    if plan.merging:
        merging = merge_tile(sizes.tile, block_v)
        launch(
            _merge, (sizes.splits, -(-sizes.tile // merging.tokens), heads), (partial, lse, plan.merges, plan.starts, out), (),
            (*out.stride()[:2], heads, value_dim, sizes.tile, merging.tokens, merging.parts, block_v), warps=merging.warps,
        )  # fmt: skip
    return out


def whole_first(rows: int, window: int | None) -> bool:
    """Whether tiles of keys that all rows see go first, without masks: another loop to fill, which products of few rows do not
    earn back."""
    return window is None and rows > FEW_ROWS


def pool_format(architecture: int) -> int:
    """How a chip reads an 8-bit pool."""
    return FP8_NATIVE if architecture >= 89 else FP8_BITS


class MergeTile(NamedTuple):
    """``tokens`` of a tile that a program merges, and how many of their ``parts`` at once."""

    tokens: int
    parts: int
    warps: int


def merge_tile(tile: int, block_v: int) -> MergeTile:
    """For tiles of ``tile`` tokens. Of most tiles nothing is in parts, but each of theirs has a program: so it takes several."""
    if tile == 1:
        return MergeTile(1, 16, 1 if block_v <= 64 else 2)
    return MergeTile(min(8, next_power_of_2(tile)), 2, 4)


def _check(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, plan: AttentionPlan, block_size: int, window: int | None,
    softcap: float | None, sinks: Tensor | None, key_scale: Tensor | None, value_scale: Tensor | None, fp8: bool,
) -> None:  # fmt: skip
    tokens, heads, dim = query.shape
    slots, kv_heads, _ = values.shape
    if keys.shape != (slots, kv_heads, dim):
        raise ValueError(
            f"keys has shape {tuple(keys.shape)}; it must be {(slots, kv_heads, dim)}, as query and values say"
        )
    if heads % kv_heads:
        raise ValueError(f"query has {heads} heads; it must be a multiple of the {kv_heads} KV heads")
    if any(x.stride(2) != 1 for x in (query, keys, values)):
        raise ValueError("the last dimension of query, keys and values must be contiguous")
    if tokens > plan.sizes.tokens:
        raise ValueError(f"query has {tokens} tokens; the plan is for at most {plan.sizes.tokens}")
    if table.dim() != 2 or table.shape[0] < plan.sizes.sequences or table.stride(1) != 1:
        raise ValueError(
            f"table has shape {tuple(table.shape)}; it must be [{plan.sizes.sequences} or more, blocks] with contiguous rows"
        )
    if table.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"table is {table.dtype}; it must be int32 or int64")
    if block_size < 1 or slots % block_size:
        raise ValueError(f"block_size is {block_size}; it must divide the pool's {slots} slots")
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"query is {query.dtype}; it must be float32, bfloat16 or float16")
    if values.dtype != keys.dtype or not (fp8 or keys.dtype == query.dtype):
        raise ValueError(
            f"keys are {keys.dtype} and values {values.dtype}; both must be {query.dtype}, as the query, "
            "or e4m3 (uint8, float8_e4m3fn)"
        )
    if fp8 and (
        key_scale is None or value_scale is None or key_scale.shape != (kv_heads,) or value_scale.shape != (kv_heads,)
    ):
        raise ValueError(f"an 8-bit pool needs key_scale and value_scale, each [{kv_heads}]")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}; it must be above 0")
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; it must be a contiguous [{heads}]")
