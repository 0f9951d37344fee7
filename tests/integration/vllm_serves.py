"""Run by the pytest of an environment with vLLM (see test_vllm_engine.py): a small model of random weights, really computed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm import SamplingParams as Theirs

import autotune
from autotune.engines.vllm import VllmEngine, VllmSource
from autotune.measure.evaluate import evaluate
from autotune.workload import parse_workload
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.records import FinishReason
from runtime.request import SamplingParams
from runtime.slo import SLO
from tests.fakes import Records
from tests.integration.llama_folder import weightless_folder
from tests.vllm_fakes import vllm_engine

LIMITS = KnobLimits(max_batch_size=16, max_wait_ms=200, token_budget=256, chunk_size=256)
START = Knobs(max_batch_size=8, max_wait_ms=0, token_budget=64, chunk_size=48)
PATIENT = SLO(ttft_ms=30_000, e2e_ms=60_000)
OPTIONS: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "enforce_eager": True, "block_size": 32}
LENGTHS = (5, 90, 33, 64, 7, 120, 48, 12, 20, 75)


def prompt(length: int) -> list[int]:
    return [(7 * length + 3 * i * i) % 256 for i in range(length)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weightless_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def stock(folder: Path) -> list[tuple[int, ...]]:
    """What vLLM answers without us: greedy, one prompt after the other."""
    llm = LLM(str(folder), skip_tokenizer_init=True, max_num_seqs=16, **OPTIONS)
    params = Theirs(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    return [
        tuple(llm.generate({"prompt_token_ids": prompt(length)}, params, use_tqdm=False)[0].outputs[0].token_ids)
        for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def engine(folder: Path, stock: object) -> Iterator[VllmEngine]:
    source = VllmSource(str(folder), {**OPTIONS, "slo": PATIENT})
    with source.start(START, LIMITS, seed=1) as engine:
        yield engine


def test_facts_are_those_of_vllm(engine: VllmEngine, folder: Path) -> None:
    facts = engine.facts
    assert (facts.engine, facts.version, facts.block_size, facts.prefix_cache) == ("vllm", "0.32.0", 32, True)
    assert facts.kv_tokens > 10_000 and facts.model is not None
    about = facts.model
    assert (about.name, about.vocab_size, about.max_model_len) == (str(folder), 258, 2048)
    assert (about.dtype, about.device, about.random_weights) == ("float32", "cpu", True)
    assert about.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4  # K and V, layers, heads, their size, bytes


def test_answers_are_those_of_stock_vllm_whatever_the_knobs(engine: VllmEngine, stock: list[tuple[int, ...]]) -> None:
    heard = Records()
    end = engine.subscribe(heard)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    streams = []
    for number, length in enumerate(LENGTHS):
        engine.set_knobs(
            START.with_(max_batch_size=1 + number % 5, token_budget=16 + 5 * number, chunk_size=7 + number)
        )
        streams.append(engine.submit(prompt(length), params))
    assert [stream.result().token_ids for stream in streams] == stock
    end()
    assert len(heard.requests) == len(LENGTHS)
    assert sum(step.sampled for step in heard.steps) == 12 * len(LENGTHS)
    assert all(later.start >= earlier.end for earlier, later in pairwise(heard.steps))
    engine.set_knobs(START)


def test_log_probabilities_come_along(engine: VllmEngine) -> None:
    done = engine.submit(prompt(9), max_tokens=3, ignore_eos=True, logprobs=2).result()
    assert done.logprobs is not None and len(done.logprobs) == 3
    for token, said in zip(done.token_ids, done.logprobs, strict=True):
        assert said.token_id == token and len(said.top) == 2 and said.top[0] == (token, said.logprob)


def test_it_is_measured_and_controlled(engine: VllmEngine) -> None:
    load = parse_workload("poisson:prompt=20,output=4").at_rate(30.0)
    with autotune.control(engine, slo=PATIENT, admission=True, interval_s=0.05) as control:
        found = evaluate(engine, None, load, PATIENT, vocab_size=250, seed=1, duration=2.0)
        assert not control.status().ended
    assert found.offered >= 30 and found.attainment == 1.0
    engine.view()  # of the engine's thread, behind what it was told before
    assert engine.admission is None


def test_a_request_that_cannot_run_is_refused_by_name(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match=r"the context of .* is 2048 tokens"):
        engine.submit([1] * 2040, max_tokens=20)
    with pytest.raises(ValueError, match="prompt holds token id 258"):
        engine.submit([258])


def test_requests_that_come_too_late_are_rejected() -> None:
    slo = SLO(ttft_ms=40)
    engine = vllm_engine(LIMITS, START.with_(max_batch_size=2, token_budget=16), slo=slo, admission=True, step_s=0.01)
    with engine:
        streams = [engine.submit(prompt(60), max_tokens=4, ignore_eos=True) for _ in range(40)]
        reasons = [stream.record.reason for stream in streams if (stream.result, stream._buffer.wait(None))]
        assert reasons.count(FinishReason.REJECTED) > 20
        assert not engine.view().waiting and engine.view().kv_free_blocks == engine.view().kv_total_blocks
        assert engine.submit(prompt(5), max_tokens=2, ignore_eos=True).result().token_ids


def test_a_wait_window_does_not_spin() -> None:
    with vllm_engine(LIMITS, START.with_(max_wait_ms=150), slo=PATIENT) as engine:
        engine.submit(prompt(5), max_tokens=1).result()
        prepare = engine._core.steering.prepare
        calls = 0

        def counted() -> float:
            nonlocal calls
            calls += 1
            return prepare()

        engine._core.steering.prepare = counted  # type: ignore[method-assign]
        heard = Records()
        engine.subscribe(heard)
        engine.submit(prompt(5), max_tokens=1).result()
        (record,) = heard.requests
        assert record.queue_time is not None and record.queue_time >= 0.149
        assert calls < 10


def test_what_cannot_be_steered_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    with pytest.raises(
        InputError, match=r"vLLM cannot be tuned: it is version 0\.99\.1, and this was made for 0\.31 to 0\.33"
    ):
        VllmEngine(str(folder), limits=LIMITS, **OPTIONS)
