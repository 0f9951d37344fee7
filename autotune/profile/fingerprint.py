"""What machine this is: enough to tell whether a profile measured elsewhere can be believed here.

Reads /proc, cgroups and package metadata; PyTorch is asked (and loaded) only when a GPU is to be described.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from autotune.profile.document import Profile
from autotune.profile.parts import EngineFacts, GpuInfo, Machine, ModelFacts, Software
from runtime.errors import InputError
from runtime.knobs import KnobLimits
from runtime.step_model import StepGraphs, next_size
from runtime.tunable import own_kv_cache_dtype
from runtime.version import __version__

FLAGS = (
    "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
"""CPU features that change how fast matrix products run; the rest of /proc/cpuinfo is noise."""

_SHOWN = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve2", "sve", "bf16", "asimd")  # best first


def machine(*, gpu: bool = False, device: str = "cuda", threads: int | None = None) -> Machine:
    """This machine. ``gpu`` describes the CUDA ``device`` too (loads torch); ``threads``: what the engine computes with."""
    return Machine(
        kind="gpu" if gpu else "cpu",
        cpu=cpu_model(),
        cores=usable_cores(),
        flags=cpu_flags(),
        memory_gib=round(memory_bytes() / 2**30, 1),
        threads=threads,
        gpu=gpu_info(device) if gpu else None,
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def software() -> Software:
    """Versions of what computes."""
    return Software(
        autotune=__version__,
        torch=package_version("torch"),
        transformers=package_version("transformers"),
        python=platform.python_version(),
    )


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Its name; on ARM, where the kernel knows none, the numbers of its implementer and part."""
    if name := _cpuinfo_field(cpuinfo, "model name"):
        return name
    implementer, part = (_cpuinfo_field(cpuinfo, f"CPU {field}") for field in ("implementer", "part"))
    return f"CPU {implementer} {part}" if implementer and part else platform.processor() or platform.machine()


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    present = set((_cpuinfo_field(cpuinfo, "flags") or _cpuinfo_field(cpuinfo, "Features")).split())
    return tuple(flag for flag in FLAGS if flag in present)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: its affinity, cut by a container's CPU quota (cgroup v2) when that is smaller."""
    affinity = len(affine_cpus())
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return affinity if quota == "max" else max(1, min(affinity, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return affinity


def affine_cpus() -> Sequence[int]:
    """Numbers of the CPUs that this process may run on; of all of them where the system does not say.

    Those of all its threads: OMP_PROC_BIND binds each thread to some, the main thread as soon as torch is imported.
    """
    if not hasattr(os, "sched_getaffinity"):
        return range(os.cpu_count() or 1)
    found: set[int] = set()
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # it has ended
                found |= os.sched_getaffinity(int(thread))
    return sorted(found or os.sched_getaffinity(0))


def listed_cpus(stat: Path = Path("/proc/stat")) -> Sequence[int]:
    """Numbers of the CPUs whose times the system tells, in its order: those that are offline are not among them."""
    try:
        names = [line.partition(" ")[0] for line in stat.read_text().splitlines()]
    except OSError:
        return range(os.cpu_count() or 1)
    return [int(name[3:]) for name in names if name.startswith("cpu") and name != "cpu"]


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory of the machine, or of the container when that is smaller."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return total


def gpu_info(device: str = "cuda") -> GpuInfo:
    """``cuda:N``, or the current CUDA device. Raises InputError where PyTorch sees no such device."""
    import torch

    try:
        gpu = torch.cuda.get_device_properties(device)
    except (AssertionError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        raise InputError(f"device is {device!r}, which PyTorch does not see: {said}") from None
    return GpuInfo(
        name=gpu.name,
        count=torch.cuda.device_count(),
        memory_gib=round(gpu.total_memory / 2**30, 1),
        capability=f"{gpu.major}.{gpu.minor}",
        cuda=str(torch.version.cuda or ""),
    )


def gpu_available() -> bool:
    """Whether PyTorch sees a CUDA device (loads torch)."""
    import torch

    return bool(torch.cuda.is_available())


def measured_elsewhere(profiled: Machine, *, gpu: bool, device: str = "cuda") -> str:
    """How this machine, or its GPU ``device``, is not the one of a profile, in words; empty if it is. (Loads torch to look at a
    GPU.)

    What differs in a fingerprint without changing how long steps take (memory, kernel) does not count.
    """
    here = machine(gpu=gpu, device=device)
    if profiled.kind == here.kind and not profiled.differences(here):
        return ""
    features = profiled.unlike_features(here)
    more = f", {features}" if features else ""
    if profiled.kind == here.kind == "cpu" and profiled.same_processor(here):
        if profiled.cores == here.cores:
            return f"profile was measured on {profiled.cpu}, this machine has one {features}"
        cores = f"{profiled.cores} core{'s' * (profiled.cores != 1)}"
        return f"profile was measured on {cores}, this machine has {here.cores}{more}"
    if profiled.kind == "gpu" and not gpu:
        return f"profile was measured on {profiled.processor}, but this run uses the CPU"
    if gpu and profiled.kind == "cpu":
        return f"profile was measured on a CPU ({profiled.processor}), but this run uses the GPU {here.processor}"
    return f"profile was measured on {profiled.processor}, this machine has {here.processor}{more}"


def measured_on_another(profiled: EngineFacts, name: str, version: str) -> str:
    """How the engine ``name`` of ``version`` is not the one of a profile, in words; empty if it is."""
    if (profiled.name, profiled.version) == (name, version):
        return ""
    return f"profile was measured on {profiled}, not on {name} {version}"


def measured_with_another(profiled: ModelFacts, name: str) -> str:
    """How the model ``name`` is not the one of a profile, in words; empty if it is."""
    return "" if profiled.name == name else f"profile was measured with {profiled.name}, not {name}"


def stored_otherwise(profiled: ModelFacts, kv_cache_dtype: str) -> str:
    """How a KV pool kept in ``kv_cache_dtype`` is not the one of a profile, in words; empty if it is."""
    if own_kv_cache_dtype(profiled.kv_cache_dtype) == own_kv_cache_dtype(kv_cache_dtype):
        return ""
    return f"profile was measured with kv_cache_dtype {profiled.kv_cache_dtype}, not {kv_cache_dtype}"


def recorded_otherwise(profiled: Profile, graphs: StepGraphs, limits: KnobLimits) -> str:
    """How an engine within ``limits`` that has recorded ``graphs`` records other steps than the one of a profile, in words; empty
    if it does not, or if the profile has no cost model.

    Steps that only one of them records count, and those whose rows, with the dummies, differ by more than an eighth: ladders of
    engines with other ceilings differ in their last size, which hardly matters.
    """
    if profiled.cost_model is None:
        return ""
    before, then = profiled.cost_model.graphs, profiled.engine.limits
    slots, tokens = (min(getattr(each, name) for each in (then, limits)) for name in ("max_batch_size", "token_budget"))
    found = []
    if (n := _otherwise(before.decodes, graphs.decodes, slots)) is not None:
        ran, runs = (_as_rows(next_size(sizes, n)) for sizes in (before.decodes, graphs.decodes))
        found.append(
            f"profile was measured with {_ladder(before.decodes)}, this engine has {_ladder(graphs.decodes)}: {n} "
            f"decode{'s' * (n > 1)} alone ran {ran} there and run{'s' * (n == 1)} {runs} here"
        )
    if not before.prompts and graphs.prompts:  # an earlier version recorded such steps, and did not say so
        found.append(f"profile knows of no recorded steps with prompts, this engine has {_of_prompts(graphs)}")
    elif (n := _otherwise(before.prompts, graphs.prompts, tokens)) is not None:
        ran, runs = (_as_rows(next_size(sizes, n)) for sizes in (before.prompts, graphs.prompts))
        found.append(
            f"profile was measured with {_of_prompts(before)}, this engine has {_of_prompts(graphs)}: a step of {n} "
            f"token{'s' * (n > 1)} with a prompt ran {ran} there and runs {runs} here"
        )
    elif _apart(min(before.sequences, slots), min(graphs.sequences, slots)):
        found.append(f"profile was measured with {_of_prompts(before)}, this engine has {_of_prompts(graphs)}")
    return "; ".join(found)


def _otherwise(before: Sequence[int], now: Sequence[int], most: int) -> int | None:
    """The first number up to ``most`` that is padded otherwise by these sizes than by those; None if there is none."""
    return next((n for n in range(1, most + 1) if _apart(next_size(before, n), next_size(now, n))), None)


def _apart(one: int, other: int) -> bool:
    return one != other and (not one or not other or abs(one - other) > max(one, other) / 8)


def _ladder(sizes: Sequence[int], unit: str = "row") -> str:
    if not sizes:
        return "no CUDA graphs"
    return f"CUDA graphs of {len(sizes)} size{'s' * (len(sizes) > 1)} up to {sizes[-1]} {unit}{'s' * (sizes[-1] > 1)}"


def _of_prompts(graphs: StepGraphs) -> str:
    if not graphs.prompts:
        return "no CUDA graphs of steps with prompts"
    many = f"{graphs.sequences} sequence{'s' * (graphs.sequences > 1)}"
    return f"{_ladder(graphs.prompts, 'token')} and {many} of steps with prompts"


def _as_rows(rows: int) -> str:
    return f"as {rows} row{'s' * (rows > 1)}" if rows else "launch by launch"


def describe(machine: Machine) -> str:
    """One line for people: ``cpu: 2 cores, avx512_bf16, 23 GiB``."""
    if machine.gpu is not None:
        many = f"{machine.gpu.count} × " if machine.gpu.count > 1 else ""
        return f"gpu: {many}{machine.gpu.name}, {machine.gpu.memory_gib:.0f} GiB"
    best = next((flag for flag in _SHOWN if flag in machine.flags), "")
    cores = f"{machine.cores} core{'s' if machine.cores != 1 else ''}"
    return "cpu: " + ", ".join(part for part in (cores, best, f"{machine.memory_gib:.0f} GiB") if part)


def _cpuinfo_field(path: Path, field: str) -> str:
    try:
        text = path.read_text()
    except OSError:
        return ""
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == field:
            return value.strip()
    return ""


class OtherWork:
    """How busy others keep the processors that this process may run on, from here until :meth:`cores` is asked."""

    def __init__(self) -> None:
        self._cpus = affine_cpus()
        self._begun = self._now()

    def taken(self, threads: int) -> float:
        """Cores that ``threads`` of this process lacked on average because others had them."""
        return max(0.0, self.cores() - max(0, len(self._cpus) - threads))

    def cores(self) -> float:
        """Cores of these that other processes kept busy on average."""
        (before, own_before, began), (after, own, now) = self._begun, self._now()
        return max(0.0, (after - before) - max(0.0, own - own_before)) / max(now - began, 1e-9)

    def _now(self) -> tuple[float, float, float]:
        """Seconds: those processors busy, this process and its descendants, the clock."""
        each = psutil.cpu_times(percpu=True)
        mine = sum(os.times()[:4])  # of its children, those that have ended
        for child in psutil.Process().children(recursive=True):  # such as a worker of vLLM
            with suppress(psutil.Error):
                mine += sum(child.cpu_times()[:4])
        listed = dict(zip(listed_cpus(), each, strict=False))
        if all(cpu in listed for cpu in self._cpus):  # a container may show its own, by numbers of their own
            each = [listed[cpu] for cpu in self._cpus]
        return sum(map(_busy, each)), mine, time.monotonic()


def _busy(times: Any) -> float:
    """Seconds of one processor."""
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user and nice too
    return float(sum(times) - idle - guests)
