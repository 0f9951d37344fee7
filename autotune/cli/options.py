"""What is given to an option, checked; errors name the option."""

from __future__ import annotations

from typing import Any

from autotune.profile.bounds import LEAST_RATE, MOST_RATE
from runtime.errors import InputError


def check_rate(option: str, rate: float | None) -> None:
    """Raise :class:`InputError` for a ``rate`` that nobody can wait for, or that no sender sends."""
    if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
        raise InputError(f"{option} is {rate:g}; it must be a number from {LEAST_RATE:g} to {MOST_RATE:g} requests/s")


def checked(option: str, parse: Any, *arguments: Any) -> Any:
    """``parse(*arguments)``, its errors as :class:`InputError` of ``option``."""
    try:
        return parse(*arguments)
    except InputError as error:
        text = str(error)
        raise InputError(text if not option or text.startswith("--") else f"{option}: {text}") from None
    except ValueError as error:
        raise InputError(f"{option}: {error}" if option else str(error)) from None
