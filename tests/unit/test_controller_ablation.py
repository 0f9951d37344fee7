"""Every part can be taken out of the predictive controller, and what is left still serves."""

from __future__ import annotations

import math

import pytest

from autotune.control.controllers.parts.targets import SLOTargets
from autotune.control.controllers.predictive import PredictiveController, constants
from autotune.control.controllers.predictive.attainment_model import Requests
from autotune.control.controllers.predictive.step_budget import FirstSteps, StepBudget
from autotune.control.controllers.predictive.step_size import full_step
from autotune.control.controllers.predictive.trusted_model import TrustedModel
from benchmarks.controller import ablation
from benchmarks.controller.ablation import LAYERS, PARTS, algorithm, main
from benchmarks.controller.contenders import Layer, driver_of
from benchmarks.controller.loads import arrivals
from benchmarks.controller.run import Outcome, serve
from benchmarks.controller.scenarios import SCENARIOS
from runtime.knobs import KnobLimits, Knobs

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


CONSTANTS = {
    "ceiling above step budgets": ("CEILING", math.inf),
    "room below that ceiling": ("CEILING", 1.0),
    "discount on long steps": ("LONG_BUDGETED", constants.LONG),
    "good starts are kept": ("KEPT", math.inf),
    "no larger steps than compute as fast": ("WORTHWHILE", 1 << 30),
}


@pytest.mark.parametrize("part", CONSTANTS)
def test_a_constant_is_another_in_decisions_and_nowhere_else(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, value = CONSTANTS[part]
    before, seen = getattr(constants, name), list[float]()

    def solve(self: object, *_: object) -> None:
        seen.append(getattr(constants, name))
        raise ValueError

    monkeypatch.setattr(PredictiveController, "_solve", solve)
    made, whole = (algorithm(which).made(SCENARIO.phases[0].slo, Knobs()) for which in (part, None))
    for one in (made, whole):
        with pytest.raises(ValueError):
            one.decide(0.0, Knobs(), KnobLimits())
    assert seen == [value, before] and getattr(constants, name) == before != value


def test_without_the_attainment_model_sizes_of_steps_and_trials_of_the_start_do_without() -> None:
    made = PredictiveController(SCENARIO.phases[0].slo, Knobs())
    PARTS["attainment model"](made)
    attains = made._attains(10, 0.03, Requests(1.0, [100.0], [10.0]))
    assert math.isnan(attains(512))
    sizes = [
        full_step(lambda n: 0.01 if n <= 8 else 0.025 + 1e-6 * n, 8, 0.02, 10_000.0, 8192, 256, says)[0]
        for says in (None, attains, lambda n: float(n), lambda n: float(-n))
    ]
    assert sizes[0] == sizes[1] == sizes[2] > sizes[3]
    assert not attains(512) > max(0.5, attains(256)) + 0.1


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
