"""The benchmark of padding: what is counted as padding, and that the ways differ as they must."""

from __future__ import annotations

import json
import random
from math import inf

import pytest

from benchmarks.padding import BASE_S, LARGEST, TOKEN_S, WAYS, lengths_of, main, measure, padded

ARRIVAL, BUCKETS, SORTED, PACKED = WAYS


def test_a_rectangle_is_as_wide_as_its_longest() -> None:
    assert padded([3, 1, 2]) == 9
    assert PACKED.tokens([3, 1, 2]) == 6


def test_waste_and_times_of_one_call_by_hand() -> None:
    found = measure(ARRIVAL, [100, 50, 50], inf, seed=1)
    assert found.waste == pytest.approx(1 - 200 / 300) and found.items_a_call == 3
    assert found.p50 == found.p99 == pytest.approx(BASE_S + 300 * TOKEN_S)
    assert found.served == pytest.approx(3 / (BASE_S + 300 * TOKEN_S))
    assert measure(PACKED, [100, 50, 50], inf, seed=1).waste == 0


def test_with_a_backlog_the_ways_come_in_their_order() -> None:
    lengths = lengths_of(None, 1500, random.Random(3))
    waste = [measure(way, lengths, inf, seed=3).waste for way in (ARRIVAL, BUCKETS, SORTED, PACKED)]
    assert waste == sorted(waste, reverse=True) and waste[0] > 0.5 and waste[2] < 0.2 and waste[3] == 0
    assert measure(SORTED, lengths, inf, seed=3).items_a_call > LARGEST - 1


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--items", "300"])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(told) == {way.name for way in WAYS} and told[PACKED.name] == 0 < told[BUCKETS.name] < told[ARRIVAL.name]
