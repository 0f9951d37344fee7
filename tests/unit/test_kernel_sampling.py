"""Sampling kernels against the definitions in float64, one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from runtime.request import SamplingParams
from tests.tiers import slow_but_for
from tests.unit.kernels import DEVICE, randn
from tests.unit.sampled_rows import reference

from runtime.torch_backend.cuda import sampling  # isort: skip

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCAB = 97
LARGE = 4096 + 4096 // 2 + 3
"""More than one block of the row, the last one not full."""


def philox(seed: int, position: int) -> float:
    """The draw of Philox-4x32-10 as in Salmon et al. 2011: key from the seed, counter from the position; the first word's 31
    bits."""
    key, counter = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], [position & 0xFFFFFFFF, position >> 32, 0, 0]
    for _ in range(10):
        low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            high >> 32 ^ counter[1] ^ key[0],
            high & 0xFFFFFFFF,
            low >> 32 ^ counter[3] ^ key[1],
            low & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    word = counter[0] - (1 << 32 if counter[0] >> 31 else 0)
    return (-word - 1 if word < 0 else word) * 4.6566127342e-10


def sampled(
    logits: Tensor, params: SamplingParams | list[SamplingParams], seeds: list[int], positions: list[int]
) -> list[int]:
    rows = len(logits)
    each = params if isinstance(params, list) else [params] * rows

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    out = torch.full((rows,), -7, dtype=torch.int64, device=DEVICE)
    found = sampling.sample(
        logits, column([p.temperature for p in each], torch.float32), column([p.top_k for p in each], torch.int32),
        column([p.top_p for p in each], torch.float32), column([p.min_p for p in each], torch.float32),
        column(seeds, torch.int64), column(positions, torch.int64), out,
    )  # fmt: skip
    assert found is out
    return [int(token) for token in found.tolist()]


def inverted(probabilities: np.ndarray, uniform: float) -> tuple[int, float]:
    """The token a draw falls on, and how far it is from the nearest edge of that token's part of [0, 1)."""
    cumulative = np.cumsum(probabilities)
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    edges = [cumulative[token] - uniform, uniform - (cumulative[token - 1] if token else -1.0)]
    return token, float(min(edges))


PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=5.0),
    "top-k": SamplingParams(temperature=1.0, top_k=5),
    "top-1": SamplingParams(temperature=2.0, top_k=1),
    "all": SamplingParams(temperature=1.0, top_k=10**6),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7),
    "tiny p": SamplingParams(temperature=1.0, top_p=1e-6),
    "min-p": SamplingParams(temperature=1.0, min_p=0.1),
    "min-p 1": SamplingParams(temperature=1.0, min_p=1.0),
    "k and p": SamplingParams(temperature=1.5, top_k=20, top_p=0.6),
    "k, p and min-p": SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, VOCAB, LARGE])
def test_greedy_takes_the_first_of_the_likeliest(dtype: torch.dtype, vocab: int) -> None:
    logits = randn(4, vocab, seed=vocab, dtype=dtype)
    logits[1, vocab // 2] = logits[1, -1] = 9.0
    logits[2] = -3.0
    logits[3, 0], logits[3, -1] = -0.0, 0.0
    expected = logits.float().cpu().numpy().argmax(-1).tolist()
    for out in (torch.full((4,), -7, dtype=torch.int32, device=DEVICE), None):
        assert sampling.greedy(logits, out).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_cannot_be_sampled(dtype: torch.dtype) -> None:
    logits = randn(6, LARGE, seed=3, dtype=dtype)
    logits[0, -1], logits[2, 5], logits[3] = math.nan, math.inf, -math.inf
    logits[4, :-1] = -math.inf
    expected = [-1, None, -1, -1, LARGE - 1, None]
    for found in (sampling.greedy(logits).tolist(), sampled(logits, PARAMS["min-p"], [1] * 6, [0] * 6)):
        assert [a if b is not None else None for a, b in zip(found, expected, strict=True)] == expected
        assert all(0 <= token < LARGE for token in (found[1], found[5]))


def test_temperature_zero_is_greedy_beside_others() -> None:
    logits = randn(3, VOCAB, seed=4)
    found = sampled(logits, [SamplingParams(), PARAMS["hot"], SamplingParams()], [1, 2, 3], [0, 0, 0])
    best = logits.argmax(-1).tolist()
    assert [found[0], found[2]] == [best[0], best[2]]


@pytest.mark.parametrize(
    ("dtype", "name", "rows"),
    [
        *((torch.bfloat16, name, 3) for name in PARAMS),
        *((torch.float32, name, 2) for name in ("hot", "k, p and min-p")),
        (torch.float16, "k, p and min-p", 3),
        *(pytest.param(dtype, name, 5, marks=pytest.mark.slow) for dtype in DTYPES for name in PARAMS),
    ],
    ids=str,
)
def test_a_draw_falls_where_the_distribution_says(dtype: torch.dtype, name: str, rows: int) -> None:
    params = PARAMS[name]
    logits = (3 * randn(rows, VOCAB, seed=5)).to(dtype)  # in 16 bits many tie
    seeds = [-1, 2**62, 0, *range(100, 100 + rows)][:rows]
    positions = [1, 2**33, *range(rows)][:rows]
    found = sampled(logits, params, seeds, positions)
    decided = 0
    for row in range(rows):
        probabilities = _with_ties(logits[row].double().cpu().numpy(), params)
        token, margin = inverted(probabilities, philox(seeds[row], positions[row]))
        assert probabilities[found[row]] > 0  # never a token that was dropped
        if margin > 1e-5:  # float32 sums may put an edge elsewhere
            assert found[row] == token
            decided += 1
    assert decided >= rows - 1


def _with_ties(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """:func:`reference`, and whoever ties with the last token that it keeps."""
    kept = reference(logits, set(), params)
    lowest = logits[kept > 0].min()
    weights = np.where(logits >= lowest, np.exp((logits - logits.max()) / params.temperature), 0.0)
    found: np.ndarray = weights / weights.sum()
    return found


def test_a_draw_in_a_later_block() -> None:
    logits = torch.full((2, LARGE), -20.0, device=DEVICE)
    logits[0, -1], logits[1, 4096] = 5.0, 5.0
    assert sampled(logits, PARAMS["top-p"], [1, 2], [0, 0]) == [LARGE - 1, 4096]
    logits[:, :] = 0.0  # uniform: the token is the draw
    for row, token in enumerate(sampled(logits, PARAMS["plain"], [11, 12], [3, 4])):
        assert abs(token - philox([11, 12][row], [3, 4][row]) * LARGE) <= 1.01


def test_extreme_rows() -> None:
    """A temperature next to zero, logits that leave one token, and masked ones that top-k would have to count."""
    logits = randn(3, VOCAB, seed=6)
    logits[1, 7] = 3e4
    logits[2, :-3] = -math.inf
    params = [
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=1.0, top_k=50),
    ]
    found = sampled(logits, params, [1, 2, 3], [0, 0, 0])
    assert found[:2] == [int(logits[0].argmax()), 7]
    assert found[2] >= VOCAB - 3


@pytest.mark.parametrize(
    "params",
    slow_but_for((PARAMS["tiny p"],), (SamplingParams(temperature=1.0, min_p=1.0), PARAMS["top-1"], PARAMS["tiny p"])),
    ids=str,
)
def test_all_that_tie_at_the_edge_are_kept(params: SamplingParams) -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0, 1.9, -0.0, 0.0]], device=DEVICE).expand(4, 7).contiguous()
    assert set(sampled(logits, params, [*range(4)], [0] * 4)) == {1, 3}
    logits = torch.tensor([[-3.0, -0.0, -2.0, 0.0]], device=DEVICE).expand(4, 4).contiguous()
    assert set(sampled(logits, params, [*range(4)], [0] * 4)) == {1, 3}


def test_draws_depend_on_seed_and_position_alone() -> None:
    logits = randn(1, VOCAB, seed=7).expand(5, VOCAB).contiguous()
    hot = SamplingParams(temperature=20.0)
    alone = sampled(logits[:1], hot, [5], [9])
    assert sampled(logits, hot, [1, 5, 5, 8, 5], [9, 9, 10, 9, 9])[1::3] == [*alone, *alone]
    assert len(set(sampled(logits, hot, [5] * 5, [*range(5)]))) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "along", "draws"),
    [
        ("plain", "seeds", 400),
        ("plain", "positions", 400),
        ("k, p and min-p", "seeds", 300),
    ],
)
def test_draws_are_distributed_as_they_should_be(name: str, along: str, draws: int) -> None:
    """χ² over the draws of one row, whose probability under the exact distribution must not be below 0.001.

    Over neighbouring seeds at one position, as requests have them, and over the positions of one seed. Both are fixed.
    """
    params = PARAMS[name]
    row = (1.5 * randn(1, 13, seed=8)).bfloat16()
    probabilities = reference(row[0].tolist(), set(), params)
    many, one = [*range(draws)], [12] * draws
    tokens = sampled(row.expand(draws, 13).contiguous(), params, *((many, one) if along == "seeds" else (one, many)))
    counts, likely = np.bincount(tokens, minlength=13), probabilities * draws >= 5
    assert counts[probabilities == 0].sum() == 0
    seen, expected = counts[likely].astype(float), probabilities[likely] * draws
    if (rest := draws - expected.sum()) > 1e-6:  # the unlikely ones together
        seen, expected = np.append(seen, draws - seen.sum()), np.append(expected, rest)
    assert len(seen) > 3
    assert stats.chisquare(seen, expected).pvalue > 0.001


def test_what_does_not_fit_is_named() -> None:
    logits = randn(2, VOCAB)
    ok = [
        torch.ones(2, device=DEVICE).to(dtype)
        for dtype in (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
    ]
    with pytest.raises(
        ValueError, match=r"top_k is torch.int64 of shape \(2,\); it must be torch.int32, a contiguous \[2\]"
    ):
        sampling.sample(logits, ok[0], ok[1].long(), *ok[2:])
    with pytest.raises(ValueError, match=r"seed is torch.int64 of shape \(1,\)"):
        sampling.sample(logits, *ok[:4], ok[4][:1], ok[5])
    with pytest.raises(ValueError, match="logits have shape"):
        sampling.greedy(logits[0])
    with pytest.raises(ValueError, match=r"logits are torch.float64"):
        sampling.greedy(logits.double())
    with pytest.raises(ValueError, match=r"out is torch.float32"):
        sampling.greedy(logits, torch.zeros(2, device=DEVICE))
    assert sampling.greedy(logits[:0]).shape == (0,)
    assert sampling.sample(logits[:0], *(x[:0] for x in ok)).shape == (0,)
