from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.control.guardrails import Guardrails
from runtime.knobs import KNOBS, KnobLimits, Knobs

LIMITS = KnobLimits(512, 1000, 4096, 4096)
settings = st.builds(
    Knobs,
    max_batch_size=st.integers(1, 1024),
    max_wait_ms=st.floats(0, 2000),
    token_budget=st.integers(1, 8192),
    chunk_size=st.integers(1, 8192),
)


@given(settings, settings)
def test_never_leaves_the_limits_bounds_and_pins(wanted: Knobs, current: Knobs) -> None:
    rails = Guardrails({"max_batch_size": (8, 64)}, {"chunk_size": 128})
    found = rails.apply(wanted, LIMITS.clamp(current), LIMITS)
    assert found == LIMITS.check(found)
    assert 8 <= found.max_batch_size <= 64 and found.chunk_size == 128


@given(settings, settings)
def test_one_decision_goes_only_so_far(wanted: Knobs, current: Knobs) -> None:
    current = LIMITS.clamp(current)
    found = Guardrails(slew=2.0).apply(wanted, current, LIMITS)
    for spec in KNOBS:
        if spec.log:
            old, new = getattr(current, spec.name), getattr(found, spec.name)
            assert old / 2 - 1 <= new <= old * 2, spec.name


def test_it_says_what_it_holds() -> None:
    rails = Guardrails({"max_batch_size": (8, 64), "chunk_size": (1, 99)}, {"token_budget": 128, "max_wait_ms": 2.5})
    assert rails.holds(Knobs(64, 2.5, 128, 99), LIMITS) == {}
    assert rails.holds(Knobs(65, 0, 256, 99), LIMITS) == {
        "max_batch_size": "max_batch_size is bounded to 8–64",
        "max_wait_ms": "max_wait_ms is pinned at 2.5 ms",
        "token_budget": "token_budget is pinned at 128",
    }


def test_what_a_ceiling_holds_no_pin_does() -> None:
    rails, low = Guardrails({"chunk_size": (64, 128)}, {"max_batch_size": 64}), KnobLimits(32, 0, 400, 50)
    assert rails.holds(Knobs(512, 0, 400, 4096), low) == {}, "32 and 50 either way"
    assert rails.holds(Knobs(16, 0, 400, 8), low) == {
        "max_batch_size": "max_batch_size is pinned at 64 (the ceiling is 32 now)",
        "chunk_size": "chunk_size is bounded to 64–128 (the ceiling is 50 now)",
    }


def test_small_changes_are_not_worth_an_epoch() -> None:
    current = Knobs(100, 0, 1000, 1000)
    found = Guardrails().apply(Knobs(105, 0, 950, 1200), current, LIMITS)
    assert found == Knobs(100, 0, 1000, 1200)


def test_a_limit_that_shrank_binds_even_without_a_proposal() -> None:
    current = Knobs(100, 0, 1000, 1000)
    assert Guardrails().apply(current, current, KnobLimits(50, 0, 400, 400)) == Knobs(50, 0, 400, 400)


@pytest.mark.parametrize(
    ("bounds", "pinned", "says"),
    [
        ({"batch": (1, 2)}, {}, "bounds.batch is not a knob; the knobs are max_batch_size"),
        ({}, {"batch": 1}, "pinned.batch is not a knob"),
        ({"chunk_size": 9}, {}, "bounds.chunk_size is 9; it must be a pair"),
        ({"chunk_size": (9,)}, {}, r"bounds.chunk_size is \(9,\); it must be a pair"),
        ({"chunk_size": (9, 3)}, {}, r"bounds.chunk_size is \(9, 3\)"),
        ({"chunk_size": (0, 3)}, {}, "bounds.chunk_size is 0"),
        ({}, {"token_budget": 0}, "pinned.token_budget is 0"),
        ({"chunk_size": (1, 3)}, {"chunk_size": 2}, "chunk_size is both pinned and bounded"),
    ],
)
def test_bad_bounds_and_pins(bounds: dict[str, tuple[float, float]], pinned: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Guardrails(bounds, pinned)


def test_a_pin_above_the_ceiling_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pinned.token_budget is 9000; it must be .*between 1 and 4096"):
        Guardrails(pinned={"token_budget": 9000}).check(LIMITS)
