"""What a calibration has not seen: kinds of steps that serving makes, and whose cost is then an extrapolation."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.cost.facts import StepPoint
from autotune.cost.fit import SERVED
from autotune.cost.model import untold_terms

APART = 1.5
"""Contexts of a sequence that differ by this factor are two, for the cost of a token of context to be told."""


def lacking(points: Sequence[StepPoint]) -> tuple[str, ...]:
    """What is not among ``points``, a few words each; empty when all of it is there."""
    alone = [p for p in points if p.decodes and not p.prefill_tokens]
    batches = {p.decodes for p in alone}
    contexts = sorted(p.decode_context / p.decodes for p in alone)
    told = []
    if not any(n > 1 for n in batches):
        told.append("no batch of decodes")
    elif len(batches) < 2 or contexts[-1] < APART * contexts[0]:
        told.append("less than two batch sizes at two contexts")
    if not any(p.decodes and p.prefill_tokens for p in points):
        told.append("no prompt beside decodes")
    if not any(p.prefill_context > p.prefill_tokens for p in points):
        told.append("no chunk behind computed tokens")
    if not any(p.region == SERVED for p in points):
        told.append("no served load")
    return tuple(told or (f"no steps with more and less {name}" for name in untold_terms(points)))
