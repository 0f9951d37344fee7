"""Collation without padding: sequences end to end, with offsets that say where each begins.

:func:`pack` is for models that take offsets (variable-length attention): no filler at all. :func:`pack_rows` is for those
that take rows of a fixed width and a segment id for each place, such as a compiled graph: first-fit decreasing, which needs at
most 11/9 of the rows of the best packing, and 2/3 of one more (Johnson 1973; Dósa 2007).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Packed(NamedTuple):
    """Sequence i is ``values[offsets[i]:offsets[i + 1]]``; ``positions`` count from 0 in each."""

    values: NDArray[Any]
    offsets: NDArray[np.int32]
    positions: NDArray[np.int64]

    @property
    def longest(self) -> int:
        return int(np.diff(self.offsets).max())

    @property
    def segments(self) -> NDArray[np.int64]:
        """Which sequence each place belongs to."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def rows(self, values: Any = None) -> list[Any]:
        """The sequences again, or what belongs to each of ``values``, which a model has made place by place."""
        source = self.values if values is None else values
        bounds = self.offsets.tolist()
        return [source[a:b] for a, b in pairwise(bounds)]


def pack(sequences: Sequence[Any], *, dtype: Any = None) -> Packed:
    """``sequences`` (lists of numbers, or arrays that differ in their first axis only) end to end."""
    if not sequences:
        raise ValueError("sequences is empty; there is nothing to pack")
    arrays = [np.asarray(sequence, dtype) for sequence in sequences]
    if min(array.ndim for array in arrays) < 1 or len({array.shape[1:] for array in arrays}) > 1:
        raise ValueError("sequences must be lists or arrays that differ in their first axis only")
    lengths = [len(array) for array in arrays]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Packed(np.concatenate(arrays), offsets, np.concatenate([np.arange(n) for n in lengths]))


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``lengths`` for each row of ``capacity`` places. Raises ``ValueError`` for one that fits in no row."""
    for index, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(f"lengths[{index}] is {length}; a row holds between 0 and {capacity}")
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        row = next((r for r, left in enumerate(free) if left >= length), None)
        if row is None:
            rows.append([index])
            free.append(capacity - length)
        else:
            rows[row].append(index)
            free[row] -= length
    return rows
