"""Every part can be taken out of the predictive controller, and what is left still serves."""

from __future__ import annotations

import pytest

from autotune.control.controllers.parts.targets import SLOTargets
from autotune.control.controllers.predictive import PredictiveController
from autotune.control.controllers.predictive.step_budget import FirstSteps, StepBudget
from autotune.control.controllers.predictive.trusted_model import TrustedModel
from benchmarks.controller import ablation
from benchmarks.controller.ablation import LAYERS, PARTS, algorithm, main
from benchmarks.controller.contenders import Layer, driver_of
from benchmarks.controller.loads import arrivals
from benchmarks.controller.run import Outcome, serve
from benchmarks.controller.scenarios import SCENARIOS
from runtime.knobs import Knobs

SCENARIO = SCENARIOS["M9"]


def served(part: str | None, layer: Layer, seconds: float = 8.0) -> Outcome:
    """The beginning of each phase of a scenario in which prompts had better come together."""
    kv_tokens = SCENARIO.hardware.kv_tokens
    phases = [
        tuple(arrivals(p.parts, SCENARIO.pattern, 20.0, seconds, (1, n), kv_tokens=kv_tokens, traces=None))
        for n, p in enumerate(SCENARIO.phases)
    ]
    return serve(SCENARIO, phases, driver_of(algorithm(part), layer, {}), 1)


@pytest.mark.parametrize("part", PARTS)
def test_what_takes_a_part_out_replaces_what_is_there(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = PredictiveController(SCENARIO.phases[0].slo, Knobs())
    replaced = list[str]()

    def replace(owner: object, name: str, value: object) -> None:
        old = getattr(owner, name)
        ours = value if isinstance(value, type) else type(value)
        if ours.__module__ == ablation.__name__:  # a stand-in, or a class that overrides
            whole = owner if name == "__class__" else old
            assert [each for each in vars(ours) if each[:2] != "__" and not hasattr(whole, each)] == []
        replaced.append(name)
        object.__setattr__(owner, name, value)

    for kind in (PredictiveController, TrustedModel, SLOTargets, StepBudget, FirstSteps):
        monkeypatch.setattr(kind, "__setattr__", replace)
    PARTS[part](made)
    assert replaced


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
