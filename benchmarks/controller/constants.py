"""The constants that rivals take part with: those found by ``python -m benchmarks.controller.tune``, and which may be chosen.

The ranges are those of their sources. AIMD's factor: what Netflix's ``AIMDLimit`` accepts, from a half (TCP's) to nearly 1; its
step and floor: from one of vLLM's blocks to half a GPU's budget. ``Gradient2Limit``: a tolerance of at least 1, a smoothing up to
1, queues and windows of any size. The paper of the bisection (arXiv 2503.05248) leaves its three constants open. P-PAS and
Niyama name theirs for several models (see :mod:`benchmarks.controller.rivals`). ``interval_s`` is the time between two
decisions: Netflix's windows last from a tenth of a second to one.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

FILE: Final = Path(__file__).parents[1] / "data" / "controller_rivals.json"

Constants = dict[str, Any]
Range = Callable[[random.Random], Any]


def _log(low: float, high: float) -> Range:
    return lambda dice: round(math.exp(dice.uniform(math.log(low), math.log(high))), 4)


def _tokens(low: int, high: int) -> Range:
    return lambda dice: round(math.exp(dice.uniform(math.log(low), math.log(high))))


def _even(low: float, high: float) -> Range:
    return lambda dice: round(dice.uniform(low, high), 3)


def _one_of(*values: Any) -> Range:
    return lambda dice: dice.choice(values)


_INTERVALS = _one_of(0.1, 0.25, 0.5, 1.0)
RANGES: Final[Mapping[str, Mapping[str, Range]]] = {
    "aimd": {"back": _even(0.5, 0.98), "more": _tokens(16, 1024), "floor": _tokens(16, 512), "interval_s": _INTERVALS},
    "bisection": {
        "wide": _log(0.02, 0.5), "slow": _log(0.05, 0.9), "tolerance": _log(0.01, 0.2), "interval_s": _INTERVALS,
    },
    "gradient": {
        "knob": _one_of("max_batch_size", "token_budget"), "tolerance": _even(1.0, 2.0), "smoothing": _log(0.05, 1.0),
        "queue": _tokens(1, 256), "least": _tokens(4, 256), "window": _tokens(10, 600), "interval_s": _INTERVALS,
    },
    "p-pas": {"cap": _one_of(256, 512, 768, 1024, 1280, 1536, 2048, 4096)},
    "niyama": {
        "margin": _even(1.0, 1.4), "most": _one_of(2048, 2552, 4096, 8192),
        "alpha": _one_of(0.0, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.008, 0.016),
    },
}  # fmt: skip
"""Of each rival that has any; published constants are the defaults of its class."""


@cache
def _found() -> dict[str, dict[str, Constants]]:
    if not FILE.is_file():
        return {}
    return dict(json.loads(FILE.read_text(encoding="utf-8"))["constants"])


def constants_of(base: str, layer: str) -> Constants:
    """What was found best for ``base`` with knobs alone, or with all layers; nothing is the published constants."""
    by_layer = _found().get(base, {})
    return dict(by_layer.get("knobs" if layer == "knobs" else "full", {}))
