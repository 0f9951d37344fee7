"""What share of requests the attainment model says are in time, against the scheduler itself in virtual time."""

from __future__ import annotations

import math
import random

import pytest

from autotune.control.controllers.predictive.attainment_model import Requests, attainment
from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival
from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.slo import SLO
from runtime.step_model import StepFeatures, StepModel
from tests.fakes import Records

TTFT, TPOT = 0.5, 0.03
SECONDS = 240
PROMPTS, ANSWERS = [400, 900, 1600, 2500, 4600], [6, 12, 20, 35, 60]
DEAR = 0.010, 0.014, 45e-6
"""A step of decodes alone, what any prompt adds, and a prompt token, s: 512 tokens take longer than the target."""
CHEAP = 0.012, 0.0, 60e-6


class Steps(StepModel):
    def __init__(self, costs: tuple[float, float, float]) -> None:
        self._alone, self._prompt, self._token = costs

    def seconds(self, prompt: int) -> float:
        return self._alone + (self._prompt if prompt else 0.0) + self._token * prompt

    def predict(self, step: StepFeatures) -> float:
        return self.seconds(step.prefill_tokens)


INTERACTIVE = SLO(ttft_ms=1e3 * TTFT, tpot_ms=1e3 * TPOT)
WHOLE = SLO(e2e_ms=1.5e3)


def served(steps: Steps, rate: float, budget: int, slo: SLO = INTERACTIVE) -> tuple[float, int]:
    """The share of requests in time under a fixed budget, and decodes of a usual step."""
    dice, at, arrivals = random.Random(1), 0.0, []
    while (at := at + dice.expovariate(rate)) < SECONDS:
        prompt = dice.choice(PROMPTS)
        arrivals.append(Arrival(at, prompt, dice.choice(ANSWERS), ((len(arrivals), prompt),)))
    engine = SimulatedEngine(
        steps, kv_tokens=10**7, knobs=Knobs(512, 0, budget, budget), prefix_cache=False, max_queue=10**6,
        admission=AdmissionPolicy(late=None, queue_timeout=None, order=None),
    )  # fmt: skip
    heard = Records()
    engine.subscribe(heard)
    engine.serve(arrivals)
    engine.run()
    decodes = sorted(step.decodes for step in heard.steps)
    return sum(map(slo.met, heard.requests)) / len(heard.requests), max(1, decodes[len(decodes) // 2])


def predicted(steps: Steps, rate: float, budget: int, decodes: int, slo: SLO = INTERACTIVE) -> float:
    requests = Requests(rate, [float(p) for p in PROMPTS], [a - 1.0 for a in ANSWERS])
    ttft, tpot, e2e = (math.inf if ms is None else ms / 1e3 for ms in (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms))
    first = min(ttft, e2e)
    return attainment(lambda n: steps.seconds(n - decodes), decodes, budget - decodes, tpot, first, requests, e2e)


@pytest.mark.parametrize("slo", [INTERACTIVE, WHOLE], ids=["TTFT and TPOT", "E2E"])
@pytest.mark.parametrize("costs", [DEAR, CHEAP], ids=["dear prompts", "cheap prompts"])
@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_it_says_what_the_scheduler_does_and_prefers_what_is_good(
    costs: tuple[float, float, float], rate: float, slo: SLO
) -> None:
    steps, found = Steps(costs), {}
    for budget in (128, 256, 512, 1024, 2048, 8192):
        met, decodes = served(steps, rate, budget, slo)
        found[budget] = met, predicted(steps, rate, budget, decodes, slo)
    best = max(found, key=lambda budget: found[budget][1])
    assert found[best][0] >= max(met for met, _ in found.values()) - 0.03
    assert sum(abs(met - said) for met, said in found.values()) / len(found) < 0.08


def test_a_step_within_the_target_leaves_only_the_queue_to_be_late_by() -> None:
    steps = Steps(CHEAP)
    requests = Requests(0.01, [100.0], [50.0])
    assert attainment(lambda n: steps.seconds(n - 4), 4, 200, TPOT, TTFT, requests) == pytest.approx(1.0, abs=1e-6)
    assert attainment(lambda n: steps.seconds(n - 4), 4, 200, TPOT, 0.001, requests) == 0.0
    assert attainment(lambda n: steps.seconds(n - 4), 4, 200, TPOT, math.inf, requests) == 1.0


def test_an_e2e_target_asks_less_of_short_answers_than_of_long_ones() -> None:
    """Ten gaps bear four times as long steps as forty do; a TPOT that suits the long ones would fail both."""
    steps = Steps(CHEAP)

    def share(gaps: list[float], tpot: float = math.inf) -> float:
        requests, e2e = Requests(2.0, [2000.0], gaps), 0.8
        return attainment(lambda n: steps.seconds(n - 8), 8, 2000, tpot, e2e, requests, e2e)

    apart = [share([10.0]), share([40.0])]
    assert apart[0] > 0.95 > 0.4 > apart[1]
    assert share([10.0, 40.0]) == pytest.approx(sum(apart) / 2)
    assert share([10.0], tpot=0.02) < 0.7, "both count where both are asked for"


def test_decodes_that_take_longer_than_the_target_are_all_late() -> None:
    assert attainment(lambda n: 0.04 + 1e-5 * n, 8, 512, TPOT, TTFT, Requests(1.0, [500.0], [20.0])) == 0.0


def test_beyond_capacity_the_share_falls_with_the_load() -> None:
    shares = [predicted(Steps(CHEAP), rate, 256, 8) for rate in (4.0, 8.0, 16.0, 32.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < shares[0] / 3


def test_beyond_capacity_nobody_is_in_time_in_the_end_where_nobody_leaves_the_queue() -> None:
    def both(rate: float) -> tuple[float, ...]:
        seconds, leave = Steps(CHEAP).seconds, Requests(rate, [500.0], [20.0])
        return tuple(
            attainment(lambda n: seconds(n - 8), 8, 256, TPOT, TTFT, requests)
            for requests in (leave, leave._replace(stay=True))
        )

    assert both(0.5)[0] == both(0.5)[1] > 0
    assert both(32.0)[0] > both(32.0)[1] == 0


def test_no_traffic_no_time_and_long_answers_are_borne() -> None:
    seconds = Steps(DEAR).seconds
    assert attainment(lambda n: seconds(n - 8), 8, 512, TPOT, TTFT, Requests(0.0, [500.0], [20.0])) == 1.0
    assert attainment(lambda n: 0.0, 8, 512, TPOT, TTFT, Requests(1.0, [500.0], [20.0])) == 1.0
    few, many = (
        attainment(lambda n: seconds(n - 8), 8, 2048, TPOT, math.inf, Requests(rate, [2048.0], [50_000.0]))
        for rate in (2.0, 7.0)
    )
    assert few == 1.0  # a mean gap of 12 ms, surely; and of 37
    assert many == 0.0
