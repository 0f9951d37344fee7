"""The controller on the measured costs of an H100 (``profiles/h100-llama-3.1-8b.yaml``), in virtual time: code under a TPOT
target of 25 ms, steps with budgets, nothing rejected. What it did wrong on that GPU is told in docs/log.md."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from autotune.profile import load_profile
from autotune.simulate.scenario import Scenario
from runtime.knobs import Knobs
from runtime.slo import SLO

PROFILE = Path(__file__).parents[2] / "profiles" / "h100-llama-3.1-8b.yaml"
CODE, TARGETS = "azure-code:length=1/2", SLO(ttft_ms=1000, tpot_ms=25)
DEFAULTS, BEST = Knobs(1024, 0, 8192, 8192), tuple(Knobs(1024, 0, tokens, tokens) for tokens in (640, 768, 896))


@cache
def machine() -> Scenario:
    return Scenario.of(load_profile(PROFILE), workload=CODE, slo=TARGETS)


def test_a_burst_that_meets_an_engine_that_has_just_started() -> None:
    """12 s from a cold start, as `autotune bench` measures: the defaults compute all that comes first in steps of 200 ms."""
    offered = ours = theirs = 0
    for seed in (3, 8, 9, 11):
        ours += (found := machine().measure_over(DEFAULTS, 6.25, seed, 0.0, 12.0, controller="predictive")).met
        theirs += machine().measure_over(DEFAULTS, 6.25, seed, 0.0, 12.0).met
        offered += found.offered
    assert offered > 200 and theirs < 0.75 * offered and ours > 0.96 * offered


@pytest.mark.parametrize("rate", [9.0, 12.0])
def test_past_capacity_steps_do_not_grow_where_larger_ones_serve_no_more(rate: float) -> None:
    """Prompts that are late anyway once made steps longer and longer, until decodes were late, too: .83 of the best setting."""
    ours = sum(machine().measure(DEFAULTS, rate, s, requests=700, controller="predictive").met for s in (1, 2))
    best = max(sum(machine().measure(knobs, rate, s, requests=700).met for s in (1, 2)) for knobs in BEST)
    assert ours >= 0.97 * best
