"""Arrival processes, length distributions and trace readers, all seeded."""

from __future__ import annotations

from autotune.workload.parse import (
    at_length_scale,
    brings_lengths,
    cuts_in_words,
    length_scale_as_data,
    length_scale_in_words,
    named_options,
    named_rate,
    parse_workload,
)
from autotune.workload.presets import PRESETS
from autotune.workload.replay import ReplayReport, replay
from autotune.workload.spec import Arrival, Source, Workload, prompt_ids

__all__ = [
    "PRESETS",
    "Arrival",
    "ReplayReport",
    "Source",
    "Workload",
    "at_length_scale",
    "brings_lengths",
    "cuts_in_words",
    "length_scale_as_data",
    "length_scale_in_words",
    "named_options",
    "named_rate",
    "parse_workload",
    "prompt_ids",
    "replay",
]
