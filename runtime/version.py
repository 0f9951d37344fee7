"""The version, as installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gpu-autotune")
except PackageNotFoundError:  # the source tree on the path, not installed
    __version__ = "0+unknown"
