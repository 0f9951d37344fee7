"""What is given to an option, checked; errors name the option."""

from __future__ import annotations

import re
from typing import Any

from autotune.profile.fields import LEAST_RATE, MOST_RATE
from runtime.errors import InputError

SHORTEST_BUDGET_S = 10.0
_BUDGET = re.compile(r"^(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?$")


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


def seconds(text: str, *, option: str = "--budget", least: float = SHORTEST_BUDGET_S) -> float:
    """``90s``, ``2m``, ``1h30m`` in seconds, at least ``least``: the value of ``option``. Raises :class:`InputError`."""
    match = _BUDGET.match(text.strip())
    if match is None or not text.strip():
        hint = f"; write {text.strip()}s or {text.strip()}m" if text.strip().isdigit() else ", such as 90s, 2m or 1h30m"
        raise InputError(f'{option}: "{text}" is not a time{hint}')
    total = sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True))
    if total < least:
        raise InputError(f"{option} is {text}; it must be at least {least:g}s")
    return total
