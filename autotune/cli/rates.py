"""Rates of requests that a verb can take."""

from __future__ import annotations

from runtime.errors import InputError

LEAST, MOST = 1e-6, 1e6  # requests/s


def check_rate(option: str, rate: float | None) -> None:
    """Raise :class:`InputError` for a ``rate`` that nobody can wait for, or that no sender sends."""
    if rate is not None and not LEAST <= rate <= MOST:
        raise InputError(f"{option} is {rate:g}; it must be a number from {LEAST:g} to {MOST:g} requests/s")
