"""What makes a profiling run doubtful: a cost model that is rough or saw little, another speed, other programs."""

from __future__ import annotations

import os

from autotune.profiling.coverage import lacking
from autotune.profiling.findings import Findings

ROUGH = 0.1
"""Cross-validated error of the cost model from which simulations are doubtful."""

MOVED = 1.25
"""Factor between the speed of serving and that of the calibration from which they were not of the same machine."""

BUSY = 0.15
"""Share of the machine's cores that others had, from which what was measured is doubtful."""


def doubts(found: Findings) -> tuple[str, ...]:
    """Reasons, each a clause; empty when there are none."""
    told = []
    if found.cost is not None and found.cost.facts.error > ROUGH:
        told.append(f"the cost model's error is {found.cost.facts.error:.0%}")
    if found.steps and (unseen := lacking(found.steps)):
        told.append(
            f"the calibration saw {', '.join(unseen)}, so what is simulated is guessed there (a longer --budget sees more)"
        )
    speed = 1.0 if found.setup is None else found.setup.speed
    if not 1 / MOVED <= speed <= MOVED:
        told.append(f"the machine served at {speed:.0%} of the speed it was calibrated at")
    seconds = sum(s for s, _ in found.others)
    cores = sum(s * c for s, c in found.others) / seconds if seconds else 0.0
    if cores > BUSY * (os.cpu_count() or 1):
        told.append(f"other programs used {cores:.1f} cores while it was measured")
    return tuple(told)
