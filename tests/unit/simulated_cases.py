"""Random cases for simulators: requests, knobs, pools, timeouts, changes of knobs, on machines of different shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.knobs import KnobLimits, Knobs
from runtime.ordering import ORDERINGS
from runtime.records import RequestRecord, StepRecord
from runtime.step_model import StepFeatures
from tests.unit.reference_simulator import Request

LIMITS = KnobLimits(64, 1000, 512, 512)


@dataclass(frozen=True)
class Machine:
    """Overhead plus the longer of two times (``overlap``), or both: plain arithmetic on whole numbers and floats."""

    base: float
    chunk: float
    token: float
    context: float
    pair: float
    overlap: bool

    def __call__(self, step: StepFeatures) -> float:
        memory = self.context * (step.decode_context + step.prefill_context)
        tokens = step.decodes + step.drafted + step.prefill_tokens
        compute = self.token * tokens + self.pair * step.prefill_attention
        return self.base + self.chunk * step.chunks + (max(memory, compute) if self.overlap else memory + compute)

    def predict(self, step: StepFeatures) -> float:
        return self(step)


class RunMachine(Machine):
    """The same, asked for runs of decode steps at once."""

    def predict_run(self, decodes: int, context: int, count: int) -> list[float]:
        return [self(StepFeatures(decodes, context + i * decodes, 0, 0, 0)) for i in range(count)]


@dataclass
class Case:
    machine: Machine
    requests: list[Request]
    knobs: Knobs
    changes: list[tuple[float, Knobs]]
    blocks: int
    block_size: int
    ordering: str
    prefix_cache: bool
    policy: Callable[[int], int] | None
    shared: bool
    acceptance: float = 0.0


def knobs(dice: random.Random, drafts: bool = False) -> Knobs:
    return Knobs(
        draft_tokens=dice.choice([0, 1, 3, 8]) if drafts else 0,
        max_batch_size=dice.choice([1, 3, 8, 24, 64]),
        max_wait_ms=dice.choice([0, 0, 0, 5, 40]),
        token_budget=dice.choice([4, 16, 48, 128, 512]),
        chunk_size=dice.choice([3, 16, 64, 512]),
    )


def case(number: int, *, drafts: bool = False) -> Case:
    """``drafts``: its knobs draft tokens, which are right with some probability."""
    dice = random.Random(number)
    kind = dice.choice([Machine, RunMachine])
    machine = kind(
        base=dice.choice([1e-3, 5e-3]),
        chunk=dice.choice([0.0, 2e-4]),
        token=dice.choice([0.0, 1e-5, 1.3e-4]),
        context=dice.choice([0.0, 1e-7, 3.7e-6]),
        pair=dice.choice([0.0, 1e-7]),
        overlap=dice.random() < 0.5,
    )
    size = dice.choice([1, 4, 16])
    longest = dice.choice([12, 40, 90])
    tokens = 2 * longest + dice.choice([1, 30, 200, 2000])  # some request nearly fills the smallest pools
    shared = dice.random() < 0.5
    rate = dice.choice([5, 60, 400])
    timeouts = dice.random() < 0.4
    requests, now = [], 0.0
    for i in range(dice.randrange(5, 45)):
        now += dice.expovariate(rate)
        prompt = dice.randrange(1, longest + 1)
        first = dice.randrange(1, prompt + 1)
        pieces = [(dice.randrange(3) if shared else 100 + 2 * i, first), (101 + 2 * i, prompt - first)]
        requests.append(
            Request(
                f"r{i}",
                now,
                tuple((seed, length) for seed, length in pieces if length),
                dice.randrange(1, longest + 1),
                priority=dice.choice([0, 0, 1]),
                deadline=None if dice.random() < 0.5 else now + dice.random(),
                expires=now + dice.expovariate(10) if timeouts and dice.random() < 0.5 else None,
                tenant=dice.choice("ab"),
            )
        )
    ticks = sorted(dice.uniform(0, now + 0.2) for _ in range(dice.choice([0, 0, 2, 6])))
    step = dice.choice([4, 20])
    return Case(
        machine,
        requests,
        knobs(dice, drafts),
        [(tick, knobs(dice, drafts)) for tick in ticks],
        -(-tokens // size),
        size,
        dice.choice(sorted(ORDERINGS)),
        dice.random() < 0.7,
        (lambda decoding: decoding + step) if dice.random() < 0.2 else None,
        shared,
        dice.choice([0.2, 0.7, 1.0]) if drafts else 0.0,
    )


@dataclass
class Everything:
    """Keeps all records, those of runs taken apart."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    runs: int = 0

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        assert record.steps == len(ends) > 1
        self.runs += 1
        self.steps += record.split(ends)

    def on_request(self, record: RequestRecord) -> None:
        self.requests.append(record)
