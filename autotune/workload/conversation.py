"""Multi-turn conversations behind common system prompts: work for a prefix cache.

Chosen, not fitted: no public trace tells text that is shared from text that is equally long.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from autotune.workload.lengths import Lognormal
from autotune.workload.randomness import BLOCK, Floats, Stream, generator
from autotune.workload.spec import Arrival, positive, whole
from runtime.errors import InputError

USER = Lognormal(median=50, sigma=0.9)  # tokens; mean 75
ANSWER = Lognormal(median=120, sigma=0.7)  # tokens; mean 153
_MOST_TURNS = 100  # on average; prompts grow with every turn


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
        if not 1 <= self.turns <= _MOST_TURNS:
            raise InputError(f"turns is {self.turns}; it must be at least 1 and at most {_MOST_TURNS}")
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
        coming: list[tuple[float, int, int, Arrival]] = []  # conversation and turn break ties of time
        for time, k in heapq.merge(self._under_way(seed), self._starts(seed)):
            while coming and coming[0][0] <= time:
                yield heapq.heappop(coming)[3]
            for turn, arrival in enumerate(self._conversation(seed, k, time, systems)):
                heapq.heappush(coming, (arrival.time, k, turn, arrival))

    def _starts(self, seed: tuple[int, ...]) -> Iterator[tuple[float, int]]:
        """(time, number) of conversations that begin at 0 or later: 0, 1, …"""
        mean_gap = self.mean_turns / self.rate
        rng, time = generator(seed, Stream.TIMES), 0.0
        for k in count():
            time += rng.exponential() * mean_gap
            yield time, k

    def _under_way(self, seed: tuple[int, ...]) -> Iterator[tuple[float, int]]:
        """(time of the next turn, number) of conversations begun before 0 that go on: −1, −2, … in order of that time.

        Think times end λ = rate · (1 − 1/mean_turns) times a second. One that ends at t began before 0 if it is longer than t.
        A conversation has at most one of those, so they are a Poisson process: rate λ, thinned by P(think > t).
        """
        rate = self.rate * (1 - 1 / self.mean_turns)
        if rate <= 0:  # single turns
            return
        rng, number, end = generator(seed, Stream.SESSIONS), count(1), 0.0
        longest = float(self._thinks(np.ones(1))[0])
        while end <= longest:
            times = end + np.cumsum(rng.exponential(size=BLOCK)) / rate
            thinks = self._thinks(rng.random(BLOCK))
            yield from ((time, -next(number)) for time in times[thinks > times].tolist())
            end = float(times[-1])

    def _thinks(self, u: Floats) -> Floats:
        return Lognormal.of_mean_cv(self.think_s, 1.0).quantile(u)

    def _conversation(self, seed: tuple[int, ...], k: int, time: float, systems: list[int]) -> Iterator[Arrival]:
        """The turns of conversation ``k`` from ``time`` on: all of them, or of one begun before 0 those from the next on."""
        # Streams of their own for every conversation: how many are under way at 0 does not shift the others' draws.
        rng = generator(seed, Stream.LENGTHS, 2 * k if k >= 0 else -2 * k - 1)
        weights = 1 / np.arange(1, len(systems) + 1)
        tenant = int(rng.choice(len(systems), p=weights / weights.sum()))
        go_on = 1 - 1 / self.turns
        over = 0 if k >= 0 else self._turns_over(rng)
        turns = over + 1
        while turns < self.max_turns and rng.random() < go_on:
            turns += 1
        users = _tokens(self.user, rng, turns)
        answers = _tokens(self.answer, rng, turns)
        thinks = self._thinks(rng.random(turns)).tolist()
        pieces = rng.integers(0, 2**63, size=2 * turns).tolist()
        segments: tuple[tuple[int, int], ...] = ((systems[tenant], self.system_prompts[tenant]),)
        for turn in range(turns):
            segments = (*segments, (pieces[2 * turn], users[turn]))
            if turn >= over:
                prompt = sum(length for _, length in segments)
                yield Arrival(time, prompt, answers[turn], segments, "default", f"tenant-{tenant}")
                time += thinks[turn]
            segments = (*segments, (pieces[2 * turn + 1], answers[turn]))

    def _turns_over(self, rng: np.random.Generator) -> int:
        """Before a think time, whichever: n in proportion to the conversations that have more than n turns."""
        weights = (1 - 1 / self.turns) ** np.arange(self.max_turns - 1)
        return 1 + int(rng.choice(len(weights), p=weights / weights.sum()))


def _tokens(lengths: Lognormal, rng: np.random.Generator, n: int) -> list[int]:
    return [max(1, round(tokens)) for tokens in lengths.quantile(rng.random(n)).tolist()]
