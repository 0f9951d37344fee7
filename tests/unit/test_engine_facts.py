"""What is simulated and written down of an engine is what the engine says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.cost.model import CostModel
from autotune.engines.own import OwnSource
from autotune.profiling.simulator import Simulator
from autotune.workload import parse_workload
from runtime import Engine
from runtime.step_model import NO_GRAPHS, StepGraphs
from tests.fakes import FakeExecutor, FakeModel
from tests.unit.profiles import setup
from tests.unit.simulated_profile import EVEN, profiled, scenario


@pytest.mark.parametrize(("prefix_cache", "simulated"), [(True, True), ("tenant", True), (False, False)])
def test_the_prefix_cache_is_simulated_as_the_engine_has_it(prefix_cache: Any, simulated: bool) -> None:
    facts = profiled().cost_model
    assert facts is not None
    model, cost = FakeModel(), CostModel(facts)
    with Engine(model, executor=FakeExecutor(), kv_tokens=4096, block_size=32, prefix_cache=prefix_cache) as engine:
        scenario = Simulator.of(cost, engine, parse_workload(EVEN), setup()).scenario
        assert engine.facts.prefix_cache is simulated is scenario.prefix_cache
        assert (scenario.kv_tokens, scenario.block_size) == (4096, 32)
        assert scenario.start().facts.prefix_cache is simulated


def test_facts_name_the_model_with_the_context_in_force() -> None:
    source = OwnSource(FakeModel(), executor=FakeExecutor(), kv_tokens=4096).with_options(max_model_len=100)  # type: ignore[arg-type]
    with source.start() as engine:
        model = engine.facts.model
        assert model is not None and (model.name, model.vocab_size, model.max_model_len) == ("fake", 257, 100)
    assert scenario().start().facts.model is None


def test_the_steps_that_an_executor_has_recorded_are_a_fact_of_the_engine() -> None:
    executor = FakeExecutor()
    with Engine(FakeModel(), executor=executor, kv_tokens=4096) as engine:
        assert engine.facts.graphs == NO_GRAPHS
    executor.graphs = StepGraphs((1, 2, 4), (16, 32), 4)  # type: ignore[attr-defined]
    with Engine(FakeModel(), executor=executor, kv_tokens=4096) as engine:
        assert engine.facts.graphs == StepGraphs((1, 2, 4), (16, 32), 4)


@pytest.mark.parametrize(
    ("device", "gib", "slots"),
    [("cpu", 0, 1024), ("NVIDIA L4", 22, 256), ("NVIDIA A100-SXM4-80GB", 79, 256), ("NVIDIA H100", 79, 1024)],
)
def test_vllms_defaults_are_those_of_the_gpu_that_the_engine_runs_on(
    device: str, gib: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a large one's, where nobody would start vLLM with those."""
    of_it = SimpleNamespace(name=device, total_memory=gib << 30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: of_it)
    model: Any = SimpleNamespace(device=torch.device("cpu" if device == "cpu" else "cuda"), info=None)
    assert OwnSource(model).stock.max_batch_size == slots
