"""A two-tower recommender with ragged features: what a person looked at, as long as it may be, in batches without padding.

    python examples/recommend.py

One tower makes a vector of a person's history, the other one of each film; the product says how well they go together. The
histories are ragged: 1 to 60 films. A call gets them end to end with offsets (``EmbeddingBag``), so a batch costs what its films
cost, and the Batcher gets it: ``cost=len``.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime import SLO, Batcher, StepRecord
from runtime.batching.packing import pack

GENRES, FILMS_EACH, WIDTH = 8, 40, 24
FILMS = GENRES * FILMS_EACH


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(FILMS, WIDTH, mode="mean")
        self.person = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.film = nn.Embedding(FILMS, WIDTH)

    def people(self, histories: Sequence[Sequence[int]]) -> Tensor:
        """``[people, width]`` of ragged histories, packed end to end."""
        packed = pack(histories)
        films, offsets = torch.from_numpy(packed.values), torch.from_numpy(packed.offsets[:-1]).long()
        found: Tensor = self.person(self.history(films, offsets))
        return found

    def scores(self, histories: Sequence[Sequence[int]]) -> Tensor:
        return self.people(histories) @ self.film.weight.T


def person(rng: random.Random, longest: int) -> tuple[int, list[int]]:
    """Somebody with a favourite genre, and what they looked at: mostly that."""
    genre = rng.randrange(GENRES)
    seen = []
    for _ in range(rng.randint(1, longest)):
        g = genre if rng.random() < 0.8 else rng.randrange(GENRES)
        seen.append(g * FILMS_EACH + rng.randrange(FILMS_EACH))
    return genre, seen


def train(steps: int, rng: random.Random) -> TwoTowers:
    torch.manual_seed(0)
    model = TwoTowers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        people = [person(rng, 20) for _ in range(64)]
        next_film = torch.tensor([g * FILMS_EACH + rng.randrange(FILMS_EACH) for g, _ in people])
        loss = F.cross_entropy(model.scores([seen for _, seen in people]), next_film)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval()


class Calls:
    def __init__(self) -> None:
        self.people = 0
        self.films = 0
        self.calls = 0

    def on_step(self, record: StepRecord) -> None:
        self.calls += 1
        self.people += record.chunks
        self.films += record.prefill_tokens  # cost units

    def on_request(self, record: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=300)
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--slo", default="e2e=100ms@95%", help="latency target; what cannot meet it is rejected")
    args = parser.parse_args()
    try:
        slo = SLO.parse(args.slo)
    except ValueError as error:
        parser.error(f"--slo: {error}")
    for name in ("people", "steps"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} is {getattr(args, name)}; it must be above 0")

    rng = random.Random(7)
    model = train(args.steps, rng)
    people = [person(rng, 60) for _ in range(args.people)]

    def recommend(histories: list[list[int]]) -> list[list[int] | Exception]:
        """The five best films each has not seen. Somebody without a history is an error of theirs, not of the batch."""
        known = [h for h in histories if h]
        answers: list[list[int] | Exception] = [
            ValueError("this person has not looked at anything yet") for _ in histories
        ]
        if known:
            with torch.inference_mode():
                scores = model.scores(known)
                for row, history in zip(scores, known, strict=True):
                    row[history] = -torch.inf
            best = iter(scores.topk(5).indices.tolist())
            answers = [next(best) if h else error for h, error in zip(histories, answers, strict=True)]
        return answers

    calls = Calls()
    with Batcher(recommend, slo=slo, cost=lambda h: max(1, len(h))) as batcher:
        batcher.subscribe(calls)
        with ThreadPoolExecutor(max_workers=16) as threads:
            found = list(threads.map(lambda history: batcher.submit(history).result(), (seen for _, seen in people)))
        newcomer = batcher.submit([])
        print("somebody new:", newcomer.exception())

    hits = sum(film // FILMS_EACH == genre for (genre, _), films in zip(people, found, strict=True) for film in films)
    print(f"{hits / (5 * len(people)):.0%} of recommendations are of the favourite genre; by chance {1 / GENRES:.0%}")
    print(f"{calls.calls} calls, {calls.people} people, {calls.films} films looked up, none of them padding")


if __name__ == "__main__":
    main()
