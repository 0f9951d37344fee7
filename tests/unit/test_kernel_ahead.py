"""Every kernel compiled for every chip, without a GPU: it must fit. And what is compiled is what the engine launches.

Compiled in a process of its own, for one in which kernels are interpreted can compile none.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.6", reason="the GPU kernels need Triton 3.6 or newer")

from runtime.torch_backend.cuda import activation, attention, norm, rope, sampling
from runtime.torch_backend.cuda.ahead import attention_specialisation, specialisations
from runtime.torch_backend.cuda.backend import CUDA
from runtime.torch_backend.cuda.language import INTERPRETED
from runtime.torch_backend.cuda.tiles import ARCHITECTURES, SHARED_BYTES
from runtime.torch_backend.executor import TorchExecutor
from tests.tiers import slow_but_for
from tests.unit.executor_harness import tiny
from tests.unit.step_operations import put_elsewhere
from tests.unit.test_step_operations import decode_step, mixed_step

ROOT = Path(__file__).parents[2]
REGISTERS = 255
SPILLED = 64
"""Most bytes a thread may spill. ptxas (CUDA 12.8) spills 8 to 32 in some attention tiles at 128 or 255 registers; that
stays in L1."""


def ahead(*options: str, cache: Path, interpret: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "runtime.torch_backend.cuda.ahead", *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_fits_the_chip(architecture: int, tmp_path: Path) -> None:
    """On chips with little shared memory only attention, the others take none to speak of: a compiler takes minutes."""
    small = SHARED_BYTES[architecture] < SHARED_BYTES[80]
    done = ahead("--architecture", str(architecture), "--only", "attend" if small else "", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    names = [one["name"] for one in found]
    assert len(set(names)) == len(names)
    everywhere = {"attend"} if small else {"attend", "merge", "rope", "rms_norm", "gated", "greedy", "sample"}
    measured = {"linear"} if architecture == 90 else set()  # elsewhere a library multiplies
    assert {name.split()[0] for name in names} == everywhere | measured
    too_large = [
        one for one in found
        if not 0 < one["registers"] <= REGISTERS or one["spilled"] > SPILLED or one["shared"] > SHARED_BYTES[architecture]
    ]  # fmt: skip
    assert too_large == []
    # 64 K registers a multiprocessor, in which at least one block must find room
    assert [one for one in found if one["registers"] * one["warps"] * 32 > 65536] == []


NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip


@pytest.mark.skipif(not INTERPRETED.value, reason="the model lies on the CPU: kernels must be interpreted")
@pytest.mark.parametrize(
    ("dtype", "kept"),
    slow_but_for(
        [(torch.bfloat16, "auto"), (torch.float32, "fp8")],
        product((torch.float32, torch.bfloat16, torch.float16), ("auto", "fp8")),
    ),
    ids=str,
)
def test_what_is_compiled_is_what_the_engine_launches(
    dtype: torch.dtype, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each launch the dtypes of its tensors; of attention the constants, too."""
    seen: list[tuple[Any, dict[str, str], dict[str, Any]]] = []

    def launched(kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, **options: Any) -> None:
        names = list(inspect.signature(kernel.fn).parameters)
        types = {name: f"*{NAMES[tensor.dtype]}" for name, tensor in zip(names, tensors, strict=False)}
        seen.append((kernel, types, dict(zip(names[len(tensors) + len(numbers) :], constants, strict=False))))

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # which takes a driver
    known = list(specialisations(80))
    for made, each in ((decode_step, 1), (mixed_step, 32)):
        loaded = replace(tiny("qwen3", dtype, num_hidden_layers=1), kv_cache_dtype=kept)
        executor = TorchExecutor(loaded, kv_blocks=40, backend=CUDA)
        put_elsewhere(executor)
        seen.clear()
        with monkeypatch.context() as stubbed:  # behind the fusing of layers, which looks at what kernels compute
            for module in (activation, attention, norm, rope, sampling):
                stubbed.setattr(module, "launch", launched)
            executor.launch(made(temperature=0.8))
        assert executor._launched[-1].cause is None, executor._launched[-1].cause
        for kernel, types, constants in seen:
            assert any(one.kernel is kernel and types == {name: one.types[name] for name in types} for one in known), (
                kernel.fn.__name__,
                types,
            )
            if kernel is attention._attend:
                fp8 = kept == "fp8"
                one = attention_specialisation(80, 4, 2, 32, NAMES[dtype], each=each, sequences=4, fp8=fp8)
                assert constants == one.constants
        assert {kernel.fn.__name__ for kernel, *_ in seen} >= {
            "_attend",
            "_rms_norm",
            "_rope_write",
            "_gated",
            "_sample",
        }


@pytest.mark.slow
def test_an_interpreting_process_says_that_it_cannot_compile(tmp_path: Path) -> None:
    done = ahead("--architecture", "90", "--only", "gated", cache=tmp_path, interpret="1")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: TRITON_INTERPRET is set; kernels cannot be compiled in this process"
