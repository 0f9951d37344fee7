"""A model small enough for any test, whose every token depends on its whole context, and what it says by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.llm.engine import Engine
from runtime.torch_backend.loading import LoadedModel, from_model
from runtime.torch_backend.tokenizer import byte_tokenizer

VOCABULARY = 320
CONTEXT = 256
TOKENS = 24
"""Output tokens of every reference."""


@dataclass(frozen=True)
class SmallModel:
    """``references[i]`` is the greedy continuation of ``prompts[i]`` by transformers' own ``generate``."""

    loaded: LoadedModel
    prompts: tuple[tuple[int, ...], ...]
    references: tuple[tuple[int, ...], ...]

    @property
    def unused_token(self) -> int:
        """An id that is in no prompt and no reference."""
        used = {token for text in (*self.prompts, *self.references) for token in text}
        return next(token for token in range(VOCABULARY) if token not in used)

    def own_token(self, index: int, least: int = 3) -> tuple[int, int]:
        """(id, position) of an output token of ``index``, from position ``least`` on, that appears nowhere else."""
        others = {t for i, p in enumerate(self.prompts) for t in p} | {
            t for i, r in enumerate(self.references) if i != index for t in r
        }
        reference = self.references[index]
        return next(
            (t, at) for at, t in enumerate(reference) if at >= least and t not in others and reference.index(t) == at
        )


def small_model(prompts: int = 8) -> SmallModel:
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.mul_(6.0)  # so that the likeliest token stands out and hangs on the context
    loaded = replace(from_model(model, byte_tokenizer(VOCABULARY), "small"), eos_token_ids=())
    texts: dict[tuple[int, ...], tuple[int, ...]] = {}
    while len(texts) < prompts:
        text = tuple(torch.randint(0, 120, (int(torch.randint(5, 60, ())),)).tolist())
        said = reference(loaded, text)
        if smallest_gap(loaded, text, said) > 1e-3:  # a tie may be broken either way: it says nothing about an engine
            texts[text] = said
    return SmallModel(loaded, tuple(texts), tuple(texts.values()))


def smallest_gap(loaded: LoadedModel, prompt: Sequence[int], said: Sequence[int]) -> float:
    """The least difference between the two largest logits where a token of ``said`` was chosen."""
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1]
    top = logits.topk(2).values
    return float((top[:, 0] - top[:, 1]).min())


def reference(loaded: LoadedModel, prompt: Sequence[int], count: int = TOKENS) -> tuple[int, ...]:
    """What transformers itself continues ``prompt`` with, greedily. Not while an engine runs the model."""
    with torch.inference_mode():
        out = loaded.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=count,
            do_sample=False,
        )
    return tuple(out[0, len(prompt) :].tolist())


@contextmanager
def forward_of(
    loaded: LoadedModel, around: Callable[[Callable[..., Any], Tensor, dict[str, Any]], Any]
) -> Iterator[None]:
    """While inside, ``around(forward, input_ids, arguments)`` stands in for the model's own forward."""
    own = loaded.model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(own, kwargs["input_ids"], kwargs)

    loaded.model.forward = forward
    try:
        yield
    finally:
        del loaded.model.forward


@contextmanager
def engine_for(loaded: LoadedModel, **options: Any) -> Iterator[Engine]:
    """An engine that at the end has given back every block."""
    engine = Engine(loaded, **{"kv_tokens": 1024, "threads": 1, **options})
    try:
        yield engine
    finally:
        engine.close(drain=False)
        view = engine.view()
        assert view.running == view.waiting == 0
        assert view.kv_free_blocks == view.kv_total_blocks, "blocks were lost"
        engine._core.scheduler.check_integrity()
