"""Environments with software that tests run against, kept in the user's cache."""

from __future__ import annotations

import fcntl
import os
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from autotune.writing import write_whole

BUILD = "AUTOTUNE_BUILD_ENVIRONMENTS"
READY = ".ready-3"


def kept(name: str, build: Callable[[Path], None], use: Callable[[Path], None] = lambda folder: None) -> Path:
    """The Python of the environment of that ``name`` in the user's cache, built there if missing; ``use`` runs each time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-autotune"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{name}-python{sys.version_info.major}.{sys.version_info.minor}"
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / READY).exists():
            if os.environ.get(BUILD) != "1":
                pytest.skip(f"needs {name} in {cache}; `make test-integration` makes it")
            build(folder)
            (folder / READY).touch()
        use(folder)
    return folder / "bin" / "python"


def reach_outer(folder: Path) -> None:
    """Take torch and the rest from the environment that runs now: the one that made ``folder`` may be gone."""
    outer = [os.path.realpath(path) for path in site.getsitepackages() if Path(path).is_dir()]
    write_whole(site_packages(folder) / "outer.pth", "\n".join(outer) + "\n")


def new(folder: Path) -> None:
    """Begin an environment in ``folder``."""
    must([sys.executable, "-m", "venv", "--clear", str(folder)])


def pip_of(folder: Path) -> list[str]:
    return [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]


def site_packages(folder: Path) -> Path:
    (found,) = (folder / "lib").glob("python*/site-packages")
    return found


def unpack(folder: Path, names: Sequence[str], version: str, package: str) -> list[str]:
    """Put the Python of ``package`` there, from the first wheel of ``names`` that can be had, and nothing else of it.

    Returns what it needs, as its metadata says. Skips where there is no such wheel.
    """
    pip, wheels = pip_of(folder), folder / "wheels"
    for name in names:
        command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), f"{name}=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if not done.returncode:
            break
    else:
        pytest.skip(f"{names[-1]} {version} cannot be had: {last(done.stderr)}")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        for member in opened.namelist():
            if member.startswith(f"{package}/") and member.endswith(".py"):
                opened.extract(member, site_packages(folder))
        (about,) = [member for member in opened.namelist() if member.endswith(".dist-info/METADATA")]
        needs = [line for line in opened.read(about).decode().splitlines() if line.startswith("Requires-Dist: ")]
    shutil.rmtree(wheels)
    return [need.removeprefix("Requires-Dist: ").partition(";")[0].strip() for need in needs]


def install(folder: Path, *options: str) -> None:
    """``pip install`` there; skips where something cannot be had."""
    done = subprocess.run([*pip_of(folder), "install", *options], capture_output=True, text=True, timeout=1500)
    if done.returncode:
        pytest.skip(f"{' '.join(options)} cannot be had: {last(done.stderr)}")


def last(text: str) -> str:
    return (text.strip() or "no reason given").splitlines()[-1]


def must(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
