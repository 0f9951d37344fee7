"""Every kernel compiled for every chip, without a GPU: it must fit.

In a process of its own, for one in which kernels are interpreted can compile none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.torch_backend.cuda.tiles import ARCHITECTURES, SHARED_BYTES

pytest.importorskip("triton", minversion="3.6", reason="the GPU kernels need Triton 3.6 or newer")

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
@pytest.mark.parametrize(("architecture", "each"), [(one, 1 if one == 90 else 3) for one in ARCHITECTURES])
def test_every_kernel_fits_the_chip(architecture: int, each: int, tmp_path: Path) -> None:
    """In every shape on sm_90, in a third of them on the others: a compiler takes minutes."""
    done = ahead("--architecture", str(architecture), "--each", str(each), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    names = [one["name"] for one in found]
    assert len(set(names)) == len(names)
    everywhere = {"attend", "merge", "rope", "rms_norm", "gated", "greedy", "sample"}
    measured = {"linear"} if architecture == 90 else set()  # elsewhere a library multiplies
    assert {name.split()[0] for name in names} == everywhere | measured
    too_large = [
        one for one in found
        if not 0 < one["registers"] <= REGISTERS or one["spilled"] > SPILLED or one["shared"] > SHARED_BYTES[architecture]
    ]  # fmt: skip
    assert too_large == []
    # 64 K registers a multiprocessor, in which at least one block must find room
    assert [one for one in found if one["registers"] * one["warps"] * 32 > 65536] == []


@pytest.mark.slow
def test_an_interpreting_process_says_that_it_cannot_compile(tmp_path: Path) -> None:
    done = ahead("--architecture", "90", "--only", "gated", cache=tmp_path, interpret="1")
    assert done.returncode == 2
    assert done.stderr.strip() == "error: TRITON_INTERPRET is set; kernels cannot be compiled in this process"
