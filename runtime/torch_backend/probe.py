"""One token through a model, to see what its attention keeps and whether its rotary embedding stands still."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from runtime.torch_backend.attention import PackedModel
from runtime.torch_backend.contract import KVLayer
from runtime.torch_backend.padded import lone_step


class Probe(NamedTuple):
    """``kv_bytes_per_token``: of all layers that called our attention, which are ``kv_layers``. ``vocab_size``: width of the
    logits.

    ``rope_moved``: a buffer of frequencies changed at the last position of the context.
    """

    kv_bytes_per_token: int
    kv_layers: tuple[KVLayer, ...]
    vocab_size: int
    rope_moved: bool


def probe(model: PreTrainedModel, context: int) -> Probe:
    """Run one token at position ``context − 1``.

    A model whose forward fails with our attention, or never calls it, gets figures from its config here; what is wrong
    with it is for :func:`runtime.torch_backend.self_test.self_test` to say.
    """
    text = model.config.get_text_config()
    step = lone_step(1, model.device)
    pool = step.pool
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    before = _frequencies(model)
    vocab_size = int(text.vocab_size)
    try:
        with torch.inference_mode(), PackedModel(model).running(step):
            logits = model(input_ids=token, position_ids=token + context - 1, use_cache=False).logits
        vocab_size = int(logits.shape[-1])
    except Exception:  # whatever a model that was not made for this raises
        pool.layers.clear()
    after = _frequencies(model)
    moved = any(name not in after or not torch.equal(values, after[name]) for name, values in before.items())
    slots = pool.block_count + 1  # one more block than requested pads tables
    kept = pool.bytes // slots or _from_config(model)
    return Probe(kept, pool.kept, vocab_size, moved)


def _frequencies(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in model.named_buffers() if name.endswith("inv_freq")}


def _from_config(model: PreTrainedModel) -> int:
    text = model.config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * text.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize)
