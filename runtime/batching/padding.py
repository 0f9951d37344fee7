"""Padded collation: sequences of different lengths as one rectangle, and how much of it is filler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Padded(NamedTuple):
    """``values[i, :lengths[i]]`` is sequence i, the rest filler; ``mask`` is True where there are values."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    @property
    def mask(self) -> NDArray[np.bool_]:
        return np.arange(self.values.shape[1]) < self.lengths[:, None]

    @property
    def efficiency(self) -> float:
        """Share of the rectangle that is no filler."""
        return efficiency(self.lengths.tolist(), self.values.shape[1])

    def rows(self) -> list[NDArray[Any]]:
        """The sequences again; also of what a model made of ``values``, by ``padded._replace(values=output)``."""
        return [row[:length] for row, length in zip(self.values, self.lengths.tolist(), strict=True)]


def pad(sequences: Sequence[Any], *, value: float = 0, multiple_of: int = 1, dtype: Any = None) -> Padded:
    """``sequences`` (lists of numbers, or arrays whose first axis is the length) side by side, filled with ``value``.

    The width is the longest length, rounded up to ``multiple_of``: kernels and compiled graphs like few widths.
    """
    if not sequences:
        raise ValueError("sequences is empty; there is nothing to pad")
    if multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of!r}; it must be at least 1")
    arrays = [np.asarray(sequence, dtype) for sequence in sequences]
    shapes = {array.shape[1:] for array in arrays}
    if min(array.ndim for array in arrays) < 1 or len(shapes) > 1:
        raise ValueError("sequences must be lists or arrays that differ in their first axis only")
    lengths = np.array([len(array) for array in arrays], np.int64)
    width = -(-max(1, int(lengths.max())) // multiple_of) * multiple_of
    filled = np.full((len(arrays), width, *shapes.pop()), value, np.result_type(*arrays))
    for row, array in zip(filled, arrays, strict=True):
        row[: len(array)] = array
    return Padded(filled, lengths)


def efficiency(lengths: Sequence[int], width: int | None = None) -> float:
    """Share of a padded call that is no filler; 1 of nothing."""
    area = len(lengths) * (max(lengths, default=0) if width is None else width)
    return sum(lengths) / area if area else 1.0
