"""Serve minutes of traffic in a second: the engine in virtual time, on a machine given by a formula.

    python examples/simulate_engine.py [--rate 20] [--requests 2000] [--bandwidth 1.0]

The formula is a roofline: a step takes as long as reading the weights and the KV cache, or as the arithmetic, whichever is
longer, and a little more. A profile holds one that was fitted to your machine (`autotune simulate --profile …`).
"""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext

import autotune
from autotune.measure.evaluate import evaluate
from autotune.simulate import SimulatedEngine
from autotune.workload import parse_workload
from runtime import SLO, Knobs
from runtime.step_model import StepFeatures

SETTINGS = {
    "small steps": Knobs(max_batch_size=512, max_wait_ms=0, token_budget=256, chunk_size=256),
    "large steps": Knobs(max_batch_size=512, max_wait_ms=0, token_budget=8192, chunk_size=8192),
    "large steps, controlled": Knobs(max_batch_size=512, max_wait_ms=0, token_budget=8192, chunk_size=8192),
}


class Roofline:
    """Seconds of a step of an 8-billion-parameter model in bfloat16 on one large GPU."""

    def __init__(self, bandwidth: float) -> None:
        self.bytes_per_s = 3.84e12 * bandwidth

    def predict(self, step: StepFeatures) -> float:
        tokens = step.decodes + step.prefill_tokens
        read = 15e9 + 131072 * (step.decode_context + step.prefill_context)
        operations = 16e9 * tokens + 524288 * (step.decode_context + step.prefill_attention)
        return 0.75e-3 + max(read / self.bytes_per_s, operations / 643e12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=20.0, help="requests/s")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--bandwidth", type=float, default=1.0, help="of the memory, relative to 3.84 TB/s")
    args = parser.parse_args()
    for name in ("rate", "requests", "bandwidth"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} is {getattr(args, name)}; it must be above 0")

    slo = SLO(ttft_ms=500, tpot_ms=30)
    load = parse_workload("poisson:lengths=azure-conv").at_rate(args.rate)
    for name, knobs in SETTINGS.items():
        engine = SimulatedEngine(Roofline(args.bandwidth), kv_tokens=760_000, knobs=knobs, slo=slo)
        with autotune.control(engine, slo=slo) if "controlled" in name else nullcontext():
            score = evaluate(engine, None, load, slo, vocab_size=2, seed=0, duration=args.requests / args.rate)
        print(
            f"{name:<24} {score.attainment:6.1%} of {score.offered} requests in time, {score.goodput:5.1f}/s, "
            f"TTFT p99 {score.ttft_ms.p99:.0f} ms, TPOT p99 {score.tpot_ms.p99:.1f} ms; now {engine.knobs}"
        )
    print(f"{engine.clock.now():.0f} s passed in each simulation")


if __name__ == "__main__":
    main()
