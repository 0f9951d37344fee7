"""Profiles of a callable, their settings simulated."""

from __future__ import annotations

from typing import Any

from autotune.profile.callable import BatcherSetting, CallableProfile
from autotune.profile.fingerprint import machine, software
from autotune.profiling.assemble import assemble, of_callable
from autotune.profiling.target import OfferedLoad
from runtime import SLO
from runtime.knobs import Knobs
from tests.unit.callable_world import Ticking, calibrated, findings, question, simulated, subject

DYNAMIC = BatcherSetting("dynamic", Knobs(max_batch_size=8, max_wait_ms=4, token_budget=8, chunk_size=8))
SLOWER = BatcherSetting("dynamic", Knobs(max_batch_size=1, max_wait_ms=0, token_budget=1, chunk_size=1))
ADAPTIVE = BatcherSetting("adaptive", Knobs(max_batch_size=32, max_wait_ms=20, token_budget=32, chunk_size=32))


def profile_of(*settings: BatcherSetting, **changes: Any) -> CallableProfile:
    """A callable's profile that recommends the first of ``settings``, all of them simulated."""
    ticking, slo = Ticking(0.020, 0.002), SLO(e2e_ms=400)
    of = subject(ticking)
    cost, load = calibrated(ticking, of), OfferedLoad(200.0, 1, 5.0, 1.0)
    runs = [simulated(s, cost, [1], load, slo) for s in settings]
    found = findings(cost, slo, 200.0, runs, capacity=380.0, capacity_size=32)
    found.stopped = True
    profile = assemble(
        CallableProfile, found, of_callable(found, question(slo, 200.0, 60.0), of), name="embed", command="autotune profile",
        machine=machine(), software=software(),
    )  # fmt: skip
    order = [next(p for p in profile.points if p.setting == s) for s in settings]
    first = settings[0]
    return profile.model_copy(
        update={"points": tuple(order), "strategy": first.strategy, "knobs": first.knobs, "status": "complete"}
        | changes
    )
