"""What serving costs: a price of the machine for a time, and what that makes of a rate of tokens."""

from __future__ import annotations

import re

from autotune.cost.fields import MOST
from runtime.errors import InputError

_PRICE = re.compile(r"^\s*[$€£]?\s*(?P<amount>[0-9]+(?:\.[0-9]+)?)\s*/\s*(?P<unit>h|hr|hour|day|month)\s*$")
# a month as cloud price lists count it: 8760 h / 12
_HOURS = {"h": 1.0, "hr": 1.0, "hour": 1.0, "day": 24.0, "month": 730.0}


def parse_price(text: str) -> float:
    """``2.50/h``, ``$2.50/hr``, ``40/day`` or ``900/month`` as money per hour, whichever the currency.

    Raises :class:`InputError` that quotes the text.
    """
    match = _PRICE.match(text)
    if match is None:
        hourly = f"{text.strip()}/h"
        hint = f"; write {hourly}" if _PRICE.match(hourly) else ", such as 2.50/h, 40/day or 900/month"
        raise InputError(f'--price: "{text}" is not a price for a time{hint}')
    price = float(match["amount"]) / _HOURS[match["unit"]]
    if not 0 < price <= MOST:
        raise InputError(f'--price: "{text}" must be above 0 and at most {MOST:g} an hour')
    return price


def per_million(price_per_hour: float, tokens_per_s: float) -> float | None:
    """Money per million tokens at a steady ``tokens_per_s``; None where no tokens come out."""
    return price_per_hour / (tokens_per_s * 3600) * 1e6 if tokens_per_s > 0 else None


def money(amount: float | None) -> str:
    """Three digits, without a currency: it is whichever the price was in. – for what is not known."""
    if amount is None:
        return "–"
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.3g}"
