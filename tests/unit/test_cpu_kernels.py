"""The CPU's kernels against float64: every element type, on wide vectors and narrow ones, with odd shapes and poisoned memory."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.llm.plan import Chunk
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend.attention import Terms
from runtime.torch_backend.contract import KVLayer
from runtime.torch_backend.cpu import compiled, operations
from runtime.torch_backend.cpu.attention import PagedAttention
from runtime.torch_backend.cpu.compiled import Kernels, Layer, Step, kernels, library
from runtime.torch_backend.cpu.operations import CPUOperations
from runtime.torch_backend.inputs import DecodeRows, PackedBatch
from runtime.torch_backend.kv_pool import KVPool, LayerKV
from runtime.torch_backend.operations import HeadNorm, Operations

HALF = torch.bfloat16
pytestmark = pytest.mark.skipif(kernels(torch.float32) is None, reason="no C compiler: apt install gcc")
_CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


def _variants() -> Iterator[object]:
    yield pytest.param((torch.float32, ()), id="float32")
    yield pytest.param((HALF, ("-DBFLOAT16",)), id="bfloat16")
    if platform.machine() == "x86_64" and "avx512f" in _CPU:  # and as other processors have it
        yield pytest.param((torch.float32, ("-mno-avx512f",)), id="float32 narrow")
        yield pytest.param((HALF, ("-DBFLOAT16", "-mno-avx512f")), id="bfloat16 narrow")
        yield pytest.param((HALF, ("-DBFLOAT16", "-mno-avx512bf16")), id="bfloat16 without products")


class Variant:
    """The kernels as compiled with some flags, and how exact they are."""

    def __init__(self, dtype: torch.dtype, flags: tuple[str, ...]) -> None:
        self.dtype, self.kernels = dtype, Kernels(library(*flags))
        self.tolerance = 1e-5 if dtype == torch.float32 else 2**-7

    def near(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found.double(), expected, rtol=self.tolerance, atol=self.tolerance)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self.dtype)


@pytest.fixture(params=_variants())
def variant(request: pytest.FixtureRequest) -> Variant:
    torch.manual_seed(0)
    return Variant(*request.param)


def _normed(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * scale.double()


@pytest.mark.parametrize(("rows", "size"), [(0, 16), (1, 16), (3, 48), (33, 512)])
@pytest.mark.parametrize("threads", [1, 2])
def test_norms(variant: Variant, rows: int, size: int, threads: int) -> None:
    for scale in (variant.random(size), torch.randn(size)):
        wide = scale.dtype == torch.float32
        x, residual = variant.random(rows, size), variant.random(rows, size)
        x[:1] *= 1e-3  # where eps shows
        out = variant.random(rows + 1, size).fill_(math.nan)
        variant.kernels.norm(out.data_ptr(), x.data_ptr(), scale.data_ptr(), wide, 1e-5, rows, size, threads)
        variant.near(out[:rows], _normed(x, scale, 1e-5))
        assert out[rows:].isnan().all()  # and nothing beyond
        both = (x.float() + residual.float()).to(variant.dtype)
        out.fill_(math.nan)
        pointers = [t.data_ptr() for t in (out, x, residual, scale)]
        variant.kernels.add_norm(*pointers, wide, 1e-5, rows, size, threads)
        assert torch.equal(x, both)
        variant.near(out[:rows], _normed(both, scale, 1e-5))
        assert out[rows:].isnan().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_gates(variant: Variant, threads: int) -> None:
    gate_up = variant.random(5, 2 * 48) * 5
    gate_up[1, :6] = torch.tensor([100.0, -100.0, 3e38, -3e38, math.inf, 0.0])
    out = torch.full((6, 48), math.nan, dtype=variant.dtype)
    variant.kernels.silu_mul(out.data_ptr(), gate_up.data_ptr(), 5, 48, threads)
    gate, up = gate_up.double().split(48, 1)
    variant.near(out[:5], (torch.nn.functional.silu(gate) * up).to(variant.dtype).double())
    assert out[5:].isnan().all()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_rotations_are_written_to_the_pool(variant: Variant, normed: bool, threads: int) -> None:
    tokens, heads, kv_heads, dim = 7, 6, 2, 64
    qkv, cos, sin = (variant.random(tokens, n) for n in ((heads + 2 * kv_heads) * dim, dim, dim))
    scales = [torch.rand(dim) + 0.5 for _ in range(2)] if normed else []
    keys, values = (torch.full((20, kv_heads, dim), math.nan, dtype=variant.dtype) for _ in range(2))
    slots = torch.randperm(20)[:tokens]
    both, value = qkv.view(tokens, -1, dim).double().split([heads + kv_heads, kv_heads], 1)
    if normed:
        both = torch.cat(
            [_normed(x, s, 1e-6) for x, s in zip(both.split([heads, kv_heads], 1), scales, strict=True)], 1
        )
    turned = torch.cat([-both[..., dim // 2 :], both[..., : dim // 2]], -1)
    expected = both * cos.double()[:, None] + turned * sin.double()[:, None]
    pointers = [s.data_ptr() for s in scales] or [None, None]
    variant.kernels.rope_write(
        qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), *pointers, True, 1e-6, keys.data_ptr(), values.data_ptr(),
        slots.data_ptr(), len(keys), tokens, heads, kv_heads, dim, threads,
    )  # fmt: skip
    found = qkv.view(tokens, -1, dim)
    variant.near(found[:, : heads + kv_heads], expected)
    assert torch.equal(keys[slots], found[:, heads : heads + kv_heads])
    assert torch.equal(values[slots].double(), value)
    others = sorted({*range(20)} - {*slots.tolist()})
    assert keys[others].isnan().all() and values[others].isnan().all()


SHAPES = [
    # (new tokens, context) of each sequence
    [(1, 1)],
    [(1, 16), (1, 17), (1, 64), (1, 65), (1, 300)],
    [(5, 5), (1, 40), (64, 64), (33, 150), (2, 2)],
    [(1, 700), (130, 257)],
]
HEADS = [(4, 4, 32, 32), (8, 2, 64, 64), (3, 1, 96, 32), (16, 2, 128, 128), (20, 1, 64, 64), (2, 2, 256, 256)]
TERMS = {
    "plain": Terms(0.2, None, None, None),
    "window": Terms(0.2, 9, None, None),
    "wide window": Terms(0.2, 100, None, None),
    "softcap": Terms(0.2, None, 1.5, None),
    "sinks": Terms(0.2, 9, None, torch.linspace(-2, 2, 20)),
}


def _by_definition(query: Tensor, keys: Tensor, values: Tensor, terms: Terms) -> Tensor:
    """``query [tokens, heads, dim]`` are the last tokens of ``keys``/``values [context, kv_heads, dim]``; in float64."""
    group = query.shape[1] // keys.shape[1]
    scores = torch.einsum("thd,chd->htc", query.double(), keys.double().repeat_interleave(group, 1)) * terms.scale
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    last = torch.arange(len(keys) - len(query), len(keys))[:, None]
    at = torch.arange(len(keys))
    scores = scores.masked_fill((at > last) | (at <= last - (terms.window or len(keys))), -math.inf)
    if terms.sinks is not None:
        scores = torch.cat([scores, terms.sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)], -1)
    weights = torch.softmax(scores, -1)[..., : len(keys)]
    return torch.einsum("htc,chd->thd", weights, values.double().repeat_interleave(group, 1))


def _attended(
    variant: Variant, shape: list[tuple[int, int]], heads: tuple[int, int, int, int], terms: Terms, threads: int = 1,
    block: int = 16, spoilt: int | None = None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """What the kernel makes of random sequences, and what it should, sequence by sequence. All that is no sequence's is NaN.

    ``spoilt``: the sequence whose first key is NaN.
    """
    of_query, of_kv, key_dim, value_dim = heads
    needed = [-(-context // block) for _, context in shape]
    table = torch.full((len(shape), max(needed)), sum(needed))  # the rest is padding, which nobody may read
    blocks = torch.randperm(sum(needed)).tolist()
    keys, values = (torch.full(((sum(needed) + 1) * block, of_kv, d), math.nan) for d in (key_dim, value_dim))
    keys, values = keys.to(variant.dtype), values.to(variant.dtype)
    query = variant.random(sum(new for new, _ in shape), of_query, key_dim)
    expected, at = [], 0
    for row, (new, context) in enumerate(shape):
        mine = [blocks.pop() for _ in range(needed[row])]
        table[row, : len(mine)] = torch.tensor(mine)
        slots = (torch.tensor(mine)[:, None] * block + torch.arange(block)).view(-1)[:context]
        keys[slots], values[slots] = variant.random(context, of_kv, key_dim), variant.random(context, of_kv, value_dim)
        if row == spoilt:
            keys[slots[0]] = math.nan
        expected.append(_by_definition(query[at : at + new], keys[slots], values[slots], terms))
        at += new
    out = torch.full((len(query) + 1, of_query, value_dim), math.nan, dtype=variant.dtype)
    sinks = None if terms.sinks is None else terms.sinks.data_ptr()
    layer = Layer(
        query.data_ptr(), keys.data_ptr(), values.data_ptr(), sinks, out.data_ptr(), query.stride(0), of_query, of_kv,
        key_dim, value_dim, terms.window or 0, terms.scale, terms.softcap or 0.0,
    )  # fmt: skip
    fresh, contexts = (torch.tensor([pair[i] for pair in shape]) for i in (0, 1))
    step = Step(fresh.data_ptr(), contexts.data_ptr(), table.data_ptr(), *table.shape, block, sum(needed) + 1)
    assert variant.kernels.attend(ctypes.byref(layer), ctypes.byref(step), threads) == 0
    assert out[-1].isnan().all()
    return out[:-1], expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("terms", TERMS.keys())
def test_attention(variant: Variant, shape: list[tuple[int, int]], terms: str) -> None:
    wanted = TERMS[terms]
    for heads in HEADS if len(shape) < 5 else HEADS[:2]:
        sinks = None if wanted.sinks is None else wanted.sinks[: heads[0]].contiguous()
        here = Terms(wanted.scale, wanted.window, wanted.softcap, sinks)
        found, expected = _attended(variant, shape, heads, here)
        tolerance = 1e-5 if variant.dtype == torch.float32 else 2**-6
        torch.testing.assert_close(found.double(), torch.cat(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block", [1, 5, 16, 64])
def test_blocks_of_any_size(variant: Variant, block: int) -> None:
    found, expected = _attended(variant, SHAPES[2], HEADS[1], TERMS["window"], block=block)
    torch.testing.assert_close(found.double(), torch.cat(expected), rtol=2**-6, atol=2**-6)


def test_threads_change_no_bit(variant: Variant) -> None:
    found = []
    for threads in (1, 3):
        torch.manual_seed(1)
        found.append(_attended(variant, SHAPES[2], HEADS[1], TERMS["plain"], threads)[0])
    assert torch.equal(*found)


def test_a_sequence_that_is_not_finite_harms_no_other(variant: Variant) -> None:
    found, expected = _attended(variant, SHAPES[2], HEADS[1], TERMS["plain"], spoilt=3)
    begin = 0
    for row, each in enumerate(expected):
        mine = found[begin : begin + len(each)]
        assert mine.isnan().any(-1).all() if row == 3 else mine.isfinite().all()
        begin += len(each)


def _layer(kv_heads: int, dim: int, dtype: torch.dtype) -> LayerKV:
    return LayerKV(torch.zeros(8, kv_heads, dim, dtype=dtype), torch.zeros(8, kv_heads, dim, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [32, 24])
def test_what_kernels_do_not_take_pytorch_computes(dtype: torch.dtype, dim: int) -> None:
    """Sizes that are no multiples, rows that do not lie end to end, other dtypes: the same numbers by one way or the other."""
    torch.manual_seed(0)
    tokens, heads, kv_heads = 5, 4, 2
    near = 0.03 if dtype in (HALF, torch.float16) else 1e-5
    x, residual = torch.randn(tokens, 2 * dim, dtype=dtype), torch.randn(tokens, 2 * dim, dtype=dtype)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cos, sin = torch.randn(tokens, dim, dtype=dtype), torch.randn(tokens, dim, dtype=dtype)
    scales = [torch.rand(dim, dtype=dtype) for _ in range(2)]
    counts = heads, kv_heads
    each = torch.cat([s.expand(n, dim) for s, n in zip(scales, counts, strict=True)])
    slots = torch.tensor([7, 1, 0, 3, 2])
    for norm in (None, HeadNorm(*scales, each, 1e-6)):
        kept = []
        for ops in (Operations(), CPUOperations()):
            layer = _layer(kv_heads, dim, dtype)
            found = ops.rope_write(qkv.clone(), cos, sin, kv_heads, norm, layer, slots)
            kept.append([*found, layer.keys, layer.values])
        for a, b in zip(*kept, strict=True):
            torch.testing.assert_close(a, b, rtol=near, atol=near)
    for rows in (x, x[:, :dim], x.T.contiguous().T):
        scale = torch.rand(rows.shape[1], dtype=dtype)
        other = residual[:, : rows.shape[1]]
        for call in ("norm", "add_norm", "silu_mul"):
            made = []
            for ops in (Operations(), CPUOperations()):
                mine = rows.clone()
                args = {"norm": (mine, scale, 1e-5), "add_norm": (mine, other, scale, 1e-5), "silu_mul": (mine,)}[call]
                made.append(getattr(ops, call)(*args))
            torch.testing.assert_close(*made, rtol=near, atol=near)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As on a machine where nothing has been compiled yet; yields the folder of the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.cache_clear()
    yield tmp_path / "gpu-autotune"
    kernels.cache_clear()


def test_what_is_compiled_is_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert kernels(torch.float32) is not None
    [kept] = fresh.iterdir()
    assert kept.name.startswith("cpu-kernels-") and stat.S_IMODE(kept.stat().st_mode) == 0o644
    ran: list[list[str]] = []
    run = compiled._run

    def counted(command: list[str]) -> str:
        ran.append(command)
        return run(command)

    monkeypatch.setattr(compiled, "_run", counted)
    kernels.cache_clear()
    assert kernels(torch.float32) is not None
    assert [command[1:] for command in ran] == [["--version"]]
    elsewhere = tmp_path / "elsewhere" / "gpu-autotune" / kept.name
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_bytes(b"damaged")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    kernels.cache_clear()
    assert kernels(torch.float32) is not None
    assert len(ran) == 4  # asked for its version again, compiled and linked
    assert elsewhere.stat().st_size == kept.stat().st_size and [*elsewhere.parent.iterdir()] == [elsewhere]


def test_what_cannot_be_read_in_the_cache_is_done_without(fresh: Path) -> None:
    assert kernels(torch.float32) is not None
    [kept] = fresh.iterdir()
    (unreadable := kept.with_name(f"{kept.stem.rpartition('-')[0]}-.so")).mkdir()  # also for root
    kernels.cache_clear()
    assert kernels(torch.float32) is not None and sorted(fresh.iterdir()) == [unreadable, kept]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_to_is_done_without(fresh: Path) -> None:
    fresh.mkdir()
    fresh.chmod(0o500)
    assert kernels(torch.float32) is not None
    assert not [*fresh.iterdir()]


def test_a_folder_in_the_way_of_the_cache_is_left_alone(fresh: Path) -> None:
    fresh.write_text("not a folder")
    assert kernels(torch.float32) is not None
    assert fresh.read_text() == "not a folder"


def test_without_a_compiler_the_log_says_so(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert kernels(HALF) is None
    assert "there is no C compiler: install gcc" in caplog.text
    x = torch.randn(3, 32, dtype=HALF)
    assert torch.equal(CPUOperations().norm(x, x[0], 1e-5), Operations().norm(x, x[0], 1e-5))


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ('[ "$1" = --version ] && echo gcc 1 && exit\necho cannot compile today >&2\nexit 1', "cannot compile today"),
        ("exit 0", "there are no CPU kernels of our own"),  # and makes nothing
    ],
)
def test_a_compiler_that_does_not_compile(
    does: str, said: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "gcc"
    broken.write_text(f"#!/bin/sh\n{does}\n")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    with caplog.at_level(logging.WARNING):
        assert kernels(torch.float32) is None
    assert said in caplog.text
    assert not [*fresh.iterdir()]


def test_kernels_can_be_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert kernels(torch.float32) is None
    assert not fresh.exists()


def test_small_work_wakes_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert operations.threads_for(1000) == 1
    assert operations.threads_for(1 << 20) == 8


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_nothing_is_compiled_but_on_linux(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.torch_backend.cpu.compiled.sys.platform", system)
    with pytest.raises(ValueError, match=f"they are compiled on Linux only, not on {system}"):
        library()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a flag of GCC for x86")
def test_processors_without_wide_vectors_are_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as raised:
        library("-mno-avx")
    assert "no vectors of 256 bits" in raised.value.stderr


def test_kernels_that_compute_something_else_are_not_taken(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = compiled._SOURCE.read_text()
    wrong = fresh.parent / "kernels.c"
    wrong.write_text(
        source.replace("* layer->scale;", "* layer->scale * (begin ? 0.5f : 1.0f);")
    )  # behind the first tile
    assert wrong.read_text() != source
    monkeypatch.setattr(compiled, "_SOURCE", wrong)
    assert kernels(torch.float32) is None
    assert kernels(HALF) is None


def _paged(new: int, context: int) -> tuple[PagedAttention, PackedBatch, LayerKV]:
    """One prompt over a pool of eight blocks of 16, in the blocks 3, 4, …"""
    pool = KVPool(8, 16)
    layer = pool.layer(torch.nn.Identity(), KVLayer((2, 32), (2, 32), torch.float32), torch.device("cpu"))
    layer.keys.normal_(), layer.values.normal_()
    sequence = Sequence(Request("a", (0,) * context, SamplingParams(), 9, 0.0))
    sequence.blocks = list(range(3, 3 + -(-context // 16)))
    batch = PackedBatch(DecodeRows.alone(16, pool.pad_block, [], 0), [Chunk(sequence, context - new, new, True)])
    return PagedAttention(pool, torch.device("cpu")), batch, layer


def test_blocks_beyond_the_pool_are_an_error_and_no_read() -> None:
    attention, batch, layer = _paged(3, 40)
    batch.chunks[0].sequence.blocks[1] = 10_000_000
    inputs = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    with pytest.raises(IndexError, match="a block that the KV pool does not have"):
        attention.run(attention.plan(batch), layer, *inputs, TERMS["plain"])


def test_slots_beyond_the_pool_are_an_error_and_no_write() -> None:
    layer, ones = _layer(2, 32, torch.float32), torch.ones(2, 32)
    for slots in ([1, 8], [-1, 0]):
        with pytest.raises(IndexError, match="of a pool of 8"):
            CPUOperations().rope_write(torch.randn(2, 8 * 32), ones, ones, 2, None, layer, torch.tensor(slots))
    assert not layer.keys.any()


def test_what_does_not_fit_together_raises_as_pytorch_does() -> None:
    layer, ones = _layer(2, 32, torch.float32), torch.ones(2, 32)
    slots = torch.tensor([0, 1])
    for qkv, cos, sin, kv_heads in (
        (torch.randn(3, 8 * 32), torch.ones(3, 32), torch.ones(3, 32), 2),  # more tokens than slots
        (torch.randn(2, 8 * 32), torch.ones(0, 32), ones, 2),
        (torch.randn(2, 8 * 32), ones, ones, 3),  # heads that the pool does not have
    ):
        with pytest.raises((RuntimeError, IndexError)):
            CPUOperations().rope_write(qkv, cos, sin, kv_heads, None, layer, slots)
    attention, batch, layer = _paged(3, 40)
    for tokens, heads, dim in ((2, 4, 32), (3, 3, 32), (3, 4, 64)):
        query, key, value = torch.randn(tokens, heads, dim), torch.randn(tokens, 2, 32), torch.randn(tokens, 2, 32)
        with pytest.raises((RuntimeError, IndexError)):
            attention.run(attention.plan(batch), layer, query, key, value, TERMS["plain"])


@pytest.mark.parametrize("window", [1 << 20, (1 << 31) + 50, (1 << 32) + 4, 1 << 62])
def test_a_window_wider_than_any_context_is_none(window: int) -> None:
    attention, batch, layer = _paged(3, 40)
    inputs = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    found, plain = (
        attention.run(attention.plan(batch), layer, *inputs, Terms(0.2, wide, None, None)) for wide in (window, None)
    )
    assert torch.equal(found, plain)


def test_threads_with_small_stacks_attend() -> None:
    found: list[Tensor] = []
    attention, batch, layer = _paged(3, 40)
    inputs = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)

    def attend() -> None:
        found.append(attention.run(attention.plan(batch), layer, *inputs, TERMS["plain"]))

    before = threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert found[0].isfinite().all()
