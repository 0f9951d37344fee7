"""The version, as installed."""

from __future__ import annotations

from runtime.version import __version__

__all__ = ["__version__"]
