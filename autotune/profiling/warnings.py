"""What makes a profiling run unreliable: a cost model that is rough or saw little, another speed, other programs."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.cost.facts import StepPoint
from autotune.cost.fit import SERVED
from autotune.cost.model import undetermined_terms
from autotune.profile.fingerprint import affine_cpus
from autotune.profiling.findings import Findings
from autotune.profiling.setup import typical_step

ROUGH = 0.1
"""Cross-validated error of the cost model from which simulations are unreliable."""

FAR = 20
"""Times the context of the largest measured step beyond which nobody knows that it goes on along a line."""

MOVED = 1.25
"""Factor between the speed of serving and that of the calibration from which they were not of the same machine."""

BUSY = 0.15
"""Share of the cores that profiling may use and others had, from which what was measured is unreliable."""


APART = 1.5
"""Contexts of a sequence that differ by this factor are two, for the cost of a token of context to be known."""


def warnings(found: Findings) -> tuple[str, ...]:
    """Reasons, each a clause; empty when there are none."""
    reasons = []
    if found.cost is not None and found.cost.facts.error > ROUGH:
        reasons.append(f"the cost model's error is {found.cost.facts.error:.0%}")
    if found.steps and (missing := unseen(found.steps)):
        reasons.append(
            f"the calibration saw {', '.join(missing)}, so what is simulated is guessed there "
            "(a longer --budget with --fresh sees more)"
        )
    if (beyond := extrapolated(found)) is not None:
        reasons.append(beyond)
    speed = 1.0 if found.setup is None else found.setup.speed
    if not 1 / MOVED <= speed <= MOVED:
        served = f"{speed:.0%} of" if speed < 2 else f"{speed:.3g} times"
        reasons.append(f"the machine served at {served} the speed it was calibrated at")
    seconds = sum(s for s, _ in found.others)
    cores = sum(s * c for s, c in found.others) / seconds if seconds else 0.0
    if (crowded := crowding(cores)) is not None:
        reasons.append(crowded)
    return tuple(reasons)


def crowding(cores: float) -> str | None:
    """That other programs used ``cores`` of the processors, where figures may suffer; None where they do not."""
    if cores <= BUSY * len(affine_cpus()):
        return None
    return f"other programs used {cores:.1f} cores while it was measured"


def extrapolated(found: Findings) -> str | None:
    """That a full engine reads more context than any measured step, where the cost model may be far off; None where it is not."""
    if found.setup is None or found.cost is None or not found.steps:
        return None
    setup, seen = found.setup, max(p.decode_context for p in found.steps)
    step = typical_step(setup.fitted.max_batch_size, 0, setup.mean_prompt + setup.mean_output / 2)
    off = found.cost.uncertainty(step)
    if step.decode_context <= seen or (off <= ROUGH and step.decode_context < FAR * seen):
        return None
    what = f"may be {off:.0%} off" if off > ROUGH else "is guessed"
    return (
        f"the cost model {what} where {step.decodes} sequences decode over {step.decode_context:,} tokens: the calibration"
        f" saw {seen:,} at most (a longer --budget with --fresh sees more)"
    )


def unseen(points: Sequence[StepPoint]) -> tuple[str, ...]:
    """What is not among ``points``, a few words each; empty when all of it is there."""
    alone = [p for p in points if p.decodes and not p.prefill_tokens]
    batches = {p.decodes for p in alone}
    contexts = sorted(p.decode_context / p.decodes for p in alone)
    reasons = []
    if not any(n > 1 for n in batches):
        reasons.append("no batch of decodes")
    elif len(batches) < 2 or contexts[-1] < APART * contexts[0]:
        reasons.append("less than two batch sizes at two contexts")
    if not any(p.decodes and p.prefill_tokens for p in points):
        reasons.append("no prompt beside decodes")
    if not any(p.prefill_context > p.prefill_tokens for p in points):
        reasons.append("no chunk behind computed tokens")
    if not any(p.region == SERVED for p in points):
        reasons.append("no served load")
    return tuple(reasons or (f"no steps with more and less {name}" for name in undetermined_terms(points)))
