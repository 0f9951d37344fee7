"""Independent random streams from one seed: what one part of a workload draws never shifts what another draws."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCK = 1024
"""Draws are made in blocks of this size, whatever the reader takes: NumPy is slow one number at a time."""


class Stream(IntEnum):
    """One name for each independent stream. Numbers are part of what a seed means: never renumber."""

    TIMES = 1
    LENGTHS = 2
    SEGMENTS = 3
    SESSIONS = 4
    JITTER = 6


def generator(seed: tuple[int, ...], stream: Stream, *keys: int) -> np.random.Generator:
    """A generator of its own for this seed, stream and keys (PCG64, seeded through SeedSequence)."""
    return np.random.default_rng(np.random.SeedSequence([*seed, int(stream), *keys]))


def segment_seeds(seed: tuple[int, ...]) -> Iterator[int]:
    """64-bit segment seeds without end, for prompts that share nothing (a clash among 10⁶: 3·10⁻⁸)."""
    rng = generator(seed, Stream.SEGMENTS)
    while True:
        yield from rng.integers(0, 2**63, size=BLOCK).tolist()
