"""Rates of requests that a verb can take."""

from __future__ import annotations

from autotune.profile.bounds import LEAST_RATE, MOST_RATE
from runtime.errors import InputError


def check_rate(option: str, rate: float | None) -> None:
    """Raise :class:`InputError` for a ``rate`` that nobody can wait for, or that no sender sends."""
    if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
        raise InputError(f"{option} is {rate:g}; it must be a number from {LEAST_RATE:g} to {MOST_RATE:g} requests/s")
