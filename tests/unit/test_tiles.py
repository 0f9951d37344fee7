"""Whole tiles: what number of tokens becomes of which, and that every controller that chooses one has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune import control
from autotune.control.controllers.aimd import AimdController
from autotune.control.controllers.bisection import BisectionController
from autotune.control.controllers.gradient import GradientController
from autotune.control.controllers.parts.tiles import whole_tiles
from autotune.control.controllers.predictive import PredictiveController
from autotune.control.controllers.protocol import Controller
from autotune.measure.evaluate import recorded
from autotune.profile import find_profile, load_profile
from autotune.simulate.scenario import Scenario
from benchmarks.controller.contenders import KnobsOnly
from runtime.knobs import Knobs
from runtime.records import LimitedBy
from runtime.slo import SLO, attainment
from runtime.step_model import StepFeatures
from runtime.tunable import TILE, tile_on
from tests.unit.control_world import SimulatedEngine, poisson


@pytest.mark.parametrize(
    ("tokens", "decodes", "whole"),
    [
        (40, 0, 40),
        (64, 0, 64),
        (100, 0, 96),
        (605, 3, 512),
        (800, 0, 768),
        (1250, 4, 1024),
        (5999, 60, 5632),
        (355, 255, 352),
    ],
)
def test_they_are_round_numbers(tokens: int, decodes: int, whole: int) -> None:
    assert whole_tiles(tokens, decodes) == whole


@given(st.integers(1, 20_000), st.integers(0, 2_000), st.integers(0, 12))
def test_more_than_half_of_the_prompt_stays_and_all_decodes(prompt: int, decodes: int, power: int) -> None:
    tokens = decodes + prompt
    whole = whole_tiles(tokens, decodes, 1 << power)
    assert decodes + prompt / 2 < whole <= tokens
    assert whole_tiles(whole, decodes, 1 << power) <= whole


@pytest.mark.parametrize("budgeted", [True, False], ids=["budgets", "knobs"])
def test_where_kernels_compute_whole_tiles_more_requests_are_in_time(budgeted: bool) -> None:
    def hardware(step: StepFeatures) -> float:
        tiles = -(-(step.decodes + step.prefill_tokens) // 256)
        return 4e-3 + 6.4e-3 * tiles + 3e-8 * (step.decode_context + step.prefill_context)

    slo = SLO(ttft_ms=1000, tpot_ms=25)

    def share(tile: int) -> float:
        engine = SimulatedEngine(hardware, knobs=Knobs(256, 0, 2048, 2048))
        controller = PredictiveController(slo, engine.knobs)
        controller._steps.tile = tile
        chosen = controller if budgeted else KnobsOnly(controller)
        with control(engine, slo=slo, controller=chosen):
            met = attainment(engine.play(poisson(18, 20, 1500, 60, seed=1)), slo)
        return met.met / met.offered

    assert share(512) > share(1) + (0.05 if budgeted else 0.1)


@pytest.mark.parametrize("tile", [512, 1], ids=["GPU", "CPU"])
@pytest.mark.parametrize(
    "make",
    [
        AimdController,
        BisectionController,
        lambda slo, start, tile: GradientController(start, knob="token_budget", queue=37, tile=tile),
        PredictiveController,
    ],
    ids=["aimd", "bisection", "gradient", "predictive"],
)
def test_every_controller_that_chooses_tokens_has_them(make: Callable[..., Controller], tile: int) -> None:
    def hardware(step: StepFeatures) -> float:
        return 4e-3 + 3e-5 * (step.decodes + step.prefill_tokens)

    engine = SimulatedEngine(hardware, knobs=Knobs(256, 0, 1000, 1000))
    slo = SLO(ttft_ms=1000, tpot_ms=25)
    with control(engine, slo=slo, controller=KnobsOnly(make(slo, engine.knobs, tile=tile))) as it:
        engine.play(poisson(12, 20, 1500, 60, seed=1))
        chosen = {d.new["token_budget"] for d in it.decisions if d.action == "set"}
    assert chosen and any(tokens % 32 for tokens in chosen) == (tile == 1)


@pytest.mark.parametrize("name", ["aimd", "bisection", "predictive"])
def test_steps_are_of_whole_tiles_where_the_engine_computes_by_tiles(name: str) -> None:
    def hardware(step: StepFeatures) -> float:
        return 4e-3 + 3e-5 * (step.decodes + step.prefill_tokens)

    for tile in (TILE, 1):
        engine = SimulatedEngine(hardware, knobs=Knobs(256, 0, 2048, 2048), tile=tile)
        with control(engine, slo=SLO(ttft_ms=1000, tpot_ms=25), controller=name), recorded(engine) as log:
            engine.play(poisson(12, 20, 1500, 60, seed=1))
        full = {
            s.decodes + s.prefill_tokens
            for s in log.steps
            if s.limited_by is LimitedBy.BUDGET and s.prefill_tokens > 300
        }
        assert full and any(tokens % 32 for tokens in full) == (tile == 1)


def test_a_cpu_has_no_tiles() -> None:
    assert (tile_on("cpu"), tile_on("cuda")) == (1, TILE)
    of = {name: Scenario.of(load_profile(find_profile(name))).start() for name in ("cpu-2core-tiny", "h200-qwen3-8b")}
    assert {name: engine.facts.tile for name, engine in of.items()} == {"cpu-2core-tiny": 1, "h200-qwen3-8b": TILE}
