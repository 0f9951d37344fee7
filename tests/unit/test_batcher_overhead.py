"""The overhead benchmark measures what it says: full calls, every way of using a batcher."""

from __future__ import annotations

import pytest

from benchmarks.batcher import overhead
from benchmarks.batcher.overhead import BATCH, WAYS, cpu_us, memory, rules_us
from runtime import RequestRecord

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_measured_in_calls_of_the_right_size(way: str) -> None:
    cost, size = cpu_us(way, 2000)
    assert cost > 0 and 1 < size <= BATCH  # how full calls are depends on what else the machine does


def test_a_request_is_heard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[RequestRecord]()
    monkeypatch.setattr(overhead.Hears, "on_request", lambda self, record: heard.append(record))
    cpu_us("slo, cost, records", 3000)
    assert 3000 < len(heard) <= 2000 + 3000, "those of the warm-up and those that count"


def test_the_rules_and_the_memory_are_measured() -> None:
    assert rules_us(500, 0.9) > 0
    looks = memory(2000, looks=3)
    assert [items for items, _ in looks] == [0, 1000, 2000] and all(size > 1 for _, size in looks)
