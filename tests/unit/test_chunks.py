"""How much of one prompt a step may hold, where knobs are all there is and the engine computes prompts as they come."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autotune import control
from autotune.control.controllers.predictive import constants
from autotune.control.controllers.predictive.step_size import Chunks
from runtime.llm.admission import AdmissionPolicy
from runtime.slo import SLO
from runtime.tunable import Capabilities
from tests.unit.control_world import poisson
from tests.unit.test_infeasible import Served

STEP_S, CAPACITY, WHOLE = 0.03, 1000, 1200  # seconds of a step, prompt tokens it has room for, and all of its tokens
RATE = CAPACITY / STEP_S
ARRIVAL = AdmissionPolicy(late=None, queue_timeout="ttft", order="fcfs")  # one after the other, as they come
CHAT, LONG = SLO(ttft_ms=500, tpot_ms=30), SLO(ttft_ms=10_000, tpot_ms=200)


def followed(**lengths: int) -> Chunks:
    chunks = Chunks()
    for _ in range(100):
        for name, tokens in lengths.items():
            chunks.saw(name, tokens)
    return chunks


def size(chunks: Chunks, firsts: dict[str, float], demand: float = 0.8 * RATE) -> int:
    return chunks.size(firsts, STEP_S, CAPACITY, demand, WHOLE)


def test_a_prompt_that_has_time_is_cut_to_what_it_needs() -> None:
    found = size(followed(chat=1000, long=30_000), {"chat": 0.5, "long": 10.0})
    assert found == math.ceil(30_000 * STEP_S / 7.5) == 120
    assert 1000 / found * STEP_S < 0.5 and 30_000 / found * STEP_S < 10, "both are in time"
    assert size(followed(chat=1000, long=30_000), {"chat": 0.5, "long": math.inf}) == 80, "what chat needs"
    assert size(followed(chat=10, long=30_000), {"chat": 0.5, "long": math.inf}) == constants.FLOOR
    assert followed(chat=10, long=30_000).size({"chat": 0.5, "long": math.inf}, STEP_S, CAPACITY, 0.0, 32) == 32, (
        "no more than allowed"
    )


@pytest.mark.parametrize(
    ("lengths", "firsts"),
    [
        ({"default": 30_000}, {"default": 0.5}),
        ({"default": 30_000, "other": 100}, {"default": 0.5, "other": 0.5}),
        ({"chat": 100, "long": 30_000}, {"chat": math.inf, "long": math.inf}),
        ({"chat": 30_000, "long": 100}, {"chat": 0.5, "long": 10.0}),
        ({"chat": 1000, "code": 8000}, {"chat": 0.5, "code": 2.0}),
        ({"chat": 15_000, "long": 30_000}, {"chat": 0.5, "long": 10.0}),
        ({"chat": 1000}, {"chat": 0.5, "long": 10.0}),
        ({}, {}),
    ],
    ids=["one class", "one target", "none in a hurry", "the hurried are the long ones", "soon computed", "chat needs the step",
         "a class not seen yet", "no class"],
)  # fmt: skip
def test_else_a_step_may_be_all_of_one_prompt(lengths: dict[str, int], firsts: dict[str, float]) -> None:
    assert size(followed(**lengths), firsts) == WHOLE


def test_nothing_is_cut_while_the_queue_grows() -> None:
    chunks, firsts = followed(chat=1000, long=30_000), {"chat": 0.5, "long": 10.0}
    assert size(chunks, firsts, 0.99 * RATE) == 120
    assert size(chunks, firsts, 1.01 * RATE) == WHOLE


class Foreign(Served):
    """One that asks for no budgets of single steps."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, step_budgets=False)


def play(*, cutting: bool) -> tuple[float, float]:
    """Attainment of chat and of long prompts. A prompt of 30,000 tokens takes a second of steps that hold nothing else, twice the
    time that chat has."""
    engine = Foreign(CHAT, LONG)
    with control(engine, slo=CHAT, admission=ARRIVAL) as attached:
        engine.play(poisson(10, 20, 1000, 100, seed=1), [(2.0 * k, 30_000, 50) for k in range(1, 10)])
        assert any("chunks of" in d.cause for d in attached.decisions) == cutting
    return engine.share("default", CHAT), engine.share("other", LONG)


def test_long_prompts_that_have_time_make_less_chat_late(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, long = play(cutting=True)
    assert (chat, long) == (pytest.approx(0.9, abs=0.05), 1)
    monkeypatch.setattr(Chunks, "size", lambda self, firsts, seconds, capacity, demand, most: most)
    late, long = play(cutting=False)
    assert late < chat - 0.2 and long == 1
