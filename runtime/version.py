"""The version, as installed; of a source tree on the path, what its project file says."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def _of_source() -> str:
    try:
        with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
            return f"{tomllib.load(file)['project']['version']}+source"
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return "0+unknown"


try:
    __version__ = version("gpu-autotune")
except PackageNotFoundError:
    __version__ = _of_source()
