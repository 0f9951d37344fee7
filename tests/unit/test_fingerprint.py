"""The hardware fingerprint, from files of known content and from this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from autotune.profile import GpuInfo
from autotune.profile.fingerprint import (
    OtherWork,
    affine_cpus,
    cpu_flags,
    cpu_model,
    describe,
    listed_cpus,
    machine,
    measured_elsewhere,
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
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp sve i8mm bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


def test_an_x86_machine(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(X86)
    assert cpu_model(file) == "AMD EPYC 9755"
    assert cpu_flags(file) == ("avx2", "avx512f", "avx512_bf16", "avx512_vnni")


def test_an_arm_machine_has_no_model_name_there(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(ARM)
    assert cpu_model(file) == "CPU 0x41 0xd40"
    assert cpu_model(tmp_path / "none") != ""
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


def test_cpus_of_one_name_and_other_features_are_two() -> None:
    """A hypervisor gives all of its CPUs one name."""
    new = profiles.machine(flags=("asimd", "bf16", "sve2"))
    old = new.model_copy(update={"flags": ("asimd", "avx2")})
    assert new.differences(new) == []
    assert new.differences(old) == ["CPU without bf16, sve2 and with avx2"]
    assert new.differences(old.model_copy(update={"flags": ("asimd",)})) == ["CPU without bf16, sve2"]
    unknown = new.model_copy(update={"flags": ()})
    assert new.differences(unknown) == unknown.differences(new) == [], "not known is not without"
    gpu = GpuInfo(name="NVIDIA H200", count=1, memory_gib=139.8, capability="9.0", cuda="13.0")
    on_gpu = {"kind": "gpu", "gpu": gpu}
    assert new.model_copy(update=on_gpu).differences(old.model_copy(update=on_gpu)) == []


def test_an_arm_profile_from_before_may_be_of_any_cpu_of_its_architecture() -> None:
    before = profiles.machine(cpu="aarch64", os="Linux 6.1 aarch64", flags=("asimd",))
    graviton = before.model_copy(update={"cpu": "CPU 0x41 0xd4f"})
    ampere = before.model_copy(update={"cpu": "CPU 0xc0 0xac3"})
    assert before.differences(graviton) == graviton.differences(before) == []
    assert graviton.differences(ampere) == ["CPU 0xc0 0xac3 instead of CPU 0x41 0xd4f"]
    x86 = before.model_copy(update={"cpu": "AMD EPYC", "os": "Linux 6.1 x86_64"})
    assert before.differences(x86) == ["AMD EPYC instead of aarch64"]
    h200 = GpuInfo(name="NVIDIA H200", count=1, memory_gib=139.8, capability="9.0", cuda="13.0")
    gh200 = h200.model_copy(update={"name": "NVIDIA GH200"})
    with_h200 = before.model_copy(update={"kind": "gpu", "gpu": h200})
    with_gh200 = graviton.model_copy(update={"kind": "gpu", "gpu": gh200})
    assert with_h200.differences(with_gh200) == ["NVIDIA GH200 instead of NVIDIA H200"]


def test_how_a_cpu_of_the_same_name_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    here = profiles.machine(cores=2, flags=("avx2", "avx512f"))
    monkeypatch.setattr("autotune.profile.fingerprint.machine", lambda **options: here)
    more = here.model_copy(update={"flags": ("avx2", "avx512f", "amx_bf16")})
    assert measured_elsewhere(here, gpu=False) == ""
    name, one = here.cpu, "this machine has one without amx_bf16"
    assert measured_elsewhere(more, gpu=False) == f"profile was measured on {name}, {one}"
    fewer_cores = here.model_copy(update={"cores": 1})
    assert measured_elsewhere(fewer_cores, gpu=False) == "profile was measured on 1 core, this machine has 2"
    both = more.model_copy(update={"cores": 4})
    assert measured_elsewhere(both, gpu=False) == (
        "profile was measured on 4 cores, this machine has 2, without amx_bf16"
    )
    other = more.model_copy(update={"cpu": "Old CPU"})
    assert measured_elsewhere(other, gpu=False) == (
        f"profile was measured on Old CPU, this machine has {name}, without amx_bf16"
    )


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
        work = OtherWork()
        before = work._now()[1]
        with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"done\n"
            assert work._now()[1] - before > 0.15, "while it lives"
            child.communicate(b"\n")
        assert work._now()[1] - before > 0.15, "and once it has ended"


@pytest.mark.parametrize(
    ("affinity", "cores"), [({1}, 0.25), ({0, 1}, 1.25), ({0, 1, 2, 3}, 2.0), ({2, 7}, 2.0)]
)  # of the last a container shows others
def test_work_of_others_counts_on_cpus_that_this_process_may_use(
    affinity: set[int], cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, shares = [0.0], (1.0, 0.25, 0.5, 0.25)

    class Times(NamedTuple):
        user: float
        idle: float

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: affinity)
    monkeypatch.setattr("autotune.profile.fingerprint.listed_cpus", lambda: range(4))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "times", lambda: (0.0,) * 5)
    monkeypatch.setattr("psutil.cpu_times", lambda percpu: [Times(s * now[0], (1 - s) * now[0]) for s in shares])
    work = OtherWork()
    now[0] = 8.0
    assert work.cores() == pytest.approx(cores)
    assert work.taken(len(affinity)) == work.taken(len(affinity) + 3) == pytest.approx(cores)
    assert work.taken(0) == pytest.approx(max(0.0, cores - len(affinity)))
    monkeypatch.setattr("autotune.profile.fingerprint.listed_cpus", lambda: (0, 2, 3, 7))  # the others are offline
    there = affinity <= {0, 2, 3, 7}
    assert OtherWork()._now()[0] == pytest.approx(8 * (0.25 + 0.25 if there else sum(shares)))


def test_cpus_that_are_listed_are_those_online(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  9 9 9\ncpu0 1 1 1\ncpu2 1 1 1\ncpu10 1 1 1\nintr 5\n")
    assert [*listed_cpus(tmp_path / "stat")] == [0, 2, 10]
    assert len(listed_cpus(tmp_path / "none")) == os.cpu_count()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no threads")
def test_a_thread_that_is_bound_does_not_bind_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libgomp binds the main thread under OMP_PROC_BIND."""
    bound = {"1": {0}, "2": {0, 3}, "3": None}

    def affinity(pid: int) -> set[int]:
        if (found := bound[str(pid or 1)]) is None:
            raise ProcessLookupError
        return found

    monkeypatch.setattr(os, "listdir", lambda path: [*bound])
    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert affine_cpus() == [0, 3]
    monkeypatch.setattr(os, "listdir", lambda path: [])
    assert affine_cpus() == [0]
