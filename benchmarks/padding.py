"""How much of a padded batch is padding, by how items are put together, and what that does to their latency.

Prompt lengths of code completion as in Azure's 2023 trace: the shipped preset fitted to it, or the trace itself (``--trace``).
Up to 16 prompts go into a call. Those that wait are taken in order of arrival, from buckets of like length, or as the closest in
length among the sorted ones, and padded to the longest; or end to end without padding. A call takes 5 ms and 20 µs for each
token it computes, padding included. Items arrive open-loop at the same rates for all, shares of what goes without padding, or
all at once; in virtual time: the Batcher's own core, told to call whenever the worker is free.

Run ``python -m benchmarks.padding``; the last line is JSON: the share of tokens that are padding in each way, when all items are
there at once.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from autotune.measure.evaluate import recorded
from autotune.simulate.batcher import SimulatedBatcher
from autotune.workload.fitted import load_fitted
from autotune.workload.readers import read_azure
from benchmarks.command import at_least, command, exit_code
from runtime import KnobLimits, Knobs
from runtime.batching.item import Call

LARGEST = 16
BASE_S, TOKEN_S = 0.005, 20e-6
RATES = (0.3, 0.7, inf)
_LONGEST = 1 << 20


class Way(NamedTuple):
    """How items are put together: the grouping, and how many tokens a call of given lengths computes."""

    name: str
    grouping: str
    tokens: Callable[[Sequence[int]], int]


def padded(lengths: Sequence[int]) -> int:
    return len(lengths) * max(lengths)


WAYS = (
    Way("order of arrival", "arrival", padded),
    Way("length buckets", "buckets", padded),
    Way("sorted windows", "sorted", padded),
    Way("packing, no padding", "arrival", sum),
)


class Found(NamedTuple):
    """``waste``: share of what was computed that was padding; latencies in s; ``served``: items a second until all were done."""

    waste: float
    p50: float
    p99: float
    served: float
    items_a_call: float


def lengths_of(trace: str | None, count: int, rng: random.Random) -> list[int]:
    """``count`` prompt lengths, of the trace or of the preset fitted to it."""
    if trace is not None:
        rows = [row.prompt_tokens for row in read_azure(trace)]
        return [rng.choice(rows) for _ in range(count)]
    uniforms = np.array([[rng.random(), rng.random()] for _ in range(count)]).T
    prompts, _ = load_fitted("azure-code").lengths.draw(*uniforms)
    return [int(length) for length in prompts]


def measure(way: Way, lengths: Sequence[int], rate: float, seed: int) -> Found:
    """Items of ``lengths`` at Poisson times, ``rate`` a second, the worker never idle while any wait."""
    computed: list[int] = []  # by each call

    def service(call: Call) -> float:
        computed.append(way.tokens([item.cost for item in call.items]))
        return BASE_S + TOKEN_S * computed[-1]

    most = Knobs(max_batch_size=LARGEST, max_wait_ms=0, token_budget=_LONGEST)
    limits = KnobLimits(max_batch_size=LARGEST, token_budget=_LONGEST)
    batcher = SimulatedBatcher(service, lengths, strategy="dynamic", grouping=way.grouping, knobs=most, limits=limits)
    rng = random.Random(seed)
    with recorded(batcher) as log:
        for _ in lengths:  # in their order
            if rate < inf:
                batcher.wait(rng.expovariate(rate))
            batcher.submit(())
        batcher.close()
    records = log.requests.values()
    seconds = sorted(record.finished - record.arrival for record in records)
    return Found(
        1 - sum(lengths) / sum(computed),
        seconds[len(seconds) // 2],
        seconds[int(0.99 * len(seconds))],
        len(lengths) / max(record.finished for record in records),
        len(lengths) / len(computed),
    )


@exit_code()
def main(argv: Sequence[str] | None = None) -> None:
    parser = command("padding", __doc__)
    parser.add_argument("--trace", default=None, help="AzureLLMInferenceTrace_code.csv; the fitted preset by default")
    parser.add_argument("--items", type=at_least(1), default=8000)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args(argv)
    lengths = lengths_of(args.trace, args.items, random.Random(args.seed))
    mean = sum(lengths) / len(lengths)
    capacity = LARGEST / (BASE_S + TOKEN_S * LARGEST * mean)
    print(
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, {mean:.0f} on average; at most {LARGEST} a call"
    )
    print(f"{'rate':>20}  {'':22}{'padding':>9}{'served/s':>10}{'p50 s':>9}{'p99 s':>9}{'items a call':>14}")
    waste = {}
    for share in RATES:
        for way in WAYS:
            found = measure(way, lengths, share * capacity, args.seed)
            if share == inf:
                waste[way.name] = round(found.waste, 4)
            rate = "all at once" if share == inf else f"{share:5} = {share * capacity:5.1f} items/s"
            print(
                f"{rate:>20}  {way.name:22}{found.waste:9.1%}{found.served:10.1f}"
                f"{found.p50:9.2f}{found.p99:9.2f}{found.items_a_call:14.1f}"
            )
    print(json.dumps(waste))


if __name__ == "__main__":
    sys.exit(main())
