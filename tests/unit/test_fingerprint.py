"""The hardware fingerprint, from files of known content and from this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.profile import GpuInfo
from autotune.profile.fingerprint import (
    OtherWork,
    cpu_flags,
    cpu_model,
    describe,
    machine,
    memory_bytes,
    package_version,
    software,
    usable_cores,
)
from tests.unit import profiles

X86 = """processor\t: 0
model name\t: AMD EPYC 9755
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 avx512_vnni

processor\t: 1
model name\t: another
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp sve i8mm bf16\n"


def test_an_x86_machine(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(X86)
    assert cpu_model(file) == "AMD EPYC 9755"
    assert cpu_flags(file) == ("avx2", "avx512f", "avx512_bf16", "avx512_vnni")


def test_an_arm_machine_has_no_model_name_there(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(ARM)
    assert cpu_model(file) != ""
    assert cpu_flags(file) == ("asimd", "asimddp", "bf16", "i8mm", "sve")
    assert cpu_flags(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("quota", "most"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("bad", None)]
)
def test_a_container_may_use_fewer_cores(tmp_path: Path, quota: str, most: int | None) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    mine = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == (mine if most is None else min(mine, most))
    assert usable_cores(tmp_path / "none") == mine


def test_a_container_may_have_less_memory(tmp_path: Path) -> None:
    whole = memory_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    assert memory_bytes(tmp_path) == 1000000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path) == whole > 2**28


def test_this_machine() -> None:
    found = machine(threads=2)
    assert found.kind == "cpu" and found.gpu is None and found.threads == 2
    assert found.cores >= 1 and found.cpu and found.os.startswith(os.uname().sysname)
    assert software().torch == package_version("torch") != "unknown"
    assert package_version("no-such-package-anywhere") == "unknown"


def test_in_words() -> None:
    assert describe(profiles.machine(flags=("avx2", "avx512f", "avx512_bf16"))) == "cpu: 2 cores, avx512_bf16, 16 GiB"
    assert describe(profiles.machine(cores=1, flags=())) == "cpu: 1 core, 16 GiB"
    gpu = GpuInfo(name="NVIDIA H200", count=1, memory_gib=139.8, capability="9.0", cuda="13.0")
    assert describe(profiles.machine(kind="gpu", gpu=gpu)) == "gpu: NVIDIA H200, 140 GiB"
    two = gpu.model_copy(update={"count": 2})
    assert describe(profiles.machine(kind="gpu", gpu=two)) == "gpu: 2 × NVIDIA H200, 140 GiB"


def test_what_a_descendant_computes_is_no_other_work() -> None:
    # seconds of another process are counted in ticks, so they may be fewer
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    parent = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {burn!r}]).returncode)"
    for program in (burn, parent):  # a child, and a child's child
        before = OtherWork._now()[1]
        with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"done\n"
            assert OtherWork._now()[1] - before > 0.15, "while it lives"
            child.communicate(b"\n")
        assert OtherWork._now()[1] - before > 0.15, "and once it has ended"
