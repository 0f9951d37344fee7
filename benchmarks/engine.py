"""This engine against transformers' two ways to generate: continuous batching (``generate_batch``) and static batches.

The same 57M-parameter model (the ``tiny`` preset, random weights), the same prompts, 64 tokens each, greedy. Each
contender runs with the best of a few settings, found before the rounds on 32 prompts of another seed; then all take turns, so
that what else the machine does hits each alike. Ours and ``generate_batch`` have the same token budgets, the latter 256 as well,
and another size of pages. The number of prompts is a multiple of every batch size, so that no one's last batch is a small one.
The figure is output tokens per second of the process's CPU time, and ratios are taken within a round.

Prompts have 132 tokens on average, spread as in real traffic: log-normal with a coefficient of variation of 1, at most 768.
Long ones have 256 to 768, even ones 8 to 256, both uniform; even ones are what static batches like best. Batches of the
static peer are made in order of arrival, as a server would; ``--sorted-static`` lets it see all prompts beforehand and batch
those of like length. Every pair of dtype and thread count runs in a process of its own. The JSON line is of the dtype that is
fast on this machine, bfloat16 where the CPU multiplies it, else float32.

Run ``python -m benchmarks.engine`` (``--quick``: fewer prompts and rounds; ``--vllm PYTHON``: also against vLLM's CPU build, by a
Python that has it, :mod:`benchmarks.vllm.generation`); the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import at_least, command, exit_code
from runtime.errors import InputError

BATCH = 32
OUTPUT = 64
BUDGETS = (512, 1024, 2048, 4096)
"""Tokens of a step that every contender which has such a budget may have."""
CHOSEN_ON = 1
"""The seed of the prompts that settings are chosen on; those of the rounds have 0."""
LONGEST = {"short": 768, "even": 256, "long": 768}
KINDS = ("short", "even", "long")
Prompts = Sequence[Sequence[int]]


class Peer(NamedTuple):
    """Something that generates. ``run`` returns how many tokens came out."""

    name: str
    settings: str
    run: Callable[[Prompts], int]


def cases(fast: str) -> list[tuple[str, int, str]]:
    """(dtype, threads, kind of prompts), those of the ``fast`` dtype first."""
    slow = [("float32", threads, "short") for threads in (1, 2) if fast != "float32"]
    return [*((fast, 1, kind) for kind in KINDS), *slow[:1], (fast, 2, "short"), *slow[1:]]


def make_prompts(count: int, kind: str, vocab: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(f"{seed} {kind}")
    high = LONGEST[kind]
    if kind == "short":
        spread = math.sqrt(math.log(2))  # a coefficient of variation of 1
        mean = 132.0
        lengths = [rng.lognormvariate(math.log(mean) - spread**2 / 2, spread) for _ in range(count)]
    else:
        lengths = [rng.randint(256 if kind == "long" else 8, high) for _ in range(count)]
    return [[rng.randrange(vocab) for _ in range(max(8, min(high, round(n))))] for n in lengths]


def ours(dtype: str, budgets: Sequence[int] = BUDGETS, model: str = "tiny") -> list[Peer]:
    """Our engine at batch 32, with a few token budgets; one executor serves them all. ``model``: a preset or a directory."""
    from runtime.knobs import Knobs
    from runtime.llm.core import EngineCore
    from runtime.llm.output import OutputProcessor
    from runtime.llm.scheduler import Scheduler
    from runtime.request import Request, SamplingParams
    from runtime.torch_backend.executor import TorchExecutor
    from runtime.torch_backend.loading import load_model

    blocks = BATCH * (LONGEST["long"] + OUTPUT) // 16 + BATCH
    executor = TorchExecutor(load_model(model, dtype=dtype, device="cpu"), kv_blocks=blocks)

    def run(prompts: Prompts, budget: int) -> int:
        knobs = Knobs(max_batch_size=BATCH, token_budget=budget, chunk_size=budget)
        core = EngineCore(Scheduler(kv_blocks=blocks), executor, knobs=knobs, output=OutputProcessor())
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        sequences = [core.add(Request(f"r{i}", tuple(p), params, OUTPUT, 0.0)) for i, p in enumerate(prompts)]
        now = 1.0
        while core.has_work:
            now = core.step(now).end
        return sum(len(s.output) for s in sequences)

    return [Peer("ours", f"{BATCH} sequences, budget {b}", lambda p, b=b: run(p, b)) for b in budgets]  # type: ignore[misc]  # bound now


def continuous_peers(model: Any, kind: str) -> list[Peer]:
    """``generate_batch`` with a few page sizes and budgets, its cache sized for the workload."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    config = GenerationConfig(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)
    peers = []
    for page, budget in ((32, 256), *((256, budget) for budget in (256, *BUDGETS))):
        pages = (BATCH + 1) * -(-(LONGEST[kind] + OUTPUT) // page)
        batching = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=pages,
            max_batch_tokens=budget,
            max_requests_per_batch=BATCH,
            allow_block_sharing=False,  # the prompts share nothing
        )

        def run(prompts: Prompts, batching: Any = batching) -> int:
            out = model.generate_batch([list(p) for p in prompts], config, batching)
            return sum(len(o.generated_tokens) for o in out.values())

        peers.append(Peer("transformers cb", f"page {page}, budget {budget}", run))
    return peers


def static_peers(model: Any, by_length: bool) -> list[Peer]:
    """``generate`` on left-padded batches, by batch size."""
    import torch

    def run(prompts: Prompts, size: int) -> int:
        if by_length:
            prompts = sorted(prompts, key=len)
        done = 0
        for at in range(0, len(prompts), size):
            batch = prompts[at : at + size]
            longest = max(map(len, batch))
            ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in batch])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
            out = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=OUTPUT, do_sample=False, pad_token_id=0
            )
            done += (out.shape[1] - longest) * len(batch)
        return done

    name = "transformers static" + (", sorted" if by_length else "")
    return [Peer(name, f"batch {size}", lambda p, size=size: run(p, size)) for size in (8, 16, 32)]  # type: ignore[misc]  # bound now


def measure(peer: Peer, prompts: Prompts) -> float:
    """Output tokens per CPU second."""
    started = time.process_time()
    tokens = peer.run(prompts)
    spent = time.process_time() - started
    if tokens != len(prompts) * OUTPUT:
        raise RuntimeError(f"{peer.name} put out {tokens} tokens, not {len(prompts) * OUTPUT}")
    return tokens / spent


def best(peers: Sequence[Peer], prompts: Prompts) -> Peer:
    """The fastest of ``peers``, each warmed up on a few prompts."""
    for peer in peers:
        peer.run(prompts[:4])
    return max(peers, key=lambda peer: measure(peer, prompts))


def alternated(peers: Sequence[Peer], prompts: Prompts, rounds: int) -> list[dict[str, Any]]:
    """What each measures in its turns: its name, its settings and its rates, a round each."""
    figures: list[list[float]] = [[] for _ in peers]
    for number in range(rounds):
        order = range(len(peers)) if number % 2 == 0 else reversed(range(len(peers)))
        for at in order:
            figures[at].append(measure(peers[at], prompts))
    return [{"name": p.name, "settings": p.settings, "rates": f} for p, f in zip(peers, figures, strict=True)]


def contest(choices: Sequence[Sequence[Peer]], kind: str, count: int, vocab: int, rounds: int) -> list[dict[str, Any]]:
    """The best of each of ``choices``, chosen on prompts of a seed of their own, in ``rounds`` rounds of ``count`` prompts."""
    peers = [best(choice, make_prompts(BATCH, kind, vocab, CHOSEN_ON)) for choice in choices]
    return alternated(peers, make_prompts(count, kind, vocab), rounds)


def said(peers: list[dict[str, Any]], where: str) -> Iterator[str]:
    """A row of the table for each."""
    for at, peer in enumerate(peers):
        rates = peer["rates"]
        spread = f"{statistics.median(rates):6.0f} ({min(rates):.0f}–{max(rates):.0f})"
        versus = "" if at == 0 else f"ours is {ratio(peers, at):.2f} times that"
        yield f"{where}  {peer['name']:27} {spread:20} {peer['settings']:36} {versus}"


def worker(dtype: str, kinds: list[str], count: int, rounds: int, by_length: bool) -> None:
    """Run the cases of one dtype in this process, with the threads it was given; prints a JSON line for each."""
    import torch
    from transformers.utils import logging as transformers_logging

    from runtime.torch_backend.loading import load_model

    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    engines = ours(dtype)
    model = load_model("tiny", dtype=dtype, device="cpu").model
    model.generation_config.eos_token_id = None
    for kind in kinds:
        choices = (engines, continuous_peers(model, kind), static_peers(model, by_length))
        found = contest(choices, kind, count, model.config.vocab_size, rounds)
        print(json.dumps({"kind": kind, "peers": found}), flush=True)


def run_case(dtype: str, threads: int, kinds: list[str], args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Have a process of its own measure ``kinds``; yields (kind, peers) as each is done."""
    command = [sys.executable, "-m", "benchmarks.engine", "--worker", dtype, "--kinds", ",".join(kinds)]
    command += ["--prompts", str(args.prompts), "--rounds", str(args.rounds)]
    command += ["--sorted-static"] if args.sorted_static else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                done = json.loads(line)
                yield done["kind"], done["peers"]
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def beside_vllm(python: Path, dtype: str, prompts: int, rounds: int) -> dict[str, Any]:
    """What :mod:`benchmarks.vllm.generation` says, run by ``python``; its table goes to stdout."""
    command = [str(python), "-m", "benchmarks.vllm.generation", "--dtype", dtype]
    command += ["--prompts", str(prompts), "--rounds", str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    *rows, last = done.stdout.splitlines()
    print("\n".join(rows), flush=True)
    found: dict[str, Any] = json.loads(last)
    return found


def ratio(peers: list[dict[str, Any]], at: int) -> float:
    """Median over the rounds of ours ÷ the peer."""
    return float(statistics.median(a / b for a, b in zip(peers[0]["rates"], peers[at]["rates"], strict=True)))


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """The ratios of each kind of prompts that was measured, for the JSON line."""
    prefixes = {"short": "", "long": "long_", "even": "even_"}
    names = {"vs_transformers_cb": 1, "vs_static": 2}
    return {
        f"{prefix}{name}": round(ratio(found[kind], at), 3)
        for kind, prefix in prefixes.items()
        if kind in found
        for name, at in names.items()
    }


@exit_code()
def main(argv: Sequence[str] | None = None) -> None:
    parser = command("engine", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer prompts and rounds, and only the fast dtype on one thread"
    )
    parser.add_argument("--prompts", type=at_least(1), default=None, help="prompts in each round (64; quick: 32)")
    parser.add_argument("--rounds", type=at_least(1), default=None, help="rounds in each case (3; quick: 2)")
    parser.add_argument(
        "--sorted-static", action="store_true", help="batch the static peer by length, all prompts known"
    )
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="also against vLLM's CPU build, by this Python")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--kinds", default="short,long", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.prompts = args.prompts or (32 if args.quick else 64)
    args.rounds = args.rounds or (2 if args.quick else 3)
    if args.worker:
        worker(args.worker, args.kinds.split(","), args.prompts, args.rounds, args.sorted_static)
        return
    if args.vllm is not None:
        if shutil.which(args.vllm) is None:
            raise InputError(f"--vllm: {args.vllm} is no program")
        if max(args.prompts, args.rounds) > 100:
            raise InputError(
                f"--prompts is {args.prompts} and --rounds {args.rounds}; they must be at most 100 with --vllm"
            )
    from runtime.torch_backend.loading import cpu_has_bfloat16

    fast = "bfloat16" if cpu_has_bfloat16() else "float32"
    wanted = cases(fast)[: len(KINDS) if args.quick else None]
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    print(
        f"output tokens per CPU second, {args.prompts} prompts, {OUTPUT} tokens each, median of {args.rounds} rounds (range)"
    )
    beside: dict[str, Any] = {"dtype": fast}
    try:
        for dtype, threads in dict.fromkeys((d, t) for d, t, _ in wanted):
            kinds = [k for d, t, k in wanted if (d, t) == (dtype, threads)]
            for kind, peers in run_case(dtype, threads, kinds, args):
                found[dtype, threads, kind] = peers
                for row in said(peers, f"{dtype:8} {threads} thread{'s' if threads > 1 else ' '} {kind:5}"):
                    print(row, flush=True)
        if args.vllm is not None:
            beside = beside_vllm(args.vllm, fast, args.prompts, args.rounds)
    finally:  # what was measured stands, whatever a process failed with
        print(json.dumps(summary({kind: found[fast, 1, kind] for kind in KINDS if (fast, 1, kind) in found}) | beside))


if __name__ == "__main__":
    sys.exit(main())
