"""A profile as a page to look at: what to set, why, how sure it is, and every figure behind it."""

from __future__ import annotations

from autotune.report.evidence import Evidence, gather
from autotune.report.page import Report, compose, html

__all__ = ["Evidence", "Report", "compose", "gather", "html"]
