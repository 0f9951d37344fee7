"""The search space: ranges, pins, narrowing, starting points, and one clear line for what is wrong."""

from __future__ import annotations

import pytest

from autotune.engines.defaults import VLLM_LABEL
from autotune.profiling.space import SearchSpace, is_baseline, make_space, round_number, starting_points
from runtime.errors import InputError
from runtime.knobs import KNOBS, KnobLimits, Knobs

LIMITS = KnobLimits(max_batch_size=256, max_wait_ms=5, token_budget=4096, chunk_size=4096)
FITTED = Knobs(16, 0, 128, 128)


def test_every_knob_is_pinned_or_searched_once_and_below_its_ceiling() -> None:
    space = make_space(LIMITS, ["chunk_size=64"], ["token_budget=64:2048"])
    assert space.pinned == {"chunk_size": 64, "draft_tokens": 0}
    assert set(space.ranges) | set(space.pinned) == {spec.name for spec in KNOBS}
    assert space.ranges["token_budget"] == (64, 2048)
    assert space.ranges["max_batch_size"][1] == 256
    assert space.ranges["max_wait_ms"] == (0, 5)
    assert set(space.distributions()) == set(space.ranges)


def test_a_trial_becomes_knobs_of_the_right_types() -> None:
    space = make_space(LIMITS, ["max_wait_ms=0"])
    knobs = space.knobs({"max_batch_size": 7, "token_budget": 100, "chunk_size": 2000})
    assert knobs == Knobs(7, 0.0, 96, 96)  # a chunk above the budget acts like the budget
    assert make_space(LIMITS, ["chunk_size=2000"]).knobs(
        {"max_batch_size": 7, "max_wait_ms": 1.2345, "token_budget": 100}
    ) == Knobs(7, 1.2, 96, 2000)  # but what was pinned stays
    assert make_space(LIMITS, ranges=["token_budget=100:101"]).knobs(
        {"max_batch_size": 7, "max_wait_ms": 0, "token_budget": 101, "chunk_size": 64}
    ) == Knobs(7, 0, 100, 64)  # round or not, it stays in its range


@pytest.mark.parametrize(
    ("pins", "ranges", "params"),
    [
        (["max_wait_ms=0.25"], [], {"max_batch_size": 7, "token_budget": 100, "chunk_size": 64}),
        (
            [],
            ["max_wait_ms=0.01:0.04"],
            {"max_batch_size": 7, "max_wait_ms": 0.022, "token_budget": 100, "chunk_size": 64},
        ),
        (["max_wait_ms=0", "token_budget=256"], ["chunk_size=512:2048"], {"max_batch_size": 7, "chunk_size": 700}),
    ],
)
def test_whatever_was_asked_for_a_trial_keeps_to_it(
    pins: list[str], ranges: list[str], params: dict[str, float]
) -> None:
    """Or none of them may be recommended."""
    space = make_space(LIMITS, pins, ranges)
    assert space.allows(space.knobs(params))


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1), (3.4, 3), (7, 7), (9, 8), (9.1, 10), (15.2, 16), (47, 48), (500, 512), (585, 640), (8192, 8192)],
)
def test_proposals_are_round_numbers(value: float, number: int) -> None:
    assert round_number(value) == number


def test_narrowing_leaves_what_the_user_asked_for() -> None:
    space = make_space(KnobLimits(), ranges=["token_budget=32:8000"]).narrowed(FITTED)
    assert space.ranges["token_budget"] == (32, 8000)
    assert space.ranges["max_batch_size"] == (2, 256)
    assert space.ranges["chunk_size"] == (16, 2048)
    assert space.ranges["max_wait_ms"] == (0, 10)


def contains(space: SearchSpace, knobs: Knobs) -> bool:
    values = knobs.as_dict()
    return space.params(knobs).items() <= values.items() and space.pinned.items() <= values.items()


def test_starting_points_lie_in_the_space_and_differ() -> None:
    space = make_space(LIMITS, ["max_wait_ms=0"], ["token_budget=100:200"]).narrowed(FITTED)
    points = starting_points(space, FITTED)
    assert points[0] == (VLLM_LABEL, Knobs(256, 0, 4096, 4096))  # the baseline: as the limits allow, pins or not
    assert len({knobs for _, knobs in points}) == len(points) >= 3
    for label, knobs in points:
        assert is_baseline(label) or contains(space, knobs), knobs
        assert is_baseline(label) or space.allows(knobs)
        LIMITS.check(knobs)
    assert not space.allows(points[0][1])


def test_a_setting_is_moved_to_the_nearest_point() -> None:
    space = make_space(LIMITS, ["max_wait_ms=0"], ["token_budget=100:200"])
    moved = space.params(Knobs(1, 3, 8192, 8192))
    assert set(moved) == set(space.ranges)
    assert (moved["max_batch_size"], moved["token_budget"], moved["chunk_size"]) == (2, 200, 4096)
    assert not contains(space, Knobs(1, 0, 150, 150))


@pytest.mark.parametrize(
    ("pins", "ranges", "text"),
    [
        (["budget=3"], [], "--pin: budget is not a knob; the knobs are max_batch_size, max_wait_ms, token_budget, chunk_size"),
        (["token_budget"], [], '--pin: "token_budget" has no value; write token_budget=512'),
        (["token_budget=x"], [], "--pin: token_budget is 'x'; it must be a whole number between 1 and 4096"),
        (["token_budget=1_000"], [], "--pin: token_budget is '1_000'; it must be a whole number"),
        (["token_budget=0"], [], "--pin: token_budget is 0; it must be a whole number between 1 and 4096 tokens"),
        (["token_budget=5000"], [], "--pin: token_budget is 5000; it must be a whole number between 1 and 4096 tokens"),
        (["token_budget=1.5"], [], "--pin: token_budget is 1.5; it must be a whole number between 1 and 4096 tokens"),
        (["token_budget=nan"], [], "--pin: token_budget is 'nan'; "),
        (["token_budget=8", "token_budget=9"], [], "--pin: token_budget is given twice"),
        (["token_budget=8"], ["token_budget=8:9"], "--range: token_budget is given twice"),
        ([], ["token_budget=64"], '--range: "token_budget=64" is not a range; write token_budget=LOW:HIGH'),
        ([], ["token_budget=9:8"], "--range: token_budget=9:8: 9 is not below 8; use --pin for one value"),
        ([], ["token_budget=a:8"], "--range: token_budget is 'a'; it must be a whole number"),
        ([], ["token_budget=1:9999"], "--range: token_budget is 9999; it must be a whole number between 1 and 4096 tokens"),
        ([f"{spec.name}=1" for spec in KNOBS], [], "--pin: every knob is pinned, so there is nothing to search"),
    ],
)  # fmt: skip
def test_one_line_says_what_is_wrong(pins: list[str], ranges: list[str], text: str) -> None:
    with pytest.raises(InputError) as caught:
        make_space(LIMITS, pins, ranges)
    assert str(caught.value).startswith(text)
