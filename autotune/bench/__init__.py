"""Live comparison: one workload, several ways to run the engine, taking turns."""

from __future__ import annotations

from autotune.bench.comparing import ContenderSummary, Difference, Estimate, PairedComparison
from autotune.bench.contenders import Contender, controlled, defaults, fixed, parse_fixed
from autotune.bench.running import Failure, Outcome, Result, Turn, measure, turns

__all__ = [
    "Contender",
    "ContenderSummary",
    "Difference",
    "Estimate",
    "Failure",
    "Outcome",
    "PairedComparison",
    "Result",
    "Turn",
    "controlled",
    "defaults",
    "fixed",
    "measure",
    "parse_fixed",
    "turns",
]
