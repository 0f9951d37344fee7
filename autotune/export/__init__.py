"""Takes a profile's setting along to another system. A target is a table; see :mod:`autotune.export.target`."""

from __future__ import annotations

from autotune.export.exporting import Export, export
from autotune.export.source import ProfiledCallable, ProfiledEngine, Source
from autotune.export.target import ExportTarget, Fit, Row
from autotune.export.targets import TARGETS

__all__ = ["TARGETS", "Export", "ExportTarget", "Fit", "ProfiledCallable", "ProfiledEngine", "Row", "Source", "export"]
