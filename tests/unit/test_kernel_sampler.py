"""The engine's sampler by the sampling kernels beside the one in PyTorch; interpreted where there is no GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from runtime.errors import StepFailedError
from runtime.llm.plan import Token
from runtime.torch_backend.sampling import Sampler
from tests.unit.kernels import DEVICE
from tests.unit.sampled_rows import VOCAB, logits_of, reference, sequence

from runtime.torch_backend.cuda.backend import CUDA  # isort: skip
from runtime.torch_backend.cuda.sampler import KernelSampler  # isort: skip

CERTAIN: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"repetition_penalty": 1.7},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 2.0, "top_p": 1e-6, "logprobs": 2},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.5, "top_k": 1, "repetition_penalty": 1.3},
]
"""Parameters that leave one token."""


def sampler(vocab: int = VOCAB, seed: int = 0) -> KernelSampler:
    return KernelSampler(vocab, DEVICE, seed)


def test_it_is_the_sampler_of_cuda() -> None:
    assert CUDA.sampler is KernelSampler


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_one_token_is_left_it_is_the_same_and_so_are_log_probabilities(dtype: torch.dtype) -> None:
    logits = logits_of(len(CERTAIN), seed=1).to(dtype)
    rows = [sequence(f"r{at}", prompt=(at, 5), output=[7] * at, **params) for at, params in enumerate(CERTAIN)]
    before = logits.clone()
    found = sampler().sample(logits.to(DEVICE), rows)
    assert torch.equal(logits, before)
    for ours, theirs in zip(found, Sampler(VOCAB).sample(logits, rows), strict=True):
        assert isinstance(ours, Token) and isinstance(theirs, Token)
        assert ours[:2] == theirs[:2] and [i for i, _ in ours.top] == [i for i, _ in theirs.top]
        if theirs.logprob is not None:
            assert [ours.logprob, *(v for _, v in ours.top)] == pytest.approx(
                [theirs.logprob, *(v for _, v in theirs.top)], abs=1e-4
            )


def test_the_penalty_counts_prompt_and_output() -> None:
    logits = torch.full((3, VOCAB), -5.0, device=DEVICE)
    logits[:, 4], logits[:, 9], logits[:, 30] = 3.0, 2.9, 2.0
    rows = [
        sequence("a", prompt=(4,), output=[9], repetition_penalty=2.0),
        sequence("b", prompt=(4,), repetition_penalty=2.0),
        sequence("c", prompt=(4,), output=[9]),
    ]
    assert [token.id for token in sampler().sample(logits, rows) if isinstance(token, Token)] == [30, 9, 4]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.5}], ids=str)
def test_rows_that_cannot_be_sampled_fail_alone(params: dict[str, Any]) -> None:
    logits = logits_of(4, seed=2).to(DEVICE)
    logits[0, 3], logits[2], logits[3, -1] = math.nan, -math.inf, math.inf
    found = sampler().sample(logits, [sequence(f"r{at}", **params) for at in range(4)])
    assert [isinstance(token, StepFailedError) for token in found] == [True, False, True, True]


def test_no_rows_are_no_launch() -> None:
    assert sampler().sample(torch.zeros(0, VOCAB, device=DEVICE), []) == []
    with pytest.raises(ValueError, match=r"logits have shape \(1, 96\)"):
        sampler().sample(torch.zeros(1, 96, device=DEVICE), [sequence()])


def drawn(row: torch.Tensor, draws: int, by: Sampler, **params: Any) -> list[int]:
    rows = [sequence(f"r{at}", output=[1] * (at % 3), **params) for at in range(draws)]
    device = by.device
    tokens = by.sample(row.expand(draws, len(row)).contiguous().to(device), rows)
    return [token.id for token in tokens if isinstance(token, Token)]


@pytest.mark.parametrize(
    ("params", "draws"),
    [
        pytest.param({"top_k": 4, "min_p": 0.01}, 60, marks=pytest.mark.slow),
        pytest.param({}, 300, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8}, 90, marks=pytest.mark.slow),
        pytest.param({"top_k": 9, "top_p": 0.9, "min_p": 0.05}, 90, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_requests_draw_from_the_distribution_that_the_other_sampler_draws_from(
    params: dict[str, Any], draws: int
) -> None:
    """χ² against the exact distribution for both, with the request ids as seeds; neither may be below 0.001."""
    row = logits_of(1, seed=5, vocab=13, scale=1.5)[0]
    made = sequence(temperature=0.9, **params).request.params
    expected = reference(row.tolist(), set(), made) * draws
    for by in (sampler(13), Sampler(13)):
        counts = np.bincount(drawn(row, draws, by, temperature=0.9, **params), minlength=13)
        assert counts.sum() == draws and not counts[expected == 0].any()
        likely = expected >= 5
        seen, wanted = counts[likely].astype(float), expected[likely]
        if (rest := draws - wanted.sum()) > 1e-6:
            seen, wanted = np.append(seen, draws - seen.sum()), np.append(wanted, rest)
        assert len(seen) > 2 and stats.chisquare(seen, wanted).pvalue > 0.001


def test_a_request_draws_the_same_whatever_is_beside_it() -> None:
    row = logits_of(1, seed=6, scale=0.3)
    hot: dict[str, Any] = {"temperature": 3.0}
    alone = sampler().sample(row.to(DEVICE), [sequence("x", output=[1, 2], **hot)])[0]
    rows = [sequence(name, output=[1, 2], **hot) for name in ("a", "x", "b")]
    beside = sampler().sample(row.expand(3, VOCAB).contiguous().to(DEVICE), rows)
    assert isinstance(alone, Token) and isinstance(beside[1], Token) and alone.id == beside[1].id
    seeds = [sampler().seed_of(sequence("x", seed=-3)), sampler().seed_of(sequence("y", seed=-3))]
    assert seeds == [-3, -3]
    assert sampler().seed_of(sequence("x")) != sampler().seed_of(sequence("y"))
    assert sampler().seed_of(sequence("x")) != sampler(seed=1).seed_of(sequence("x"))
