"""A source made of an arrival process and a length model: prompts that share nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotune.workload.lengths import LengthModel, pairs
from autotune.workload.processes import ArrivalProcess, times
from autotune.workload.randomness import Stream, generator, segment_seeds
from autotune.workload.spec import Arrival


@dataclass(frozen=True)
class Synthetic:
    """Independent requests: times from ``process``, lengths from ``lengths``, each with random streams of its own."""

    process: ArrivalProcess
    lengths: LengthModel
    request_class: str = "default"

    @property
    def rate(self) -> float:
        return self.process.rate

    @property
    def finite(self) -> bool:
        return False

    def at_rate(self, rate: float) -> Synthetic:
        return replace(self, process=self.process.at_rate(rate))

    def generate(self, seed: tuple[int, ...]) -> Iterator[Arrival]:
        when = times(self.process, generator(seed, Stream.TIMES))
        how_long = pairs(self.lengths, generator(seed, Stream.LENGTHS))
        for time, (prompt, output), segment in zip(when, how_long, segment_seeds(seed), strict=False):
            yield Arrival(time, prompt, output, ((segment, prompt),), self.request_class)
