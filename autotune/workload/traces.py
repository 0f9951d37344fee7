"""Real traces, replayed: what was read, as a source of requests.

A trace is as random as its file. The seed chooses only token values and, in binned traces, the place inside a bin.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from autotune.workload.randomness import Stream, generator, segment_seeds
from autotune.workload.spec import Arrival, positive
from runtime.errors import InputError


class TraceRow(NamedTuple):
    """One request of a trace. ``time`` is s from any origin; ``blocks`` (seed, length) are pieces other rows may share."""

    time: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[tuple[int, int], ...] = ()
    request_class: str = "default"
    tenant: str = ""


@dataclass(frozen=True)
class Trace:
    """Rows in order of time, the first one sent at 0 s.

    ``bin_s`` says that times were rounded down to bins about that wide: requests of one time are spread evenly at random
    over the bin, or up to the next time that occurs, in their order. 0 leaves times alone. An output of 0 tokens is
    replayed as 1: an engine that runs a prompt makes at least one token.
    """

    path: str
    rows: tuple[TraceRow, ...] = field(repr=False)
    bin_s: float = 0.0
    time_factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.rows:
            raise InputError(f"{self.path}: no requests; there must be at least one")
        if not math.isfinite(self.bin_s) or self.bin_s < 0:
            raise InputError(f"bin is {self.bin_s!r}; it must be a number of seconds, 0 for none")

    @property
    def rate(self) -> float:
        """Requests/s over the whole trace (inf when all came at once)."""
        span = (self.rows[-1].time - self.rows[0].time + self.bin_s) * self.time_factor
        count = len(self.rows) if self.bin_s else len(self.rows) - 1
        return count / span if span > 0 else math.inf

    @property
    def finite(self) -> bool:
        return True

    @property
    def replayed(self) -> float:
        """All of its requests, wherever the seed places them inside their bins."""
        return 1.0

    def at_rate(self, rate: float) -> Trace:
        positive("rate", rate)
        if math.isinf(self.rate):
            raise InputError(
                f"{self.path}: all requests have one time; no rate can be given to them (bin=1 spreads them over a second)"
            )
        return replace(self, time_factor=self.time_factor * self.rate / rate)

    def generate(self, seed: tuple[int, ...]) -> Iterator[Arrival]:
        fresh = segment_seeds(seed)
        for row, time in zip(self.rows, self._times(seed), strict=True):
            blocks = row.blocks or ((next(fresh), row.prompt_tokens),)
            output = max(1, row.output_tokens)
            when = time * self.time_factor
            yield Arrival(when, row.prompt_tokens, output, blocks, row.request_class, row.tenant)

    def _times(self, seed: tuple[int, ...]) -> Iterator[float]:
        first = self.rows[0].time
        if not self.bin_s:
            yield from (row.time - first for row in self.rows)
            return
        rng = generator(seed, Stream.JITTER)
        bins = [(time, len(list(rows))) for time, rows in groupby(self.rows, key=lambda row: row.time)]
        ends = [time for time, _ in bins[1:]] + [math.inf]
        for (time, count), following in zip(bins, ends, strict=True):
            width = min(self.bin_s, following - time)
            for place in sorted(rng.random(count).tolist()):
                yield time - first + place * width


def guess_bin(times: list[float]) -> float:
    """Width of the bins that ``times`` (ascending, s) were rounded to: the usual step between different times if half of
    the requests or more share theirs with another, else 0."""
    counts = Counter(times)
    different = sorted(counts)
    shared = sum(count for count in counts.values() if count > 1)
    if len(different) < 2 or 2 * shared < len(times):
        return 0.0
    return median(b - a for a, b in pairwise(different))


def window(path: str | Path, rows: list[TraceRow], start_s: float) -> list[TraceRow]:
    """Rows from ``start_s`` seconds after the first on. Raises InputError if the trace ends before."""
    kept = [row for row in rows if row.time - rows[0].time >= start_s]
    if not kept:
        raise InputError(f"{path}: start is {start_s:g} s; the trace is {rows[-1].time - rows[0].time:g} s long")
    return kept
