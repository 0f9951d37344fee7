"""The SLO: its one spelling, what meets it, and how sure one can be of a share."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.records import FinishReason
from runtime.slo import METRICS, SLO, RequestClass, attainment, find_slo, in_percent, slo_for, wilson_interval
from tests.building import request_record

WRITE = "write ttft=500ms,tpot=50ms@99%"
BOUNDS = "above 0 and at most 1e+15 ms"
SHARE = "it must be above 0% and at most 100%, like @99% or @0.99"

GOOD = [
    ("ttft=500ms", SLO(ttft_ms=500)),
    ("ttft=500ms,tpot=50ms", SLO(ttft_ms=500, tpot_ms=50)),
    ("ttft=0.5s,tpot=0.05s@99%", SLO(ttft_ms=500, tpot_ms=50)),
    (" ttft = 500 ms , tpot = 50 ms @ 99 % ", SLO(ttft_ms=500, tpot_ms=50)),
    ("itl=80ms@95%", SLO(itl_ms=80, attainment=0.95)),
    ("e2e=200ms@0.999", SLO(e2e_ms=200, attainment=0.999)),
    ("e2e=1e3ms@100%", SLO(e2e_ms=1000, attainment=1)),
    ("tpot=1.5e-3s", SLO(tpot_ms=1.5)),
    ("e2e=2s,itl=1s,tpot=+.5s,ttft=1.s@1", SLO(ttft_ms=1000, tpot_ms=500, itl_ms=1000, e2e_ms=2000, attainment=1)),
]

BAD = [
    ("tpot=50", '"tpot=50" has no unit; write tpot=50ms or tpot=0.05s'),
    ("ttft=500ms,tpot=50", '"tpot=50" has no unit; write tpot=50ms or tpot=0.05s'),
    ("ttft=5us", '"ttft=5us": us is not a unit; the units are ms, s'),
    ("ttft=5MS", '"ttft=5MS": MS is not a unit; the units are ms, s'),
    ("TTFT=5ms", '"TTFT" is not a metric; the metrics are ttft, tpot, itl, e2e'),
    ("p99=5ms", '"p99" is not a metric; the metrics are ttft, tpot, itl, e2e'),
    ("ttft=1ms,ttft=2ms", '"ttft" is given twice'),
    ("", f'"" is not a target; {WRITE}'),
    ("@99%", f'"" is not a target; {WRITE}'),
    ("ttft", f'"ttft" is not a target; {WRITE}'),
    ("ttft=500ms,", f'"" is not a target; {WRITE}'),
    ("ttft=500ms;tpot=50ms", f'"ttft=500ms;tpot=50ms" is not a target; {WRITE}'),
    ("ttft<500ms", f'"ttft<500ms" is not a target; {WRITE}'),
    ("ttft=infms", f'"ttft=infms" is not a target; {WRITE}'),
    ("ttft=1.2.3ms", '"ttft=1.2.3ms": 1.2.3 is not a number'),
    ("ttft=0ms", f'"ttft=0ms" must be {BOUNDS}'),
    ("ttft=-5ms", f'"ttft=-5ms" must be {BOUNDS}'),
    ("ttft=1e-400ms", f'"ttft=1e-400ms" must be {BOUNDS}'),
    ("ttft=1e400ms", f'"ttft=1e400ms" must be {BOUNDS}'),
    ("ttft=1.1e12s", f'"ttft=1.1e12s" must be {BOUNDS}'),
    ("ttft=1e999s", f'"ttft=1e999s" must be {BOUNDS}'),
    ("ttft=1e999999s", f'"ttft=1e999999s" must be {BOUNDS}'),
    ("ttft=5ms@", '"@" is not a share; write @99% or @0.99'),
    ("ttft=5ms@most", '"@most" is not a share; write @99% or @0.99'),
    ("ttft=5ms@sNaN", '"@sNaN" is not a share; write @99% or @0.99'),
    ("ttft=5ms@99%@98%", '"@99%@98%" is not a share; write @99% or @0.99'),
    ("ttft=5ms@99", f'"@99" is not a share; {SHARE}'),
    ("ttft=5ms@0%", f'"@0%" is not a share; {SHARE}'),
    ("ttft=5ms@nan", f'"@nan" is not a share; {SHARE}'),
]


@pytest.mark.parametrize(("text", "slo"), GOOD)
def test_good_spellings(text: str, slo: SLO) -> None:
    parsed = SLO.parse(text)
    assert parsed.targets_ms == pytest.approx(slo.targets_ms)
    assert parsed.attainment == pytest.approx(slo.attainment)
    assert SLO.of(text) == parsed and SLO.of(parsed) is parsed


@pytest.mark.parametrize(
    ("text", "ms"),
    [("1.001s", 1001.0), ("0.29s", 290.0), ("4.35s", 4350.0), ("1.001e0s", 1001.0), ("1e12s", 1e15), ("1e15ms", 1e15)],
)
def test_seconds_are_milliseconds_to_the_last_digit(text: str, ms: float) -> None:
    assert SLO.parse(f"ttft={text}").ttft_ms == ms


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_spellings_quote_the_part_at_fault(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SLO.parse(text)
    assert str(caught.value) == message


def test_it_prints_as_one_would_write_it() -> None:
    assert str(SLO(ttft_ms=500, tpot_ms=50)) == "ttft=500ms,tpot=50ms@99%"
    assert str(SLO(e2e_ms=0.25, itl_ms=1e6, attainment=0.999)) == "itl=1000000ms,e2e=0.25ms@99.9%"


targets = st.floats(min_value=0, max_value=1e15, exclude_min=True) | st.none()


@given(ttft=targets, tpot=targets, itl=targets, e2e=targets, share=st.floats(0, 1, exclude_min=True))
def test_what_it_prints_reads_back_to_the_last_digit(
    ttft: float | None, tpot: float | None, itl: float | None, e2e: float | None, share: float
) -> None:
    if ttft is tpot is itl is e2e is None:
        ttft = 1.0
    slo = SLO(ttft, tpot, itl, e2e, share)
    assert SLO.parse(str(slo)) == slo


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "an SLO needs at least one of ttft, tpot, itl, e2e; for example ttft=500ms,tpot=50ms@99%"),
        ({"ttft_ms": 0}, f"ttft_ms is 0; it must be {BOUNDS}"),
        ({"e2e_ms": float("inf")}, f"e2e_ms is inf; it must be {BOUNDS}"),
        ({"e2e_ms": float("nan")}, f"e2e_ms is nan; it must be {BOUNDS}"),
        ({"itl_ms": 1e16}, f"itl_ms is 1e+16; it must be {BOUNDS}"),
        ({"tpot_ms": 50, "attainment": 99}, "attainment is 99; it must be above 0 and at most 1 (0.99 is 99%)"),
        ({"tpot_ms": 50, "attainment": 0}, "attainment is 0; it must be above 0 and at most 1 (0.99 is 99%)"),
    ],
)
def test_bad_values_in_code(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SLO(**values)
    assert str(caught.value) == message


def test_there_is_a_target_for_every_metric() -> None:
    assert [f.name for f in dataclasses.fields(SLO)] == [*(f"{metric}_ms" for metric in METRICS), "attainment"]


FOUR_TOKENS = request_record([10.4, 10.45, 10.45, 10.7], arrival=10.0)
"""TTFT 400 ms; gaps 50, 0, 250 ms, so TPOT 100 ms; E2E 700 ms."""


@pytest.mark.parametrize(
    ("text", "missed"),
    [
        ("ttft=401ms,tpot=101ms,itl=251ms,e2e=701ms", ()),
        ("ttft=399ms", ("ttft",)),
        ("tpot=99ms", ("tpot",)),
        ("itl=249ms", ("itl",)),
        ("e2e=699ms", ("e2e",)),
        ("ttft=1ms,tpot=1s,e2e=1ms", ("ttft", "e2e")),
    ],
)
def test_each_metric_against_its_own_target(text: str, missed: tuple[str, ...]) -> None:
    slo = SLO.parse(text)
    assert slo.violated(FOUR_TOKENS) == missed
    assert slo.met(FOUR_TOKENS) is (not missed)


def test_a_target_met_exactly_is_met() -> None:
    assert SLO(ttft_ms=500, e2e_ms=1000, tpot_ms=250).met(request_record([0.5, 0.75, 1.0]))


@pytest.mark.parametrize("name", METRICS)
def test_a_time_that_is_no_number_is_a_miss(name: str) -> None:
    record = request_record([0.1, math.nan, math.nan], arrival=math.nan, finished=math.nan)
    assert SLO.parse(f"{name}=1s").violated(record) == (name,)


def test_one_output_token_cannot_violate_tpot_or_itl() -> None:
    one = request_record([0.5])
    assert SLO(tpot_ms=0.001, itl_ms=0.001).met(one)
    assert SLO(ttft_ms=499, tpot_ms=0.001).violated(one) == ("ttft",)


@pytest.mark.parametrize("reason", [r for r in FinishReason if r not in (FinishReason.LENGTH, FinishReason.STOP)])
def test_what_did_not_complete_is_a_miss_however_fast(reason: FinishReason) -> None:
    assert SLO(ttft_ms=1e9).violated(request_record([0.001], reason=reason)) == ("completion",)


def test_attainment_counts_every_offered_request_and_sets_cancelled_ones_apart() -> None:
    slo = SLO(ttft_ms=500, tpot_ms=100)
    records = [
        request_record([0.4, 0.5]),  # met
        request_record([0.4], reason=FinishReason.STOP),  # met: one token has no TPOT
        request_record([0.6, 0.8]),  # misses both
        request_record([0.4, 0.6]),  # misses TPOT
        request_record(reason=FinishReason.REJECTED),
        request_record(reason=FinishReason.TIMEOUT),
        request_record([0.1], reason=FinishReason.ERROR),
        request_record([0.1], reason=FinishReason.CANCELLED),
    ]
    result = attainment(records, slo)
    assert (result.met, result.offered, result.cancelled) == (2, 7, 1)
    assert result.violations == {"ttft": 1, "tpot": 2, "completion": 3}
    assert result.share == pytest.approx(2 / 7)
    assert (result.low, result.high) == wilson_interval(2, 7)


def test_attainment_by_class_falls_back_to_the_default_class() -> None:
    slow = request_record([2.0], request_class="batch")
    classes = {"default": SLO(ttft_ms=500), "batch": SLO(ttft_ms=3000)}
    assert attainment([slow], classes).met == 1
    assert attainment([slow._replace(request_class="chat")], classes).met == 0
    with pytest.raises(ValueError, match=r"no SLO for class chat, and no default; the classes with one are batch$"):
        attainment([slow._replace(request_class="chat")], {"batch": SLO(ttft_ms=3000)})


def test_the_slo_of_a_class() -> None:
    default, batch = SLO(ttft_ms=500), SLO(ttft_ms=3000)
    both = {"default": default, "batch": batch}
    assert (find_slo(both, "batch"), find_slo(both, "chat")) == (batch, default)
    assert find_slo({"batch": batch}, "chat") is None
    assert (slo_for(batch, "chat"), slo_for(both, "chat"), slo_for(both, "batch")) == (batch, default, batch)
    with pytest.raises(ValueError, match=r"no SLO for class chat, and no default; the classes with one are none$"):
        slo_for({}, "chat")


def test_attainment_of_nothing() -> None:
    result = attainment([request_record(reason=FinishReason.CANCELLED)], SLO(ttft_ms=500))
    assert (result.share, result.low, result.high, result.cancelled) == (0.0, 0.0, 1.0, 1)


@pytest.mark.parametrize(
    ("met", "offered", "digits", "target", "text"),
    [
        (3999, 4000, 1, None, "99.98%"), (9999, 10_000, 1, 0.99, "99.99%"), (999_999, 1_000_000, 0, None, "99.9999%"),
        (4000, 4000, 1, 0.99, "100.0%"), (250, 251, 0, None, "99.6%"), (0, 4, 1, 0.99, "0.0%"),
        (989, 999, 1, 0.99, "98.999%"), (296, 299, 1, 0.99, "98.997%"), (990, 1000, 1, 0.99, "99.0%"),
        (989, 999, 1, None, "99.0%"), (989, 999, 1, 0.95, "99.0%"), (1799, 2000, 0, 0.9, "89.95%"),
        (99_951, 100_000, 1, 0.9996, "99.95%"), (99_961, 100_000, 1, 0.9996, "99.96%"),
    ],
)  # fmt: skip
def test_rounding_hides_no_miss_and_crosses_no_target(
    met: int, offered: int, digits: int, target: float | None, text: str
) -> None:
    assert in_percent(met / offered, digits, target=target) == text


def test_what_is_no_number_is_no_share() -> None:
    assert [in_percent(math.nan, target=target) for target in (None, 0.99)] == ["–", "–"]


def test_an_error_of_arithmetic_is_no_miss() -> None:
    below = math.nextafter(0.99, 0), math.nextafter(1.0, 0)
    assert [in_percent(share, target=0.99) for share in below] == ["99.0%", "100.0%"]


@pytest.mark.parametrize(
    ("met", "offered", "low", "high"),  # scipy.stats.binomtest(met, offered).proportion_ci(method="wilson")
    [
        (99, 100, 0.9455138038, 0.9982325679),
        (297, 300, 0.9710165066, 0.9965933816),
        (3, 7, 0.1582198552, 0.7495416354),
        (0, 10, 0.0, 0.2775327998),
        (10, 10, 0.7224672001, 1.0),
        (1, 1, 0.2065493143, 1.0),
    ],
)
def test_wilson_interval_against_scipy(met: int, offered: int, low: float, high: float) -> None:
    assert wilson_interval(met, offered) == pytest.approx((low, high), abs=1e-7)


@given(st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_the_share(counts: tuple[int, int]) -> None:
    met, offered = counts
    low, high = wilson_interval(met, offered)
    assert 0 <= low <= met / offered + 1e-12 and met / offered - 1e-12 <= high <= 1


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("", 1, "a request class needs a name"),
        ("chat", 0, "weight of class chat is 0; it must be above 0"),
        ("chat", float("nan"), "weight of class chat is nan; it must be above 0"),
    ],
)
def test_request_classes_are_checked(name: str, weight: float, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        RequestClass(name, SLO(ttft_ms=1), weight)
    assert str(caught.value) == message
