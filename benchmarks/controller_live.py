"""A controller on the live engine while prompts grow, against vLLM's defaults and ten fixed settings.

The load: Poisson arrivals with the joint lengths of Azure's conversation trace, first × 1/16, from the middle on × 3/16, each
half at the same share of what a saturated engine serves of it. The SLO follows from a calibration on the spot: TPOT is a small
multiple of the mean step of 8 decodes and no prompts, so that steps stuffed with prompts, as the defaults make them, break it;
TTFT is a fixed multiple of TPOT. Neither depends on what any contender achieves.

Turns alternate in rounds that share their arrivals (``autotune.bench``). ``--quick`` serves all ten fixed settings in a first
round of its own, and takes the best three of them, with the defaults and the controller, into the rounds that count; without it
all take part in every round. Every turn of the controller starts cold, from the defaults, and all its requests count.

``--undisturbed`` runs engine and load on a clock that leaves out the time for which the kernel kept the engine's thread waiting
for a processor: for machines that do other work too. The model then has one thread; a second one would wait at other times.

Run ``python -m benchmarks.controller_live`` (``--quick``: within six minutes on two cores); the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.bench import Comparison, Contender, Failure, Result, compare, controlled, defaults, fixed, measure, turns
from autotune.bench.loads import setup_for
from autotune.evaluate import Recorder
from autotune.profile import ModelFacts
from autotune.workload import Arrival, Workload, parse_workload
from autotune.writing import write_whole
from benchmarks.undisturbed import UndisturbedClock, others
from runtime.clock import Clock, MonotonicClock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.engine import Engine
from runtime.slo import SLO

BEFORE = "poisson:lengths=azure-conv,length=1/16,cap_output=128"
AFTER = "poisson:lengths=azure-conv,length=3/16,cap_output=128"
LOAD = 0.7
TPOT_FACTOR, TTFT_FACTOR = 2.5, 20
FIXED = [(64, 2048), (64, 512), (64, 256), (64, 128), (64, 64), (64, 32), (16, 256), (16, 128), (16, 64), (8, 128)]
"""(max_batch_size, token_budget = chunk_size)"""
QUICK_FINALISTS = 3
KV_TOKENS = 131_072


@dataclass(frozen=True)
class Growing:
    """``before`` until ``at`` seconds, then ``after``."""

    before: Workload
    after: Workload
    at: float

    @property
    def rate(self) -> float:
        return (self.before.rate + self.after.rate) / 2

    @property
    def finite(self) -> bool:
        return False

    def at_rate(self, rate: float) -> Growing:
        factor = rate / self.rate
        before, after = (w.at_rate(w.rate * factor) for w in (self.before, self.after))
        return replace(self, before=before, after=after)

    def generate(self, seed: tuple[int, ...]) -> Iterator[Arrival]:
        yield from self.before.arrivals(seed[-1], duration=self.at)
        for arrival in self.after.arrivals(seed[-1] + 10_000, duration=3600.0):
            yield arrival._replace(time=self.at + arrival.time)


def saturated(engine: Engine, facts: ModelFacts, workload: Workload, seconds: float, clock: Clock) -> float:
    """Requests/s of the workload that the engine serves when it is kept full."""
    return setup_for(engine, facts, workload, seed=991, clock=clock, budget_s=seconds).calibration.saturated_rate


def decoding(engine: Engine, vocab_size: int, count: int = 8, tokens: int = 100) -> list[float]:
    """Seconds of each step of ``count`` sequences that decode, prompts of 64 tokens behind them, and nothing else."""
    recorder = Recorder()
    unsubscribe = engine.subscribe(recorder)
    try:
        rng = random.Random(tokens)
        prompts = [[rng.randrange(vocab_size) for _ in range(64)] for _ in range(count)]
        engine.generate(prompts, max_tokens=tokens, ignore_eos=True)
    finally:
        unsubscribe()
    return [s.duration for s in recorder.steps if s.decodes == count and not s.prefill_tokens]


def serve(
    engine: Engine,
    facts: ModelFacts,
    contenders: Sequence[Contender],
    workload: Workload,
    slo: SLO,
    rounds: int,
    seed: int,
    duration: float,
    clock: Clock,
) -> list[Result]:
    results = []
    planned = turns(contenders, rounds, seed)
    busy = others()
    for found in measure(engine, planned, workload, slo, vocab_size=facts.vocab_size, duration=duration, clock=clock):
        before, busy = busy, others()
        if isinstance(found, Failure):
            raise SystemExit(f"{found.turn.contender.name}: {found.cause}")
        results.append(found)
        s = found.score
        print(
            f"  round {found.turn.round} {found.turn.contender.name:<10} {s.attainment:6.1%} of {s.offered:4} "
            f"TTFT {s.ttft_ms.p50 or 0:5.0f}/{s.ttft_ms.p99 or 0:5.0f} TPOT {s.tpot_ms.p50 or 0:5.1f}/{s.tpot_ms.p99 or 0:6.1f} "
            f"missed {s.violations}, "
            f"steps {s.steps.mean_ms:.0f} ms, others use {(busy[1] - before[1]) / (busy[0] - before[0]):.2f} cores",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.controller_live", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--quick", action="store_true", help="within six minutes on two cores")
    parser.add_argument("--rounds", type=int, help="that count (default: 6, quick 4)")
    parser.add_argument("--duration", type=float, help="seconds of arrivals in a turn (default: 40, quick 9)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="of the model (default: 2, with --undisturbed 1)")
    parser.add_argument("--undisturbed", action="store_true", help="leave out time that other processes took")
    parser.add_argument("--plot", type=Path, help="a .html, .svg or .png to write")
    parser.add_argument("--log", type=Path, help="a file for the controller's decisions, one JSON object a line")
    args = parser.parse_args()
    duration = args.duration or (9.0 if args.quick else 40.0)
    rounds = args.rounds or (4 if args.quick else 6)
    threads = args.threads or (1 if args.undisturbed else 2)
    if args.undisturbed and threads > 1:
        parser.error("--undisturbed follows one thread; leave out --threads")
    clock = UndisturbedClock() if args.undisturbed else MonotonicClock()
    begun = time.monotonic()

    from autotune.bench import plotting
    from runtime.torch_backend.loading import load_model

    if args.plot is not None:
        plotting.check(args.plot)
    loaded = load_model("tiny", dtype="bfloat16", device="cpu")
    limits = KnobLimits()
    with Engine(loaded, limits=limits, kv_tokens=KV_TOKENS, threads=threads, clock=clock) as engine:
        if isinstance(clock, UndisturbedClock):
            clock.follow(next(t for t in threading.enumerate() if t.name.startswith("engine ")))
        facts = ModelFacts(
            name=loaded.name, architecture=loaded.architecture, parameters=loaded.parameters, dtype="bfloat16",
            random_weights=True, seed=0, max_model_len=loaded.max_model_len, vocab_size=loaded.vocab_size,
            kv_bytes_per_token=loaded.kv_bytes_per_token,
        )  # fmt: skip
        workload, slo, said = set_up(engine, facts, duration, 2.0 if args.quick else 8.0, clock)
        print(said, flush=True)
        rivals = [fixed(Knobs(batch, 0, budget, budget)) for batch, budget in FIXED]
        ours, vllm = controlled(limits), defaults(limits)
        if args.quick:
            print("the ten fixed settings, to choose the best of them", flush=True)
            seen = compare(serve(engine, facts, rivals, workload, slo, 1, args.seed + 500, duration, clock), duration)
            rivals.sort(key=lambda c: seen.standing(c).attainment.value, reverse=True)
            del rivals[QUICK_FINALISTS:]
        print(f"{rounds} rounds", flush=True)
        results = serve(engine, facts, [vllm, ours, *rivals], workload, slo, rounds, args.seed, duration, clock)
    comparison = compare(results, duration)
    best = max(rivals, key=lambda c: comparison.standing(c).attainment.value)
    report(comparison, slo, ours, vllm, best)
    if args.log is not None:
        lines = [d.as_json() for r in results if r.turn.contender.control for d in r.decisions]
        write_whole(args.log, "".join(line + "\n" for line in lines))
    if args.plot is not None:
        title = f"tiny on {threads} CPU threads, prompts × 3 from {duration / 2:g} s on, SLO {slo}"
        write_whole(args.plot, plotting.render(comparison, slo, title, args.plot.suffix, shown=(ours, vllm, best)))
    print(f"took {time.monotonic() - begun:.0f} s")
    print(json.dumps(summary(comparison, slo, ours, vllm, best)))


def set_up(
    engine: Engine, facts: ModelFacts, duration: float, seconds: float, clock: Clock
) -> tuple[Workload, SLO, str]:
    """The load and the promise for this machine, and the sentence that says so."""
    before, after = parse_workload(BEFORE), parse_workload(AFTER)
    decoding(engine, facts.vocab_size, tokens=8)  # the first steps of a process are not typical
    steps = decoding(engine, facts.vocab_size)
    few = saturated(engine, facts, before, seconds, clock)
    steps += decoding(engine, facts.vocab_size)
    many = saturated(engine, facts, after, seconds, clock)
    steps += decoding(engine, facts.vocab_size)  # at three times: a moment's noise must not make the promise
    step = statistics.fmean(steps)  # as TPOT is: beside other work a typical step says too little
    tpot = float(f"{TPOT_FACTOR * step * 1e3:.2g}")
    slo = SLO(ttft_ms=TTFT_FACTOR * tpot, tpot_ms=tpot)
    growing = Growing(before.at_rate(LOAD * few), after.at_rate(LOAD * many), duration / 2)
    said = (
        f"a step of 8 decodes takes {step * 1e3:.1f} ms (mean of {len(steps)}, median {statistics.median(steps) * 1e3:.1f})\n"
        f"SLO {slo}: TPOT {TPOT_FACTOR:g} × that, TTFT {TTFT_FACTOR} × TPOT\n"
        f"{growing.before.rate:.1f} req/s of lengths × 1/16 until {duration / 2:g} s, "
        f"then {growing.after.rate:.1f} req/s of × 3/16: {LOAD:.0%} of what saturates the engine ({few:.1f}, {many:.1f})"
    )
    return Workload("growing", "Azure conversations whose lengths triple midway", growing), slo, said


def report(comparison: Comparison, slo: SLO, ours: Contender, vllm: Contender, best: Contender) -> None:
    from autotune.bench.table import points, show
    from autotune.cli.display import make_console

    console = make_console()
    console.width = max(console.width, 200)
    show(comparison, slo, console, baseline=vllm)
    for other in (vllm, best):
        found = comparison.difference(ours, other)
        assert found is not None
        print(
            f"control − {other.name}: {points(found)} percentage points in SLO over {found.rounds} rounds".replace(
                "\\", ""
            )
        )


def summary(comparison: Comparison, slo: SLO, ours: Contender, vllm: Contender, best: Contender) -> dict[str, Any]:
    found = {
        name: comparison.standing(c).attainment for name, c in (("control", ours), ("defaults", vllm), ("best", best))
    }
    ratios: dict[str, Any] = {}
    for name, other in (("control_vs_defaults", vllm), ("control_vs_best_fixed", best)):
        difference = comparison.difference(ours, other)
        assert difference is not None
        ratios[name] = round(difference.ratio.value, 4)
        ratios[f"{name}_interval"] = [round(difference.ratio.low, 4), round(difference.ratio.high, 4)]
    return {
        "control": round(found["control"].value, 4),
        "defaults": round(found["defaults"].value, 4),
        "best_fixed": round(found["best"].value, 4),
        "best_fixed_setting": best.name,
        **ratios,
        "slo": str(slo),
    }


if __name__ == "__main__":
    main()
