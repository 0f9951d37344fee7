"""A decoder's forward without what transformers puts around it.

Embedding, rotary tables, layers, norm and head, called one after the other: at every step the model's own forward also
looks up masks, checks caches and wraps outputs, about 0.4 ms that a small model feels. What a layer adds is summed with
the norm that reads it, across layers too. Whether a model is no more than such a chain is found by trying.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runtime.torch_backend.attention import StepInputs
from runtime.torch_backend.fused_layer import FusedLayer, longest_of, normed

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
        listened = (model, base, *base.layers)
        self._hooks: list[Any] = [hooks for m in listened for hooks in (m._forward_hooks, m._forward_pre_hooks)]

    @property
    def parameters(self) -> int:
        """Of the layers: what each token of a step is multiplied with."""
        return sum(parameter.numel() for layer in self._layers for parameter in layer.parameters())

    @property
    def applies(self) -> bool:
        """Whether the model's own forward is still what a chain stands for: nobody has replaced it or hooked into it."""
        return "forward" not in self._model.__dict__ and not any(self._hooks)

    def __call__(self, ids: Tensor, positions: Tensor, step: StepInputs, wanted: Tensor | None) -> Tensor:
        """Logits ``[rows, vocab]`` of ``ids [tokens]`` at ``positions [tokens]``, while ``step`` runs.

        ``wanted``: the rows; None for all, or when the last layer hands on only those.
        """
        return self.logits(self.hidden(ids, positions, step, wanted))

    def hidden(self, ids: Tensor, positions: Tensor, step: StepInputs, wanted: Tensor | None) -> Tensor:
        """What the head reads ``[rows, width]``, arguments as for logits."""
        residual: Any = None
        x = self._embed(ids)
        cos, sin = (table[0] for table in self._rotary(x.unsqueeze(0), positions.unsqueeze(0)))
        for layer in self._layers:
            x, residual = layer.compute(x, residual, cos, sin, step)
        if wanted is not None:
            x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
        return normed(self._norm, x, residual, step.operations)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` of ``hidden [rows, width]``."""
        found: Tensor = self._head(hidden)
        return found

    def tables(self, ids: Tensor, positions: Tensor) -> Any:
        """What the layers get as position embeddings: as a rule cosines and sines ``[1, tokens, dim]``."""
        return self._rotary(self._embed(ids), positions)

    def plainly(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits ``[1, tokens, vocab]`` of ``ids`` and ``positions [1, tokens]``, each part called as it is, outside any step."""
        x = self._embed(ids)
        embeddings = self._rotary(x, positions)
        for layer in self._layers:
            x = layer(x, position_embeddings=embeddings, attention_mask=None, position_ids=positions)
        logits: Tensor = self._head(self._norm(x))
        return logits


def straight(model: nn.Module, context: int | None = None) -> StraightModel | None:
    """``model`` as a :class:`StraightModel`, if all its layers are fused and that computes what its own forward does.

    ``context``: most tokens that are served, up to which it must; None: what the config says.
    """
    base: Any = getattr(model, "model", None)
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
    chain = StraightModel(model)
    if not chain.applies:
        return None
    device = next(base.parameters()).device
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=device)[None] % model.config.get_text_config().vocab_size
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    last = max(0, (context or longest_of(model.config)) - _PROBE_TOKENS)
    try:
        with torch.inference_mode():
            same = all(  # at the end of the context, too: some models scale by the position
                torch.equal(chain.plainly(ids, at), model(input_ids=ids, position_ids=at, use_cache=False).logits)
                for at in (positions, positions + last)
            )
            tables: Any = chain.tables(ids, positions)
    except Exception as error:  # whatever a model raises that only looks like a chain
        log.debug("%s is not run as a chain: %s", type(model).__name__, error)
        return None
    turned = isinstance(tables, tuple) and all(table.shape[-1] == layer.dim for table in tables for layer in layers)
    return chain if turned and same else None
