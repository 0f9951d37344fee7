"""Each knob turned by itself around the recommended setting, in the simulator, on the profile's own cost model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from autotune.measure.evaluate import EvaluationError
from autotune.measure.score import Score
from autotune.profile import Profile
from autotune.simulate.scenario import Scenario
from runtime.errors import InputError
from runtime.knobs import Knobs, KnobSpec

REQUESTS = 800
"""Requests a setting is simulated with: enough for a share to mean something, few enough for seconds."""

LONGEST_S = 20.0
"""Seconds of the host after which what is done by then is shown."""

_FACTORS = (1 / 8, 1 / 4, 1 / 2, 2**-0.5, 1, 2**0.5, 2, 4, 8)
_WAITS_MS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


@dataclass(frozen=True)
class Sensitivity:
    """For each knob that was turned: (value, score), by value. ``requests``: how many each was simulated with, about."""

    by_knob: dict[str, list[tuple[float, Score]]]
    requests: int
    complete: bool


def values_of(spec: KnobSpec, knobs: Knobs, high: float) -> list[float]:
    """Values of one knob around its own, up to the engine's ceiling; half and double are among them where they may be."""
    here = float(getattr(knobs, spec.name))
    wanted = [here * factor for factor in _FACTORS] if spec.log else [here, here / 2, here * 2, *_WAITS_MS]
    values = {float(min(max(w, spec.low), high)) for w in wanted}
    return sorted({float(round(v)) if spec.integer else round(v, 2) for v in values} | {here})


def one_at_a_time(
    profile: Profile, knobs: Knobs, rate: float, *, advance: Callable[[float], None] | None = None
) -> Sensitivity | None:
    """Goodput and latencies with one knob changed at a time; None where the profile has no cost model or its load is gone.

    All values meet the same arrivals (common random numbers). ``advance`` gets the share that is done.
    """
    if profile.cost_model is None:
        return None
    try:
        scenario = Scenario.of(profile).even()  # so that settings differ by nothing but the knob
    except InputError:  # such as a trace that is elsewhere
        return None
    known: dict[Knobs, Score] = {}
    found: dict[str, list[tuple[float, Score]]] = {}
    plan = [(s, v) for s in knobs.shown for v in values_of(s, knobs, getattr(profile.engine.limits, s.name))]
    begun = time.process_time()
    for done, (spec, value) in enumerate(plan):
        if time.process_time() - begun > LONGEST_S:
            return Sensitivity(found, REQUESTS, False) if found else None
        turned = knobs.with_(**{spec.name: int(value) if spec.integer else value})
        if turned not in known:
            try:
                known[turned] = scenario.measure(turned, rate, profile.seed, requests=REQUESTS)
            except (
                EvaluationError,
                InputError,
            ):  # such a setting cannot serve this load at all; the others still say something
                continue
        found.setdefault(spec.name, []).append((value, known[turned]))
        if advance is not None:
            advance((done + 1) / len(plan))
    return Sensitivity(found, REQUESTS, True) if found else None
