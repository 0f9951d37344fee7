"""Chat, and batch that asks for more than chat leaves."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final, NamedTuple

from autotune.workload import Arrival, Workload, parse_workload

CHAT, BATCH = "chat", "batch"
CHAT_LOAD, BATCH_LOAD = "azure-conv", "poisson:prompt=2000~1,output=200~1"
BATCH_WEIGHT: Final = 0.2
ATTAINMENT: Final = 0.95
"""The share of chat that must meet its SLO."""
SHARES: Final = (0.3, 0.6)
"""Chat's load, of what the machine serves of it at most."""
BEYOND: Final = 1.3
"""Batch's load, of what is left."""
_LENGTHS = 4000  # requests whose mean output is taken

Scaled = Callable[[Workload], Workload]


class Most(NamedTuple):
    """What a machine serves of each with nothing else to do: requests/s of chat, output tokens/s of batch."""

    chat: float
    batch: float


class Offered(NamedTuple):
    """Chat alone, the same chat beside batch, and the output tokens/s that are left for batch."""

    alone: Workload
    beside: Workload
    left: float


def as_it_is(load: Workload) -> Workload:
    return load


def offered(share: float, most: Most, seed: int, scaled: Scaled = as_it_is) -> Offered:
    """Chat at ``share`` of its most, and batch at :data:`BEYOND` times what is left. ``scaled``: with lengths that suit the
    machine."""
    chat_rate, left = share * most.chat, (1 - share) * most.batch
    batch_rate = BEYOND * left / mean_output(scaled(parse_workload(BATCH_LOAD)), seed)
    total = chat_rate + batch_rate
    alone = parse_workload(f"{CHAT}={CHAT_LOAD}")
    both = parse_workload(f"{CHAT}={CHAT_LOAD}@{chat_rate / total:.9f}+{BATCH}={BATCH_LOAD}@{batch_rate / total:.9f}")
    return Offered(scaled(alone).at_rate(chat_rate), scaled(both).at_rate(total), left)


def mean_output(load: Workload, seed: int) -> float:
    return statistics.fmean(a.output_tokens for a in load.arrivals(seed, limit=_LENGTHS))


def at_once(load: Workload, count: int, seed: int = 0) -> list[Arrival]:
    """``count`` requests that are there from the start."""
    return [arrival._replace(time=0.0) for arrival in load.arrivals(seed, limit=count)]
