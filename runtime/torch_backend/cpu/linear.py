"""Linear layers in oneDNN's own weight layout, where that is faster.

On a CPU, PyTorch's linear reorders its weight at every call (bfloat16) or goes through a BLAS that may not know the
processor (float32). Reordered once, the same product takes 0.3 to 0.9 of the time; bfloat16 results are the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime.torch_backend.memory import prefer_huge_pages

log = logging.getLogger(__name__)

ROWS = 32  # rows of input the layout is chosen for, unless said; others run too
WORTH = 0.95  # of the plain time; above this the layout is not worth having
COPY_SHARE = 0.1  # of available memory that copies of tied weights may take
_SAMPLE_BYTES = 64 << 20
_HUGE_NOW = 1 << 30  # bytes of weights that are moved to huge pages at load; that takes a few seconds


def padded_rows(rows: int) -> int:
    """The rows that a product of ``rows`` rows is padded to: up to 6% more, 2% on average, and none up to 32.

    oneDNN generates code for each number of rows and shape of weight that it meets, in 0.1 to 0.3 ms, and keeps the last 1,024.
    A model has some five shapes, so that a step of another number of rows than any of the last two hundred would wait 2 ms for
    code; these are sixteen numbers between a power of two and the next.
    """
    unit = 1 << max(0, rows.bit_length() - 5)
    return -(-rows // unit) * unit


class PackedLinear(nn.Module):
    """What ``nn.Linear`` computes, over a packed weight. Inference only.

    The plain weight is not kept, so memory stays what it was. Who asks for ``weight`` gets it back, and the layer is a
    plain one from then on: such a model reads weights in its forward, and unpacking each time would be slow.
    """

    def __init__(self, linear: nn.Linear, rows: int = ROWS) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.dtype = linear.weight.dtype
        self._packed: Tensor | None = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self._plain: Tensor | None = None
        self.nbytes = linear.weight.nbytes
        self._op: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self.training = linear.training

    @property
    def weight(self) -> Tensor:
        """The plain weight ``[out_features, in_features]``."""
        if self._plain is None:
            assert self._packed is not None
            self._plain = self._packed.to_dense()
            self._packed = None
        return self._plain

    def forward(self, x: Tensor) -> Tensor:
        packed = self._packed
        if packed is None or x.dtype != self.dtype:
            return F.linear(x, self.weight, self.bias)
        return self._op(x, packed, self.bias, "none", [], "")

    def prefer_huge_pages(self, now: bool) -> None:
        if self._packed is not None:
            prefer_huge_pages(self._packed, now)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(model: nn.Module, rows: int = ROWS) -> int:
    """Replace the linear layers of ``model`` by packed ones where a measurement says it pays; returns how many are.

    ``rows``: of the usual input; the layout is chosen, and timed, for that many.

    Only exact ``nn.Linear`` layers on the CPU, in float32 or bfloat16. A weight that other modules hold as well (a head
    tied to the embedding) becomes a copy, if it fits into ``COPY_SHARE`` of the available memory. What is packed already stays.
    """
    mkldnn: Any = torch.backends.mkldnn  # whose is_available has no types
    if not (mkldnn.is_available() and mkldnn.enabled):
        return 0
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    spare = int(psutil.virtual_memory().available * COPY_SHARE)
    verdicts: dict[Any, bool] = {}
    packed: list[PackedLinear] = []
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is not nn.Linear or not _packable(child):
                continue
            tied = owners[id(child.weight)] > 1
            if tied and child.weight.nbytes > spare:
                continue
            kind = (child.weight.shape, child.weight.dtype)
            if kind not in verdicts:
                verdicts[kind] = _pays(child, rows)
            if verdicts[kind]:
                if tied:
                    spare -= child.weight.nbytes
                packed.append(PackedLinear(child, rows))
                setattr(parent, name, packed[-1])
    seen = 0
    for linear in packed:  # when all are in place, since neighbours share pages
        seen += linear.nbytes
        linear.prefer_huge_pages(now=seen <= _HUGE_NOW)
    if packed:
        log.info("%d linear layers packed for oneDNN (%d shapes looked at)", len(packed), len(verdicts))
    return sum(isinstance(module, PackedLinear) for module in model.modules())


def _packable(linear: nn.Linear) -> bool:
    weight = linear.weight
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.numel() == 0:
        return False
    if linear._forward_hooks or linear._forward_pre_hooks:
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _pays(linear: nn.Linear, rows: int) -> bool:
    """Whether the packed product of ``rows`` rows is faster here; a large layer is judged by a slice of it."""
    weight = linear.weight.detach()
    outputs = max(1, min(len(weight), _SAMPLE_BYTES // max(1, weight[0].nbytes)))
    weight = weight[:outputs].contiguous()
    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
    with torch.inference_mode():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        plain_s = _fastest(lambda: F.linear(x, weight))
        packed_s = _fastest(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    return packed_s < WORTH * plain_s


def _fastest(call: Callable[[], Tensor], times: int = 7) -> float:
    """CPU seconds of the fastest of a few calls, so that a busy machine does not decide."""
    call()
    best = float("inf")
    for _ in range(times):
        started = time.process_time()
        call()
        best = min(best, time.process_time() - started)
    return best
