"""A time on the command line: ``90s``, ``2m``, ``1h30m``."""

from __future__ import annotations

import re

from runtime.errors import InputError

SHORTEST_BUDGET_S = 10.0
_BUDGET = re.compile(r"^(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?$")


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
