"""Machines whose steps scatter."""

from __future__ import annotations

from autotune.profile.parts import JitterFacts

STALLS = JitterFacts(quantiles=(0.9,) * 9 + (1.9,), persistent=0.7, memory=0.8)
"""A tenth of the steps take twice as long as the others, and they come together."""
