"""What a workload is: requests with times and lengths, made from a seed, scaled to the machine.

A :class:`Source` makes requests at their natural rate and size. A :class:`Workload` is a source with a name and four
transforms (time, length, two caps), so that presets, synthetic mixes and replayed traces are scaled by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np

from runtime.errors import InputError

MOST_TOKENS = 10**9
"""In a prompt or an answer, before scaling."""


class Arrival(NamedTuple):
    """One request to send ``time`` seconds after the start.

    ``segments`` are (segment seed, length) pieces of the prompt, their lengths adding up to ``prompt_tokens``. A segment
    seed has the same tokens wherever it appears (a shorter piece has the beginning of a longer one), so prompts that
    begin with the same segments really share a prefix.
    """

    time: float
    prompt_tokens: int
    output_tokens: int
    segments: tuple[tuple[int, int], ...]
    request_class: str = "default"
    tenant: str = ""


class Source(Protocol):
    """Makes requests, in order of time, at natural rate and size."""

    @property
    def rate(self) -> float:
        """Mean requests/s in the long run."""
        ...

    @property
    def finite(self) -> bool:
        """Whether it runs out (a trace) or goes on for ever."""
        ...

    def at_rate(self, rate: float) -> Source:
        """The same requests at ``rate`` requests/s."""
        ...

    def generate(self, seed: tuple[int, ...]) -> Iterator[Arrival]: ...


@dataclass(frozen=True)
class Workload:
    """A named source of requests, scaled. Equal seeds give equal requests; lengths do not depend on rate or time scale.

    ``time_scale`` stretches time (2: half the rate); ``length_scale`` multiplies prompt and output lengths (rounded, at
    least 1). The caps, in tokens, come after scaling: a longer prompt keeps its beginning. ``limit`` bounds the number
    of requests; ``seed`` is mixed with the one given to :meth:`arrivals`. ``acceptance``: the probability that a drafted token of
    its answers is right, which simulations go by; at 0 none is drafted there. Of a mix, its parts say that.
    """

    name: str
    description: str
    source: Source
    time_scale: float = 1.0
    length_scale: float = 1.0
    cap_prompt: int | None = None
    cap_output: int | None = None
    limit: int | None = None
    seed: int = 0
    acceptance: float = 0.0

    def __post_init__(self) -> None:
        for field in ("time_scale", "length_scale"):
            positive(field, getattr(self, field))
        for field in ("cap_prompt", "cap_output", "limit"):
            if getattr(self, field) is not None:
                whole(field, getattr(self, field), 1)
        whole("seed", self.seed, 0)
        share("acceptance", self.acceptance)

    @property
    def rate(self) -> float:
        """Mean requests/s in the long run, after scaling."""
        return self.source.rate / self.time_scale

    @property
    def finite(self) -> bool:
        return self.source.finite or self.limit is not None

    @property
    def acceptances(self) -> float | Mapping[str, float]:
        """``acceptance``, or that of each class where the workload is a mix."""
        found: Mapping[str, float] | None = getattr(self.source, "acceptances", None)
        return self.acceptance if found is None else found

    @property
    def replayed(self) -> float:
        """Share of the requests that a trace brings. They are no draw: another seed changes only their token values and, of a
        trace with bins, their places inside bins."""
        found: float = getattr(self.source, "replayed", 0.0)
        return found

    @property
    def may_draft(self) -> bool:
        """Whether some drafted tokens are right."""
        found = self.acceptances
        return any(found.values()) if isinstance(found, Mapping) else found > 0

    def arrivals(self, seed: int, *, duration: float | None = None, limit: int | None = None) -> Iterator[Arrival]:
        """Requests in order of time, those with ``time < duration`` and at most ``limit`` of them.

        Raises ValueError, at the call, when the workload never ends and neither bound is given.
        """
        whole("seed", seed, 0)
        if duration is not None:
            positive("duration", duration)
        if limit is not None:
            whole("limit", limit, 0)
        if duration is None and limit is None and not self.finite:
            raise ValueError(f"{self.name} never ends; give duration (s) or limit (requests)")
        bounds = [n for n in (limit, self.limit) if n is not None]
        return self._generate(seed, math.inf if duration is None else duration, min(bounds, default=None))

    def alike_under(self, seed: int, other: int, *, limit: int) -> bool:
        """Whether the first ``limit`` requests come at the same times with the same lengths, as those of a trace without bins."""
        pairs = zip_longest(self.arrivals(seed, limit=limit), self.arrivals(other, limit=limit))
        return all(a is not None and b is not None and a._replace(segments=b.segments) == b for a, b in pairs)

    def repeated(self, *, limit: int) -> float:
        """Share of the requests that count once, however many seeds they were met under: those of a trace, and all where no seed
        changes the first ``limit``."""
        return self.replayed if self.replayed == 1 or not self.alike_under(0, 1, limit=limit) else 1.0

    def _generate(self, seed: int, duration: float, limit: int | None) -> Iterator[Arrival]:
        if limit == 0:
            return
        for sent, arrival in enumerate(self.source.generate((self.seed, seed)), start=1):
            scaled = self._scale(arrival)
            if scaled.time >= duration:
                return
            yield scaled
            if sent == limit:
                return

    def _scale(self, arrival: Arrival) -> Arrival:
        segments = scale_segments(arrival.segments, self.length_scale, self.cap_prompt)
        output = scale_length(arrival.output_tokens, self.length_scale)
        return Arrival(
            arrival.time * self.time_scale,
            sum([length for _, length in segments]),
            output if self.cap_output is None else min(output, self.cap_output),
            segments,
            arrival.request_class,
            arrival.tenant,
        )

    def scaled(
        self, *, time: float = 1.0, length: float = 1.0, cap_prompt: int | None = None, cap_output: int | None = None
    ) -> Workload:
        """The same requests, time stretched and lengths multiplied; scales multiply up, of two caps the smaller holds."""
        positive("time", time)
        positive("length", length)
        return replace(
            self,
            time_scale=self.time_scale * time,
            length_scale=self.length_scale * length,
            cap_prompt=_smaller(self.cap_prompt, cap_prompt),
            cap_output=_smaller(self.cap_output, cap_output),
        )

    def at_rate(self, requests_per_s: float) -> Workload:
        """The same requests, the same lengths, at another mean rate."""
        positive("rate", requests_per_s)
        return replace(self, source=self.source.at_rate(requests_per_s), time_scale=1.0)


def scale_length(tokens: int, scale: float) -> int:
    """``tokens · scale``, rounded, at least 1."""
    return max(1, round(tokens * scale))


def scale_segments(segments: tuple[tuple[int, int], ...], scale: float, cap: int | None) -> tuple[tuple[int, int], ...]:
    """Segments with their *ends* scaled and rounded, cut at ``cap`` tokens, empty ones dropped.

    Ends, not lengths: then prompts that shared a prefix still share it, and a total is rounded once.
    """
    total = scale_length(sum(length for _, length in segments), scale)
    total = total if cap is None else min(total, cap)
    scaled: list[tuple[int, int]] = []
    end = done = 0
    for seed, length in segments:
        end += length
        new = min(round(end * scale), total)
        if new > done:
            scaled.append((seed, new - done))
            done = new
    if not scaled:  # everything rounded to nothing: one token of the first
        scaled.append((segments[0][0], 1))
    return tuple(scaled)


def prompt_ids(arrival: Arrival, vocab_size: int, seed: int = 0, *, reserved: int = 0) -> list[int]:
    """The prompt's token ids, uniform on [``reserved``, ``vocab_size``): equal segments, vocabularies and seeds give equal ids.

    ``reserved`` keeps clear of special tokens at the low end of a vocabulary. Philox (Salmon et al., SC 2011) is keyed by
    (seed, segment seed): NumPy guarantees that its raw stream never changes, so recorded runs stay repeatable.
    """
    whole("vocab_size", vocab_size, 1)
    whole("reserved", reserved, 0)
    if reserved >= vocab_size:
        raise ValueError(f"reserved is {reserved}; it must be below vocab_size, {vocab_size}")
    span = np.uint64(vocab_size - reserved)
    ids: list[int] = []
    for segment, length in arrival.segments:
        key = np.array([seed & _MASK64, segment & _MASK64], dtype=np.uint64)
        raw = np.random.Philox(key=key).random_raw(length)
        ids.extend((raw % span + np.uint64(reserved)).tolist())
    return ids


def positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{name} is {value!r}; it must be a finite number above 0")


def share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InputError(f"{name} is {value!r}; it must be a number from 0 to 1")


def whole(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InputError(f"{name} is {value!r}; it must be a whole number, at least {low}")


def _smaller(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


_MASK64 = 2**64 - 1
