"""``autotune.control(llm)``: what of vLLM's is told by what it has, and what it says of an engine that it cannot steer."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import autotune
from autotune.engines.vllm import attached
from runtime.slo import SLO

TARGET = SLO(ttft_ms=500)


class LLM:
    """As vLLM's: it is told by where its class comes from, and by its engine."""

    __module__ = "vllm.entrypoints.llm"

    def __init__(self, engine: Any) -> None:
        self.llm_engine = engine


class LLMEngine:
    __module__ = "vllm.v1.engine.llm_engine"

    def __init__(self, client: Any) -> None:
        self.engine_core, self.vllm_config = client, SimpleNamespace()


class Mine(LLM):
    """A user's own."""

    __module__ = "application"


class Scheduler:
    def __init__(self, requests: int = 0) -> None:
        self.requests = dict.fromkeys(range(requests))


def in_process(scheduler: Any) -> LLM:
    return Mine(LLMEngine(SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))))


@pytest.mark.parametrize("engine", [LLM(LLMEngine(SimpleNamespace())), LLMEngine(SimpleNamespace(engine_core=b""))])
def test_an_engine_core_in_another_process_is_out_of_reach(engine: Any) -> None:
    with pytest.raises(ValueError) as told:
        autotune.control(engine, slo=TARGET)
    said = str(told.value)
    assert said.startswith(f"engine is a {type(engine).__name__} of vLLM whose engine core runs in another process")
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in said and "--scheduler-cls autotune.engines.vllm.Scheduler" in said


def test_one_that_cannot_be_steered_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Scheduler()
    monkeypatch.setattr(attached, "unfit", lambda config: "it is version 0.99")
    with pytest.raises(ValueError, match=r"^engine cannot be tuned: it is version 0\.99$"):
        autotune.control(in_process(scheduler), slo=TARGET)
    monkeypatch.setattr(attached, "unfit", lambda config: None)
    with (
        caplog.at_level(logging.WARNING, "vllm.autotune"),
        pytest.raises(ValueError, match=r"^engine cannot be tuned: the scheduler has no running, waiting"),
    ):
        autotune.control(in_process(scheduler), slo=TARGET)
    assert type(scheduler) is Scheduler and "the scheduler has no running, waiting" in caplog.text


def test_one_at_work_says_when_to_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "unfit", lambda config: None)
    scheduler = Scheduler(3)
    with pytest.raises(
        ValueError, match=r"has 3 requests in progress; .*scheduler_cls=\"autotune\.engines\.vllm\.Steered\""
    ):
        autotune.control(in_process(scheduler), slo=TARGET)
    assert type(scheduler) is Scheduler


def test_what_only_looks_like_it_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"engine is a SimpleNamespace; it must be .*, a vllm\.LLM, or have capabilities"
    ):
        autotune.control(SimpleNamespace(engine_core=None), slo=TARGET)  # type: ignore[arg-type]
