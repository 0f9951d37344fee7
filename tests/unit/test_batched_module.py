"""A bare PyTorch module in a batcher."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runtime import Batcher


def test_each_item_gets_its_row() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    inputs = torch.randn(20, 4)
    with Batcher(module) as b:
        found = torch.stack(list(b.map(inputs)))
    expected = module.eval()(inputs)
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad


class Two(nn.Module):
    """Two inputs; outputs of several kinds."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, a: Tensor, b: Tensor) -> object:
        found = (a + b, a - b)
        return found if self.kind is tuple else dict(zip("sd", found, strict=True)) if self.kind is dict else 7


def test_several_inputs_and_outputs() -> None:
    with Batcher(Two(tuple)) as b:
        assert b((3, 1)) == (4, 2)
    with Batcher(Two(dict)) as b:
        assert b((3.0, 1.0)) == {"s": 4.0, "d": 2.0}
    with Batcher(Two(int)) as b, pytest.raises(TypeError, match="Two returned int"):
        b((1, 2))


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


def test_different_lengths_are_padded_with_zeros() -> None:
    with Batcher(Last(), strategy="static", max_batch_size=3) as b:
        futures = [b.submit(torch.ones(n)) for n in (1, 5, 3)]
        assert [float(f.result(30)) for f in futures] == [1.0, 5.0, 3.0]


def test_a_collate_function_comes_before_the_module() -> None:
    with Batcher(Last(), collate=lambda items: torch.tensor([[item, 1.0] for item in items])) as b:
        assert list(map(float, b.map([1.0, 2.0, 3.0]))) == [2.0, 3.0, 4.0]
