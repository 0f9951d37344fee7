"""Every part can be taken out of the predictive controller, and what is left still serves."""

from __future__ import annotations

import pytest

from benchmarks.controller.ablation import LAYERS, PARTS, algorithm, main
from benchmarks.controller.contenders import Layer, driver_of
from benchmarks.controller.loads import arrivals
from benchmarks.controller.run import Outcome, serve
from benchmarks.controller.scenarios import SCENARIOS

SCENARIO = SCENARIOS["M9"]


def served(part: str | None, layer: Layer, seconds: float = 8.0) -> Outcome:
    """The beginning of each phase of a scenario in which prompts had better come together."""
    kv_tokens = SCENARIO.hardware.kv_tokens
    phases = [
        tuple(arrivals(p.parts, SCENARIO.pattern, 20.0, seconds, (1, n), kv_tokens=kv_tokens, traces=None))
        for n, p in enumerate(SCENARIO.phases)
    ]
    return serve(SCENARIO, phases, driver_of(algorithm(part), layer, {}), 1)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_without_any_part_requests_are_served(layer: Layer) -> None:
    whole = served(None, layer)
    without = {part: served(part, layer) for part in PARTS}
    assert all(found.offered == whole.offered > 300 for found in without.values())
    assert all(found.met > 0.3 * whole.met for found in without.values())
    assert any(found.met != whole.met for found in without.values()), "nothing was taken out"


def test_a_scenario_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scenario", "M99"]) == 2
    assert "--scenario is M99; it must be one of M1, M2" in capsys.readouterr().err
