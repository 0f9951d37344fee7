from __future__ import annotations

import time

import pytest

from runtime.llm.kv_blocks import KVBlocks


def test_take_and_give_count() -> None:
    kv = KVBlocks(8, 4)
    held = kv.take(3)
    assert kv.free == 5 and kv.blocks_for(9) == 3 and kv.blocks_for(8) == 2
    kv.check_integrity([held])
    kv.give(held)
    kv.check_integrity([])
    assert kv.take(0) == []


def test_least_recently_used_is_taken_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    kv = KVBlocks(4, 4)
    old, new = kv.take(2), kv.take(2)
    for block, digest in zip(old + new, (1, 2, 3, 4), strict=True):
        kv.publish(block, digest)
    kv.give(old)
    kv.give(new)
    kv.take(1)
    assert kv.lookup([1, 2], 9) == old[:1], "the end of the older prefix went first"
    kv.take(1)
    assert kv.lookup([1, 2], 9) == [] and kv.lookup([3, 4], 9) == new


def test_holding_refreshes() -> None:
    kv = KVBlocks(2, 4)
    a, b = kv.take(2)
    kv.publish(a, 1)
    kv.publish(b, 2)
    kv.give([a])
    kv.give([b])
    kv.hold([a])
    kv.give([a])
    kv.take(1)
    assert kv.lookup([2], 1) == [] and kv.lookup([1], 1) == [a]


def test_of_copies_the_next_is_found_when_the_first_is_gone() -> None:
    """Where every copy is known; else the second is no more than a free block as soon as it is let go."""
    for every_copy in (False, True):
        kv = KVBlocks(3, 4, every_copy=every_copy)
        first, second, third = kv.take(3)
        for block in (first, second):
            kv.publish(block, 7)
        assert kv.lookup([7], 1) == [first] and (kv.published, kv.cached) == (1, 1)
        kv.give([first])
        kv.give([second])
        kv.check_integrity([[third]])
        assert kv.take(1) == ([first] if every_copy else [second])
        assert kv.lookup([7], 1) == ([second] if every_copy else [first])
        kv.forget([first, second])
        kv.check_integrity([[third], [first if every_copy else second]])
        assert kv.lookup([7], 1) == []


def test_shared_blocks_are_free_when_the_last_holder_lets_go() -> None:
    kv = KVBlocks(3, 4)
    blocks = kv.take(1)
    kv.publish(blocks[0], 7)
    kv.hold(blocks)
    kv.hold(blocks)
    kv.check_integrity([blocks, blocks, blocks])
    kv.give(blocks)
    kv.give(blocks)
    assert kv.free == 2
    kv.give(blocks)
    assert kv.free == 3 and kv.lookup([7], 1) == blocks
    kv.check_integrity([])


def test_forgetting_a_shared_block_keeps_its_holders() -> None:
    kv = KVBlocks(3, 4)
    blocks = kv.take(1)
    kv.publish(blocks[0], 7)
    kv.hold(blocks)
    kv.forget(blocks)
    assert kv.lookup([7], 1) == []
    kv.check_integrity([blocks, blocks])
    kv.give(blocks)
    kv.give(blocks)
    kv.check_integrity([])
    assert kv.free == 3


def test_the_first_block_with_a_prefix_is_the_one_kept() -> None:
    kv = KVBlocks(3, 4)
    one, two = kv.take(2)
    kv.publish(one, 7)
    kv.publish(two, 7)
    assert kv.lookup([7], 1) == [one]
    kv.give([two])
    assert kv.free == 2 and kv.cached == 1
    kv.check_integrity([[one]])


def test_integrity_check_sees_leaks_and_double_frees() -> None:
    kv = KVBlocks(4, 4)
    held = kv.take(2)
    with pytest.raises(AssertionError, match="leaked"):
        kv.check_integrity([held[:1]])
    kv.give(held)
    kv.give(held)
    with pytest.raises(AssertionError, match="free twice"):
        kv.check_integrity([])


@pytest.mark.parametrize(("total", "size", "name"), [(0, 4, "total"), (4, 0, "block_size")])
def test_bad_sizes(total: int, size: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        KVBlocks(total, size)


def _seconds_a_take(total: int) -> float:
    """CPU time of taking one block from a pool full of known prefixes, on average until the pool is empty."""
    kv = KVBlocks(total, 16)
    blocks = kv.take(total)
    for block in blocks:
        kv.publish(block, block)
    kv.give(blocks)
    began = time.thread_time()
    for _ in range(total):
        kv.take(1)
    return (time.thread_time() - began) / total


def test_taking_a_cached_block_costs_the_same_however_many_were_taken_before() -> None:
    """It once cost a look at each block taken before: 16 times the blocks took 16 times as long each."""
    ratio = min(_seconds_a_take(32_000) / _seconds_a_take(2_000) for _ in range(3))
    assert ratio < 5
