"""What machine this is, and with what it computes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.place import Place

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "optuna",
    "scipy",
    "pydantic",
    "fastapi",
    "uvicorn",
    "pytest",
    "vllm",
)
_QUERIED = "name,driver_version,pstate,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,temperature.gpu"


def run(place: Place, argument: str) -> None:
    place.keep("packages", {name: _version(name) for name in _PACKAGES})
    place.keep("host", {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()})
    place.keep("commit", _said("git", "rev-parse", "HEAD"))
    if place.dry:
        place.keep("gpu", {"name": "none: a dry run on the CPU"})
        return
    device = torch.cuda.get_device_properties(0)
    place.keep(
        "gpu",
        {
            "name": device.name,
            "count": torch.cuda.device_count(),
            "capability": f"{device.major}.{device.minor}",
            "memory_gib": round(device.total_memory / 2**30, 1),
            "multiprocessors": device.multi_processor_count,
            "cuda": str(torch.version.cuda),
            "l2_mib": round(getattr(device, "L2_cache_size", 0) / 2**20),
        },
    )
    place.keep("nvidia-smi", _said("nvidia-smi", f"--query-gpu={_QUERIED}", "--format=csv"))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return done.stdout.strip() if done.returncode == 0 else None
