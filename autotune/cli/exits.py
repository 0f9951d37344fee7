"""What the command's exit codes mean. Scripts rely on them."""

from __future__ import annotations

from typing import Final

DONE: Final = 0
FELL_SHORT: Final = 1  # it ran, and what was requested is out of reach: no setting meets the SLO
BAD_INPUT: Final = 2  # nothing ran
INTERRUPTED: Final = 130  # Ctrl-C (128 + SIGINT), the best so far is saved
