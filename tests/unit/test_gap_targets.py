"""A bound on the gaps between tokens: every step is held to it, with budgets of single steps and without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.controller.contenders import CONTENDERS
from benchmarks.controller.run import Bench, run
from benchmarks.controller.scenarios import SCENARIOS


@pytest.mark.parametrize("contender", ["predictive-knobs", "predictive"])
def test_steps_are_as_short_as_the_itl_target(contender: str) -> None:
    """The means of steps are far below it; it is the longest that break it, and with fixed knobs nobody sees those coming."""
    whole = SCENARIOS["M1gap"]
    scenario = replace(whole, phases=(replace(whole.phases[0], seconds=40.0),))
    outcome = run(scenario, CONTENDERS[contender].driver(()), 24, Bench({"H200 conv-gap": 22.5}))
    assert outcome.met / outcome.offered > 0.94
