"""What is drawn: by the distribution, independently, and again with the same seed."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from runtime.llm.plan import Token
from runtime.request import SamplingParams
from runtime.torch_backend.sampling import Sampler, gumbel
from tests.unit.sampled_rows import logits_of, reference, sample, sequence


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_k": 10},
        {"temperature": 2.0, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.3},
    ],
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    """Chi-square over 20,000 draws, and never a token of probability zero."""
    draws, vocab = 20_000, 30
    logits = logits_of(1, seed=11, vocab=vocab, scale=1.5)
    expected = reference(logits[0].tolist(), {1}, SamplingParams(**params))
    counts = np.zeros(vocab)
    sampler = Sampler(vocab)
    for block in range(0, draws, 500):
        rows = [sequence(f"draw {block + i}", **params) for i in range(500)]
        for token in sampler.sample(logits.expand(500, -1), rows):
            assert isinstance(token, Token)
            counts[token.id] += 1
    assert counts[expected == 0].sum() == 0
    common = expected * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common] * draws, expected[~common].sum() * draws)
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed, wanted).pvalue > 1e-4


@pytest.mark.slow
def test_draws_at_successive_positions_are_independent() -> None:
    """One seeded request, 4,000 tokens in a row from a fair eight-sided die: singles and pairs are uniform."""
    sampler, logits = Sampler(8), torch.zeros(1, 8)
    rolling = sequence(temperature=1.0, seed=5)
    for _ in range(4000):
        token = sampler.sample(logits, [rolling])[0]
        assert isinstance(token, Token)
        rolling.output.append(token.id)
    rolls = np.array(rolling.output)
    assert stats.chisquare(np.bincount(rolls, minlength=8)).pvalue > 1e-4
    assert stats.chisquare(np.bincount(rolls[:-1] * 8 + rolls[1:], minlength=64)).pvalue > 1e-4


def test_a_seed_repeats_whatever_the_request_is_called_and_the_sampler_was_seeded_with() -> None:
    logits = logits_of(1, vocab=5000)
    history = [3, 5]
    one = sample(logits, [sequence("a", output=history, temperature=3.0, seed=42)], seed=0)[0].id
    two = sample(logits, [sequence("b", output=history, temperature=3.0, seed=42)], seed=9)[0].id
    assert one == two
    others = {
        sample(logits, [sequence("a", output=[3] * n, temperature=3.0, seed=seed)])[0].id
        for n, seed in [(2, 43), (3, 42), (4, 42), (2, -42), (2, 2**63 - 1)]
    }
    assert len(others | {one}) >= 5


def test_without_a_seed_requests_differ_and_the_engines_seed_repeats() -> None:
    logits = logits_of(1, vocab=5000).expand(20, -1)
    rows = [sequence(f"r{i}", temperature=5.0) for i in range(20)]
    first = [token.id for token in sample(logits, rows, seed=1)]
    assert len(set(first)) > 10
    assert [token.id for token in sample(logits, rows, seed=1)] == first
    assert [token.id for token in sample(logits, rows, seed=2)] != first


@pytest.mark.parametrize(("scale", "top_p"), [(2.0, 1.0), (2.0, 0.9), (0.5, 0.9)])
def test_logits_that_are_rounded_otherwise_draw_the_same(scale: float, top_p: float) -> None:
    """As another batch rounds them, a hundred times coarser: 1,000 draws from 8,192 tokens."""
    vocab, count = 8192, 1000
    logits = logits_of(1, seed=3, vocab=vocab, scale=scale)
    noise = torch.empty(count, vocab).uniform_(-1e-4, 1e-4, generator=torch.Generator().manual_seed(1))
    rows = [sequence(f"draw {i}", temperature=1.0, top_p=top_p, seed=i) for i in range(count)]
    exact = sample(logits.expand(count, -1), rows)
    rounded = sample(logits + noise, rows)
    assert [token.id for token in exact] == [token.id for token in rounded]
    assert len({token.id for token in exact}) > 100


def test_noise_follows_the_gumbel_distribution() -> None:
    """Of one key all places, of one place all keys (Kolmogorov, Smirnov), and the tail; no two keys or places go together."""
    keys = [blake2b(str(number).encode(), digest_size=8).digest() for number in range(2000)]
    noise = np.stack([gumbel(key, 2000) for key in keys]).astype(np.float64)
    for sample_of in (noise[0], noise[:, 0], noise[:, -1], noise.ravel()[::7]):
        assert stats.kstest(sample_of, stats.gumbel_r.cdf).pvalue > 1e-4
    above = np.array([(noise > stats.gumbel_r.isf(p)).sum() / (p * noise.size) for p in (1e-2, 1e-3, 1e-4)])
    assert np.allclose(above, 1, atol=[0.02, 0.06, 0.2])
    uniform = stats.gumbel_r.cdf(noise)
    for table in (uniform[::20], uniform[:, ::20].T):
        apart = np.corrcoef(table) - np.eye(100)
        assert np.abs(apart).max() < 6 / 2000**0.5


def test_noise_is_never_so_low_that_a_token_left_out_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hash in 2²⁵ is rounded to 1."""
    monkeypatch.setattr("runtime.torch_backend.sampling._HASH", [(np.uint32(31), np.uint32(0), np.uint32(1))])
    key = bytes(4) + b"\xff\xff\xff\xff"
    noise = gumbel(key, 100)
    assert np.allclose(noise, -np.log(24 * np.log(2)), rtol=1e-3)
