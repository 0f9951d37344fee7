"""Multi-turn conversations behind common system prompts: work for a prefix cache.

Chosen, not fitted: no public trace tells text that is shared from text that is equally long.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from autotune.workload.lengths import Lognormal
from autotune.workload.randomness import Stream, generator
from autotune.workload.spec import Arrival, positive, whole

USER = Lognormal(median=50, sigma=0.9)  # tokens; mean 75
ANSWER = Lognormal(median=120, sigma=0.7)  # tokens; mean 153


@dataclass(frozen=True)
class Conversations:
    """Conversations begin at random (Poisson); each belongs to a tenant and goes on for a few turns.

    ``system_prompts``: tokens of each tenant's system prompt; tenant i is chosen with a chance proportional to 1/(i+1).
    Turns are geometric with mean near ``turns``, at most ``max_turns``. Between turns lies a think time, lognormal with
    mean ``think_s`` and coefficient of variation 1. ``user`` and ``answer`` are tokens of each message. A turn's prompt
    is system prompt, every message and answer so far, and the new message, as segments equal to those of the turn before.

    Open loop: a turn is due one think time after the turn before it was *due*, answered or not, and the answer in its
    prompt is made up, not the engine's own. Conversations begun before time 0 are under way, so the rate holds from the start.
    :meth:`at_rate` changes how often conversations begin; people do not think faster, and conversation k is the same
    at every rate.
    """

    rate: float = 1.0
    system_prompts: tuple[int, ...] = (256, 384, 512, 768)
    turns: float = 4.0
    max_turns: int = 12
    think_s: float = 15.0
    user: Lognormal = USER
    answer: Lognormal = ANSWER

    def __post_init__(self) -> None:
        positive("rate", self.rate)
        positive("think_s", self.think_s)
        whole("max_turns", self.max_turns, 1)
        positive("turns", self.turns)
        if self.turns < 1:
            raise ValueError(f"turns is {self.turns}; it must be at least 1")
        if not self.system_prompts:
            raise ValueError("system_prompts is empty; there must be at least one tenant")
        for tokens in self.system_prompts:
            whole("every system prompt", tokens, 1)

    @property
    def finite(self) -> bool:
        return False

    @property
    def mean_turns(self) -> float:
        """Of the geometric distribution cut at ``max_turns``: (1 − qᵐ) / (1 − q)."""
        go_on = 1 - 1 / self.turns
        return (1 - go_on**self.max_turns) / (1 - go_on)

    def at_rate(self, rate: float) -> Conversations:
        return replace(self, rate=rate)

    def generate(self, seed: tuple[int, ...]) -> Iterator[Arrival]:
        systems = generator(seed, Stream.SEGMENTS).integers(0, 2**63, size=len(self.system_prompts)).tolist()
        under_way: list[tuple[float, int, int, Arrival]] = []  # conversation and turn break ties of time
        for k, start in self._starts(seed):
            while under_way and under_way[0][0] <= start:
                yield heapq.heappop(under_way)[3]
            for turn, arrival in enumerate(self._conversation(seed, k, start, systems)):
                if arrival.time >= 0:
                    heapq.heappush(under_way, (arrival.time, k, turn, arrival))

    def _starts(self, seed: tuple[int, ...]) -> Iterator[tuple[int, float]]:
        """(number, time) of conversations: first those begun before 0 (numbers −1, −2, …), then from 0 on (0, 1, …)."""
        mean_gap = self.mean_turns / self.rate
        # Turns have a mean and a deviation of one think time: of max_turns of them all but a sliver are done by then.
        horizon = self.think_s * (self.max_turns + 6 * math.sqrt(self.max_turns)) if self.max_turns > 1 else 0.0
        rng, time = generator(seed, Stream.SESSIONS), 0.0
        past = []
        while (time := time - rng.exponential() * mean_gap) > -horizon:
            past.append(time)
        yield from ((-1 - i, start) for i, start in reversed(list(enumerate(past))))
        rng, time = generator(seed, Stream.TIMES), 0.0
        for k in count():
            time += rng.exponential() * mean_gap
            yield k, time

    def _conversation(self, seed: tuple[int, ...], k: int, start: float, systems: list[int]) -> Iterator[Arrival]:
        # Streams of their own for every conversation: how many are under way at 0 does not shift the others' draws.
        rng = generator(seed, Stream.LENGTHS, 2 * k if k >= 0 else -2 * k - 1)
        weights = 1 / np.arange(1, len(systems) + 1)
        tenant = int(rng.choice(len(systems), p=weights / weights.sum()))
        go_on = 1 - 1 / self.turns
        turns = 1
        while turns < self.max_turns and rng.random() < go_on:
            turns += 1
        users = _tokens(self.user, rng, turns)
        answers = _tokens(self.answer, rng, turns)
        thinks = Lognormal.of_mean_cv(self.think_s, 1.0).quantile(rng.random(turns)).tolist()
        pieces = rng.integers(0, 2**63, size=2 * turns).tolist()
        segments: tuple[tuple[int, int], ...] = ((systems[tenant], self.system_prompts[tenant]),)
        time = start
        for turn in range(turns):
            segments = (*segments, (pieces[2 * turn], users[turn]))
            prompt = sum(length for _, length in segments)
            yield Arrival(time, prompt, answers[turn], segments, "default", f"tenant-{tenant}")
            segments = (*segments, (pieces[2 * turn + 1], answers[turn]))
            time += thinks[turn]


def _tokens(lengths: Lognormal, rng: np.random.Generator, n: int) -> list[int]:
    return [max(1, round(tokens)) for tokens in lengths.quantile(rng.random(n)).tolist()]
