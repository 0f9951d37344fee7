"""Who takes part, and the grid of fixed settings in which the best is looked for."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Final

from autotune.bench import fixed
from benchmarks.live.contenders import ours, ours_knobs_only
from benchmarks.vllm.starting import DEFAULTS, LIMITS
from runtime.knobs import Knobs

STOCK: Final = fixed(DEFAULTS, "defaults")
OURS: Final = replace(ours(LIMITS), knobs=DEFAULTS)
KNOBS_ONLY: Final = replace(ours_knobs_only(LIMITS), knobs=DEFAULTS)

GRID: Final = tuple(
    Knobs(batch, 0, budget, budget)
    for batch, budget in product((128, 64, 32, 16, 8), (32, 48, 64, 96, 128, 192, 256, 512, 2048))
) + tuple(Knobs(batch, 0, budget, 64) for batch, budget in product((128, 32), (128, 256, 2048)))
