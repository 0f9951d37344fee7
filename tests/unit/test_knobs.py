"""The knobs: bounds, messages, ceilings; and that a further one could not slip in unhandled."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.knobs import KNOBS, KnobLimits, Knobs, KnobSpec

NAMES = [f.name for f in dataclasses.fields(Knobs)]


def knob_values(spec: KnobSpec) -> st.SearchStrategy[float]:
    if spec.integer:
        return st.integers(int(spec.low), int(spec.high))
    return st.floats(spec.low, spec.high)


any_knobs = st.builds(Knobs, **{spec.name: knob_values(spec) for spec in KNOBS})


def test_limits_and_specs_cover_exactly_the_knobs() -> None:
    assert [f.name for f in dataclasses.fields(KnobLimits)] == NAMES
    assert [spec.name for spec in KNOBS] == NAMES


@pytest.mark.parametrize("spec", KNOBS, ids=lambda spec: spec.name)
def test_every_knob_says_what_it_is(spec: KnobSpec) -> None:
    assert spec.doc and spec.unit in ("sequences", "tokens", "ms")
    assert spec.low < spec.high
    assert not (spec.log and spec.low <= 0), "a logarithmic scale cannot begin at 0"
    default, ceiling = getattr(Knobs(), spec.name), getattr(KnobLimits(), spec.name)
    assert spec.low <= default <= ceiling <= spec.high
    assert isinstance(default, int) is spec.integer


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"token_budget": 0}, "token_budget is 0; it must be a whole number between 1 and 1048576 tokens"),
        ({"max_batch_size": 65537}, "max_batch_size is 65537; it must be a whole number between 1 and 65536 sequences"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5; it must be a whole number between 1 and 1048576 tokens"),
        ({"max_wait_ms": -0.5}, "max_wait_ms is -0.5; it must be between 0 and 60000 ms"),
        ({"max_wait_ms": math.nan}, "max_wait_ms is nan; it must be between 0 and 60000 ms"),
        ({"token_budget": math.inf}, "token_budget is inf; it must be a whole number between 1 and 1048576 tokens"),
        ({"token_budget": "512"}, "token_budget is '512'; it must be a whole number between 1 and 1048576 tokens"),
        ({"chunk_size": None}, "chunk_size is None; it must be a whole number between 1 and 1048576 tokens"),
        ({"max_batch_size": True}, "max_batch_size is True; it must be a whole number between 1 and 65536 sequences"),
    ],
)
def test_bad_values_name_field_value_and_bounds(values: dict[str, object], message: str) -> None:
    for make in (lambda: Knobs(**values), lambda: Knobs().with_(**values)):  # type: ignore[arg-type]
        with pytest.raises(ValueError) as caught:
            make()
        assert str(caught.value) == message
    with pytest.raises(ValueError) as caught:
        Knobs.from_mapping(values)
    assert str(caught.value) == f"knobs.{message}"
    with pytest.raises(ValueError) as caught:
        KnobLimits(**values)  # type: ignore[arg-type]
    assert str(caught.value) == f"limits.{message}"


def test_unknown_names_are_refused_and_the_valid_ones_listed() -> None:
    listed = f"the knobs are {', '.join(NAMES)}"
    assert NAMES[:4] == ["max_batch_size", "max_wait_ms", "token_budget", "chunk_size"]
    with pytest.raises(ValueError, match=f"^knobs.batch_size is not a knob; {listed}$"):
        Knobs.from_mapping({"token_budget": 512, "batch_size": 8})
    with pytest.raises(ValueError, match=f"^batch_size is not a knob; {listed}$"):
        Knobs().with_(batch_size=8)


def test_missing_names_take_the_default_and_whole_floats_become_integers() -> None:
    knobs = Knobs.from_mapping({"token_budget": 512.0, "max_wait_ms": 3})
    assert knobs == Knobs(token_budget=512, max_wait_ms=3.0)
    assert type(knobs.token_budget) is int and type(knobs.max_wait_ms) is float
    assert Knobs.from_mapping({}) == Knobs()


def test_knobs_and_limits_are_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Knobs().token_budget = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        KnobLimits().token_budget = 1  # type: ignore[misc]
    assert len({Knobs(), Knobs(), Knobs(chunk_size=1)}) == 2


@given(any_knobs)
def test_a_mapping_reads_back_to_equal_knobs(knobs: Knobs) -> None:
    assert Knobs.from_mapping(knobs.as_dict()) == knobs
    assert list(knobs.as_dict()) == NAMES
    printed = dict(part.split("=") for part in str(knobs).split())
    read = {name: pytest.approx(float(text)) for name, text in printed.items()}
    assert {**Knobs().as_dict(), **read} == knobs.as_dict()
    assert ("draft_tokens" in printed) == (knobs.draft_tokens > 0), (
        "one that came later and is at its default is not told of"
    )


@given(any_knobs, any_knobs)
def test_clamp_lowers_what_is_above_the_ceiling_and_nothing_else(knobs: Knobs, ceilings: Knobs) -> None:
    limits = KnobLimits(**ceilings.as_dict())
    clamped = limits.clamp(knobs)
    assert limits.check(clamped) is clamped
    for name in NAMES:
        assert getattr(clamped, name) == min(getattr(knobs, name), getattr(limits, name))
    if clamped == knobs:
        assert limits.check(knobs) is knobs
    else:
        with pytest.raises(ValueError, match="the engine's ceiling"):
            limits.check(knobs)


def test_above_the_ceiling_the_message_says_whose_bound_it_is() -> None:
    with pytest.raises(ValueError) as caught:
        KnobLimits(token_budget=4096).check(Knobs(token_budget=8192))
    expected = "token_budget is 8192; it must be a whole number between 1 and 4096 tokens (the engine's ceiling)"
    assert str(caught.value) == expected


def test_with_leaves_the_original_alone() -> None:
    knobs = Knobs()
    assert knobs.with_(chunk_size=64).chunk_size == 64
    assert knobs == Knobs()


def test_a_number_is_read_from_text_and_quoted_as_it_was_written() -> None:
    specs = {spec.name: spec for spec in KNOBS}
    budget = specs["token_budget"].read("64")
    assert budget == 64 and isinstance(budget, int) and isinstance(specs["max_wait_ms"].read("5"), float)
    assert specs["token_budget"].read("1e3") == 1000 and specs["max_wait_ms"].read(" 2.5 ") == 2.5
    for text, quoted in (
        ("", "''"), ("x", "'x'"), ("1_000", "'1_000'"), ("nan", "'nan'"), ("inf", "'inf'"), ("0", "0"), ("2.5", "2.5"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            specs["token_budget"].read(text, 128, where="--pin: ")
        assert (
            str(caught.value) == f"--pin: token_budget is {quoted}; it must be a whole number between 1 and 128 tokens"
        )
