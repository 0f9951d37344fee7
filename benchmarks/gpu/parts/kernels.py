"""Every kernel against its definition in float64, at the shapes of models that are served; and what it takes.

What no sequence owns is NaN, in the pool and in the outputs: what is read or left out by mistake shows. An error is the L2 norm
of the difference over that of the expected; one above the dtype's epsilon fails (float32: above 1e-5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.place import Place, seconds_of
from runtime.torch_backend.cuda.activation import gated
from runtime.torch_backend.cuda.attention import paged_attention
from runtime.torch_backend.cuda.attention_plan import AttentionPlan, plan_sizes
from runtime.torch_backend.cuda.linear import linear
from runtime.torch_backend.cuda.norm import rms_norm
from runtime.torch_backend.cuda.rope import rope_and_write
from runtime.torch_backend.cuda.sampling import greedy, sample
from runtime.torch_backend.cuda.tiles import LinearTile, architecture_of, linear_tile, multiprocessors_of

_BLOCK: Final = 16


class Attention(NamedTuple):
    """Attention of ``sequences`` (new tokens, context)."""

    name: str
    sequences: Sequence[tuple[int, int]]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    fp8: bool = False


FULL: Final = (
    Attention("decode 1 × 128", [(1, 128)]),
    Attention("decode 1 × 8k", [(1, 8192)]),
    Attention("decode 64 × 1k", [(1, 1024)] * 64),
    Attention("decode 256 × 300", [(1, 300)] * 256),
    Attention("decode skewed", [(1, 8192)] + [(1, 100 + i) for i in range(63)]),
    Attention("prompt 2k", [(2048, 2048)]),
    Attention("mixed", [(1, 700)] * 32 + [(512, 4096), (300, 300), (7, 1000)]),
    Attention("group of 7, 64 wide", [(1, 500)] * 16 + [(100, 350)], heads=14, kv_heads=2, dim=64),
    Attention("80 wide", [(1, 500)] * 16 + [(100, 350)], heads=32, kv_heads=8, dim=80),
    Attention("256 wide, window, softcap", [(1, 3000)] * 8 + [(200, 5000)], 8, 4, 256, 1024, 50.0),
    Attention("64 wide, window, sinks", [(1, 3000)] * 8 + [(200, 5000)], 64, 8, 64, 128, None, True),
    Attention("decode, pool of 8 bits", [(1, 1500)] * 16, fp8=True),
    Attention("mixed, pool of 8 bits", [(1, 1500)] * 4 + [(300, 900)], fp8=True),
)
DRY: Final = (
    Attention("decode", [(1, 40), (1, 5)], 4, 2, 16),
    Attention("mixed, window, softcap, sinks", [(1, 20), (9, 30)], 4, 2, 16, 8, 5.0, True),
    Attention("decode, pool of 8 bits", [(1, 20)], 4, 2, 16, fp8=True),
)


def run(place: Place, argument: str) -> None:
    """All are tried, and one that is wrong fails the part at its end."""
    device = torch.device(place.device)
    dtypes = (torch.float32,) if place.dry else (torch.bfloat16, torch.float16, torch.float32)
    checks: list[tuple[str, Callable[[], dict[str, float]]]] = []
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for case in DRY if place.dry else FULL:
            if not (case.fp8 and dtype == torch.float32 and not place.dry):
                checks.append((f"attention {case.name} {kind}", _bound(_attention, case, device, dtype)))
        for rows, width in ((3, 48),) if place.dry else ((1, 4096), (64, 4096), (256, 8192), (2048, 1024)):
            checks.append((f"norm {rows} × {width} {kind}", _bound(_norm, rows, width, device, dtype)))
            checks.append((f"gate {rows} × {width} {kind}", _bound(_gate, rows, width, device, dtype)))
        for tokens, normed in ((3, True),) if place.dry else ((1, False), (64, True), (2048, False)):
            name = f"rope and write {tokens}{', normed' if normed else ''} {kind}"
            checks.append((name, _bound(_rope, tokens, normed, device, dtype, place.dry)))
        if dtype != torch.float32 or place.dry:
            for rows in (3,) if place.dry else (1, 17, 64):
                for shape in (
                    ((64, 32, True),) if place.dry else ((4096, 6144, False), (4096, 14336, True), (14336, 4096, False))
                ):
                    checks.append((f"product {rows} × {shape} {kind}", _bound(_product, rows, *shape, device, dtype)))
        vocabulary = 300 if place.dry else 128_256
        checks.append((f"greedy {kind}", _bound(_greedy, 3 if place.dry else 64, vocabulary, device, dtype)))
        checks.append((f"sampling {kind}", _bound(_sampled, 12 if place.dry else 20_000, device, dtype)))
    wrong = []
    for name, check in checks:
        try:
            found = check()
            right = found["error"] <= found["allowed"]
        except Exception as error:
            place.keep(name, {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
            wrong.append(name)
            if device.type == "cuda" and isinstance(error, torch.AcceleratorError):
                raise  # the device is lost: nothing that follows would run
            continue
        if not right:
            wrong.append(name)
        place.keep(name, {key: float(f"{value:.4g}") for key, value in found.items()})
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(checks)} kernels are wrong: {', '.join(wrong)}")


def _bound(check: Callable[..., dict[str, float]], *arguments: Any) -> Callable[[], dict[str, float]]:
    return lambda: check(*arguments)


def _random(seed: int, device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _reported(found: Tensor, expected: Tensor, dtype: torch.dtype, seconds: float, moved: float) -> dict[str, float]:
    """``moved``: bytes that had to be."""
    error = float((found.double().cpu() - expected).norm() / expected.norm())
    allowed = max(torch.finfo(dtype).eps, 1e-5)
    if not np.isfinite(error):
        error = float("inf")
    return {"error": error, "allowed": allowed, "us": seconds * 1e6, "bytes_per_s": moved / seconds}


def _attention(case: Attention, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    heads, kv_heads, dim = case.heads, case.kv_heads, case.dim
    new, context = [n for n, _ in case.sequences], [c for _, c in case.sequences]
    counts = [-(-c // _BLOCK) for c in context]
    order = np.random.default_rng(0).permutation(sum(counts))
    table = np.full((len(context), max(counts)), sum(counts))
    stored = torch.float8_e4m3fn if case.fp8 else dtype
    pools = [torch.full(((sum(counts) + 1) * _BLOCK, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2)]
    scales = [torch.full((kv_heads,), scale) for scale in (0.5, 0.25)] if case.fp8 else []
    taken, kept = 0, list[list[Tensor]]()
    for at, (length, count) in enumerate(zip(context, counts, strict=True)):
        mine = order[taken : taken + count]
        taken += count
        table[at, :count] = mine
        slots = torch.from_numpy((mine[:, None] * _BLOCK + np.arange(_BLOCK)).reshape(-1)[:length])
        ours = [_random(1000 * at + i, torch.device("cpu"), dtype, length, kv_heads, dim) for i in range(2)]
        if case.fp8:
            ours = [x.float().to(stored).to(dtype) for x in ours]
        for pool, x in zip(pools, ours, strict=True):
            pool[slots] = x
        factors = [s[None, :, None] for s in scales] if case.fp8 else [torch.ones(1)] * 2
        kept.append([x.double() * f for x, f in zip(ours, factors, strict=True)])
    keys, values = (pool.float().to(stored).to(device) if case.fp8 else pool.to(device) for pool in pools)
    query = _random(7, device, dtype, sum(new), heads, dim)
    sinks = _random(8, device, dtype, heads) if case.sinks else None
    there = torch.from_numpy(table).to(device, torch.int32)
    splits = 3 if device.type == "cpu" else None
    sizes = plan_sizes(
        len(new), sum(new), heads, kv_heads, multiprocessors_of(device), each=max(new), splits=splits
    )  # fmt: skip
    plan = AttentionPlan(sizes, device)
    plan.update(new, context)
    out = torch.full((sum(new), heads, dim), float("nan"), dtype=dtype, device=device)
    given: dict[str, Any] = {"window": case.window, "softcap": case.softcap, "sinks": sinks}
    if case.fp8:
        given |= {"key_scale": scales[0].to(device), "value_scale": scales[1].to(device)}

    def work() -> Tensor:
        return paged_attention(
            query, keys, values, there, plan, block_size=_BLOCK, scale=dim**-0.5, out=out, **given
        )  # fmt: skip

    found = work().clone()
    expected = _by_definition(case, query, kept, None if sinks is None else sinks.double().cpu())
    seen = [c if case.window is None else min(c, case.window + n - 1) for n, c in case.sequences]
    moved = 2 * sum(seen) * kv_heads * dim * keys.element_size() + 2 * query.nbytes
    return _reported(found, expected, dtype, seconds_of(device, work), moved)


def _by_definition(case: Attention, query: Tensor, kept: list[list[Tensor]], sinks: Tensor | None) -> Tensor:
    """Where there is a GPU, on it: float64 is slow, and it is the definition all the same."""
    out, begun, device = [], 0, query.device
    for (new, context), pair in zip(case.sequences, kept, strict=True):
        k, v = (x.to(device).repeat_interleave(case.heads // case.kv_heads, 1) for x in pair)
        q = query[begun : begun + new].double()
        begun += new
        scores = torch.einsum("thd,chd->htc", q, k) * case.dim**-0.5
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        row = torch.arange(context - new, context, device=device)[:, None]
        column = torch.arange(context, device=device)[None, :]
        hidden = column > row
        if case.window is not None:
            hidden = hidden | (column <= row - case.window)
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(device)[:, None, None].expand(-1, new, 1)], -1)
        weights = torch.softmax(scores, -1)[..., :context]
        out.append(torch.einsum("htc,chd->thd", weights, v).cpu())
    return torch.cat(out)


def _norm(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    x, residual, weight = (
        _random(i, device, dtype, *shape) for i, shape in enumerate([(rows, width)] * 2 + [(width,)])
    )
    total = (x.double() + residual.double()).to(dtype).double().cpu()
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double().cpu()
    found = rms_norm(x, weight, 1e-6, residual=residual.clone())
    seconds = seconds_of(device, lambda: rms_norm(x, weight, 1e-6, residual=residual))
    return _reported(found, expected, dtype, seconds, 4 * x.nbytes)


def _gate(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    x = _random(1, device, dtype, rows, 2 * width)
    gate, up = x.double().cpu().chunk(2, -1)
    return _reported(
        gated(x), torch.nn.functional.silu(gate) * up, dtype, seconds_of(device, lambda: gated(x)), 1.5 * x.nbytes
    )


def _product(
    rows: int, inputs: int, outputs: int, silu_gated: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """With the tile that the engine takes; where it takes none, a small one."""
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    tile = linear_tile(architecture_of(device), rows, inputs, outputs, silu_gated) or LinearTile(16, 32, 2, 4, 2)
    x = _random(1, device, dtype, rows, inputs)
    weight = _random(2, device, dtype, outputs * (2 if silu_gated else 1), inputs) * inputs**-0.5
    expected = x.double() @ weight.double().T
    if silu_gated:
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    out = torch.full((rows, outputs), float("nan"), dtype=dtype, device=device)

    def work() -> Tensor:
        return linear(x, weight, None, tile, silu_gated=silu_gated, out=out)

    work()
    found = work().clone()  # the counters of the first launch are right for a second
    return _reported(found, expected.cpu(), dtype, seconds_of(device, work), weight.nbytes)


def _rope(tokens: int, normed: bool, device: torch.device, dtype: torch.dtype, small: bool) -> dict[str, float]:
    """Queries, and the pool as it is read back; both in one error."""
    heads, kv_heads, dim = (4, 2, 16) if small else (32, 8, 128)
    qkv = _random(1, device, dtype, tokens, heads + 2 * kv_heads, dim)
    angle = torch.outer(torch.arange(tokens).double(), 10_000 ** (-torch.arange(0, dim, 2).double() / dim)).repeat(1, 2)
    cos, sin = (x.to(device, dtype) for x in (angle.cos(), angle.sin()))
    weights = [_random(5 + i, device, dtype, dim) for i in range(2)] if normed else [None, None]
    keys, values = (torch.full((tokens + 9, kv_heads, dim), float("nan"), dtype=dtype, device=device) for _ in range(2))
    slots = torch.from_numpy(np.random.default_rng(1).permutation(tokens + 9)[:tokens]).to(device)
    parts = [heads, heads + kv_heads]  # where keys and values begin

    def work(whole: Tensor) -> Tensor:
        query, key, value = whole.tensor_split(parts, 1)
        return rope_and_write(
            query, key, value, cos, sin, keys, values, slots, query_norm=weights[0], key_norm=weights[1], eps=1e-6
        )  # fmt: skip

    found = work(qkv.clone())
    expected = list[Tensor]()
    for x, weight in zip(qkv.double().cpu().tensor_split(parts, 1), [*weights, None], strict=True):
        if len(expected) == 2:
            expected.append(x)
            break
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double().cpu()
        turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        c, s = (t.double().cpu()[:, None] for t in (cos, sin))
        expected.append(x * c + turned * s)
    together = torch.cat([found, keys[slots], values[slots]], 1)
    scratch = qkv.clone()
    seconds = seconds_of(device, lambda: work(scratch))
    return _reported(together, torch.cat(expected, 1), dtype, seconds, 2 * qkv.nbytes + cos.nbytes + sin.nbytes)


def _greedy(rows: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    logits = _random(3, device, dtype, rows, vocabulary)
    logits[0, 5] = float("nan")
    expected = torch.from_numpy(logits.float().cpu().numpy().argmax(-1))  # the first of equals
    expected[0] = -1
    wrong = float((greedy(logits).cpu() != expected).sum())
    seconds = seconds_of(device, lambda: greedy(logits))
    return {"error": wrong, "allowed": 0.0, "us": seconds * 1e6, "bytes_per_s": logits.nbytes / seconds}


def _sampled(rows: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """How far the shares of the tokens drawn are from their probabilities, in standard errors, the largest of them. One token is
    cut off by top-k and must not come."""
    one = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -9.0])
    logits = one.to(device, dtype).repeat(rows, 1)
    column = [torch.full((rows,), value, device=device) for value in (0.8, 1.0, 0.0)]
    ks = torch.full((rows,), 5, dtype=torch.int32, device=device)
    seeds, positions = (torch.arange(rows, device=device) * factor for factor in (7, 1))

    def work() -> Tensor:
        return sample(logits, column[0], ks, column[1], column[2], seeds, positions)

    counts = torch.bincount(work().cpu(), minlength=6).double()
    p = torch.softmax(one[:5].double() / 0.8, 0)
    off = (counts[:5] - rows * p).abs() / (rows * p * (1 - p)).sqrt()
    error = float("inf") if counts[5] else float(off.max())
    seconds = seconds_of(device, work)
    return {"error": error, "allowed": 4.5, "us": seconds * 1e6, "bytes_per_s": logits.nbytes / seconds}
