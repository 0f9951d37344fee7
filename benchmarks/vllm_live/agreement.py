"""Stock vLLM beside the steered one: whether they say the same, and how fast each is.

Both serve the same requests at once: vLLM's LLMEngine with its own scheduler, and the steered engine at the same knobs, by
turns. Then the steered one serves them again while its knobs are turned at random, and once more under a controller, with
budgets of single steps and deadline order.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import autotune
from benchmarks.command import command, exit_code
from benchmarks.vllm.starting import DEFAULTS, LIMITS, apart, ready, start, start_stock
from runtime.records import FinishReason
from runtime.request import SamplingParams
from runtime.slo import SLO

if TYPE_CHECKING:
    from autotune.engines.vllm import VllmEngine

REQUESTS = 48
_OUTPUT = 48
_BINDING = SLO(ttft_ms=60_000, tpot_ms=25.0)  # steps of the defaults are longer


class Agreement(NamedTuple):
    """``differing``: requests whose greedy outputs are not those of stock; ``lost``: those that did not come to their end;
    ``speed``: stock's seconds for all of them ÷ ours, the median of the rounds; ``decisions`` of the controller that it was
    served under at the end."""

    served: int
    differing: int
    lost: int
    speed: float
    decisions: int


def compared_apart(folder: Path, *, rounds: int, threads: int) -> Agreement:
    """:func:`compare` in a process of its own."""
    return Agreement(**apart(__name__, ["--folder", str(folder), "--rounds", str(rounds)], threads=threads))


def compare(stock: Any, engine: VllmEngine, *, rounds: int, requests: int = REQUESTS, seed: int = 5) -> Agreement:
    draw = random.Random(seed)
    vocabulary = stock.model_config.get_vocab_size()
    prompts = [[draw.randrange(2, vocabulary) for _ in range(draw.randint(4, 160))] for _ in range(requests)]
    speeds = []
    differing = lost = served = decisions = 0
    expected: list[tuple[int, ...]] = []
    for number in range(rounds + 2):
        begun = time.perf_counter()
        expected = _stock(stock, prompts, number)
        theirs = time.perf_counter() - begun
        turned, steered = number == rounds, number > rounds
        engine.set_knobs(DEFAULTS)
        control = autotune.control(engine, slo=_BINDING, interval_s=0.25) if steered else None
        begun = time.perf_counter()
        streams = []
        for prompt in prompts:
            streams.append(engine.submit(prompt, SamplingParams(max_tokens=_OUTPUT, ignore_eos=True)))
            if turned:
                engine.set_knobs(_drawn(draw))
            if turned or steered:
                time.sleep(0.02)
        found = [stream.result() for stream in streams]
        if control is not None:
            decisions = len(control.decisions)
            control.close()
        if number < rounds:
            speeds.append(theirs / (time.perf_counter() - begun))
        served += len(found)
        differing += sum(one.token_ids != other for one, other in zip(found, expected, strict=True))
        lost += sum(stream.record is None or stream.record.reason is not FinishReason.LENGTH for stream in streams)
    engine.set_knobs(DEFAULTS)
    return Agreement(served, differing, lost, statistics.median(speeds), decisions)


def _drawn(draw: random.Random) -> Any:
    budget = draw.choice([16, 48, 128, 512, 2048])
    return LIMITS.clamp(
        DEFAULTS.with_(
            max_batch_size=draw.choice([2, 8, 32, 128]), token_budget=budget, chunk_size=draw.choice([8, 64, budget])
        )
    )


def _stock(llm: Any, prompts: list[list[int]], number: int) -> list[tuple[int, ...]]:
    from vllm import SamplingParams as Theirs

    params = Theirs(max_tokens=_OUTPUT, temperature=0.0, ignore_eos=True, detokenize=False)
    found: dict[str, tuple[int, ...]] = {}
    for at, prompt in enumerate(prompts):
        llm.add_request(f"{number}-{at}", {"prompt_token_ids": prompt}, params)
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                found[output.request_id] = tuple(output.outputs[0].token_ids)
    return [found[f"{number}-{at}"] for at in range(len(prompts))]


@exit_code()
def main(argv: Sequence[str] | None = None) -> None:
    parser = command("vllm_live.agreement", __doc__)
    parser.add_argument("--folder", type=Path, required=True, help="a model directory")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (3)")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; it must be at least 1")
    ready()
    stock = start_stock(args.folder)
    with start(args.folder) as engine:
        found = compare(stock, engine, rounds=args.rounds)
    print(json.dumps(found._asdict()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
