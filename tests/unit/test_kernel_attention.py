"""The attention kernel against its definition in float64: every output poisoned, every slot of the pool that nobody owns
NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.kernels import DEVICE, close, poisoned, randn
from tests.unit.paged_cases import Case, attended, by_definition, case, planned

from runtime.torch_backend.cuda import attention  # isort: skip
from runtime.torch_backend.cuda.attention import paged_attention  # isort: skip

# What a dtype may be off: float32 sums of up to 8k products in another order; otherwise the rounding of weights and of the result
# (2^-8 and 2^-7 cut off in bfloat16) relative to values of about 1 that cancel, so the bound is absolute.
TOLERANCE = {torch.float32: (1e-5, 2e-6), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 1e-2)}

MIXED = [(1, 40), (1, 1), (7, 7), (0, 0), (20, 50), (0, 33), (1, 16)]
DECODE = [(1, 40), (1, 1), (1, 17), (0, 0), (1, 16), (1, 5)]
LONG = [(1, 700), (1, 3)]


def check(
    given: Case,
    scale: float = 0.25,
    *,
    splits: int = 0,
    tokens: int | None = None,
    **terms: Any,
) -> None:
    dtype = given.query.dtype
    shape = (len(given.query), given.query.shape[1], given.value_pool.shape[2])
    plan = planned(given, splits=splits, tokens=tokens)
    out = attended(given, plan, scale, poisoned(*shape, dtype=dtype), **terms)
    expected = by_definition(given, scale, **terms)
    count = sum(given.new)
    assert out[count:].isnan().all()  # rows of nobody are left alone
    close(out[:count], expected[:count], *TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("sequences", "dtype"),
    [
        *((MIXED, dtype) for dtype in TOLERANCE), (DECODE, torch.float32), ([(1, 1)], torch.bfloat16), ([(3, 3)], torch.float32),
        ([(70, 70)], torch.bfloat16),
    ],
    ids=["mixed, float32", "mixed, float16", "mixed, bfloat16", "decode", "one", "three", "chunk"],
)  # fmt: skip
def test_any_mixture_of_rows(sequences: list[tuple[int, int]], dtype: torch.dtype) -> None:
    check(case(sequences, dtype=dtype))


@pytest.mark.parametrize(
    ("heads", "sequences"),
    [*((heads, MIXED[:3]) for heads in ((1, 1), (7, 1), (6, 2), (20, 1))), ((8, 1), DECODE), ((4, 4), DECODE[:2])],
    ids=str,
)
def test_heads_share_keys(heads: tuple[int, int], sequences: list[tuple[int, int]]) -> None:
    check(case(sequences, heads=heads[0], kv_heads=heads[1]))


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 80), (112, 112), (256, 256), (96, 64), (24, 40), (8, 8)])
def test_head_sizes(dim: int, value_dim: int) -> None:
    check(case([(1, 20), (5, 9)], dim=dim, value_dim=value_dim), scale=dim**-0.5)


@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_block_sizes(block_size: int) -> None:
    check(case([(1, 40), (9, 30)], block_size=block_size, index=torch.int64))


TERMS = {
    "window": {"window": 9},
    "window of one": {"window": 1},
    "wide window": {"window": 500},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-2, 2, 4, device=DEVICE)},
    "all": {"window": 30, "softcap": 2.0, "sinks": torch.linspace(-1, 3, 4, device=DEVICE)},
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())
@pytest.mark.parametrize(("sequences", "splits"), [(MIXED, 0), (LONG, 3)], ids=["mixed", "split"])
def test_terms(terms: dict[str, Any], sequences: list[tuple[int, int]], splits: int) -> None:
    check(case(sequences), splits=splits, **terms)


@pytest.mark.parametrize(
    ("sequences", "splits", "dtype"),
    [
        (LONG, 1, torch.float32), (LONG, 40, torch.float32), ([(1, 700), (5, 600), (0, 0)], 3, torch.float32),
        ([(1, 700), (5, 600), (0, 0)], 20, torch.bfloat16),
    ],
)  # fmt: skip
def test_parts_are_merged(sequences: list[tuple[int, int]], splits: int, dtype: torch.dtype) -> None:
    given = case(sequences, heads=2, kv_heads=1, dtype=dtype)
    if splits > 3:
        assert (planned(given, splits=splits).merges[:, 0] >= 0).any()
    check(given, splits=splits)


@pytest.mark.slow
@pytest.mark.parametrize("position", (0, 2600, 4499))
def test_any_part_may_weigh_most(position: int) -> None:
    """Of 18 parts, which are more than are merged at a time."""
    given = case([(1, 4500)], heads=1, kv_heads=1, dim=64)
    given.query.copy_(given.keys[0][position])
    assert planned(given, splits=40).merges[0, 3] == 18
    check(given, 0.5, splits=40)


def test_a_window_leaves_parts_empty() -> None:
    given = case([(1, 900), (1, 4)])
    plan = planned(given, splits=4)
    assert (plan.merges[:, 0] >= 0).sum() == 1
    check(given, splits=4, window=300, sinks=TERMS["sinks"]["sinks"])


def test_a_plan_may_be_larger_than_its_step() -> None:
    check(case(MIXED, padding=3), tokens=100)
    check(case(DECODE, padding=5), splits=3, tokens=len(DECODE) + 5)


def test_a_context_may_turn_out_shorter_than_planned() -> None:
    """As when drafted tokens are refused: the device's lengths count."""
    given = case([(1, 600), (1, 30)])
    plan = planned(given, splits=4)
    plan.lengths -= 100 * (plan.lengths > 100).int()
    out = attended(given, plan, 0.25, poisoned(2, 4, 16))
    shorter = given._replace(
        contexts=[500, 30], keys=[given.keys[0][:500], given.keys[1]], values=[given.values[0][:500], given.values[1]]
    )
    close(out, by_definition(shorter, 0.25), *TOLERANCE[torch.float32])


def test_queries_and_outputs_may_be_views() -> None:
    given = case(MIXED)
    tokens = len(given.query)
    merged = randn(tokens, 4 + 2, 16, seed=5)
    merged[:, :4] = given.query
    out = poisoned(tokens, 6, 16)
    attended(given._replace(query=merged[:, :4]), planned(given), 0.25, out[:, 2:])
    assert out[:, :2].isnan().all()
    close(out[:, 2:], by_definition(given, 0.25), *TOLERANCE[torch.float32])


@pytest.mark.parametrize(("architecture", "as_bytes"), [(80, False), (90, True)])
def test_pools_in_8_bits(architecture: int, as_bytes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By integer operations and by the chip's own conversion."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(attention, "architecture_of", lambda device: architecture)
    given = case([*MIXED[:4], (1, 300)])
    scales = torch.tensor([0.02, 0.005], device=DEVICE), torch.tensor([0.01, 0.03], device=DEVICE)
    pools, kept = [], []
    for pool, parts, scale in ((given.key_pool, given.keys, scales[0]), (given.value_pool, given.values, scales[1])):
        pools.append((pool / scale[:, None]).to(torch.float8_e4m3fn))
        kept.append([(x / scale[:, None]).to(torch.float8_e4m3fn).float() * scale[:, None] for x in parts])
    if as_bytes:
        pools = [pool.view(torch.uint8) for pool in pools]
    stored = given._replace(key_pool=pools[0], value_pool=pools[1], keys=kept[0], values=kept[1])
    out = poisoned(len(given.query), 4, 16)
    attended(stored, planned(given, splits=2), 0.25, out, key_scale=scales[0], value_scale=scales[1])
    close(out, by_definition(stored, 0.25), *TOLERANCE[torch.float32])


@pytest.mark.slow
def test_a_context_of_8k() -> None:
    check(
        case([(1, 8192), (1, 100), (40, 8000), (1, 8191)], heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16),
        scale=128**-0.5,
        splits=33,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "terms",
    [{"window": 4096, "softcap": 30.0}, {"window": 128, "sinks": torch.ones(8, device=DEVICE)}],
    ids=["gemma", "gpt-oss"],
)
def test_a_context_of_8k_with_terms(terms: dict[str, Any]) -> None:
    check(case([(1, 8192), (20, 8000)], heads=8, kv_heads=2, dim=64), scale=0.125, splits=16, **terms)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_drawn_cases(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    kv_heads = whole(1, 3)
    sequences = []
    for _ in range(whole(1, 6)):
        new = whole(0, 3) and whole(0, 60)
        sequences.append((new, new + whole(0, 500)))
    if not sum(new for new, _ in sequences):
        sequences.append((1, 1))
    heads = kv_heads * whole(1, 9)
    given = case(
        sequences, heads=heads, kv_heads=kv_heads, dim=8 * whole(1, 16), value_dim=8 * whole(1, 16), block_size=whole(1, 40),
        dtype=list(TOLERANCE)[whole(0, 2)], padding=whole(0, 3), seed=seed,
    )  # fmt: skip
    terms: dict[str, Any] = {}
    if whole(0, 1):
        terms["window"] = whole(1, 300)
    if whole(0, 1):
        terms["softcap"] = 0.5 + whole(0, 40)
    if whole(0, 1):
        terms["sinks"] = randn(heads, seed=seed)
    check(given, given.query.shape[2] ** -0.5, splits=whole(0, 9), **terms)


def test_what_does_not_fit_is_named() -> None:
    given = case(DECODE)
    plan, out = planned(given), poisoned(len(given.query), 4, 16)
    with pytest.raises(ValueError, match="softcap is -1; it must be above 0"):
        attended(given, plan, 1.0, out, softcap=-1)
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        attended(given, plan, 1.0, out, window=0)
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\); it must be a contiguous \[4\]"):
        attended(given, plan, 1.0, out, sinks=randn(3))
    with pytest.raises(
        ValueError, match=r"keys are torch.float16 and values torch.float32; both must be torch.float32"
    ):
        attended(given._replace(key_pool=given.key_pool.half()), plan, 1.0, out)
    with pytest.raises(ValueError, match="an 8-bit pool needs key_scale and value_scale"):
        eight = [x.to(torch.float8_e4m3fn) for x in (given.key_pool, given.value_pool)]
        attended(given._replace(key_pool=eight[0], value_pool=eight[1]), plan, 1.0, out)
    with pytest.raises(ValueError, match=r"table has shape \(5, 3\); it must be \[6 or more, blocks\]"):
        attended(given._replace(table=given.table[:5]), plan, 1.0, out)
    with pytest.raises(ValueError, match="block_size is 7; it must divide the pool's"):
        paged_attention(given.query, given.key_pool, given.value_pool, given.table, plan, block_size=7, scale=1.0)
    with pytest.raises(ValueError, match="out has shape"):
        attended(given, plan, 1.0, out[:1])
    with pytest.raises(ValueError, match="query has 5 heads; it must be a multiple of the 2 KV heads"):
        attended(given._replace(query=randn(5, 5, 16)), plan, 1.0, out)
    with pytest.raises(ValueError, match="head size is 264; the attention kernel takes 1 to 256"):
        check(case(DECODE, dim=264))
    with pytest.raises(ValueError, match="the plan has tiles of 1 tokens in 16 rows, too few for 160 heads over 2"):
        attended(case(DECODE, heads=160), plan, 1.0, poisoned(6, 160, 16))
