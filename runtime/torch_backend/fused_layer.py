"""Decoder layers with fewer, larger operations, on every device.

The layers of most decoders are the same: norm, attention with rotary embedding, norm, gated MLP, each added to what came
in. Model code computes that in about forty operations. Here the projections that read the same input are one product,
query and key are normed, rotated and written to the KV pool together, and a sum is taken with the norm that reads it; in the
last layer, rows whose logits nobody wants stop after their keys and values are written. How each of these is computed is the
device's business (:mod:`runtime.torch_backend.operations`).

Which layers can be replaced is found by trying: a layer that looks like one is run beside the original on random input.
So no list of architectures is needed, and one that differs (a scaled residual, another rotary convention, another
activation) keeps its own code and calls the attention hook.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from runtime.torch_backend.attention import StepInputs, Terms, running_step, terms_of, window_of
from runtime.torch_backend.contract import KVLayer
from runtime.torch_backend.memory import is_out_of_memory
from runtime.torch_backend.norm import FusedRMSNorm
from runtime.torch_backend.operations import HeadNorm, Operations
from runtime.torch_backend.padded import lone_step

log = logging.getLogger(__name__)

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_PROBE = "autotune_probe"
_PROBE_TOKENS = 5
_OPTIONS = ("scaling", "sliding_window", "softcap", "s_aux")


class _Part(nn.Module):
    """A linear layer that has become some outputs of a merged one: for code that still calls it, at the merged one's cost."""

    def __init__(self, layer: FusedLayer, name: str, begin: int, end: int) -> None:
        super().__init__()
        self._whole = (layer, name)  # in a tuple, so that it does not become a child
        self._rows = slice(begin, end)

    @property
    def _linear(self) -> Any:
        return getattr(*self._whole)

    @property
    def weight(self) -> Tensor:
        return self._linear.weight[self._rows]  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        bias = self._linear.bias
        return None if bias is None else bias[self._rows]

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x)[..., self._rows]  # type: ignore[no-any-return]


class FusedLayer(nn.Module):
    """``inner`` with merged projections. Packed steps run here; any other call goes to ``inner``.

    ``last``: of the model, so that only the rows of ``StepInputs.wanted`` go on from here.
    """

    def __init__(self, inner: nn.Module, last: bool) -> None:
        super().__init__()
        self.inner = inner
        self.last = last
        attention: Any = inner.self_attn
        mlp: Any = inner.mlp
        query, key, value = (getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj"))
        self.dim = dim = int(attention.head_dim)
        heads, self._kv_heads = query.out_features // dim, key.out_features // dim
        self.qkv = _merged(query, key, value)
        self.gate_up = _merged(mlp.gate_proj, mlp.up_proj)
        self.terms = Terms(dim**-0.5, None, None, None)
        self._kept = KVLayer((self._kv_heads, dim), (self._kv_heads, dim), self.qkv.weight.dtype)
        self._head_norm: HeadNorm | None = None
        norm = getattr(attention, "q_norm", None)
        if norm is not None:
            scales = [getattr(attention, name).scale.detach() for name in ("q_norm", "k_norm")]
            counts = (heads, self._kv_heads)
            each = torch.cat([s.expand(n, dim) for s, n in zip(scales, counts, strict=True)])
            self._head_norm = HeadNorm(scales[0], scales[1], each, norm.eps)
        self.train(inner.training)

    def take_over(self) -> None:
        """Make the projections of ``inner`` parts of the merged ones, which frees their weights."""
        attention, mlp = self.inner.self_attn, self.inner.mlp
        for owner, merged, names in (
            (attention, "qkv", ("q_proj", "k_proj", "v_proj")),
            (mlp, "gate_up", ("gate_proj", "up_proj")),
        ):
            begin = 0
            for name in names:
                end = begin + getattr(owner, name).out_features
                setattr(owner, name, _Part(self, merged, begin, end))
                begin = end

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # model code looks at its layers: their attention type, their index
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        step = running_step()
        embeddings = kwargs.get("position_embeddings")
        if step is None or args or embeddings is None or embeddings[0].shape[-1] != self.dim:
            return self.inner(hidden_states, *args, **kwargs)
        cos, sin = embeddings
        own = hidden_states[0].clone()  # what is theirs is not ours to overwrite
        x, residual = self.compute(own, None, cos[0], sin[0], step)
        return x.add_(residual).unsqueeze(0)

    def compute(
        self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor, step: StepInputs
    ) -> tuple[Tensor, Tensor]:
        """The layer's input is ``x + residual`` (None: ``x``), each ``[tokens, hidden]`` and ours to overwrite; what it
        returns is its output likewise, for the next norm to add up. ``cos``/``sin [tokens, dim]``."""
        inner: Any = self.inner
        attention, ops = inner.self_attn, step.operations
        x, residual = normed(inner.input_layernorm, x, residual, ops)
        layer = step.layer(attention, self._kept)
        query, key, value = ops.rope_write(
            ops.linear(self.qkv, x), cos, sin, self._kv_heads, self._head_norm, layer, step.slots
        )
        x = step.attend(layer, query, key, value, self.terms)
        if self.last and step.wanted is not None:
            x, residual = x.index_select(0, step.wanted), residual.index_select(0, step.wanted)
        x = ops.linear(attention.o_proj, x.view(x.shape[0], -1))
        x, residual = normed(inner.post_attention_layernorm, x, residual, ops)
        return ops.linear(inner.mlp.down_proj, ops.silu_mul_linear(self.gate_up, x)), residual


def normed(norm: nn.Module, x: Tensor, residual: Tensor | None, operations: Operations) -> tuple[Tensor, Tensor]:
    """``norm`` of ``x + residual`` (None: of ``x``), and the sum. ``x`` may be overwritten if there is a ``residual``."""
    if not isinstance(norm, FusedRMSNorm):
        total = x if residual is None else x.add_(residual)
        return norm(total), total
    if residual is None:
        return operations.norm(x, norm.scale, norm.eps), x
    return operations.add_norm(x, residual, norm.scale, norm.eps)


def _merged(*linears: nn.Linear) -> nn.Linear:
    whole = nn.Linear(1, 1, bias=False, device="meta")
    whole.in_features, whole.out_features = linears[0].in_features, sum(linear.out_features for linear in linears)
    whole.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    if linears[0].bias is not None:
        biases = [linear.bias.detach() for linear in linears]
        whole.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return whole


def fuse_layers(model: PreTrainedModel, operations: Operations, context: int | None = None) -> int:
    """Replace the decoder layers of ``model`` that :class:`FusedLayer` reproduces; returns how many. Harmless when repeated.

    ``operations``: of its device, which each layer is tried with. ``context``: most tokens that are served (None: what the config
    says), up to which they must be the same. To be called after the norms are fused and before linear
    layers are packed. Takes the memory of one layer's merged weights besides; of all of them where somebody else holds the old
    ones as well. Layers for which there is none keep their own code.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    fused = 0
    for layers in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for at, layer in enumerate(layers):
            if not _fusable(layer, owners):
                continue
            last = at == len(layers) - 1 and len(layers) == model.config.get_text_config().num_hidden_layers
            try:
                candidate = FusedLayer(layer, last)
                same = _same(candidate, operations, context or longest_of(model.config))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                log.warning("%d decoder layers fused; for more there is no memory: the others run slower", fused)
                return fused
            if same:
                candidate.take_over()
                layers[at] = candidate
                fused += 1
    if fused:
        log.info("%d decoder layers fused", fused)
    return fused


def prunes(model: nn.Module) -> bool:
    """Whether the last layer of ``model`` hands on only the rows that are wanted."""
    return any(isinstance(module, FusedLayer) and module.last for module in model.modules())


def _children(module: nn.Module) -> set[str]:
    """Names of the children that hold parameters."""
    return {name for name, child in module.named_children() if any(True for _ in child.parameters())}


def _fusable(layer: nn.Module, owners: dict[int, int]) -> bool:
    """Whether ``layer`` has the parts, and only the parts, of a layer that can be fused."""
    if isinstance(layer, FusedLayer) or _children(layer) != _LAYER or layer._parameters:
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    if (
        _children(attention) - _NORMS != _ATTENTION
        or _children(mlp) != _MLP
        or attention._parameters
        or mlp._parameters
    ):
        return False
    dim = getattr(attention, "head_dim", None)
    if not isinstance(dim, int) or dim % 2:
        return False
    for group in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        if not all(type(x) is nn.Linear and x.in_features == group[0].in_features for x in group):
            return False
        if len({(x.bias is None, x.weight.dtype, x.weight.device) for x in group}) > 1:
            return False
        if any(owners[id(p)] > 1 for x in group for p in x.parameters()):
            return False
        if any(x._forward_hooks or x._forward_pre_hooks for x in group):
            return False
    if attention.k_proj.out_features != attention.v_proj.out_features or attention.q_proj.out_features % dim:
        return False
    norms = [getattr(attention, name, None) for name in sorted(_NORMS)]
    if norms == [None, None]:
        return True
    found = [n for n in norms if isinstance(n, FusedRMSNorm) and tuple(n.scale.shape) == (dim,)]
    return len(found) == 2 and found[0].eps == found[1].eps


def longest_of(config: Any) -> int:
    """Tokens of context that a model's config names; 0 if none."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else 0


def _same(candidate: FusedLayer, operations: Operations, context: int) -> bool:
    """Whether ``candidate`` computes what its ``inner`` does, tried on a few random tokens; learns the terms of its attention."""
    inner: Any = candidate.inner
    attention = inner.self_attn
    config: Any = getattr(attention, "config", None)
    if config is None:
        return False
    seen: list[dict[str, Any]] = []

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        seen.append({name: options[name] for name in _OPTIONS if name in options})
        return _by_definition(query, key, value, _terms(module, seen[-1], query.shape[-1])), None

    AttentionInterface.register(_PROBE, probe)
    weight = candidate.qkv.weight
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(weight.device, weight.dtype)

    x = random(1, _PROBE_TOKENS, candidate.qkv.in_features)
    cos, sin = random(1, _PROBE_TOKENS, candidate.dim), random(1, _PROBE_TOKENS, candidate.dim)

    def fused(wanted: Tensor | None, earlier: bool) -> Tensor:
        """The whole output of ``candidate``, a step's as it is; ``earlier``: its input is a sum yet to be taken."""
        step = lone_step(_PROBE_TOKENS, weight.device, operations)
        step.wanted, last = wanted, candidate.last
        candidate.last = wanted is not None
        half = 0.5 * x[0]  # whose double is x to the last bit
        try:
            added, total = candidate.compute(
                half if earlier else x[0].clone(), half.clone() if earlier else None, cos[0], sin[0], step
            )
        finally:
            candidate.last = last
        return (added + total).float()  # rounded as the original rounds it

    before = config._attn_implementation
    config._attn_implementation_internal = _PROBE
    try:
        with torch.inference_mode():
            positions = torch.arange(_PROBE_TOKENS, device=weight.device)[None]
            expected = inner(x.clone(), attention_mask=None, position_ids=positions, position_embeddings=(cos, sin))
            if not isinstance(expected, Tensor) or len(seen) != 1 or "scaling" not in seen[0]:
                return False
            if any(isinstance(option, Tensor) for option in seen[0].values()):
                return False
            candidate.terms = _terms(attention, seen[0], candidate.dim)
            far = positions + max(0, context - _PROBE_TOKENS)  # a layer may go by positions beside cosines and sines
            there = inner(x.clone(), attention_mask=None, position_ids=far, position_embeddings=(cos, sin))
            if not torch.equal(there, expected):
                return False
            some = torch.tensor([1, 3], device=weight.device)
            found = fused(None, earlier=False), fused(None, earlier=True), fused(some, earlier=False)
    except Exception as error:  # whatever a layer raises that only looks like one of these
        if is_out_of_memory(error):
            raise
        log.debug("layer %s is not fused: %s", type(inner).__name__, error)
        return False
    finally:
        config._attn_implementation_internal = before
    if expected.shape != x.shape or expected.dtype != x.dtype:
        return False
    # by what the layer adds to its input: an input far larger than it would hide a difference
    tolerance = 1e-5 if weight.dtype == torch.float32 else 0.02
    whole = expected[0].float()
    added = (whole - x[0].float()).norm()
    near = all(
        a.shape == b.shape and float((a - b).norm()) <= tolerance * float(added) + 1e-30
        for a, b in zip(found, (whole, whole, whole[[1, 3]]), strict=True)
    )
    return near and bool(added.isfinite())


def _terms(module: nn.Module, options: dict[str, Any], dim: int) -> Terms:
    """What the model code hands to the attention function besides tensors of tokens."""
    window = window_of(module, options["sliding_window"]) if "sliding_window" in options else window_of(module)
    return terms_of(dim, options.get("scaling"), window, options.get("softcap"), options.get("s_aux"))


def _by_definition(query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
    """Causal attention in float32, all scores at once: ``[1, heads, tokens, dim]`` in, ``[1, tokens, heads, dim]`` out."""
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1).float() for x in (key, value))
    scores = query.float() @ keys.transpose(-1, -2) * terms.scale
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    back = torch.arange(scores.shape[-1], device=query.device)
    back = back[:, None] - back[None, :]
    hidden = back < 0 if terms.window is None else (back < 0) | (back >= terms.window)
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    return (weights @ values).to(query.dtype).transpose(1, 2).contiguous()
