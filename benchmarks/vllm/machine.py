"""vLLM as a machine of the live benchmarks, and a simulation of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.cost.model import CostModel
from autotune.profile import ModelFacts
from autotune.simulate import SimulatedEngine
from benchmarks.live.machine import NOISE, Machine
from benchmarks.vllm.model import parameters
from benchmarks.vllm.starting import LIMITS, start
from runtime.tunable import Facts


@contextmanager
def live(folder: Path, preset: str) -> Iterator[Machine]:
    """vLLM in this process, serving the model of random weights in ``folder``."""
    with start(folder) as engine:
        yield Machine(engine, model_facts(engine.facts, preset), engine.clock)


def simulated(cost: CostModel, machine: Machine, seed: int = 0) -> Machine:
    """``machine``, which has step times of ``cost``, in virtual time."""
    facts = machine.engine.facts
    engine = SimulatedEngine(
        cost, kv_tokens=facts.kv_tokens, block_size=facts.block_size, limits=LIMITS, prefix_cache=False, noise=NOISE, seed=seed,
        tile=facts.tile,
    )  # fmt: skip
    return Machine(engine, machine.facts, engine.clock)


def model_facts(facts: Facts, preset: str) -> ModelFacts:
    """What a profile says of the model that an engine of such facts serves."""
    model = facts.model
    assert model is not None, "vLLM says what it serves"
    return ModelFacts(
        name=preset, architecture=model.architecture, parameters=parameters(preset), dtype=model.dtype, random_weights=True,
        seed=0, max_model_len=model.max_model_len, vocab_size=model.vocab_size, kv_bytes_per_token=model.kv_bytes_per_token,
    )  # fmt: skip
