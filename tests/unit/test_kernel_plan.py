"""The work list of an attention launch: every (token, position) pair exactly once, in no more room than the sizes say."""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import MissingTritonError
from runtime.torch_backend.cuda.attention_plan import END, GRAIN, AttentionPlan, plan_sizes, work_list
from runtime.torch_backend.cuda.tiles import ARCHITECTURES, AttentionTile, attention_tile, shared_bytes, tuned_for

SEQUENCES = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 9000)).map(lambda x: (x[0], x[0] + x[1])), min_size=1, max_size=12
)


@given(
    SEQUENCES,
    st.integers(0, 40),
    st.sampled_from([(1, 1), (4, 2), (7, 1), (32, 8), (48, 1)]),
)
def test_every_pair_belongs_to_one_item(sequences: list[tuple[int, int]], splits: int, heads: tuple[int, int]) -> None:
    new, context = (np.array(x, np.int32) for x in zip(*sequences, strict=True))
    each = max(1, int(new.max()))
    sizes = plan_sizes(len(new), max(1, int(new.sum())), *heads, 8, each=each, splits=splits)
    items, merges = work_list(new, context, sizes)
    assert len(items) <= sizes.items
    assert len(merges) <= sizes.splits
    assert sizes.tile * (heads[0] // heads[1]) <= sizes.rows
    seen: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for sequence, first, low, high, place in items.tolist():
        seen.setdefault((sequence, first), []).append((low, high, place))
    assert sorted(seen) == [(s, f) for s in range(len(new)) for f in range(0, new[s], sizes.tile)]
    merged = {(s, f): (place, count) for s, f, place, count in merges.tolist()}
    places = []
    for (sequence, first), parts in seen.items():
        parts.sort()
        assert parts[0][0] == 0
        assert parts[-1][1] == END
        assert all(a[1] == b[0] for a, b in pairwise(parts))
        last = context[sequence] - new[sequence] + min(first + sizes.tile, new[sequence])
        assert all(low < max(1, last) for low, _, _ in parts)  # no part is empty
        if len(parts) == 1:
            assert parts[0][2] == -1
            assert (sequence, first) not in merged
        else:
            place, count = merged.pop((sequence, first))
            assert [p for _, _, p in parts] == list(range(place, place + count))
            places += range(place, place + count)
    assert not merged
    assert sorted(places) == list(range(len(places)))
    assert len(places) <= sizes.partials


def test_a_long_context_among_short_ones_is_split() -> None:
    """Eight programs a KV head for a long row, one for each short one: no program has more than two grains."""
    context = np.array([8 * GRAIN * 2, 100, 100], np.int32)
    sizes = plan_sizes(3, 3, 8, 8, 1, each=1, splits=15)
    items, merges = work_list(np.ones(3, np.int32), context, sizes)
    assert len(items) == 10
    assert merges.tolist() == [[0, 0, 0, 8]]
    assert all(high - low == 2 * GRAIN for _, _, low, high, _ in items.tolist() if high != END)


def test_items_with_the_most_work_come_first() -> None:
    new, context = np.array([1, 1, 30], np.int32), np.array([100, 900, 500], np.int32)
    items, _ = work_list(new, context, plan_sizes(3, 32, 1, 1, 8, each=16, splits=0))
    assert items[:, :2].tolist() == [[1, 0], [2, 16], [2, 0], [0, 0]]


def test_sizes_of_a_step() -> None:
    """Only what is padded decides: an 8B model's decode on 132 multiprocessors, and a mixed step."""
    decode = plan_sizes(64, 64, 32, 8, 132, each=1)
    assert (decode.tile, decode.rows, decode.splits, decode.tiles, decode.items) == (1, 16, 33, 64, 97)
    mixed = plan_sizes(64, 2048, 32, 8, 132)
    assert (mixed.tile, mixed.rows, mixed.tiles) == (16, 64, 64 + (2048 - 64) // 16)
    drafts = plan_sizes(8, 40, 32, 8, 132, each=5)
    assert (drafts.tile, drafts.rows, drafts.tiles) == (5, 32, 8)
    assert plan_sizes(1, 1, 71, 1, 108).rows == 128


def test_an_update_replaces_the_step_before() -> None:
    plan = AttentionPlan(plan_sizes(3, 9, 2, 1, 8, splits=4))
    assert (plan.items[:, 0] == -1).all() and (plan.merges[:, 0] == -1).all(), "before there is a step"
    plan.update([4, 0, 5], [4, 900, 2000])
    assert plan.starts.tolist() == [0, 4, 4, 9]
    assert (plan.merges[:, 0] >= 0).sum() == 1
    buffers = [plan.items.data_ptr(), plan.merges.data_ptr(), plan.lengths.data_ptr()]
    plan.update([1], [7])
    assert [plan.items.data_ptr(), plan.merges.data_ptr(), plan.lengths.data_ptr()] == buffers
    assert plan.items[plan.items[:, 0] >= 0].tolist() == [[0, 0, 0, END, -1]]
    assert (plan.merges[:, 0] == -1).all()
    assert plan.starts.tolist() == [0, 1, 1, 1]
    assert plan.lengths.tolist() == [7, 0, 0]
    plan.update([], [])
    assert (plan.items[:, 0] == -1).all()


@pytest.mark.parametrize(
    ("new", "context", "message"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1], "query_lengths has 4 entries and lengths 4; both must have as many, at most 3"),
        ([1, 1], [1], "query_lengths has 2 entries and lengths 1"),
        ([4, 3, 3], [9, 9, 9], "query_lengths add up to 10 tokens; the plan is for at most 9"),
        ([5], [9], "query_lengths holds 5; the plan is for at most 4 tokens of one sequence"),
        (
            [1, 3],
            [1, 2],
            r"query_lengths\[1\] is 3 and lengths\[1\] 2; both must be at least 0 and the context no shorter",
        ),
        ([1, -1], [1, 2], r"query_lengths\[1\] is -1"),
        ([1.5], [2], "query_lengths has shape .* it must be a list of whole numbers"),
    ],
)
def test_a_step_that_does_not_fit_is_named(new: list[int], context: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionPlan(plan_sizes(3, 9, 2, 1, 8, each=4)).update(new, context)


def test_sizes_that_are_wrong_are_named() -> None:
    with pytest.raises(ValueError, match="sequences is 0; it must be at least 1"):
        plan_sizes(0, 1, 1, 1, 8)
    with pytest.raises(ValueError, match="heads is 5; it must be a multiple of kv_heads, 2"):
        plan_sizes(1, 1, 5, 2, 8)
    with pytest.raises(ValueError, match="splits is -1; it must be at least 0"):
        plan_sizes(1, 1, 1, 1, 8, splits=-1)
    with pytest.raises(ValueError, match="head size is 300"):
        attention_tile(90, 300, 2, 16, 1, False)
    with pytest.raises(ValueError, match="256 query heads, padded, share a KV head"):
        attention_tile(90, 64, 2, 256, 1, False)


def test_every_chip_has_numbers() -> None:
    for architecture in (70, 80, 86, 89, 90, 100, 103, 120):
        assert tuned_for(architecture) in ARCHITECTURES
        for dim in (16, 64, 80, 128, 192, 256):
            for element_bytes in (2, 4):
                for rows, fp8 in product((16, 32, 64, 128), (False, True)):
                    assert attention_tile(architecture, dim, element_bytes, rows, 1, fp8).keys >= 16


@pytest.mark.parametrize(
    ("architecture", "tuned", "kib"),
    [
        (80, 80, 163),
        (86, 80, 99),
        (87, 80, 163),
        (89, 80, 99),
        (90, 90, 227),
        (103, 100, 227),
        (120, 80, 99),
        (121, 80, 99),
    ],
)
def test_tiles_are_smaller_where_a_block_has_less_shared_memory(architecture: int, tuned: int, kib: int) -> None:
    """How much each takes is compiled in the slow tier."""
    assert tuned_for(architecture) == tuned and shared_bytes(architecture) == kib << 10
    half, whole = (attention_tile(architecture, 256, element_bytes, 64, 64, False) for element_bytes in (2, 4))
    assert half == attention_tile(tuned, 256, 2, 64, 64, False)
    assert whole == AttentionTile(16, 16, 1 if kib < 100 else 2)
    assert attention_tile(architecture, 128, 2, 64, 64, False).warps == (8 if kib < 100 else 4)


def test_float32_over_a_pool_of_8_bits_has_a_tile_of_its_own() -> None:
    """With loads in flight it spills."""
    for architecture, dim, rows in product(ARCHITECTURES, (64, 128, 256), (16, 64)):
        assert attention_tile(architecture, dim, 4, rows, 64, True).stages == 1
        assert attention_tile(architecture, dim, 2, rows, 64, True) == attention_tile(
            architecture, dim, 2, rows, 64, False
        )


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("language", "norm"):
        monkeypatch.delitem(sys.modules, f"runtime.torch_backend.cuda.{name}", raising=False)
    with pytest.raises(
        MissingTritonError, match=r"the GPU kernels need Triton 3\.6 or newer .* pip install 'triton>=3\.6"
    ):
        importlib.import_module("runtime.torch_backend.cuda.norm")
    for name in ("attention_plan", "tiles"):  # which need none
        monkeypatch.delitem(sys.modules, f"runtime.torch_backend.cuda.{name}")
        importlib.import_module(f"runtime.torch_backend.cuda.{name}")
