"""Other tools' algorithms do what their sources say, to the number."""

from __future__ import annotations

import math
from itertools import count

import pytest

from autotune.control.controllers.aimd import AimdController
from autotune.control.controllers.bisection import BisectionController
from autotune.control.controllers.gradient import GradientController
from autotune.control.controllers.length_table import LengthTableController
from autotune.control.controllers.protocol import Controller, Proposal
from runtime.knobs import KnobLimits, Knobs
from runtime.records import FinishReason, LimitedBy, RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.tunable import SchedulerView

START = Knobs(256, 5.0, 2000, 1000)
LIMITS = KnobLimits(512, 1000, 8192, 8192)
TARGET = SLO(ttft_ms=500, tpot_ms=20)


_STARTS = count(step=4096)


def step(ms: float, decodes: int = 10, prefill: int = 0, limited: LimitedBy = LimitedBy.BUDGET) -> StepRecord:
    """One of ``ms``, long after the one that was made before it."""
    start = float(next(_STARTS))
    return StepRecord(
        start, start + ms / 1e3, 1, decodes, 100 * decodes, int(prefill > 0), prefill, prefill, 0, decodes, decodes, 0, 0, 100, 0,
        0, 8192, limited,
    )  # fmt: skip


def ended(prompt: int, output: int) -> RequestRecord:
    return RequestRecord(
        "r", 0, 0, 1, (0.5, 1.0), prompt, output, 0, 0, FinishReason.LENGTH, "default", "", 0, 0, 0
    )  # fmt: skip


def decide(made: Controller, *steps: StepRecord, limits: KnobLimits = LIMITS, knobs: Knobs = START) -> Proposal:
    for one in steps:
        made.observe_step(one)
    return made.decide(0.0, knobs, limits)


def view(budget: int, decoding: int) -> SchedulerView:
    return SchedulerView(
        0.0, decoding, 1, 1, 10, 10, 100, 1, 1, 0.0, math.inf, math.inf, Knobs(256, 0, budget, budget), 0, LIMITS
    )


# -- AIMD ----------------------------------------------------------------------------------------------------------------


def test_aimd_goes_a_tenth_back_above_the_target_and_64_up_below_it() -> None:
    made = AimdController(TARGET, START)
    assert decide(made).regime == "learning"
    slow = decide(made, step(15), step(27))  # 21 ms on average
    assert (slow.regime, made.limit) == ("decrease", 1800)
    assert slow.knobs == Knobs(256, 0, 1536, 1536), "in whole tiles; waiting gains nothing, the rest is as it was"
    fast = decide(made, step(19))
    assert (fast.regime, made.limit) == ("increase", 1864)
    assert decide(made, step(19, limited=LimitedBy.DEMAND)).regime == "hold" and made.limit == 1864
    busy = decide(made, step(19, prefill=1000, limited=LimitedBy.DEMAND))
    assert busy.regime == "increase", "half of the limit is in use"
    assert made.limit == 1928
    assert made.budget(view(8192, 4)) == 1536 and made.budget(view(1000, 4)) == 1000
    assert "target 20" in busy.cause and busy.evidence["step_ms"] == 19


def test_aimd_stops_at_its_floor_and_at_the_ceiling() -> None:
    made = AimdController(TARGET, START)
    for _ in range(80):
        decide(made, step(100, decodes=30))
    assert made.limit == 64
    decide(made, step(100, decodes=90))
    assert made.limit == 90, "decodes are not held back"
    knobs = START
    for _ in range(200):
        knobs = decide(made, step(1), knobs=knobs).knobs
    assert made.limit == 8192
    assert decide(AimdController(SLO(ttft_ms=100), START)).knobs.token_budget == 8192, "nothing bounds a step"


def test_aimd_holds_a_limit_that_the_knob_does_not_follow() -> None:
    """Bounds hold it at 2,000 tokens: the very next decreases count."""
    made, free = AimdController(TARGET, START), AimdController(TARGET, START)
    bounded = [decide(made, step(1)) for _ in range(50)]
    assert bounded[-1].regime == "hold" and "does not follow" in bounded[-1].cause
    assert 1.1 * 2000 < made.limit < 1.1 * 2000 + 512 + 64, "what the dead band and a tile leave open"
    for _ in range(4):
        lowered = decide(made, step(100))
    assert lowered.knobs.token_budget < 2000
    knobs = START
    for _ in range(50):
        knobs = decide(free, step(1), knobs=knobs).knobs
    assert free.limit == 2000 + 50 * 64, "nothing holds this one"


# -- Gradient2 -----------------------------------------------------------------------------------------------------------


def test_gradient2_by_hand() -> None:
    made = GradientController(START)
    assert decide(made).regime == "learning"
    idle = decide(made, step(10, decodes=127))
    assert idle.regime == "demand-limited" and idle.knobs.max_batch_size == 256
    steady = decide(made, step(10, decodes=200))  # the long average is 10 ms: no slope, and a queue of four
    assert steady.regime == "steady" and made.limit == pytest.approx(0.8 * 256 + 0.2 * (256 + 4))
    before = made.limit
    long = 10 + (40 - 10) / 3  # the third sample of those averaged plainly
    slope = 1.5 * long / 40
    shed = decide(made, step(40, decodes=200))
    assert shed.regime == "shedding" and slope < 1
    assert made.limit == pytest.approx(0.8 * before + 0.2 * (slope * before + 4))
    before = made.limit
    decide(made, step(1e6, decodes=250))
    assert made.limit == pytest.approx(0.8 * before + 0.2 * (0.5 * before + 4)), "never by more than half"
    assert decide(made, step(5, decodes=200)).knobs.token_budget == START.token_budget


def test_gradient2_forgets_a_long_average_that_is_far_too_long() -> None:
    made = GradientController(START)
    for _ in range(10):
        decide(made, step(100, decodes=200))
    seen = [decide(made, step(10, decodes=200)).evidence["long_ms"] for _ in range(40)]
    assert seen[0] == pytest.approx(0.95 * (100 + 2 / 601 * (10 - 100)), rel=1e-3)
    assert seen[-1] == pytest.approx(20, rel=0.06), "a twentieth off at each sample, down to twice the present"


# -- bisection -----------------------------------------------------------------------------------------------------------


def test_bisection_by_hand() -> None:
    made = BisectionController(TARGET, START)
    above = decide(made, step(30, decodes=100, prefill=900))
    assert above.regime == "above" and (made.low, made.high) == (32, 1000)
    assert above.knobs == START.with_(token_budget=512, chunk_size=512, max_wait_ms=0), "516, in whole tiles"
    slow = 516 / 4 / 4
    below = decide(made, step(10, decodes=100, prefill=400))
    assert below.regime == "below" and (made.low, made.high) == pytest.approx((500, 1000 + slow))
    wide = (made.low + made.high) / 2 / 4
    inside = decide(made, step(20.5, decodes=100, prefill=650))
    assert inside.regime == "inside" and (made.low, made.high) == pytest.approx((750 - wide / 2, 750 + wide / 2))
    assert inside.knobs.token_budget == 512


def test_bisection_finds_what_fits() -> None:
    """Steps of 256 tokens take the 20 ms of the SLO, others 4 ms and as much more as they are."""
    made = BisectionController(TARGET, START)
    size = 256
    for _ in range(60):
        prefill = max(0, size - 20)
        size = decide(made, step(4 + 16 * size / 256, decodes=size - prefill, prefill=prefill)).knobs.token_budget
    assert size == pytest.approx(256, rel=0.06)
    assert decide(BisectionController(SLO(ttft_ms=1), START)).knobs.token_budget == 8192, "nothing bounds a step"


# -- the length table ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_tokens", "prompt", "output", "batch", "budget", "regime"),
    [
        (100_000, 900, 100, 128, 8192, "context-heavy"),  # the pool holds 100; 128·9 + 128 → 2048, at least 8192
        (400_000, 500, 500, 512, 4096, "balanced"),  # 400 → 512; 1024 → 1024, at least 4096
        (400_000, 100, 900, 512, 2048, "generation-heavy"),
        (2_000_000, 500, 500, 2000, 4096, "balanced"),  # 2000: more than 128 above 1536, so as it is
        (1_700_000, 500, 500, 1700, 4096, "balanced"),
        (1_664_000, 500, 500, 1664, 4096, "balanced"),  # 128 above 1536: no longer near it
        (4_196_000, 500, 500, 4096, 8192, "balanced"),  # 4196: less than 128 above 4096; 8192 tokens a step
    ],
)
def test_the_length_table(kv_tokens: int, prompt: int, output: int, batch: int, budget: int, regime: str) -> None:
    limits = KnobLimits(65536, 0, 65536, 65536)
    made = LengthTableController(START, kv_tokens=kv_tokens)
    assert made.decide(0.0, START, LIMITS).knobs == START
    for _ in range(300):
        made.observe_request(ended(10 * prompt, 10 * output))
    for _ in range(128):  # the window
        made.observe_request(ended(prompt, output))
    found = made.decide(0.0, START, limits)
    assert (found.knobs.max_batch_size, found.regime) == (batch, regime)
    assert found.knobs.token_budget == found.knobs.chunk_size == budget
    assert made.decide(0.0, START, LIMITS).knobs.max_batch_size <= 512
