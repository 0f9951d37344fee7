"""A run under a controller as a page to look at: what it decided, why, and how the requests fared."""

from __future__ import annotations

from autotune.report.run.page import RunReport, compose, html
from autotune.report.run.story import Run, read_run

__all__ = ["Run", "RunReport", "compose", "html", "read_run"]
