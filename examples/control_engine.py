"""Meet an SLO while traffic changes: an engine in your program, with a controller on its knobs.

    python examples/control_engine.py [MODEL] [--slo ttft=500ms,tpot=50ms] [--seconds 20]

Short prompts for the first half, eight times longer ones for the second. Every decision goes into a log; while it runs,
`autotune watch` in another terminal shows it, and `autotune set` overrules it.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time

import autotune
from runtime import SLO, Engine, Knobs, Stream


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--slo", default="ttft=2s,tpot=150ms@95%")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=24, help="output tokens of each request")
    parser.add_argument("--log", default="control_engine.jsonl", help="the decision log; appended to")
    parser.add_argument(
        "--kv-tokens", type=int, default=None, help="size of the KV pool; what the memory allows by default"
    )
    args = parser.parse_args()
    try:
        slo = SLO.parse(args.slo)
    except ValueError as error:
        print(f"error: --slo: {error}", file=sys.stderr)
        return 2
    for name in ("rate", "seconds", "tokens"):
        if not 0 < getattr(args, name) < math.inf:
            print(f"error: --{name} is {getattr(args, name)}; it must be above 0", file=sys.stderr)
            return 2

    start = Knobs(max_batch_size=256, token_budget=2048, chunk_size=2048)  # nobody has measured this machine yet
    with (
        Engine(args.model, knobs=start, kv_tokens=args.kv_tokens) as engine,
        autotune.control(engine, slo=slo, log=args.log, steer=True) as controller,
    ):
        print(f"control socket {controller.steer()}")
        for token in engine.stream("Once upon a time", max_tokens=args.tokens):
            print(token.text, end="", flush=True)
        print()

        streams = traffic(engine, args.rate, args.seconds, args.tokens)
        done = [stream.result() for stream in streams]
        status = controller.status()
        print(status)
        print(f"{len(done)} requests\nfrom {start}\nto   {status.knobs}")
    print(f"why: autotune explain {args.log}")
    return 0


def traffic(engine: Engine, rate: float, seconds: float, tokens: int) -> list[Stream]:
    """Poisson arrivals, whether or not the earlier ones have been answered."""
    dice, began, due, streams = random.Random(0), time.monotonic(), 0.0, []
    while (due := due + dice.expovariate(rate)) < seconds:
        time.sleep(max(0.0, began + due - time.monotonic()))
        length = 40 if due < seconds / 2 else 320
        streams.append(engine.submit([dice.randrange(1000) for _ in range(length)], max_tokens=tokens))
    return streams


if __name__ == "__main__":
    sys.exit(main())
