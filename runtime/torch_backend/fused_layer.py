"""Decoder layers with fewer, larger operations.

The layers of most decoders are the same: norm, attention with rotary embedding, norm, gated MLP, each added to what came
in. Model code computes that in about forty operations. Here the projections that read the same input are one product,
query and key are normed and rotated together, and sums are made in place; in the last layer, rows whose logits nobody
wants stop after their keys and values are written.

Which layers can be replaced is found by trying: a layer that looks like one is run beside the original on random input.
So no list of architectures is needed, and one that differs (a scaled residual, another rotary convention, another
activation) keeps its own code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.torch_backend.attention import NAME, running_step
from runtime.torch_backend.norm import FusedRMSNorm

log = logging.getLogger(__name__)

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_PROBE = "autotune_probe"
_PROBE_TOKENS = 5
Attend = Callable[..., tuple[Tensor, Any]]


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
        self._dim = dim = int(attention.head_dim)
        self._heads, self._kv_heads = query.out_features // dim, key.out_features // dim
        self._split = query.out_features + key.out_features
        self.qkv = _merged(query, key, value)
        self.gate_up = _merged(mlp.gate_proj, mlp.up_proj)
        self._half = self.gate_up.out_features // 2
        self._options: dict[str, Any] = {}  # what the model code hands to the attention function besides tensors
        self._scale: Tensor | None = None  # of the norms of query and key, [heads + kv_heads, dim]
        self._eps = 0.0
        norm = getattr(attention, "q_norm", None)
        if norm is not None:
            scales = [getattr(attention, name)._scale for name in ("q_norm", "k_norm")]
            counts = (self._heads, self._kv_heads)
            self._scale = torch.cat([s.detach().expand(n, dim) for s, n in zip(scales, counts, strict=True)])
            self._eps = norm.eps
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
        if step is None or args or embeddings is None or embeddings[0].shape[-1] != self._dim:
            return self.inner(hidden_states, *args, **kwargs)
        attend = ALL_ATTENTION_FUNCTIONS[NAME]
        return self.compute(hidden_states, embeddings, attend, step.wanted if self.last else None)

    def compute(self, x: Tensor, embeddings: tuple[Tensor, Tensor], attend: Attend, wanted: Tensor | None) -> Tensor:
        """``x [1, tokens, hidden]``; returns the layer's output of the rows ``wanted`` (None: of all)."""
        inner: Any = self.inner
        attention, mlp = inner.self_attn, inner.mlp
        shape = (1, x.shape[1], -1, self._dim)
        qkv = self.qkv(inner.input_layernorm(x))
        both = qkv[..., : self._split].view(shape)
        if self._scale is not None:
            both = F.rms_norm(both, (self._dim,), None, self._eps).mul_(self._scale)
        both = _rotated(both, *embeddings).transpose(1, 2)
        value = qkv[..., self._split :].view(shape).transpose(1, 2)
        attended, _ = attend(attention, both[:, : self._heads], both[:, self._heads :], value, None, **self._options)
        if wanted is not None:
            x, attended = x.index_select(1, wanted), attended.index_select(1, wanted)
        x = attention.o_proj(attended.reshape(1, x.shape[1], -1)).add_(x)
        merged = self.gate_up(inner.post_attention_layernorm(x))
        gated = F.silu(merged[..., : self._half]).mul_(merged[..., self._half :])
        return mlp.down_proj(gated).add_(x)  # type: ignore[no-any-return]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [1, tokens, heads, dim]`` by ``cos``/``sin [1, tokens, dim]``, the halves of ``dim`` being the pairs."""
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def _merged(*linears: nn.Linear) -> nn.Linear:
    whole = nn.Linear(1, 1, bias=False, device="meta")
    whole.in_features, whole.out_features = linears[0].in_features, sum(linear.out_features for linear in linears)
    whole.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    if linears[0].bias is not None:
        biases = [linear.bias.detach() for linear in linears]
        whole.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return whole


def fuse_layers(model: PreTrainedModel) -> int:
    """Replace the decoder layers of ``model`` that :class:`FusedLayer` reproduces; returns how many. Harmless when repeated.

    To be called after the norms are fused and before linear layers are packed.
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
            last = at == len(layers) - 1 == getattr(model.config, "num_hidden_layers", None) - 1  # type: ignore[operator]
            candidate = FusedLayer(layer, last)
            if _same(candidate):
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
    found = [n for n in norms if isinstance(n, FusedRMSNorm) and n._shape == (dim,)]
    return len(found) == 2 and found[0].eps == found[1].eps


def _same(candidate: FusedLayer) -> bool:
    """Whether ``candidate`` computes what its ``inner`` does, tried on a few random tokens; learns the attention's options."""
    inner, attention = candidate.inner, candidate.inner.self_attn
    config: Any = getattr(attention, "config", None)
    if config is None:
        return False
    seen: list[dict[str, Any]] = []

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        seen.append(
            {k: v for k, v in options.items() if k in ("scaling", "sliding_window", "softcap", "s_aux", "dropout")}
        )
        keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1).float() for x in (key, value))
        out = F.scaled_dot_product_attention(query.float(), keys, values, is_causal=True)
        return out.to(query.dtype).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_PROBE, probe)
    weight = candidate.qkv.weight
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(weight.device, weight.dtype)

    x = random(1, _PROBE_TOKENS, candidate.qkv.in_features)
    embeddings = (random(1, _PROBE_TOKENS, candidate._dim), random(1, _PROBE_TOKENS, candidate._dim))
    before = config._attn_implementation
    config._attn_implementation_internal = _PROBE
    try:
        with torch.inference_mode():
            positions = torch.arange(_PROBE_TOKENS, device=weight.device)[None]
            expected = inner(x.clone(), attention_mask=None, position_ids=positions, position_embeddings=embeddings)
            if not isinstance(expected, Tensor) or len(seen) != 1 or "scaling" not in seen[0]:
                return False
            candidate._options = seen[0]
            if any(isinstance(option, Tensor) for option in seen[0].values()):
                return False
            found = candidate.compute(x.clone(), embeddings, probe, None)
            some = candidate.compute(x.clone(), embeddings, probe, torch.tensor([1, 3], device=weight.device))
    except Exception as error:  # whatever a layer raises that only looks like one of these
        log.debug("layer %s is not fused: %s", type(inner).__name__, error)
        return False
    finally:
        config._attn_implementation_internal = before
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    # by what the layer adds to its input: an input far larger than it would hide a difference
    tolerance = 1e-5 if weight.dtype == torch.float32 else 0.02
    added = (expected.float() - x.float()).norm()
    near = all(
        float((a.float() - b.float()).norm()) <= tolerance * float(added) + 1e-30
        for a, b in ((found, expected), (some, expected[:, [1, 3]]))
    )
    return near and bool(added.isfinite())
