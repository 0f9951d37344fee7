"""Arrivals, scaling and prompt tokens: the parts of a workload every source shares."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.workload import PRESETS, Arrival, Workload, parse_workload, prompt_ids
from autotune.workload.spec import scale_segments
from tests.examples import examples

SEGMENTS = st.lists(st.tuples(st.integers(0, 2**63), st.integers(1, 3000)), min_size=1, max_size=6).map(tuple)
SCALES = st.floats(0.001, 8)
CAPS = st.none() | st.integers(1, 5000)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_seed_names_one_list_of_requests(name: str) -> None:
    workload = parse_workload(name)
    first, again, other = (list(workload.arrivals(seed, limit=300)) for seed in (7, 7, 8))
    assert first == again
    assert [a.segments for a in first] != [a.segments for a in other]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_times_ascend_and_segments_make_up_the_prompt(name: str) -> None:
    arrivals = list(parse_workload(name).arrivals(3, limit=500))
    assert len(arrivals) == 500
    assert all(a.time <= b.time for a, b in pairwise(arrivals))
    assert all(a.time >= 0 and a.output_tokens >= 1 for a in arrivals)
    assert all(a.prompt_tokens == sum(n for _, n in a.segments) and all(n > 0 for _, n in a.segments) for a in arrivals)


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"shared-prefix"}))
def test_another_rate_has_the_same_lengths_and_the_same_pattern(name: str) -> None:
    workload = parse_workload(name)
    slow = list(workload.arrivals(1, limit=400))
    fast = list(workload.at_rate(4 * workload.rate).arrivals(1, limit=400))
    assert [a[1:] for a in slow] == [a[1:] for a in fast]
    assert [a.time for a in fast] == pytest.approx([a.time / 4 for a in slow])


def test_duration_and_limit_bound_it() -> None:
    workload = parse_workload("fixed:rate=10")
    assert len(list(workload.arrivals(0, duration=1.05))) == 10
    assert len(list(workload.arrivals(0, duration=1.05, limit=3))) == 3
    assert list(workload.arrivals(0, limit=0)) == []
    limited = parse_workload("fixed:rate=10,limit=5")
    assert limited.finite and len(list(limited.arrivals(0))) == 5
    assert len(list(limited.arrivals(0, limit=2))) == 2


def test_a_longer_run_begins_with_the_shorter_one() -> None:
    workload = parse_workload("azure-code:rate=3")
    assert list(workload.arrivals(5, limit=2500))[:40] == list(workload.arrivals(5, limit=40))


def test_endless_without_a_bound_is_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match="poisson never ends; give duration"):
        parse_workload("poisson").arrivals(0)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda w: w.scaled(time=0), "time is 0"),
        (lambda w: w.scaled(length=float("nan")), "length is nan"),
        (lambda w: w.scaled(cap_prompt=0), "cap_prompt is 0"),
        (lambda w: w.scaled(cap_output=1.5), "cap_output is 1.5"),
        (lambda w: w.at_rate(-1), "rate is -1"),
        (lambda w: w.arrivals(-1, limit=1), "seed is -1"),
        (lambda w: w.arrivals(0, duration=0), "duration is 0"),
        (lambda w: w.arrivals(0, limit=-1), "limit is -1"),
    ],
)
def test_bad_values_are_named(call, field: str) -> None:
    with pytest.raises(ValueError, match=field.replace(".", r"\.")):
        call(parse_workload("poisson"))


@given(SEGMENTS, SCALES, CAPS)
def test_scaling_rounds_the_total_once_and_keeps_order(segments, scale: float, cap: int | None) -> None:
    total = sum(n for _, n in segments)
    scaled = scale_segments(segments, scale, cap)
    assert sum(n for _, n in scaled) == min(max(1, round(total * scale)), cap or 10**9)
    assert all(n > 0 for _, n in scaled)
    kept = [seed for seed, _ in scaled]
    remaining = iter(seed for seed, _ in segments)
    assert all(seed in remaining for seed in kept)  # a subsequence


@given(SEGMENTS, SEGMENTS, SEGMENTS, SCALES, CAPS)
def test_prompts_that_share_a_prefix_share_it_when_scaled(common, left, right, scale: float, cap: int | None) -> None:
    shared = round(sum(n for _, n in common) * scale)
    shared = shared if cap is None else min(shared, cap)
    ids = [
        prompt_ids(Arrival(0, sum(n for _, n in s), 1, s), 50_000)
        for s in (scale_segments(common + tail, scale, cap) for tail in (left, right))
    ]
    assert ids[0][:shared] == ids[1][:shared]


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 4), st.floats(0.1, 4), CAPS, CAPS)
def test_scales_multiply_and_the_smaller_cap_holds(t1, t2, l1, l2, cap1, cap2) -> None:
    base = parse_workload("azure-conv")
    twice = base.scaled(time=t1, length=l1, cap_prompt=cap1).scaled(time=t2, length=l2, cap_prompt=cap2)
    caps = [c for c in (cap1, cap2) if c is not None]
    once = base.scaled(time=t1 * t2, length=l1 * l2, cap_prompt=min(caps) if caps else None)
    assert twice == once
    assert twice.rate == pytest.approx(base.rate / (t1 * t2))


@settings(max_examples=examples(0.5))
@given(st.integers(1, 300), st.integers(1, 100))
def test_caps_are_never_exceeded_and_change_nothing_below(cap_prompt: int, cap_output: int) -> None:
    base = parse_workload("azure-conv:length=1/8")
    capped = base.scaled(cap_prompt=cap_prompt, cap_output=cap_output)
    for before, after in zip(base.arrivals(0, limit=20), capped.arrivals(0, limit=20), strict=True):
        assert after.prompt_tokens == min(before.prompt_tokens, cap_prompt)
        assert after.output_tokens == min(before.output_tokens, cap_output)
        assert after.time == before.time
        assert prompt_ids(after, 999) == prompt_ids(before, 999)[:cap_prompt]


@given(SEGMENTS, st.integers(2, 200_000), st.integers(0, 2**64), st.data())
def test_token_ids_stay_between_reserved_and_the_vocabulary(segments, vocab: int, seed: int, data) -> None:
    reserved = data.draw(st.integers(0, vocab - 1))
    arrival = Arrival(0, sum(n for _, n in segments), 1, segments)
    ids = prompt_ids(arrival, vocab, seed, reserved=reserved)
    assert len(ids) == arrival.prompt_tokens
    assert min(ids) >= reserved and max(ids) < vocab
    assert all(type(i) is int for i in ids[:3])


def test_equal_segments_have_equal_tokens_and_others_do_not() -> None:
    one = prompt_ids(Arrival(0, 900, 1, ((11, 400), (12, 500))), 32_000, 5)
    two = prompt_ids(Arrival(9, 700, 1, ((11, 400), (13, 300))), 32_000, 5)
    assert one[:400] == two[:400]
    assert sum(a == b for a, b in zip(one[400:], two[400:], strict=False)) < 5  # chance: 300/32000
    assert (
        prompt_ids(Arrival(0, 100, 1, ((12, 100),)), 32_000, 5) == one[400:500]
    )  # a piece is the beginning of the whole
    assert prompt_ids(Arrival(0, 900, 1, ((11, 400), (12, 500))), 32_000, 6) != one


def test_token_ids_are_pinned() -> None:
    """Recorded runs are repeatable only as long as these numbers hold."""
    assert prompt_ids(Arrival(0, 6, 1, ((1, 4), (2, 2))), 1000, 3, reserved=10) == PINNED


def test_reserved_ids_must_leave_some() -> None:
    with pytest.raises(ValueError, match="reserved is 10; it must be below vocab_size, 10"):
        prompt_ids(Arrival(0, 1, 1, ((1, 1),)), 10, reserved=10)


def test_spelled_seed_is_mixed_with_the_given_one() -> None:
    def some(text: str, seed: int) -> list[Arrival]:
        return list(islice(parse_workload(text).arrivals(seed, limit=5), 5))

    assert some("poisson:seed=1", 0) != some("poisson", 0)
    assert some("poisson:seed=1", 0) != some("poisson", 1)


def test_workload_is_a_value() -> None:
    assert parse_workload("gamma:cv=3") == parse_workload("gamma:cv=3")
    assert isinstance(parse_workload("gamma:cv=3"), Workload)


PINNED = [596, 713, 631, 344, 82, 281]
