"""How many examples Hypothesis draws: few in the default tier, five times as many in the slow one (profiles in conftest)."""

from __future__ import annotations

from hypothesis import settings


def examples(times: float) -> int:
    """``times`` as many as the profile in force draws for a test that says nothing."""
    return max(1, round(times * settings().max_examples))
