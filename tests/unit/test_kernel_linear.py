"""Products of few rows against float64."""

from __future__ import annotations

import pytest
import torch

from tests.tiers import slow_but_for
from tests.unit.kernels import DEVICE, ROUNDING, close, poisoned, randn

from runtime.torch_backend.cuda import counters  # isort: skip
from runtime.torch_backend.cuda.linear import linear  # isort: skip
from runtime.torch_backend.cuda.tiles import LinearTile  # isort: skip

DTYPES = (torch.bfloat16, torch.float16)
TILES = (LinearTile(16, 32, 1, 4, 2), LinearTile(32, 64, 3, 4, 2), LinearTile(16, 32, 99, 4, 2))


@pytest.mark.parametrize("dtype", slow_but_for([torch.bfloat16], DTYPES), ids=str)
@pytest.mark.parametrize(
    "tile", slow_but_for([(TILES[1],)], [(tile,) for tile in TILES]), ids=lambda tile: f"{tile.parts} parts"
)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 32), (3, 320, 96), (17, 128, 64)])
def test_products_by_their_definition(
    dtype: torch.dtype, tile: LinearTile, rows: int, inputs: int, outputs: int
) -> None:
    wide = randn(rows, inputs + 8, seed=1, dtype=dtype)
    x, weight, bias = wide[:, 8:], randn(outputs, inputs, seed=2, dtype=dtype), randn(outputs, seed=3, dtype=dtype)
    expected = x.double() @ weight.double().T
    for added in (None, bias):
        for _ in range(2):  # the second finds the counters as the first has left them
            out = poisoned(rows, outputs, dtype=dtype)
            assert linear(x, weight, added, tile, out=out) is out
            close(out, expected if added is None else expected + added.double(), ROUNDING[dtype], 1e-4)


@pytest.mark.parametrize("dtype", slow_but_for([torch.bfloat16], DTYPES), ids=str)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.parts} parts")
def test_gated_products_by_their_definition(dtype: torch.dtype, tile: LinearTile) -> None:
    rows, inputs, outputs = 5, 192, 64
    x, weight, bias = (randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(5, 192), (128, 192), (128,)]))
    for added in (None, bias):
        gate, up = (x.double() @ weight.double().T + (0.0 if added is None else added.double())).chunk(2, -1)
        out = poisoned(rows, outputs, dtype=dtype)
        linear(x, weight, added, tile, silu_gated=True, out=out)
        close(out, torch.nn.functional.silu(gate) * up, ROUNDING[dtype] + 1e-5, 1e-3)
    assert inputs % tile.inputs == 0


def test_counters_are_zero_behind_a_launch() -> None:
    x, weight = randn(2, 128, dtype=torch.bfloat16), randn(32, 128, dtype=torch.bfloat16)
    linear(x, weight, None, LinearTile(16, 32, 4, 4, 2))
    assert counters._counters and all(int(count.sum()) == 0 for count in counters._counters.values())


def test_what_is_recorded_anew_shares_no_counters_with_earlier_recordings() -> None:
    """PyTorch hands out streams again, and earlier recordings run on another stream by then."""
    device = torch.device(DEVICE)
    before = counters.counters_of(device, 7)
    assert counters.counters_of(device, 7) is before is not counters.counters_of(device, 8)
    counters.renew_counters(device, 7)
    after = counters.counters_of(device, 7)
    assert after is not before and any(one is before for one in counters._recorded), "recordings hold its address"
    counters.renew_counters(device, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 64)}, "both must be bfloat16"),
        ({"x": torch.zeros(65, 64, dtype=torch.bfloat16)}, "x has 65 rows; it must have 1 to 64"),
        ({"x": torch.zeros(2, 60, dtype=torch.bfloat16)}, "weight has shape"),
        ({"tile": LinearTile(64, 32, 1, 4, 2)}, "does not divide 64 inputs and 32 outputs"),
        ({"bias": torch.zeros(5, dtype=torch.bfloat16)}, "bias has shape"),
        ({"out": torch.zeros(2, 31, dtype=torch.bfloat16)}, "out has shape"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    given = {"x": torch.zeros(2, 64, dtype=torch.bfloat16), "weight": torch.zeros(32, 64, dtype=torch.bfloat16), "bias": None,
             "tile": TILES[0]} | change  # fmt: skip
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    out = moved.pop("out", None)
    with pytest.raises(ValueError, match=message):
        linear(*moved.values(), out=out)  # type: ignore[arg-type]  # one of them is wrong on purpose
