"""Kernels compiled ahead of time, and what each takes of a chip: registers, spills, shared memory.

Needs Triton and no GPU::

    $ python -m runtime.torch_backend.cuda.ahead --architecture 90
    kernel                                        registers  spilled  shared  warps
    …

The compiler decides all three, so this tells before a kernel meets a GPU whether it can be launched there at all, and
whether a tile size of :mod:`.tiles` is too large. It tells nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from runtime.errors import InputError
from runtime.torch_backend.cuda import activation, attention, linear, norm, rope, sampling
from runtime.torch_backend.cuda.attention_plan import plan_sizes
from runtime.torch_backend.cuda.language import INTERPRETED, triton
from runtime.torch_backend.cuda.launch import EARLY_FROM
from runtime.torch_backend.cuda.tiles import (
    ARCHITECTURES,
    FEW_SEQUENCES,
    LinearTile,
    attention_tile,
    linear_tile,
    next_power_of_2,
    row_warps,
)

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
DRAFTS, PROMPTS = 7, 2048
"""Tokens that a sequence has in a step beside its own where it drafts, and in all where it has a prompt."""

_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Specialisation:
    """A kernel with its arguments' types (``*bf16`` is a pointer) and its constants, as a launch would compile it."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Compiled:
    """``spilled``: bytes a thread keeps in local memory because registers ran out; ``shared``: bytes of a block."""

    name: str
    architecture: int
    registers: int
    spilled: int
    shared: int
    warps: int


def attention_specialisation(
    architecture: int, heads: int, kv_heads: int, dim: int, dtype: str = "bf16", *, value_dim: int | None = None,
    each: int = 1, sequences: int = _SEQUENCES, window: int = 0, softcap: bool = False, sinks: bool = False, fp8: bool = False,
) -> Specialisation:  # fmt: skip
    """What :func:`.attention.paged_attention` compiles for such a model in steps of up to ``sequences`` with ``each`` tokens: 1
    where they decode, more where they draft, :data:`PROMPTS` where they have prompts."""
    value_dim = dim if value_dim is None else value_dim
    sizes = plan_sizes(sequences, sequences * each, heads, kv_heads, 132, each=each)
    tile = attention_tile(architecture, max(dim, value_dim), ELEMENT_BYTES[dtype], sizes.rows, sizes.sequences, fp8)
    pool, scale = ("*u8", "*fp32") if fp8 else (f"*{dtype}", f"*{dtype}")
    types = {
        "query": f"*{dtype}", "keys": pool, "values": pool, "table": "*i64", "items": "*i32", "starts": "*i32",
        "lengths": "*i32",
        "sinks": f"*{dtype}", "key_scale": scale, "value_scale": scale, "out": f"*{dtype}", "partial": "*fp32",
        "partial_lse": "*fp32", "before_scale": "fp32", "after_scale": "fp32", "table_stride": "i32",
    }  # fmt: skip
    constants = {
        "query_stride": (heads + 2 * kv_heads) * dim, "query_head_stride": dim, "key_stride": kv_heads * dim,
        "key_head_stride": dim,
        "value_stride": kv_heads * value_dim, "value_head_stride": value_dim, "out_stride": heads * value_dim,
        "out_head_stride": value_dim,
        "HEADS": heads, "GROUP": heads // kv_heads, "DIM": dim, "VALUE_DIM": value_dim, "BLOCK_SIZE": 16, "TILE": sizes.tile,
        "WINDOW": window, "SOFTCAP": softcap, "SINKS": sinks,
        "FP8": attention.pool_format(architecture) if fp8 else attention.FP8_OFF,
        "WHOLE": attention.whole_first(sizes.rows, window or None),
        "BLOCK_M": sizes.rows, "BLOCK_N": tile.keys, "BLOCK_D": max(16, next_power_of_2(dim)), "BLOCK_V": max(16,
        next_power_of_2(value_dim)),
    }  # fmt: skip
    extras = [f"window {window}"] * (window > 0) + ["softcap"] * softcap + ["sinks"] * sinks + ["fp8"] * fp8
    size = str(dim) if dim == value_dim else f"{dim}/{value_dim}"
    extras += [f"of {sequences}"] * (sequences != _SEQUENCES)
    kind = {1: "decode", PROMPTS: "mixed"}.get(each, f"drafts {each - 1}")
    name = " ".join(["attend", f"{heads}/{kv_heads}x{size}", dtype, kind, *extras])
    return Specialisation(name, attention._attend, types, constants, tile.warps, tile.stages)


def linear_specialisation(
    rows: int, inputs: int, outputs: int, gated: bool, tile: LinearTile, dtype: str = "bf16", *, bias: bool = False
) -> Specialisation:
    """What :func:`.linear.linear` compiles for such a product."""
    pointer = f"*{dtype}"
    extras = " gated" * gated + " bias" * bias
    return Specialisation(
        f"linear {rows} of {inputs} to {outputs} {dtype}{extras}", linear._linear,
        {"x": pointer, "weight": pointer, "bias": pointer, "out": pointer, "partial": "*fp32" if tile.parts > 1 else pointer,
        "arrived": "*i32" if tile.parts > 1 else pointer, "rows": "i32"},
        {"x_stride": inputs, "out_stride": outputs, "IN": inputs, "OUT": outputs, "GATED": gated, "BIAS": bias,
        "PARTS": tile.parts, "BLOCK_M": max(linear.FEWEST, next_power_of_2(rows)), "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.inputs,
        "BEFORE": min(next_power_of_2(inputs // tile.parts // linear.LINE.value), tile.inputs * tile.ahead // linear.LINE.value)},
        tile.warps, tile.stages,
    )  # fmt: skip


def specialisations(architecture: int) -> Iterator[Specialisation]:
    """Every kernel as the models we serve would compile it, in each dtype, and every option of the attention kernel at least
    once."""
    yield from _attentions(architecture)
    for dim, tile in product((64, 80, 128, 256), (1, 8, 32)):
        yield _merge(dim, tile)
    for dtype in ("fp16", "fp32"):
        yield _merge(128, 1, dtype)
    for heads, kv_heads, dim, rotary, dtype, normed, fp8 in (
        (32, 8, 128, 128, "bf16", False, False), (16, 8, 128, 128, "bf16", True, False), (32, 8, 80, 32, "bf16", False, False),
        (8, 4, 256, 256, "bf16", True, True), (71, 1, 64, 64, "bf16", False, False), (32, 8, 128, 128, "fp16", False, False),
        (16, 8, 128, 128, "fp32", True, False), (16, 8, 128, 128, "fp16", True, True), (8, 4, 256, 256, "fp32", True, True),
    ):  # fmt: skip
        yield _rope(heads, kv_heads, dim, rotary, dtype, normed, fp8)
    # the widest that a model has in float32; twice that, which no model has, spills 112 bytes
    widths = {"bf16": (896, 1024, 4096, 8192, norm.MAX_WIDTH), "fp16": (4096,), "fp32": (4096, 16384)}
    for dtype in ELEMENT_BYTES:
        for width, add in product(widths[dtype], (False, True)):
            yield _rms_norm(width, add, dtype)
        yield Specialisation(
            f"gated {dtype}", activation._gated, {"gate_up": f"*{dtype}", "out": f"*{dtype}"},
            {"in_stride": 28672, "out_stride": 14336, "WIDTH": 14336, "BLOCK": activation.BLOCK},
        )  # fmt: skip
    yield from _products(architecture)
    for dtype in ELEMENT_BYTES:
        shared = {"logits": f"*{dtype}", "out": "*i64"}
        constants = {"VOCAB": 151936, "BLOCK": sampling.BLOCK}
        yield Specialisation(
            f"greedy {dtype}", sampling._greedy, shared, {**constants, "stride": 128256}, sampling.WARPS
        )
        types = {
            "temperatures": "*fp32",
            "top_ks": "*i32",
            "top_ps": "*fp32",
            "min_ps": "*fp32",
            "seeds": "*i64",
            "positions": "*i64",
        }
        yield Specialisation(
            f"sample {dtype}", sampling._sample, {**shared, **types}, {**constants, "stride": 128256}, sampling.WARPS
        )


def _attentions(architecture: int) -> Iterator[Specialisation]:
    shapes = [(32, 8, 128), (14, 2, 64), (32, 32, 96), (32, 8, 80), (8, 4, 256), (71, 1, 64)]
    for each in (1, PROMPTS):
        for heads, kv_heads, dim in shapes:
            yield attention_specialisation(architecture, heads, kv_heads, dim, each=each)
        yield attention_specialisation(architecture, 32, 8, 128, "fp16", each=each)
        for dim in (64, 128, 256):
            yield attention_specialisation(architecture, 16, 8, dim, "fp32", each=each)
            yield attention_specialisation(architecture, 16, 8, dim, "fp32", each=each, fp8=True)
            yield attention_specialisation(architecture, 16, 8, dim, each=each, fp8=True)
        yield attention_specialisation(architecture, 16, 8, 128, "fp16", each=each, fp8=True)
        yield attention_specialisation(architecture, 16, 16, 192, each=each, value_dim=128)
        yield attention_specialisation(architecture, 8, 4, 256, each=each, window=4096, softcap=True)
        yield attention_specialisation(architecture, 64, 8, 64, each=each, window=128, sinks=True)
    # tiles of 32 rows, between those of decodes and of prompts
    drafts, many = DRAFTS + 1, 2 * (DRAFTS + 1)
    yield attention_specialisation(architecture, 32, 8, 128, each=drafts)
    for dtype, fp8 in (("bf16", False), ("bf16", True), ("fp32", False)):
        yield attention_specialisation(architecture, 16, 8, 128, dtype, each=many, fp8=fp8)
    yield attention_specialisation(architecture, 8, 4, 256, each=many)
    for heads, kv_heads, dim, dtype, fp8 in (
        (32, 8, 128, "bf16", False), (16, 8, 128, "bf16", False), (16, 8, 128, "bf16", True), (32, 32, 96, "bf16", False),
        (32, 8, 128, "fp16", False),
    ):  # fmt: skip
        few = attention_specialisation(architecture, heads, kv_heads, dim, dtype, sequences=FEW_SEQUENCES, fp8=fp8)
        if (
            few.constants["BLOCK_N"]
            != attention_specialisation(architecture, heads, kv_heads, dim, dtype, fp8=fp8).constants["BLOCK_N"]
        ):  # else it is the binary of more sequences
            yield few


def _merge(dim: int, tile: int, dtype: str = "bf16") -> Specialisation:
    merging = attention.merge_tile(tile, next_power_of_2(dim))
    return Specialisation(
        f"merge {dim} of {tile} {dtype}", attention._merge,
        {"partial": "*fp32", "partial_lse": "*fp32", "merges": "*i32", "starts": "*i32", "out": f"*{dtype}"},
        {"out_stride": 32 * dim, "out_head_stride": dim, "HEADS": 32, "VALUE_DIM": dim, "TILE": tile,
        "TOKENS": merging.tokens, "PARTS": merging.parts, "BLOCK_V": next_power_of_2(dim)},
        merging.warps,
    )  # fmt: skip


def _rms_norm(width: int, add: bool, dtype: str) -> Specialisation:
    block = next_power_of_2(width)
    return Specialisation(
        f"rms_norm {width} {dtype}{' add' * add}", norm._rms_norm,
        {**dict.fromkeys(("x", "residual", "weight", "out"), f"*{dtype}"), "eps": "fp32"},
        {"x_stride": width, "residual_stride": width, "out_stride": width, "WIDTH": width, "ADD": add, "BLOCK": block},
        row_warps(block),
    )  # fmt: skip


def _products(architecture: int) -> Iterator[Specialisation]:
    """Those of Llama 3.1 8B and Qwen3 0.6B, where there is a tile for them."""
    large = ((4096, 6144, False), (4096, 14336, True), (14336, 4096, False))
    small = ((1024, 4096, False), (2048, 1024, False), (1024, 3072, True), (3072, 1024, False))
    shapes = [(rows, *shape, "bf16", False) for shape in (*large, *small) for rows in (1, 32, 64)]
    shapes += [(rows, *shape, "fp16", False) for shape in large for rows in (1, 64)]
    shapes += [(1, 3584, 4608, False, "bf16", True)]  # Qwen2.5 7B has biases
    for rows, inputs, outputs, gated, dtype, bias in shapes:
        if (found := linear_tile(architecture, rows, inputs, outputs, gated)) is not None:
            yield linear_specialisation(rows, inputs, outputs, gated, found, dtype, bias=bias)


def _rope(heads: int, kv_heads: int, dim: int, rotary: int, dtype: str, normed: bool, fp8: bool) -> Specialisation:
    merged, pointer, group = (heads + 2 * kv_heads) * dim, f"*{dtype}", heads // kv_heads
    pointers = ("query", "key", "value", "query_out", "keys", "values", "cos", "sin", "query_weight", "key_weight")
    types = {
        **dict.fromkeys(pointers, pointer), "slots": "*i64", "eps": "fp32",
        **dict.fromkeys(("key_scale", "value_scale"), "*fp32" if fp8 else pointer),
    } | (dict.fromkeys(("keys", "values"), "*u8") if fp8 else {})  # fmt: skip
    constants = {
        "query_stride": merged, "query_head_stride": dim, "key_in_stride": merged, "key_in_head_stride": dim,
        "value_in_stride": merged,
        "value_in_head_stride": dim, "out_stride": merged, "out_head_stride": dim, "key_stride": kv_heads * dim,
        "key_head_stride": dim,
        "value_stride": kv_heads * dim, "value_head_stride": dim, "angle_stride": rotary, "GROUP": group, "DIM": dim,
        "ROTARY": rotary,
        "VALUE_DIM": dim, "NORM": normed, "FP8": fp8, "BLOCK_G": next_power_of_2(group),
        "BLOCK_P": next_power_of_2(rotary // 2), "BLOCK_R": next_power_of_2(max(1, dim - rotary)),
        "BLOCK_V": next_power_of_2(dim),
    }  # fmt: skip
    name = f"rope {heads}/{kv_heads}x{dim} {rotary} {dtype}{' normed' * normed}{' fp8' * fp8}"
    return Specialisation(name, rope._rope_write, types, constants, rope.warps(group, dim))


def compiled(what: Specialisation, architecture: int) -> Compiled:
    """Compile ``what`` for sm_``architecture`` and read off the binary what it takes. Raises ``InputError`` where kernels
    are interpreted."""
    if INTERPRETED.value:
        raise InputError("TRITON_INTERPRET is set; kernels cannot be compiled in this process")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = what.kernel.arg_names
    signature = {name: what.types.get(name, "constexpr") for name in names}
    # as at a launch: torch's memory is aligned, and so are strides that are multiples of 16
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name].startswith("*")}
    early = architecture >= EARLY_FROM
    constants = {**what.constants, "EARLY": early}
    source = ASTSource(fn=what.kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    built = triton.compile(
        source, target=target, options={"num_warps": what.warps, "num_stages": what.stages, "launch_pdl": early}
    )
    usage = _usage(built.asm["cubin"])
    return Compiled(
        what.name, architecture, usage["REG"], usage["STACK"] + usage["LOCAL"], built.metadata.shared, what.warps
    )


def _usage(cubin: bytes) -> dict[str, int]:
    """Resources a binary declares, read by the tool of the CUDA toolkit that comes with Triton."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", done.stdout)}
    if found.keys() != {"REG", "STACK", "LOCAL", "SHARED"}:
        raise ValueError(f"{tool} says nothing about registers: {done.stdout.strip()!r}")
    return found


def main() -> int:
    """Print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description="Compile every GPU kernel without a GPU, and say what each takes.")
    parser.add_argument(
        "--architecture", type=int, choices=ARCHITECTURES, action="append", help="compute capability; all by default"
    )
    parser.add_argument("--only", default="", help="kernels whose name begins so")
    given = parser.parse_args()
    try:
        _report(given.architecture or ARCHITECTURES, given.only)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _report(architectures: Iterable[int], only: str) -> None:
    found = []
    for architecture in architectures:
        print(f"sm_{architecture:<43} registers  spilled   shared  warps")
        for what in specialisations(architecture):
            if what.name.startswith(only):
                found.append(compiled(what, architecture))
                one = found[-1]
                print(f"{one.name:<46} {one.registers:>9} {one.spilled:>8} {one.shared:>8} {one.warps:>6}", flush=True)
    print(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    sys.exit(main())
