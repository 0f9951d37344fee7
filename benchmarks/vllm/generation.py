"""This engine against vLLM's CPU build: the same weights, the same prompts, 64 tokens each, greedy, in one process by turns.

What :mod:`benchmarks.engine` does for transformers' two ways to generate: a model of 57M parameters, each contender with the best
of a few token budgets at 32 sequences, chosen on prompts of another seed; output tokens per second of the process's CPU time,
ratios within a round. vLLM runs its own scheduler in this process, without a prefix cache (prompts are random), eagerly and,
where it can, compiled.

The last line is JSON: for each kind of prompts ``vs_vllm_cpu`` (``short``), ``even_vs_vllm_cpu``, ``long_vs_vllm_cpu``, and
``alike``: of vLLM's outputs, the share of tokens up to which the two agree, on average (random weights make near ties, so that
rounding shows).

Run it by a Python that has vLLM: ``python -m benchmarks.vllm.generation`` (``--quick``: fewer prompts and rounds), or have
``python -m benchmarks.engine --vllm PYTHON`` run it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from benchmarks.command import command, count, exit_code, say
from benchmarks.engine import BATCH, BUDGETS, KINDS, OUTPUT, Peer, Prompts, contest, make_prompts, ours, ratio, said
from benchmarks.vllm.model import model_folder
from benchmarks.vllm.starting import ready, start_stock

_WAYS: Final = {"eager": {}, "compiled": {"enforce_eager": False}}
_OF_STOCK: Final = {"max_num_seqs": BATCH, "max_num_batched_tokens": max(BUDGETS), "load_format": "auto"}


@exit_code()
def main(argv: Sequence[str] | None = None) -> None:
    parser = command("vllm.generation", __doc__)
    parser.add_argument("--quick", action="store_true", help="fewer prompts and rounds")
    parser.add_argument("--prompts", type=count, default=None, help="prompts in each round (64; quick: 32)")
    parser.add_argument("--rounds", type=count, default=None, help="rounds in each case (3; quick: 2)")
    parser.add_argument("--threads", type=count, default=1, help="of the computation (1)")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "bfloat16", "float32"], help="auto: what is fast here"
    )
    parser.add_argument(
        "--kind", action="append", choices=KINDS, help="of prompts; may be given several times (default: all)"
    )
    parser.add_argument("--preset", default="tiny", help="the shape of the model (tiny)")
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    ready()
    prompts, rounds = args.prompts or (32 if args.quick else 64), args.rounds or (2 if args.quick else 3)
    print(json.dumps(compared(args.preset, args.dtype, args.threads, prompts, rounds, args.kind or KINDS)))


def compared(
    preset: str, dtype: str, threads: int, count: int, rounds: int, kinds: Sequence[str] = KINDS
) -> dict[str, Any]:
    """The JSON line; tables go to stdout, one row for each contender and kind."""
    import torch

    from runtime.torch_backend.loading import load_model

    torch.set_num_threads(threads)
    loaded = load_model(preset, dtype=dtype, device="cpu")
    name = str(loaded.model.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="generation-") as kept:
        folder = model_folder(Path(kept) / preset, preset)
        loaded.model.save_pretrained(folder)
        theirs, generate = vllm_peers(folder, name)
        mine = ours(name, model=str(folder))
        torch.set_num_threads(threads)  # vLLM may have set them
        vocabulary: int = loaded.model.config.vocab_size
        found: dict[str, Any] = {"dtype": name, "threads": threads}
        for kind in kinds:
            result = contest((mine, theirs), kind, count, vocabulary, rounds)
            for row in said(result, f"{name:8} {threads} {kind:5}"):
                print(row, flush=True)
            prefix = "" if kind == "short" else f"{kind}_"
            found[f"{prefix}vs_vllm_cpu"] = round(ratio(result, 1), 3)
        few = make_prompts(8, "even", vocabulary, seed=1)
        found["alike"] = round(statistics.fmean(map(_alike, generate(few), outputs(str(folder), name, few))), 3)
    return found


def _alike(a: Sequence[int], b: Sequence[int]) -> float:
    """Share of the tokens before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True))) / len(a)


def outputs(model: str, dtype: str, prompts: Prompts) -> list[list[int]]:
    """What our engine makes of ``prompts``."""
    from runtime import Engine

    with Engine(model, dtype=dtype, device="cpu") as engine:
        done = engine.generate([list(p) for p in prompts], max_tokens=OUTPUT, ignore_eos=True)
    return [list(one.token_ids) for one in done]


def vllm_peers(folder: Path, dtype: str) -> tuple[list[Peer], Callable[[Prompts], list[list[int]]]]:
    """vLLM at each of the budgets, eager and compiled, and what generates with the first. Says which of both does not start."""
    peers: list[Peer] = []
    first: Callable[[Prompts], list[list[int]]] | None = None
    for way, options in _WAYS.items():
        try:
            engine = start_stock(folder, **{**_OF_STOCK, "dtype": dtype, **options})
            generate = _generating(engine)
            generate([[2, 3, 4]] * 2)
        except Exception as error:
            if first is None:
                raise
            say(f"vLLM, {way}, left out: {' '.join(str(error).split())[:200]}")
            continue
        first = first or generate
        scheduler = engine.engine_core.engine_core.scheduler
        for budget in BUDGETS:

            def run(
                prompts: Prompts, budget: int = budget, generate: Any = generate, scheduler: Any = scheduler
            ) -> int:
                scheduler.max_num_scheduled_tokens = budget
                return sum(map(len, generate(prompts)))

            peers.append(Peer("vLLM", f"{BATCH} sequences, budget {budget}, {way}", run))
    assert first is not None
    return peers, first


def _generating(engine: Any) -> Callable[[Prompts], list[list[int]]]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True, detokenize=False)
    turn = 0

    def generate(prompts: Prompts) -> list[list[int]]:
        nonlocal turn
        turn += 1
        done: dict[str, list[int]] = {}
        for at, prompt in enumerate(prompts):
            engine.add_request(f"{turn}-{at}", {"prompt_token_ids": list(prompt)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)
        return [done[f"{turn}-{at}"] for at in range(len(prompts))]

    return generate


if __name__ == "__main__":
    sys.exit(main())
