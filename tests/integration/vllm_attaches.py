"""Run by the pytest of an environment with vLLM (see test_vllm_engine.py): a controller attached to engines of others."""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

import autotune
from autotune.engines import adapt
from autotune.engines.vllm import Steered
from runtime.errors import LeaseError
from runtime.slo import SLO
from tests.fakes import Records
from tests.integration.llama_folder import weightless_folder
from tests.integration.vllm_tunes import OverlappingExecutor
from tests.vllm_fakes import BLOCK, POOL_TOKENS, CountingExecutor

TARGET = SLO(ttft_ms=30_000, tpot_ms=10_000)
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}  # fmt: skip


class Fake(CountingExecutor):
    pass


def engine(folder: Path, **options: Any) -> LLMEngine:
    """As a user makes it."""
    args = EngineArgs(str(folder), distributed_executor_backend=Fake, block_size=BLOCK, **{**OPTIONS, **options})
    config = args.create_engine_config()
    return LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)


def serve(llm: LLMEngine, lengths: list[int], output: int = 5) -> dict[str, list[int]]:
    """Their answers, all submitted at once, by the engine's own loop."""
    params = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False)
    for number, length in enumerate(lengths):
        llm.add_request(str(number), {"prompt_token_ids": [(number + i) % 200 for i in range(length)]}, params)
    found: dict[str, list[int]] = {}
    while llm.has_unfinished_requests():
        for output_ in llm.step():
            found[output_.request_id] = list(output_.outputs[0].token_ids)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weightless_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(params=[None, Steered], ids=["stock scheduler", "steered"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLMEngine]:
    made = engine(folder, **({} if request.param is None else {"scheduler_cls": request.param}))
    yield made
    made.engine_core.shutdown()


def test_an_idle_engine_of_another_is_steered_where_it_is(llm: LLMEngine) -> None:
    lengths = [5, 90, 33, 64, 7, 120]
    before = serve(llm, lengths)
    with autotune.control(llm, slo=TARGET, pinned={"chunk_size": 16}) as control:
        tunable, heard = adapt(llm), Records()
        assert tunable is adapt(llm), "the same one each time"
        assert (tunable.facts.engine, tunable.facts.version) == ("vllm", "0.32.0")
        assert (tunable.facts.kv_tokens, tunable.facts.block_size) == (POOL_TOKENS, BLOCK)
        assert tunable.limits.max_batch_size == 8 and tunable.limits.token_budget == 256
        tunable.subscribe(heard)
        assert serve(llm, lengths) == before, "the answers are the same"
        assert control.status().slo == TARGET and not control.status().ended and control.failed is None
        with pytest.raises(LeaseError):
            autotune.control(llm, slo=TARGET)
    assert len(heard.requests) == len(lengths) and all(r.completed for r in heard.requests)
    assert sum(s.sampled for s in heard.steps) == 5 * len(lengths)
    assert max(s.prefill_tokens / s.chunks for s in heard.steps if s.chunks) <= 16, "the pin was in force"
    assert tunable.knobs.chunk_size == 16, "as with any engine, the last knobs stay"
    assert serve(llm, lengths) == before
    with autotune.control(llm, slo=TARGET) as again:  # and once more
        serve(llm, lengths)
        assert again.failed is None


def test_one_at_work_is_refused_unless_it_was_steered_before(folder: Path) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False)
    for options in ({}, {"scheduler_cls": Steered}):
        made = engine(folder, **options)
        made.add_request("a", {"prompt_token_ids": [1, 2, 3]}, params)
        if options:
            autotune.control(made, slo=TARGET).close()
        else:
            with pytest.raises(ValueError, match="1 requests in progress"):
                autotune.control(made, slo=TARGET)
        while made.has_unfinished_requests():
            made.step()
        made.engine_core.shutdown()


def test_an_llm_generates_under_control(folder: Path) -> None:
    llm = LLM(str(folder), block_size=32, kv_cache_memory_bytes=1 << 26, **OPTIONS)
    prompts = [{"prompt_token_ids": [(3 * n + i) % 256 for i in range(20 + 9 * n)]} for n in range(12)]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)

    def answers() -> list[tuple[int, ...]]:
        return [tuple(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]

    stock = answers()
    with autotune.control(llm, slo=TARGET, interval_s=0.01) as control:
        heard = Records()
        adapt(llm).subscribe(heard)
        assert answers() == stock
        assert control.status().attainment.met == len(prompts) and control.failed is None
    assert len(heard.requests) == len(prompts) and {r.output_tokens for r in heard.requests} == {8}


def test_an_empty_step_that_is_left_over_under_async_scheduling_is_nobodys(folder: Path) -> None:
    config = EngineArgs(
        str(folder), distributed_executor_backend=OverlappingExecutor, block_size=BLOCK, **OPTIONS
    ).create_engine_config()
    config.scheduler_config.async_scheduling = True  # which vLLM switches off on a CPU
    llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    before = serve(llm, [50, 60])
    assert llm.engine_core.engine_core.batch_queue, "it stands there until the next request comes"
    with autotune.control(llm, slo=TARGET) as control:
        heard = Records()
        adapt(llm).subscribe(heard)
        assert serve(llm, [50, 60]) == before
        assert control.failed is None
    first = heard.steps[0]
    assert first.chunks == first.sampled == 2, "what came of it is not what came of an empty step"
    llm.engine_core.shutdown()
