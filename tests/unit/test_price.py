"""Prices as people write them, and what a token costs."""

from __future__ import annotations

import pytest

from autotune.cost.price import money, parse_price, per_million
from runtime.errors import InputError


@pytest.mark.parametrize(
    ("text", "hourly"),
    [
        ("2.50/h", 2.5),
        ("2/hour", 2.0),
        (" 48 / day ", 2.0),
        ("730/month", 1.0),
        ("0.4/h", 0.4),
        ("$2.50/h", 2.5),
        ("2.50/hr", 2.5),
    ],
)
def test_a_price_is_money_for_a_time(text: str, hourly: float) -> None:
    assert parse_price(text) == pytest.approx(hourly)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2.50", "write 2.50/h"),
        ("free", "such as 2.50/h"),
        ("nan", "such as 2.50/h"),
        ("1e3", "such as 2.50/h"),
        ("-2/h", "such as"),
        ("0/h", r"must be above 0 and at most 1e\+15 an hour"),
        ("99999999999999999999/h", r"must be above 0 and at most 1e\+15 an hour"),
        ("9" * 400 + "/h", r"must be above 0 and at most 1e\+15 an hour"),
    ],
)
def test_anything_else_is_said_in_one_line(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        parse_price(text)
    assert text in str(raised.value) and "\n" not in str(raised.value)


def test_a_million_tokens() -> None:
    assert per_million(3.6, 1000) == pytest.approx(1.0)  # 3.6 an hour is a thousandth a second
    assert per_million(3.6, 0) is None
    assert money(12.344) == "12.34" and money(0.01234) == "0.0123"
