"""Every latency metric, on examples worked out by hand."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.records import FinishReason, LimitedBy, StepRecord, StepTimes, percentile
from tests.building import request_record


def test_four_tokens_by_hand() -> None:
    record = request_record([102.0, 102.5, 102.5, 104.0], arrival=100.0, scheduled=101.25)
    assert record.queue_time == 1.25
    assert record.ttft == 2.0
    assert record.itl == [0.5, 0.0, 1.5]
    assert record.tpot == pytest.approx(2.0 / 3)
    assert record.itl_p99 == 1.5
    assert record.e2e == 4.0


def test_one_token_has_no_gaps() -> None:
    record = request_record([2.0], arrival=0.5, scheduled=1.0)
    assert (record.queue_time, record.ttft, record.e2e) == (0.5, 1.5, 1.5)
    assert (record.tpot, record.itl, record.itl_p99) == (None, [], None)


def test_no_token_has_no_latency_at_all() -> None:
    record = request_record(arrival=1.0, finished=9.0, reason=FinishReason.REJECTED)
    assert (record.queue_time, record.ttft, record.tpot, record.itl, record.e2e) == (None, None, None, [], None)


def test_e2e_ends_with_the_last_token_not_with_the_record() -> None:
    assert request_record([1.0, 2.0], finished=7.0, reason=FinishReason.TIMEOUT).e2e == 2.0


@pytest.mark.parametrize(
    ("reason", "completed", "offered"),
    [
        (FinishReason.LENGTH, True, True),
        (FinishReason.STOP, True, True),
        (FinishReason.CANCELLED, False, False),
        (FinishReason.TIMEOUT, False, True),
        (FinishReason.REJECTED, False, True),
        (FinishReason.ERROR, False, True),
    ],
)
def test_what_each_end_counts_as(reason: FinishReason, completed: bool, offered: bool) -> None:
    record = request_record([1.0], reason=reason)
    assert (record.completed, record.offered) == (completed, offered)


def test_every_end_is_in_the_table_above() -> None:
    assert len(FinishReason) == 6


def test_a_record_says_whether_the_knobs_changed_under_it() -> None:
    assert request_record([1.0], epochs=(3, 4)).spans_change
    assert not request_record([1.0], epochs=(3, 3)).spans_change


gaps = st.lists(st.floats(0, 1e3), min_size=1, max_size=300)


@given(st.floats(0, 1e6), gaps)
def test_the_metrics_agree_with_each_other(arrival: float, steps: list[float]) -> None:
    times = list(accumulate(steps, initial=arrival))[1:]
    record = request_record(times, arrival=arrival)
    assert record.ttft is not None and record.e2e is not None
    assert record.e2e == pytest.approx(record.ttft + sum(record.itl), abs=1e-6)
    if record.tpot is None:
        assert len(times) == 1
    else:
        assert record.tpot == pytest.approx(sum(record.itl) / len(record.itl), abs=1e-6)
        assert record.itl_p99 in record.itl


@pytest.mark.parametrize(
    ("q", "value"), [(0, 1), (1, 1), (20, 1), (20.1, 2), (50, 3), (60, 3), (61, 4), (99, 5), (100, 5)]
)
def test_percentile_is_the_nearest_rank(q: float, value: int) -> None:
    assert percentile([5, 3, 1, 4, 2], q) == value


def test_percentile_edges() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 99) == 7.0
    assert [percentile(range(1, 101), q) for q in range(1, 101)] == [*range(1, 101)]
    assert percentile(range(1, 1001), 99) == 990
    for q in (-1, 101, float("nan")):
        with pytest.raises(ValueError, match=f"q is {q}; a percentile is between 0 and 100"):
            percentile([1.0], q)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), st.floats(0, 100))
def test_percentile_is_a_value_that_occurred_and_has_its_share_below(values: list[float], q: float) -> None:
    found = percentile(values, q)
    assert found in values
    assert sum(v <= found for v in values) >= q / 100 * len(values) - 1e-9


def step_record(**changes: object) -> StepRecord:
    record = StepRecord(
        start=10.0, end=10.5, steps=1, decodes=3, decode_context=300, chunks=1, prefill_tokens=64, prefill_context=80,
        prefill_attention=64 * 16 + 64 * 65 // 2, sampled=4, running=4, waiting=0, waiting_tokens=0, kv_free_blocks=9,
        preemptions=0, epoch=0, budget_used=128, limited_by=LimitedBy.DEMAND,
    )  # fmt: skip
    return record._replace(**changes)


def test_a_step_record_speaks_of_one_step() -> None:
    assert (step_record().duration, step_record().tokens) == (0.5, 67)
    assert step_record(steps=5, chunks=0, prefill_tokens=0).duration == pytest.approx(0.1)
    assert step_record(steps=5, chunks=0, prefill_tokens=0).tokens == 3


def timed(start: float, end: float, **more: object) -> StepRecord:
    return step_record(start=start, end=end, **more)


@pytest.mark.parametrize(
    ("before", "after", "seconds"),
    [
        (timed(0, 1), timed(1.25, 2), 1.0),  # the host's quarter of a second is part of the step
        (timed(0, 1), timed(1, 5, steps=4), 1.0),
        (timed(0, 1), timed(0.5, 2), 1.0),  # begun before the other had ended
        (timed(0, 1, running=0), timed(1.25, 2), 0.75),  # idle between them
        (timed(0, 1, running=0, waiting=2), timed(1.25, 2), 1.0),
        (timed(0, 1, running=0, waiting=2, limited_by=LimitedBy.WAIT), timed(1.25, 2), 0.75),
        (timed(0, 1), timed(1 + 2**-7, 1 + 3 * 2**-8), 3 * 2**-8),  # the host took longer than the device
        (timed(0, 1), timed(1 + 2**-7, 1 + 3 * 2**-8, after_idle=True), 2**-8),  # what ran was cancelled
        (timed(0, 1), timed(1.75, 2), 0.25),  # so long a pause is no host's
        (timed(0, 1), timed(9, 10), 1.0),
        (timed(0, 1), timed(0, 1), 1.0),  # a clock that was set back
    ],
)
def test_what_a_step_takes_of_the_engines_time(before: StepRecord, after: StepRecord, seconds: float) -> None:
    times = StepTimes()
    assert times.of(before) == 1.0, "nothing is known of what was before the first"
    assert times.of(after) == seconds


def test_steps_back_to_back_take_exactly_their_duration() -> None:
    """Of simulated steps, whose time nothing may change by as much as a rounding error."""
    ends = list(accumulate([0.1, 0.2, 0.3, 0.7, 1 / 3]))
    times = StepTimes()
    for start, end in zip([0.0, *ends], ends, strict=False):
        record = timed(start, end)
        assert times.of(record) == record.duration
