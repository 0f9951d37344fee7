"""Rows of logits and whose they are, for the tests of sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from runtime.llm.plan import Token
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend.sampling import Sampler

VOCAB = 97


def sequence(name: str = "r", *, prompt: Seq[int] = (1,), output: Seq[int] = (), **params: Any) -> Sequence:
    made = Sequence(Request(name, tuple(prompt), SamplingParams(**params), 64, 0.0))
    made.output = list(output)
    return made


def logits_of(rows: int, *, seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def sample(logits: torch.Tensor, sequences: Seq[Sequence], seed: int = 0) -> list[Token]:
    out = Sampler(logits.shape[1], "cpu", seed).sample(logits, sequences)
    assert all(isinstance(token, Token) for token in out), out
    return out


def reference(logits: Seq[float], seen: set[int], params: SamplingParams) -> np.ndarray:
    """The same by the definitions, one token at a time, in double precision."""
    scores = [float(x) for x in logits]
    r = params.repetition_penalty
    scores = [(x / r if x > 0 else x * r) if i in seen else x for i, x in enumerate(scores)]
    scores = [x / params.temperature for x in scores]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    keep = order[: params.top_k] if params.top_k else order
    weight = {i: math.exp(scores[i] - scores[order[0]]) for i in keep}
    total, mass, nucleus = sum(weight.values()), 0.0, []
    for i in keep:  # the fewest of the likeliest that hold top_p of the mass
        nucleus.append(i)
        mass += weight[i] / total
        if params.top_p < 1 and mass >= params.top_p:
            break
    kept = [i for i in nucleus if weight[i] >= params.min_p * weight[order[0]]]
    probs = np.zeros(len(scores))
    for i in kept:
        probs[i] = weight[i]
    return probs / probs.sum()
