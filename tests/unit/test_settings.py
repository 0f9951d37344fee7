"""The knobs in force, of the engine and of the batcher."""

from __future__ import annotations

from typing import cast

import pytest

from runtime.knobs import KnobLimits, Knobs
from runtime.shared.settings import Settings
from runtime.tunable import SchedulerView

LIMITS = KnobLimits(max_batch_size=64, token_budget=4096)


def look() -> SchedulerView:
    return cast(SchedulerView, None)


def test_knobs_follow_lower_ceilings_and_come_back_with_them() -> None:
    settings = Settings(Knobs(max_batch_size=32, token_budget=1024), LIMITS)
    settings.limit(KnobLimits(max_batch_size=8, token_budget=4096))
    assert settings.current == (1, Knobs(max_batch_size=8, token_budget=1024))
    assert settings.wanted == Knobs(max_batch_size=32, token_budget=1024)
    assert settings.set_knobs(Knobs(max_batch_size=16, token_budget=1024)) == 1, "8 is in force, as before"
    settings.limit(LIMITS)
    assert settings.current == (2, Knobs(max_batch_size=16, token_budget=1024)), "what was last set, not what was first"


def test_above_the_limits_nothing_changes() -> None:
    settings = Settings(None, LIMITS)
    with pytest.raises(ValueError, match="max_batch_size is 65"):
        settings.set_knobs(Knobs(max_batch_size=65))
    assert settings.current == (0, LIMITS.clamp(Knobs()))


def test_a_policy_that_raises_is_taken_off() -> None:
    class Broken:
        def budget(self, view: SchedulerView) -> int:
            raise ZeroDivisionError

    settings = Settings(None, LIMITS)
    settings.set_policy(Broken())
    assert settings.budget(look) is None and settings.policy is None


def test_a_policy_that_raises_does_not_take_off_the_one_just_set() -> None:
    settings = Settings(None, LIMITS)

    class Fixed:
        def budget(self, view: SchedulerView) -> int:
            return 7

    class Replaced:
        def budget(self, view: SchedulerView) -> int:
            settings.set_policy(Fixed())  # as another thread may, in this very moment
            raise ZeroDivisionError

    settings.set_policy(Replaced())
    assert settings.budget(look) is None
    assert settings.budget(look) == 7
