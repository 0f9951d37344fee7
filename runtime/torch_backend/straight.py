"""A decoder's forward without what transformers puts around it.

Embedding, rotary tables, layers, norm and head, called one after the other: at every step the model's own forward also
looks up masks, checks caches and wraps outputs, about 0.4 ms that a small model feels. Whether a model is no more than
that is found by trying.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.torch_backend.fused_layer import FusedLayer

log = logging.getLogger(__name__)

_PARTS = {"embed_tokens", "layers", "norm"}
_PROBE_TOKENS = 5


class StraightModel:
    """``model`` as a chain of its parts. Holds no weights of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.model
        self._model = model
        self._embed, self._layers, self._norm = base.embed_tokens, base.layers, base.norm
        self._rotary, self._head = base.rotary_emb, model.lm_head

    @property
    def applies(self) -> bool:
        """Whether the model's own forward is still what a chain stands for: nobody has replaced it or hooked into it."""
        model = self._model
        return "forward" not in model.__dict__ and not model._forward_hooks and not model._forward_pre_hooks

    def __call__(self, ids: Tensor, positions: Tensor, wanted: Tensor | None) -> Tensor:
        """Logits ``[1, rows, vocab]`` of ``ids [1, tokens]`` at ``positions [1, tokens]``.

        ``wanted``: the rows; None for all, or when the last layer hands on only those.
        """
        x = self._embed(ids)
        embeddings = self._rotary(x, positions)
        for layer in self._layers:
            x = layer(x, position_embeddings=embeddings, attention_mask=None, position_ids=positions)
        if wanted is not None:
            x = x.index_select(1, wanted)
        logits: Tensor = self._head(self._norm(x))
        return logits


def straight(model: nn.Module) -> StraightModel | None:
    """``model`` as a :class:`StraightModel`, if all its layers are fused and that computes what its own forward does."""
    base = getattr(model, "model", None)
    if not isinstance(model, PreTrainedModel) or not isinstance(base, nn.Module):
        return None
    children = {name for name, child in base.named_children() if any(True for _ in child.parameters())}
    layers = getattr(base, "layers", None)
    if (
        children != _PARTS
        or not isinstance(layers, nn.ModuleList)
        or not isinstance(getattr(model, "lm_head", None), nn.Module)
    ):
        return None
    if not hasattr(base, "rotary_emb") or not all(isinstance(layer, FusedLayer) for layer in layers):
        return None
    if any(m._forward_hooks or m._forward_pre_hooks for m in (model, base, *layers)):
        return None
    chain = StraightModel(model)
    device = next(base.parameters()).device
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=device)[None] % model.config.get_text_config().vocab_size
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    try:
        with torch.inference_mode():
            expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            found = chain(ids, positions, None)
    except Exception as error:  # whatever a model raises that only looks like a chain
        log.debug("%s is not run as a chain: %s", type(model).__name__, error)
        return None
    return chain if torch.equal(found, expected) else None
