"""What code costs, in calls of functions: a count that no machine's speed changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls(of: Callable[[], Any], *, within: str | None = None) -> int:
    """Calls of functions that ``of`` makes, those of C included; or of those in files whose path has ``within`` in it."""
    made = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal made
        if within is None:
            made += event in ("call", "c_call")
        else:
            made += event == "call" and within in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        of()
    finally:
        sys.setprofile(before)
    return made
