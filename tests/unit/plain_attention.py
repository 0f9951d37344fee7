"""Attention by its definition, for tests."""

from __future__ import annotations

import torch

from runtime.torch_backend.attention import Terms


def by_definition(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, terms: Terms) -> torch.Tensor:
    """One query and head at a time, in float64: ``query [heads, tokens, dim]`` are the last tokens of ``keys``/``values
    [kv_heads, context, dim]``; returns ``[heads, tokens, value_dim]``."""
    heads, tokens, _ = query.shape
    kv_heads, context, _ = keys.shape
    out = torch.empty(heads, tokens, values.shape[-1], dtype=torch.float64)
    for head in range(heads):
        k, v = keys[head * kv_heads // heads].double(), values[head * kv_heads // heads].double()
        for t in range(tokens):
            last = context - tokens + t
            first = 0 if terms.window is None else max(0, last - terms.window + 1)
            scores = k[first : last + 1] @ query[head, t].double() * terms.scale
            if terms.softcap is not None:
                scores = torch.tanh(scores / terms.softcap) * terms.softcap
            if terms.sinks is not None:
                scores = torch.cat([scores, terms.sinks[head, None].double()])
            weights = torch.softmax(scores, 0)[: last + 1 - first]
            out[head, t] = weights @ v[first : last + 1]
    return out
