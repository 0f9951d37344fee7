"""Several workloads as one: each is a request class and has a share of the requests."""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autotune.workload.spec import Arrival, Workload, positive
from runtime.errors import InputError


@dataclass(frozen=True)
class Part:
    """Requests of class ``name``, and how large a ``share`` of all they are. The rate of ``workload`` is not looked at."""

    name: str
    share: float
    workload: Workload


@dataclass(frozen=True)
class Mix:
    """The requests of all ``parts``, ``rate`` a second together, in order of time. It ends with the first part that ends.

    A class's requests depend on its name and the seed alone: they are the same whatever else is in the mix, only closer together
    or further apart. Tenants are those of the parts.
    """

    parts: tuple[Part, ...]
    rate: float

    def __post_init__(self) -> None:
        positive("rate", self.rate)
        names = [part.name for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"class {name} is given twice")
        total = math.fsum(part.share for part in self.parts)
        if abs(total - 1) > 1e-3:
            raise InputError(f"the shares add up to {total:.4g}; they must add up to 1")

    @classmethod
    def of(cls, parts: tuple[Part, ...]) -> Mix:
        """At the rate at which the first part comes at its own."""
        return cls(parts, parts[0].workload.rate / parts[0].share)

    @property
    def finite(self) -> bool:
        return any(part.workload.finite for part in self.parts)

    @property
    def replayed(self) -> float:
        """Share of the requests that traces bring."""
        total = math.fsum(part.share for part in self.parts)
        return math.fsum(part.share * part.workload.replayed for part in self.parts) / total

    @property
    def acceptances(self) -> Mapping[str, float]:
        """By class, the probability that a drafted token is right."""
        return {part.name: part.workload.acceptance for part in self.parts}

    def at_rate(self, rate: float) -> Mix:
        return replace(self, rate=rate)

    def generate(self, seed: tuple[int, ...]) -> Iterator[Arrival]:
        coming = [(part, self._requests(part, seed)) for part in self.parts]
        ahead: list[tuple[float, int, Arrival]] = []  # the next of each part; its number breaks ties of time
        for number, (_, requests) in enumerate(coming):
            if (first := next(requests, None)) is None:
                return
            ahead.append((first.time, number, first))
        heapq.heapify(ahead)
        while True:
            _, number, arrival = ahead[0]
            part, requests = coming[number]
            yield arrival._replace(request_class=part.name)
            if (following := next(requests, None)) is None:
                return
            heapq.heapreplace(ahead, (following.time, number, following))

    def _requests(self, part: Part, seed: tuple[int, ...]) -> Iterator[Arrival]:
        own = np.random.SeedSequence([*seed, zlib.crc32(part.name.encode())]).generate_state(1, np.uint64)
        workload = part.workload.at_rate(self.rate * part.share)
        return workload.arrivals(int(own[0]), duration=None if workload.finite else _ENDLESS)


_ENDLESS = 1e15  # s
