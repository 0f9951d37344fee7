"""Which tier a test runs in: the default one is minutes long; what adds breadth to a test of it runs in the slow one."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

SLOW = (pytest.mark.slow, pytest.mark.beside)
"""The slow tier; times nothing, so it may run beside other tests."""


def slow_but_for(now: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """``values`` as parameters, of which those in ``now`` run in the default tier and the others in the slow one."""
    given = list(values)
    assert all(one in given for one in now), f"{now} are not all among {given}"
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if one in now else SLOW) for one in given
    ]
