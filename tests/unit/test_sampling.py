"""Each sampling parameter against a plain reference and against transformers' own logits processors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runtime.errors import StepFailedError
from runtime.request import Sequence
from runtime.torch_backend import sampling
from runtime.torch_backend.sampling import Sampler, _filter, penalise
from tests.unit.sampled_rows import VOCAB, logits_of, reference, sample, sequence


def filtered(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Probabilities from which the sampler draws."""
    rows = logits.clone()
    penalise(rows, sequences)
    return _filter(rows, [s.request.params for s in sequences]).softmax(-1)


MIXED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.3, "top_k": 96},
    {"temperature": 1.0, "top_k": 5000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.7},
    {"temperature": 1.5, "repetition_penalty": 0.6, "top_p": 0.9},
    {"temperature": 0.7, "repetition_penalty": 1.2, "top_k": 12, "top_p": 0.7, "min_p": 0.02},
]


def mixed_batch() -> tuple[torch.Tensor, list[Sequence]]:
    rng = np.random.default_rng(3)
    sequences = [
        sequence(f"r{i}", prompt=rng.integers(VOCAB, size=9).tolist(), output=rng.integers(VOCAB, size=5).tolist(), **p)
        for i, p in enumerate(MIXED)
    ]
    return logits_of(len(MIXED), seed=5), sequences


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CPU NumPy does part of the work; elsewhere torch does all of it, which can be tried here as well."""
    if request.param == "torch":
        monkeypatch.setattr(sampling, "_numpy_can", lambda logits: False)
    return str(request.param)


@pytest.mark.usefixtures("library")
def test_a_mixed_batch_matches_the_definitions() -> None:
    logits, sequences = mixed_batch()
    probs = filtered(logits, sequences).double().numpy()
    for row, s in enumerate(sequences):
        seen = {*s.request.prompt, *s.output}
        expected = reference(logits[row].tolist(), seen, s.request.params)
        assert ((probs[row] > 1e-30) == (expected > 1e-30)).all(), MIXED[row]  # float32 cannot hold less
        np.testing.assert_allclose(probs[row], expected, rtol=2e-4, atol=1e-7, err_msg=str(MIXED[row]))


def test_a_mixed_batch_matches_transformers() -> None:
    logits, sequences = mixed_batch()
    probs = filtered(logits, sequences)
    for row, s in enumerate(sequences):
        p = s.request.params
        steps: list[Any] = [RepetitionPenaltyLogitsProcessor(p.repetition_penalty)]
        steps.append(TemperatureLogitsWarper(p.temperature))
        if p.top_k:
            steps.append(TopKLogitsWarper(p.top_k))
        if p.top_p < 1:
            steps.append(TopPLogitsWarper(p.top_p))
        if p.min_p:
            steps.append(MinPLogitsWarper(p.min_p))
        ids = torch.tensor([[*s.request.prompt, *s.output]])
        expected = LogitsProcessorList(steps)(ids, logits[row : row + 1].clone()).softmax(-1)[0]
        torch.testing.assert_close(probs[row], expected, rtol=1e-4, atol=1e-6, msg=lambda m, r=row: f"{MIXED[r]}: {m}")


def penalised(logits: torch.Tensor, rows: Seq[Sequence]) -> torch.Tensor:
    """By the definition."""
    out = logits.clone()
    for at, row in enumerate(rows):
        for token in {*row.request.prompt, *row.output}:
            value, penalty = out[at, token], row.request.params.repetition_penalty
            out[at, token] = value / penalty if value > 0 else value * penalty
    return out


def test_the_penalty_follows_a_growing_output() -> None:
    """Whether a step is tried again, the sequence is released in between, or another has its id."""
    dice = np.random.default_rng(7)
    rows = [
        sequence("same id", prompt=dice.integers(VOCAB, size=size).tolist(), repetition_penalty=1.3) for size in (1, 9)
    ]
    for step in range(40):
        logits = logits_of(len(rows), seed=step)
        for _ in range(1 + step % 2):
            found = logits.clone()
            penalise(found, rows)
            assert torch.equal(found, penalised(logits, rows))
        for row in rows:
            row.output += dice.integers(VOCAB, size=step % 3).tolist()
        if step % 10 == 9:
            rows[0].data = None
            rows[1].output = rows[1].output[:3]


def test_the_penalty_reads_a_prompt_once() -> None:
    class Counted(tuple[int, ...]):
        reads = 0

        def __iter__(self) -> Iterator[int]:
            Counted.reads += 1
            return super().__iter__()

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            Counted.reads += 1
            return np.array(list(super().__iter__()), dtype)

    row = sequence(repetition_penalty=1.3)
    row.request.prompt = Counted(range(50))
    for token in range(20):
        penalise(logits_of(1), [row])
        row.output.append(token)
    assert Counted.reads == 1


@pytest.mark.usefixtures("library")
def test_rows_do_not_depend_on_their_neighbours() -> None:
    logits, sequences = mixed_batch()
    together = [token.id for token in sample(logits, sequences)]
    alone = [sample(logits[row : row + 1], [s])[0].id for row, s in enumerate(sequences)]
    backwards = [token.id for token in sample(logits.flip(0), sequences[::-1])][::-1]
    assert together == alone == backwards


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_first_of_the_likeliest(dtype: torch.dtype) -> None:
    logits = logits_of(33, vocab=1000).to(dtype)
    tokens = sample(logits, [sequence(f"r{i}") for i in range(33)])
    for row, token in enumerate(tokens):
        values = logits[row].float().tolist()
        assert token.id == values.index(max(values))
        assert token.logprob is None and token.top == ()


def test_greedy_with_a_penalty_avoids_what_was_said() -> None:
    logits = torch.tensor([[5.0, 4.9, -1.0], [5.0, 4.9, -1.0], [-2.0, -1.0, -1.5]])
    rows = [
        sequence("prompt", prompt=[0], repetition_penalty=1.5),
        sequence("output", prompt=[2], output=[0, 0], repetition_penalty=1.5),
        sequence("negative", prompt=[1], repetition_penalty=2.0),
    ]
    assert [token.id for token in sample(logits, rows)] == [1, 1, 2]


@pytest.mark.usefixtures("library")
def test_ties_at_the_edge_of_top_k_are_all_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    probs = filtered(logits, [sequence(temperature=1.0, top_k=2)])[0]
    assert (probs > 0).tolist() == [True, True, True, True, False]


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = logits_of(4, seed=2)
    rows = [
        sequence("greedy", logprobs=3),
        sequence("drawn", temperature=0.1, top_k=2, repetition_penalty=3.0, prompt=[0, 1, 2], logprobs=5),
        sequence("none"),
        sequence("only its own", temperature=1.0, logprobs=0),
    ]
    tokens = sample(logits, rows)
    exact = logits.double().log_softmax(-1)
    for row, n in ((0, 3), (1, 5), (3, 0)):
        token = tokens[row]
        assert token.logprob == pytest.approx(float(exact[row, token.id]), abs=1e-5)
        values, ids = exact[row].topk(n)
        assert [i for i, _ in token.top] == ids.tolist()
        assert [v for _, v in token.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert tokens[0].top[0] == (tokens[0].id, tokens[0].logprob)
    assert tokens[2].logprob is None and tokens[2].top == ()


def test_logprobs_of_more_tokens_than_there_are() -> None:
    token = sample(torch.zeros(1, 4), [sequence(logprobs=50)])[0]
    assert sorted(i for i, _ in token.top) == [0, 1, 2, 3]
    assert all(value == pytest.approx(math.log(1 / 4)) for _, value in token.top)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.5, "logprobs": 1}, {"repetition_penalty": 2.0}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_not_finite_fails_alone(params: dict[str, Any], bad: float, dtype: torch.dtype) -> None:
    logits = logits_of(5)
    rows = [sequence(f"r{i}", **params) for i in range(5)]
    expected = sample(logits.to(dtype), rows)
    spoiled = logits.to(dtype)
    spoiled[1, 40] = bad
    spoiled[3] = -math.inf
    out = Sampler(VOCAB).sample(spoiled, rows)
    assert [out[i] for i in (0, 2, 4)] == [expected[i] for i in (0, 2, 4)]
    for row in (1, 3):
        error = out[row]
        assert isinstance(error, StepFailedError)
        assert "NaN logits" in str(error) and f"r{row}" in str(error)


@pytest.mark.usefixtures("library")
def test_tokens_ruled_out_by_the_model_are_no_fault() -> None:
    logits = torch.full((2, 6), -math.inf)
    logits[:, 4] = 1.0
    tokens = sample(logits, [sequence("a"), sequence("b", temperature=1.0, top_p=0.9, min_p=0.1, top_k=3)])
    assert [token.id for token in tokens] == [4, 4]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6, 100.0])
def test_extreme_temperatures_and_logits_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [3e38, 3.3e38, -3e38]])
    rows = [sequence(f"r{i}", temperature=temperature, top_p=0.9) for i in range(2)]
    assert [token.id for token in sample(logits, rows)] == [0, 1]


def test_the_callers_logits_are_left_alone() -> None:
    logits, sequences = mixed_batch()
    before = logits.clone()
    sample(logits, sequences)
    assert torch.equal(logits, before)


def test_no_rows_and_wrong_shapes() -> None:
    assert Sampler(VOCAB).sample(torch.zeros(0, VOCAB), []) == []
    with pytest.raises(ValueError, match=r"shape \(1, 96\), not \(1, 97\)"):
        Sampler(VOCAB).sample(torch.zeros(1, 96), [sequence()])
    with pytest.raises(ValueError, match=r"not \(2, 97\)"):
        Sampler(VOCAB).sample(torch.zeros(1, VOCAB), [sequence("a"), sequence("b")])
