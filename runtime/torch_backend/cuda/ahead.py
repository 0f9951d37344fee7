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
from collections import Counter
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
    LinearTile,
    attention_tile,
    linear_tile,
    next_power_of_2,
    row_warps,
)

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


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
    decode: bool = True,
    window: int = 0, softcap: bool = False, sinks: bool = False, fp8: bool = False,
) -> Specialisation:  # fmt: skip
    """What :func:`.attention.paged_attention` compiles for such a model; ``decode``: steps of one token a sequence."""
    value_dim = dim if value_dim is None else value_dim
    sizes = plan_sizes(64, 64 if decode else 2048, heads, kv_heads, 132, each=1 if decode else None)
    tile = attention_tile(architecture, max(dim, value_dim), ELEMENT_BYTES[dtype], sizes.rows, sizes.sequences)
    pool = "*u8" if fp8 else f"*{dtype}"
    types = {
        "query": f"*{dtype}", "keys": pool, "values": pool, "table": "*i32", "items": "*i32", "starts": "*i32",
        "lengths": "*i32",
        "sinks": f"*{dtype}", "key_scale": "*fp32", "value_scale": "*fp32", "out": f"*{dtype}", "partial": "*fp32",
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
    name = " ".join(["attend", f"{heads}/{kv_heads}x{size}", dtype, "decode" if decode else "mixed", *extras])
    return Specialisation(name, attention._attend, types, constants, tile.warps, tile.stages)


def linear_specialisation(rows: int, inputs: int, outputs: int, gated: bool, tile: LinearTile) -> Specialisation:
    """What :func:`.linear.linear` compiles for such a product."""
    return Specialisation(
        f"linear {rows} of {inputs} to {outputs}{' gated' * gated}", linear._linear,
        {"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "out": "*bf16", "partial": "*fp32" if tile.parts > 1 else "*bf16",
        "arrived": "*i32" if tile.parts > 1 else "*bf16", "rows": "i32"},
        {"x_stride": inputs, "out_stride": outputs, "IN": inputs, "OUT": outputs, "GATED": gated, "BIAS": False,
        "PARTS": tile.parts, "BLOCK_M": max(linear.FEWEST, next_power_of_2(rows)), "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.inputs,
        "BEFORE": min(next_power_of_2(inputs // tile.parts // linear.LINE.value), tile.inputs * tile.ahead // linear.LINE.value)},
        tile.warps, tile.stages,
    )  # fmt: skip


def specialisations(architecture: int) -> Iterator[Specialisation]:
    """Every kernel as the models we serve would compile it, and every option of the attention kernel at least once."""
    shapes = [(32, 8, 128), (14, 2, 64), (32, 32, 96), (32, 8, 80), (8, 4, 256), (71, 1, 64)]
    for decode in (True, False):
        for heads, kv_heads, dim in shapes:
            yield attention_specialisation(architecture, heads, kv_heads, dim, decode=decode)
        yield attention_specialisation(architecture, 32, 8, 128, "fp16", decode=decode)
        for dim in (64, 128, 256):
            yield attention_specialisation(architecture, 16, 8, dim, "fp32", decode=decode)
            yield attention_specialisation(architecture, 16, 8, dim, decode=decode, fp8=True)
        yield attention_specialisation(architecture, 16, 16, 192, decode=decode, value_dim=128)
        yield attention_specialisation(architecture, 8, 4, 256, decode=decode, window=4096, softcap=True)
        yield attention_specialisation(architecture, 64, 8, 64, decode=decode, window=128, sinks=True)
    for dim, tile in product((64, 80, 128, 256), (1, 32)):
        merging = attention.merge_tile(tile, next_power_of_2(dim))
        yield Specialisation(
            f"merge {dim} of {tile}", attention._merge,
            {"partial": "*fp32", "partial_lse": "*fp32", "merges": "*i32", "starts": "*i32", "out": "*bf16"},
            {"out_stride": 32 * dim, "out_head_stride": dim, "HEADS": 32, "VALUE_DIM": dim, "TILE": tile,
            "TOKENS": merging.tokens, "PARTS": merging.parts, "BLOCK_V": next_power_of_2(dim)},
            merging.warps,
        )  # fmt: skip
    for heads, kv_heads, dim, rotary, normed, fp8 in (
        (32, 8, 128, 128, False, False), (16, 8, 128, 128, True, False), (32, 8, 80, 32, False, False), (8, 4, 256, 256,
        True, True),
        (71, 1, 64, 64, False, False),
    ):  # fmt: skip
        yield _rope(heads, kv_heads, dim, rotary, normed, fp8)
    for width in (896, 4096, 8192, norm.MAX_WIDTH):
        for add in (False, True):
            block = next_power_of_2(width)
            yield Specialisation(
                f"rms_norm {width}{' add' * add}", norm._rms_norm,
                {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"},
                {"x_stride": width, "residual_stride": width, "out_stride": width, "WIDTH": width, "ADD": add,
                "BLOCK": block},
                row_warps(block),
            )  # fmt: skip
    yield Specialisation(
        "gated", activation._gated, {"gate_up": "*bf16", "out": "*bf16"},
        {"in_stride": 28672, "out_stride": 14336, "WIDTH": 14336, "BLOCK": activation.BLOCK},
    )  # fmt: skip
    for rows in (1, 32, 64):
        for inputs, outputs, gated in ((4096, 6144, False), (4096, 14336, True), (14336, 4096, False)):
            if (found := linear_tile(architecture, rows, inputs, outputs, gated)) is not None:
                yield linear_specialisation(rows, inputs, outputs, gated, found)
    for dtype in ("bf16", "fp32"):
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


def _rope(heads: int, kv_heads: int, dim: int, rotary: int, normed: bool, fp8: bool) -> Specialisation:
    merged, pool, group = (heads + 2 * kv_heads) * dim, "*u8" if fp8 else "*bf16", heads // kv_heads
    types = {
        "query": "*bf16", "key": "*bf16", "value": "*bf16", "query_out": "*bf16", "keys": pool, "values": pool,
        "slots": "*i64", "cos": "*bf16",
        "sin": "*bf16", "query_weight": "*bf16", "key_weight": "*bf16", "key_scale": "*fp32", "value_scale": "*fp32",
        "eps": "fp32",
    }  # fmt: skip
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
    name = f"rope {heads}/{kv_heads}x{dim} {rotary}{' normed' * normed}{' fp8' * fp8}"
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
    parser.add_argument("--each", type=_whole, default=1, help="of each kernel, the first shape and every so many-th")
    given = parser.parse_args()
    try:
        _report(given.architecture or ARCHITECTURES, given.only, given.each)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; it must be a whole number of at least 1")
    return int(text)


def _report(architectures: Iterable[int], only: str, each: int) -> None:
    found = []
    for architecture in architectures:
        print(f"sm_{architecture:<43} registers  spilled   shared  warps")
        seen = Counter[str]()
        for what in specialisations(architecture):
            if what.name.startswith(only):
                kernel = what.name.split()[0]
                seen[kernel] += 1
                if (seen[kernel] - 1) % each:
                    continue
                found.append(compiled(what, architecture))
                one = found[-1]
                print(f"{one.name:<46} {one.registers:>9} {one.spilled:>8} {one.shared:>8} {one.warps:>6}", flush=True)
    print(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    sys.exit(main())
