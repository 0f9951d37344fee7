"""Where the cost of one more token may change."""

from __future__ import annotations

from autotune.cost.shape import candidates

UP_TO_2048 = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048]


def last_knot(tokens: list[int]) -> int:
    return max(shape.knots[-1] for shape in candidates(tokens))


def test_the_last_segment_goes_on_for_ever_and_must_be_seen_widely() -> None:
    """Three counts a few percent beyond 2,048 tell no slope: noise there would make a step of 8,192 tokens free."""
    assert last_knot([*UP_TO_2048, 2056, 2080, 2112]) == 1024
    assert last_knot([*UP_TO_2048, 2056, 2560, 3072]) == 2048
