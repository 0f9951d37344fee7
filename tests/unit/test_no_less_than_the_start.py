"""A controller serves no less than the knobs that it starts with, by knobs alone and with budgets for single steps: loads on
which it did."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune import control
from autotune.control.controllers.predictive import PredictiveController
from autotune.profile import load_profile
from autotune.profile.serving import serving_cost
from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival
from benchmarks.controller.contenders import KnobsOnly
from benchmarks.controller.hardware import L4, MOE, Weather, measured
from runtime.knobs import Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO, RequestClass
from runtime.step_model import StepModel

PROFILES = Path(__file__).parents[2] / "profiles"


@dataclass(frozen=True)
class Case:
    """``wanted``: of what the starting knobs serve in time, of class ``of``."""

    slo: str
    rate: float
    prompt: int
    output: int
    classes: Sequence[RequestClass] = ()
    noise: float = 0.0
    stalls: float = 0.0
    kv_tokens: int = 600_000
    seconds: float = 40.0
    of: str = "default"
    wanted: float = 0.97

    def arrivals(self, seed: int) -> Iterator[tuple[float, int, int, str]]:
        dice, due, names = random.Random(seed), 0.0, ["default", *(one.name for one in self.classes)]
        while (due := due + dice.expovariate(self.rate)) < self.seconds:
            prompt = max(4, int(self.prompt * dice.lognormvariate(-0.32, 0.8)))
            yield due, prompt, max(2, int(self.output * dice.lognormvariate(-0.32, 0.8))), dice.choice(names)


class Judge:
    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine, self.met = engine, dict[str, int]()

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        name, slos = record.request_class, self.engine.slos
        self.met[name] = self.met.get(name, 0) + (slos.get(name) or slos["default"]).met(record)


def engine_of(model: StepModel, case: Case, seed: int, *, admission: bool = False) -> tuple[SimulatedEngine, Judge]:
    weather = Weather(model, stalls=case.stalls, seed=seed)
    engine = SimulatedEngine(
        weather, kv_tokens=case.kv_tokens, knobs=Knobs(1024, 0, 8192, 8192), slo=case.slo, classes=case.classes,
        prefix_cache=False, ordering="fcfs", admission=admission,
    )  # fmt: skip
    engine.core.executor = weather.executor(noise=case.noise, seed=seed)
    engine.subscribe(judge := Judge(engine))
    return engine, judge


def served(model: StepModel, case: Case, seed: int, by: str) -> int:
    engine, judge = engine_of(model, case, seed)
    controller = PredictiveController(engine.slos["default"], engine.knobs)
    with (
        nullcontext()
        if by == "start"
        else control(engine, controller=controller if by == "budgets" else KnobsOnly(controller))
    ):
        for number, (due, prompt, output, name) in enumerate(case.arrivals(seed)):
            engine.run_until(due)
            arrival = Arrival(due, prompt, output, ((number, prompt),), request_class=name)
            engine.offer(arrival, f"r{number}", due=due, shared=False)
        engine.run()
    return judge.met.get(case.of, 0)


def h200_8b() -> StepModel:
    return serving_cost(load_profile(PROFILES / "h200-qwen3-8b.yaml"))


def rtx4090() -> StepModel:
    return measured("rtx4090-llama3-8b").cost()


BY = ("start", "knobs", "budgets")
CHAT = (RequestClass("chat", SLO(ttft_ms=1150, tpot_ms=126)),)
CASES = {
    # no step with a prompt is as short as the ITL: each makes a gap too long for all who decode, so there had better be few
    "itl": (h200_8b, Case("ttft=2s,itl=8ms", 1.0, 500, 800, wanted=0.95)),
    "itl of experts": (MOE.cost, Case("ttft=3s,itl=12ms", 0.7, 500, 800, wanted=0.95)),
    # one class has a TPOT that no step meets, by less than steps scatter: the other must not starve for it
    "scatter": (L4.cost, Case("tpot=60ms", 1.5, 60, 64, CHAT, noise=0.1, kv_tokens=40_000, of="chat")),
    # decodes that a stall has put behind cannot catch up, and a prompt beside them makes any step longer than their TPOT
    "stalls": (rtx4090, Case("ttft=364ms,tpot=21.2ms", 4.0, 20, 64, stalls=0.01, kv_tokens=28_000)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_controller_serves_no_less_than_its_starting_knobs(name: str) -> None:
    make, case = CASES[name]
    model = make()
    start, knobs, budgets = (sum(served(model, case, seed, by) for seed in (1, 2)) for by in BY)
    assert start > 40 and min(knobs, budgets) >= case.wanted * start


def test_a_request_that_finds_the_engine_idle_is_not_rejected() -> None:
    """By the pace of the steps before, which decoded within their TPOT, its first token would be late."""
    model, case = h200_8b(), Case("ttft=60ms,tpot=6ms", 0.0, 0, 0)
    engine, judge = engine_of(model, case, 1, admission=True)
    dice = random.Random(1)
    with control(engine):
        for number in range(30):
            engine.run()
            due, prompt = engine.clock.now() + 0.3, int(500 * dice.lognormvariate(-0.08, 0.4))
            engine.run_until(due)
            engine.offer(Arrival(due, prompt, 50, ((number, prompt),)), f"r{number}", due=due, shared=False)
        engine.run()
    assert judge.met["default"] >= 28
