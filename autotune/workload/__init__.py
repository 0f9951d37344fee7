"""Arrival processes, length distributions and trace readers, all seeded."""

from __future__ import annotations

from autotune.workload.replay import ReplayReport, replay
from autotune.workload.spec import Arrival, Source, Workload, prompt_ids

__all__ = ["Arrival", "ReplayReport", "Source", "Workload", "prompt_ids", "replay"]
