"""Takes a profile's setting along to another engine. A target is a table; see :mod:`autotune.export.target`."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.export.exporting import Export, export
from autotune.export.target import ExportTarget, Fit, Row, Source
from autotune.export.vllm import VLLM

__all__ = ["TARGETS", "Export", "ExportTarget", "Fit", "Row", "Source", "export"]

TARGETS: Mapping[str, ExportTarget] = {target.name: target for target in (VLLM,)}
"""Every engine there is a table for, by the name ``--to`` takes."""
