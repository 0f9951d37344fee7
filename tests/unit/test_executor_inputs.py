from __future__ import annotations

import pytest

from runtime.llm.plan import Chunk, DecodeSet, StepPlan
from runtime.records import LimitedBy
from runtime.request import Request, SamplingParams, Sequence
from runtime.torch_backend.inputs import DecodeRows, chunk_slots, chunk_tokens


def _sequence(name: str, computed: int, blocks: list[int], joined: int = 0) -> Sequence:
    sequence = Sequence(Request(name, tuple(range(10, 10 + computed)), SamplingParams(), 9, 0.0))
    sequence.computed, sequence.blocks, sequence.joined = computed, blocks, joined
    return sequence


def _plan(decodes: DecodeSet, step: int) -> StepPlan:
    limited = LimitedBy.DEMAND
    return StepPlan(step, len(decodes), 0, (), decodes, decodes.version, 1, float("inf"), 0, 8, limited, 0)


def _state(rows: DecodeRows) -> dict[str, tuple[int, int]]:
    positions = rows.positions
    slots = rows.slots(positions)
    return {s.request.id: (int(p), int(x)) for s, p, x in zip(rows.sequences, positions, slots, strict=True)}


def test_rows_follow_the_decode_set() -> None:
    rows, decodes = DecodeRows(4, 99), DecodeSet()
    a, b = _sequence("a", 3, [7]), _sequence("b", 8, [1, 2, 5])
    decodes.members = {a: None, b: None}
    decodes.version = 1
    rows.advance(_plan(decodes, 0))
    assert _state(rows) == {"a": (3, 31), "b": (8, 20)}
    a.blocks.append(4)  # a enters its second block
    rows.advance(_plan(decodes, 1))
    assert _state(rows) == {"a": (4, 16), "b": (9, 21)}
    assert rows.table(10).tolist() == [[7, 4, 99], [1, 2, 5]]
    c = _sequence("c", 20, [10, 11, 12, 13, 14, 15], joined=2)
    decodes.members = {b: None, c: None}
    decodes.version = 2
    rows.advance(_plan(decodes, 2))
    assert rows.homes[c] == 0  # which was a's
    assert _state(rows) == {"b": (10, 22), "c": (20, 60)}


def test_a_sequence_that_left_and_came_back_is_entered_anew() -> None:
    rows, decodes = DecodeRows(4, 99), DecodeSet()
    a = _sequence("a", 3, [7])
    decodes.members[a] = None
    decodes.version = 1
    rows.advance(_plan(decodes, 5))
    a.blocks, a.computed, a.joined = [2, 3], 6, 9
    decodes.version = 3
    rows.advance(_plan(decodes, 9))
    assert _state(rows) == {"a": (6, 14)}


def test_another_decode_set_starts_from_nothing() -> None:
    rows, first, second = DecodeRows(4, 99), DecodeSet(), DecodeSet()
    first.members[_sequence("a", 3, [7])] = None
    second.members[_sequence("b", 5, [1, 2], joined=40)] = None
    first.version = second.version = 1
    rows.advance(_plan(first, 3))
    rows.advance(_plan(second, 40))
    assert _state(rows) == {"b": (5, 9)}


def test_chunks_cover_prompt_and_output() -> None:
    sequence = _sequence("a", 5, [3, 9])
    sequence.output = [50, 51, 52]
    assert chunk_tokens(Chunk(sequence, 1, 3, False)) == (11, 12, 13)
    assert chunk_tokens(Chunk(sequence, 3, 4, False)) == [13, 14, 50, 51]
    assert chunk_tokens(Chunk(sequence, 6, 2, True)) == [51, 52]
    assert chunk_slots(Chunk(sequence, 2, 5, False), 4).tolist() == [14, 15, 36, 37, 38]
    with pytest.raises(ValueError, match="5 prompt and 3 output tokens"):
        chunk_tokens(Chunk(sequence, 6, 3, True))
