"""An engine inside your own program: stream, generate many, turn a knob while it runs, use it from an event loop.

    python examples/embed_engine.py [MODEL]

MODEL is a local model directory, a hub id or a preset. The presets have random weights, so their text is gibberish; the
times are those of a real model of that shape.
"""

from __future__ import annotations

import argparse
import asyncio

from runtime import Engine, Knobs, RejectedError, RequestRecord, StepRecord


class StepCounter:
    """Hears every record of the engine, in the engine's thread: keep it short."""

    def __init__(self) -> None:
        self.steps = 0
        self.largest = 0

    def on_step(self, record: StepRecord) -> None:
        self.steps += record.steps
        self.largest = max(self.largest, record.tokens)

    def on_request(self, record: RequestRecord) -> None:
        pass


async def ask_both(engine: Engine, tokens: int) -> list[str]:
    """Two requests at once, from an event loop."""
    done = await asyncio.gather(*(engine.agenerate(p, max_tokens=tokens) for p in ("Ask me", "Tell me")))
    return [completion.text for completion in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--tokens", type=int, default=24, help="output tokens of each request")
    parser.add_argument(
        "--kv-tokens", type=int, default=None, help="size of the KV pool; what the memory allows by default"
    )
    args = parser.parse_args()

    with Engine(args.model, knobs=Knobs(max_batch_size=32, token_budget=256), kv_tokens=args.kv_tokens) as engine:
        steps = StepCounter()
        engine.subscribe(steps)

        print("one, as it comes: ", end="")
        for token in engine.stream("Once upon a time", max_tokens=args.tokens):
            print(token.text, end="", flush=True)
        print()

        prompts = [f"Number {i} is" for i in range(8)]
        completions = engine.generate(prompts, max_tokens=args.tokens, temperature=0.8, seed=1)
        for completion in completions:
            record = completion.record
            ttft, tpot = (f"{s * 1000:.0f} ms" if s is not None else "none" for s in (record.ttft, record.tpot))
            print(f"{completion.finish_reason.value:8} {record.output_tokens:3} tokens  TTFT {ttft}, TPOT {tpot}")

        epoch = engine.set_knobs(engine.knobs.with_(max_batch_size=2))  # holds from the very next step
        again = engine.generate(prompts[:4], max_tokens=args.tokens)
        print(f"knobs {engine.knobs}: {sum(c.record.epoch_first == epoch for c in again)} of 4 began under them")

        print("from an event loop:", asyncio.run(ask_both(engine, args.tokens)))

        try:
            engine.submit([])
        except ValueError as error:
            print("refused:", error)

    print(f"{steps.steps} steps, the largest of {steps.largest} tokens")
    try:
        engine.submit("too late")
    except RejectedError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
