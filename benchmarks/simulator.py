"""How fast the simulator is: requests and steps for each second of CPU time, alone and under the predictive controller.

The load has the lengths and the arrivals of the Azure conversation trace (the preset fitted to it, or the trace itself with
``--trace FILE``), at 90% of the peak goodput of an 8B model on an H200, whose step time is a roofline: what the weights and the
KV read take at 3.84 TB/s or what the operations take at 643 TFLOP/s, the longer of the two, and 0.75 ms. What is timed is the
whole simulation with every request judged against its SLO; making the arrivals is not. Times are CPU times (the best of
``--rounds``), so that other work on the machine counts as little as it can.

``--million`` serves a million requests and prints how much memory that takes on the way. Run ``python -m benchmarks.simulator``;
the last line is JSON.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from autotune import control
from autotune.measure.evaluate import evaluate
from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival, Workload, parse_workload
from benchmarks.attached import at_work
from benchmarks.command import at_least, command, exit_code
from benchmarks.controller.hardware import H200, h200
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO

TARGET = SLO(ttft_ms=500, tpot_ms=30)
RATE = 0.9 * 22.4  # of the peak goodput under that SLO
KNOBS = Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=2048, chunk_size=2048)


class Tally:
    """Counts, and judges every request; keeps none of them."""

    def __init__(self, slo: SLO) -> None:
        self.slo = slo
        self.requests = self.met = self.steps = self.calls = 0

    def on_step(self, record: StepRecord) -> None:
        self.steps += 1
        self.calls += 1

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        self.steps += len(ends)
        self.calls += 1

    def on_request(self, record: RequestRecord) -> None:
        self.requests += 1
        self.met += self.slo.met(record)


class Timing(NamedTuple):
    """One simulation: what it did, in how much CPU time, and how much time passed in it."""

    tally: Tally
    cpu_s: float
    simulated_s: float

    @property
    def requests_per_s(self) -> float:
        return self.tally.requests / self.cpu_s

    @property
    def steps_per_s(self) -> float:
        return self.tally.steps / self.cpu_s


def simulate(arrivals: Iterable[Arrival], *, controlled: bool = False, fast_forward: bool = True) -> Timing:
    """Serve ``arrivals`` to the end."""
    engine = SimulatedEngine(
        h200(), kv_tokens=H200.kv_tokens, knobs=KNOBS, limits=KnobLimits(), slo=TARGET, fast_forward=fast_forward
    )
    tally = Tally(TARGET)
    engine.subscribe(tally)
    with at_work(control(engine, slo=TARGET)) if controlled else contextlib.nullcontext():
        started = time.process_time()
        engine.serve(arrivals, shared=False)
        engine.run()
        spent = time.process_time() - started
    return Timing(tally, spent, engine.clock.now())


def evaluated(load: Workload, requests: int) -> float:
    """Requests for each second of CPU of one measurement as the sweep makes it: arrivals, simulation, score."""
    window = requests / RATE
    engine = SimulatedEngine(h200(), kv_tokens=H200.kv_tokens, knobs=KNOBS, slo=TARGET)
    started = time.process_time()
    score = evaluate(engine, None, load, TARGET, vocab_size=2, seed=0, duration=window)
    return score.offered / (time.process_time() - started)


def million(load: Workload, requests: int) -> None:
    """Serve ``requests`` of them in ten parts; memory after each."""
    engine = SimulatedEngine(h200(), kv_tokens=H200.kv_tokens, knobs=KNOBS, slo=TARGET)
    tally = Tally(TARGET)
    engine.subscribe(tally)
    source = load.arrivals(0, limit=requests)
    tracemalloc.start()
    print(f"\n{'requests':>10} {'Python, KiB':>12} {'process, MiB':>13} {'CPU s':>8}")
    begun = time.process_time()
    for _ in range(10):
        part = (arrival for _, arrival in zip(range(requests // 10), source, strict=False))
        engine.serve(part, start=0.0, shared=False)
        held = tracemalloc.get_traced_memory()[0] / 1024
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{tally.requests:>10} {held:>12.0f} {resident:>13.1f} {time.process_time() - begun:>8.1f}", flush=True)
    tracemalloc.stop()


@exit_code()
def main(argv: Sequence[str] | None = None) -> None:
    parser = command("simulator", __doc__)
    parser.add_argument("--requests", type=at_least(1), default=4000)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", help="the Azure 2023 conversation trace, a CSV file")
    parser.add_argument("--million", action="store_true", help="serve a million requests and watch the memory")
    args = parser.parse_args(argv)

    load = parse_workload(f"azure-conv:{args.trace}" if args.trace else "azure-conv").at_rate(RATE)
    arrivals = list(load.arrivals(args.seed, limit=args.requests))
    kinds = {
        "fast-forward": {"controlled": False},
        "every step by itself": {"controlled": False, "fast_forward": False},
        "controlled": {"controlled": True},
    }
    print(f"{len(arrivals)} requests at {RATE:.1f} requests/s, SLO {TARGET}, {KNOBS}\n")
    print(f"{'':<22}{'requests/CPU s':>15}{'steps/CPU s':>13}{'steps':>9}{'calls':>9}{'× real time':>13}{'met':>9}")
    found = {}
    for name, options in kinds.items():
        best = min((simulate(arrivals, **options) for _ in range(args.rounds)), key=lambda timing: timing.cpu_s)
        tally = best.tally
        found[name] = best
        print(
            f"{name:<22}{best.requests_per_s:>15,.0f}{best.steps_per_s:>13,.0f}{tally.steps:>9}{tally.calls:>9}"
            f"{best.simulated_s / best.cpu_s:>13,.0f}{tally.met / tally.requests:>9.2%}"
        )
    whole = max(evaluated(load, args.requests) for _ in range(args.rounds))
    print(f"evaluate(), with the arrivals made and the score computed: {whole:,.0f} requests/CPU s")
    if args.million:
        million(load, 1_000_000)
    fast, controlled = found["fast-forward"], found["controlled"]
    print(
        json.dumps(
            {
                "requests_per_cpu_s": round(fast.requests_per_s),
                "steps_per_cpu_s": round(fast.steps_per_s),
                "requests_per_cpu_s_controlled": round(controlled.requests_per_s),
                "requests_per_cpu_s_evaluated": round(whole),
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
