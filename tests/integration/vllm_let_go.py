"""Run by the pytest of an environment with vLLM (see test_vllm_benchmarks.py): what vLLM plans once the steering has let go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams as Theirs
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from autotune.engines.vllm import VllmEngine
from benchmarks.vllm_live.stock import let_go
from runtime.knobs import KnobLimits, Knobs
from tests.fakes import Records
from tests.integration.llama_folder import weightless_folder
from tests.vllm_fakes import BLOCK, CountingExecutor, vllm_engine

LIMITS = KnobLimits(max_batch_size=16, token_budget=256, chunk_size=256)
START = Knobs(16, 0, 256, 256)
PROMPTS = [[5] * (40 + 97 * n % 400) for n in range(30)]
OUTPUT = 60
Steps = list[list[int]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Of each step the tokens that its requests get, in their order."""
    steps: Steps = []
    run = CountingExecutor._run

    def noted(self: CountingExecutor, output: Any) -> Any:
        if output.num_scheduled_tokens:
            steps.append([*output.num_scheduled_tokens.values()])
        return run(self, output)

    monkeypatch.setattr(CountingExecutor, "_run", noted)
    return steps


@pytest.fixture
def stock(planned: Steps, tmp_path: Path) -> Steps:
    """What vLLM plans without us, of more prompts than its KV pool holds."""
    config = EngineArgs(
        model=str(weightless_folder(tmp_path / "model")), load_format="dummy", dtype="float32", enforce_eager=True,
        block_size=BLOCK, skip_tokenizer_init=True, disable_log_stats=True, async_scheduling=False, max_num_seqs=16,
        max_num_batched_tokens=256, enable_prefix_caching=False, distributed_executor_backend=CountingExecutor,
    ).create_engine_config()  # fmt: skip
    llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    for number, prompt in enumerate(PROMPTS):
        params = Theirs(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, detokenize=False)
        llm.add_request(str(number), {"prompt_token_ids": prompt}, params)
    while llm.has_unfinished_requests():
        llm.step()
    found, planned[:] = [*planned], []
    return found


@pytest.fixture
def engine() -> Iterator[VllmEngine]:
    with vllm_engine(LIMITS, START, enable_prefix_caching=False) as engine:
        yield engine


def served(engine: VllmEngine, planned: Steps, held: AbstractContextManager[None]) -> tuple[Steps, Records]:
    """All :data:`PROMPTS` at once."""
    records = Records()
    forget, planned[:] = engine.subscribe(records), []
    with held:
        streams = engine._loop.ask(
            lambda: [engine.submit(prompt, max_tokens=OUTPUT, ignore_eos=True) for prompt in PROMPTS]
        )
        assert all(len(stream.result().token_ids) == OUTPUT for stream in streams)
    engine.view()
    forget()
    return [*planned], records


def test_it_plans_as_stock_and_is_steered_again_afterwards(engine: VllmEngine, planned: Steps, stock: Steps) -> None:
    before, _ = served(engine, planned, nullcontext())
    found, records = served(engine, planned, let_go(engine))
    again, _ = served(engine, planned, nullcontext())
    assert found == stock
    assert before == again != stock, "the steering begins no prompt that the KV pool cannot hold"
    assert len(records.requests) == len(PROMPTS) and sum(step.preemptions for step in records.steps)
    assert len(records.steps) == len(stock) and sum(step.sampled for step in records.steps) == OUTPUT * len(PROMPTS)


def test_knobs_are_not_heeded_and_then_they_are(engine: VllmEngine, planned: Steps, stock: Steps) -> None:
    engine.set_knobs(START.with_(max_batch_size=4, token_budget=32, chunk_size=32))
    assert served(engine, planned, let_go(engine))[0] == stock
    assert max(map(len, served(engine, planned, nullcontext())[0])) == 4
