"""Leases: at most one controller turns the knobs, and it is named when another tries."""

from __future__ import annotations

import pytest

from runtime.errors import AutotuneError, LeaseError
from runtime.knobs import KnobLimits, Knobs
from runtime.tunable import LeaseHolder, SchedulerView


def test_without_a_lease_anyone_may_turn_the_knobs() -> None:
    LeaseHolder().check(None)


def test_while_one_is_held_only_its_holder_may() -> None:
    holder = LeaseHolder()
    lease = holder.acquire("controller A")
    holder.check(lease)
    with pytest.raises(
        LeaseError, match=r"^controller A controls this engine; its knobs cannot be set from elsewhere$"
    ):
        holder.check(None)
    with pytest.raises(
        LeaseError, match=r"^controller A controls this engine; release it before controller B takes over$"
    ):
        holder.acquire("controller B")
    holder.check(lease)


def test_releasing_hands_over_and_a_stale_lease_turns_nothing() -> None:
    holder = LeaseHolder()
    with holder.acquire("first") as first:
        holder.check(first)
    second = holder.acquire("second")
    with pytest.raises(LeaseError, match="second controls this engine"):
        holder.check(first)
    first.release()  # releasing twice, or late, must not take the lease from whoever holds it now
    holder.check(second)
    with pytest.raises(LeaseError):
        holder.check(None)
    second.release()
    holder.check(None)
    with pytest.raises(LeaseError, match=r"^the lease of second is not in force; acquire this engine again$"):
        holder.check(second)


def test_an_error_inside_still_releases() -> None:
    holder = LeaseHolder()
    with pytest.raises(ZeroDivisionError), holder.acquire("a"):
        raise ZeroDivisionError
    holder.acquire("b")


def test_a_lease_of_another_engine_is_no_lease() -> None:
    here, there = LeaseHolder(), LeaseHolder()
    here.acquire("a")
    with pytest.raises(LeaseError):
        here.check(there.acquire("a"))


def test_lease_errors_are_ours() -> None:
    assert issubclass(LeaseError, AutotuneError) and not issubclass(LeaseError, ValueError)


def test_running_is_decoding_and_prefilling() -> None:
    view = SchedulerView(
        now=0.0, decoding=5, prefilling=2, waiting=9, waiting_tokens=900, prefilling_tokens=70, decode_context=500,
        kv_free_blocks=3, kv_total_blocks=8, oldest_arrival=0.0, least_slack=0.1, decode_slack=0.1, knobs=Knobs(), epoch=0,
        effective_limits=KnobLimits(),
    )  # fmt: skip
    assert view.running == 7
