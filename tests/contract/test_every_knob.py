"""Every knob is handled wherever knobs are: a fifth one fails here until it is scheduled, searched, shown and stored.

What a fifth one takes, and what handles it without a change, is in :mod:`tests.contract.test_fifth_knob`.
"""

from __future__ import annotations

from math import inf

import pytest

from autotune.engines.defaults import VLLM_DEFAULTS
from autotune.profile import EngineFacts
from autotune.profiling.space import SEARCHED, make_space
from runtime.errors import InputError
from runtime.knobs import KNOBS, KnobLimits, Knobs, KnobSpec
from runtime.llm.plan import StepPlan
from runtime.llm.scheduler import Scheduler
from runtime.records import LimitedBy
from runtime.request import Request, SamplingParams

NAMES = [spec.name for spec in KNOBS]
LOOSE = Knobs(max_batch_size=64, max_wait_ms=0, token_budget=1024, chunk_size=1024)

TIGHT: dict[str, tuple[float, LimitedBy]] = {
    "max_batch_size": (2, LimitedBy.SLOTS),
    "max_wait_ms": (100, LimitedBy.WAIT),
    "token_budget": (50, LimitedBy.BUDGET),
    "chunk_size": (7, LimitedBy.CHUNK),
}
"""For each knob a value that binds three prompts of 40 tokens which arrive together, and what the plan then says."""


def plan(knobs: Knobs) -> StepPlan:
    scheduler = Scheduler(kv_blocks=64, block_size=16)
    for i in range(3):
        prompt = tuple(range(100 * i, 100 * i + 40))
        scheduler.add(Request(id=str(i), prompt=prompt, params=SamplingParams(), max_tokens=4, arrival=0.0))
    return scheduler.schedule(0.0, knobs)


@pytest.mark.parametrize("name", NAMES)
def test_the_scheduler_obeys_it(name: str) -> None:
    value, bound = TIGHT[name]
    loose, tight = plan(LOOSE), plan(LOOSE.with_(**{name: value}))
    assert (loose.prefill_tokens, loose.limited_by, loose.wake_at) == (120, LimitedBy.DEMAND, inf)
    assert tight.limited_by is bound
    assert tight.prefill_tokens < 120


def test_nothing_handles_a_knob_that_is_none() -> None:
    assert list(TIGHT) == NAMES
    assert list(SEARCHED) == NAMES
    assert list(VLLM_DEFAULTS.as_dict()) == NAMES


@pytest.mark.parametrize("spec", KNOBS, ids=lambda spec: spec.name)
def test_it_is_searched_within_its_bounds(spec: KnobSpec) -> None:
    low, high = make_space(KnobLimits()).ranges[spec.name]
    assert spec.low <= low < high <= getattr(KnobLimits(), spec.name)
    assert spec.name in make_space(KnobLimits()).distributions()


@pytest.mark.parametrize("spec", KNOBS, ids=lambda spec: spec.name)
def test_the_command_line_pins_and_bounds_it(spec: KnobSpec) -> None:
    pinned = make_space(KnobLimits(), pins=[f"{spec.name}=8"])
    assert pinned.pinned[spec.name] == 8 and spec.name not in pinned.distributions()
    assert make_space(KnobLimits(), ranges=[f"{spec.name}=4:9"]).ranges[spec.name] == (4, 9)
    for option in ({"pins": [f"{spec.name}=-1"]}, {"ranges": [f"{spec.name}=-1:9"]}):
        with pytest.raises(InputError, match=spec.name):
            make_space(KnobLimits(), **option)


@pytest.mark.parametrize("spec", KNOBS, ids=lambda spec: spec.name)
def test_a_profile_holds_it(spec: KnobSpec) -> None:
    facts = {"name": "e", "version": "1", "kv_pool": {"block_size": 16, "blocks": 8}, "prefix_cache": True}
    limits = KnobLimits().as_dict()
    engine = EngineFacts.model_validate(facts | {"limits": limits})
    assert engine.limits == KnobLimits()
    assert engine.model_dump(mode="json")["limits"] == limits
    del limits[spec.name]
    if not spec.required:  # one that came later is at its default
        assert EngineFacts.model_validate(facts | {"limits": limits}).limits == KnobLimits()
        return
    with pytest.raises(ValueError, match=f"{spec.name} is missing"):
        EngineFacts.model_validate(facts | {"limits": limits})
