"""A profile of a large GPU to simulate from, and scenarios of it."""

from __future__ import annotations

from typing import Any

from autotune.profile import Profile
from autotune.simulate.scenario import Scenario
from benchmarks.controller.hardware import h200
from runtime.slo import SLO
from tests.sample_profile import sample_profile

TARGET = SLO(ttft_ms=500, tpot_ms=30)
EVEN = "poisson:prompt=700,output=60"


def profiled(**changes: Any) -> Profile:
    fields: dict[str, Any] = {"cost_model": h200().facts, "kv_blocks": 47_500, "slo": TARGET} | changes
    return sample_profile(**fields)


def scenario(**options: Any) -> Scenario:
    return Scenario.of(profiled(), **{"workload": EVEN} | options)
