from __future__ import annotations

from statistics import mean

import pytest

from benchmarks.engine import KINDS, OUTPUT, Peer, alternated, cases, make_prompts, measure, ratio, said


@pytest.mark.slow
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


def test_the_fast_dtype_has_every_kind_of_prompts_first() -> None:
    assert cases("bfloat16")[:3] == [("bfloat16", 1, kind) for kind in KINDS]
    assert cases("bfloat16")[3:] == [("float32", 1, "short"), ("bfloat16", 2, "short"), ("float32", 2, "short")]
    assert cases("float32") == [*(("float32", 1, kind) for kind in KINDS), ("float32", 2, "short")]


def test_peers_take_turns_in_both_orders() -> None:
    order: list[str] = []

    def peer(name: str) -> Peer:
        def run(prompts: object) -> int:
            order.append(name)
            return 2 * OUTPUT

        return Peer(name, "as it is", run)

    found = alternated([peer("a"), peer("b"), peer("c")], [[1], [2]], 3)
    assert "".join(order) == "abccbaabc"
    assert [one["name"] for one in found] == ["a", "b", "c"] and all(len(one["rates"]) == 3 for one in found)
    rows = list(said([{**found[0], "rates": [8.0, 6.0]}, {**found[1], "rates": [4.0, 2.0]}], "here"))
    assert "ours is" not in rows[0] and "ours is 2.50 times that" in rows[1]
