"""Padding and packing: nothing is lost, and the figures are right."""

from __future__ import annotations

import random

import numpy as np
import pytest

from runtime.batching.packing import pack, pack_rows
from runtime.batching.padding import efficiency, pad


def test_padding_fills_to_the_longest_and_gives_everything_back() -> None:
    padded = pad([[1, 2, 3], [4], [5, 6]], value=-1)
    assert padded.values.tolist() == [[1, 2, 3], [4, -1, -1], [5, 6, -1]]
    assert padded.mask.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert [row.tolist() for row in padded.rows()] == [[1, 2, 3], [4], [5, 6]]
    assert padded.efficiency == pytest.approx(6 / 9)
    assert [row.tolist() for row in padded._replace(values=padded.values * 10).rows()] == [[10, 20, 30], [40], [50, 60]]


def test_widths_are_rounded_up_and_vectors_padded_along_their_length() -> None:
    padded = pad([np.ones((3, 2)), np.ones((5, 2))], multiple_of=8)
    assert padded.values.shape == (2, 8, 2) and padded.values.sum() == 16
    assert padded.efficiency == pytest.approx(8 / 16)
    assert pad([[], []]).values.shape == (2, 1)


def test_efficiency_counts_area() -> None:
    assert efficiency([]) == 1.0 and efficiency([4, 4]) == 1.0 and efficiency([1, 3]) == pytest.approx(4 / 6)


def test_packing_puts_sequences_end_to_end() -> None:
    packed = pack([[1, 2, 3], [4], [5, 6]])
    assert packed.values.tolist() == [1, 2, 3, 4, 5, 6]
    assert packed.offsets.tolist() == [0, 3, 4, 6] and packed.longest == 3
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.segments.tolist() == [0, 0, 0, 1, 2, 2]
    assert [row.tolist() for row in packed.rows()] == [[1, 2, 3], [4], [5, 6]]
    assert [row.tolist() for row in packed.rows(packed.values * 2)] == [[2, 4, 6], [8], [10, 12]]


@pytest.mark.parametrize("seed", range(5))
def test_rows_hold_everything_once_and_waste_little(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 500) for _ in range(400)]
    rows = pack_rows(lengths, 512)
    assert sorted(index for row in rows for index in row) == list(range(400))
    assert max(sum(lengths[index] for index in row) for row in rows) <= 512
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 512) + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pad([]), "sequences is empty"),
        (lambda: pad([[1]], multiple_of=0), "multiple_of is 0"),
        (lambda: pad([np.ones((2, 3)), np.ones((2, 4))]), "differ in their first axis only"),
        (lambda: pack([]), "sequences is empty"),
        (lambda: pack([1, 2]), "differ in their first axis only"),
        (lambda: pack_rows([3, 9], 8), r"lengths\[1\] is 9; a row holds between 0 and 8"),
    ],
)
def test_wrong_values_are_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
