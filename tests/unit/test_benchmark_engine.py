from __future__ import annotations

from statistics import mean

import pytest

from benchmarks.engine import OUTPUT, Peer, make_prompts, measure, ratio


@pytest.mark.parametrize(
    ("kind", "low", "high", "average"), [("short", 8, 768, 132), ("even", 8, 256, 132), ("long", 256, 768, 512)]
)
def test_prompts_have_the_lengths_that_are_claimed(kind: str, low: int, high: int, average: int) -> None:
    given = make_prompts(3000, kind, 100)
    lengths = [len(p) for p in given]
    assert low <= min(lengths) <= max(lengths) <= high
    assert mean(lengths) == pytest.approx(average, rel=0.05)
    assert given == make_prompts(3000, kind, 100)  # everyone gets the same ones
    assert 0 <= min(map(min, given)) <= max(map(max, given)) < 100


def test_a_peer_that_puts_out_too_little_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match=f"lazy put out 1 tokens, not {2 * OUTPUT}"):
        measure(Peer("lazy", "", lambda prompts: 1), [[1], [2]])


def test_ratios_are_taken_within_a_round() -> None:
    peers = [{"rates": [100.0, 200.0, 900.0]}, {"rates": [50.0, 100.0, 300.0]}]
    assert ratio(peers, 1) == 2.0
