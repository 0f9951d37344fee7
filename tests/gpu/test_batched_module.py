"""A bare PyTorch module on a CUDA device, in a batcher."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runtime import Batcher
from runtime.torch_backend.batched_module import BatchedModule


class Heavy(nn.Module):
    """Takes long on any GPU, and is launched at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8192, device="cuda"))

    def forward(self, rows: Tensor) -> Tensor:
        product = self.weight
        for _ in range(8):
            product = product @ self.weight
        return rows @ product


def test_it_waits_for_the_gpu() -> None:
    module = BatchedModule(Heavy())
    rows = [torch.randn(8192) for _ in range(4)]
    module(rows)
    found = module(rows)
    assert torch.cuda.current_stream().query(), "nothing is left to be computed"
    torch.testing.assert_close(torch.stack(found).cpu(), torch.stack(rows))


def test_its_time_is_learned() -> None:
    rows = [torch.randn(8192) for _ in range(8)]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    module = Heavy()
    with torch.inference_mode():
        module(rows[0].cuda()[None])
        begin.record()
        module(rows[0].cuda()[None])
        end.record()
    end.synchronize()
    took_s = begin.elapsed_time(end) / 1e3
    with Batcher(module, slo="e2e=30s") as batcher:
        for row in rows:
            batcher(row)
        learned = batcher.strategy.model.predict(1, 1)  # type: ignore[attr-defined]
    assert learned > 0.8 * took_s
