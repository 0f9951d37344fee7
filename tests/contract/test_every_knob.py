"""Every knob is handled wherever knobs are: a further one fails here until it is scheduled, searched, shown and stored.

What a further one takes, and what handles it without a change, is in :mod:`tests.contract.test_further_knob`.
"""

from __future__ import annotations

from math import inf

import pytest

from autotune.engines.defaults import VLLM_DEFAULTS
from autotune.profile import EngineFacts
from autotune.profiling.space import SEARCHED, make_space
from runtime.errors import InputError
from runtime.knobs import KNOBS, KnobLimits, Knobs, KnobSpec
from runtime.llm.plan import StepPlan, StepResult
from runtime.llm.scheduler import Scheduler
from runtime.records import LimitedBy
from runtime.request import Request, SamplingParams, Sequence

NAMES = [spec.name for spec in KNOBS]
LOOSE = Knobs(max_batch_size=64, max_wait_ms=0, token_budget=1024, chunk_size=1024)

TIGHT: dict[str, tuple[float, LimitedBy]] = {
    "max_batch_size": (2, LimitedBy.SLOTS),
    "max_wait_ms": (100, LimitedBy.WAIT),
    "token_budget": (50, LimitedBy.BUDGET),
    "chunk_size": (7, LimitedBy.CHUNK),
}
"""For each knob of prompts a value that binds three of 40 tokens which arrive together, and what the plan then says."""

DRAFTED = "draft_tokens"
"""The one that is of decodes."""


def plan(knobs: Knobs) -> StepPlan:
    scheduler = Scheduler(kv_blocks=64, block_size=16)
    for i in range(3):
        prompt = tuple(range(100 * i, 100 * i + 40))
        scheduler.add(Request(id=str(i), prompt=prompt, params=SamplingParams(), max_tokens=4, arrival=0.0))
    return scheduler.schedule(0.0, knobs)


class Repeats:
    """Drafts as many tokens as it may."""

    def begin_step(self) -> None:
        pass

    def draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        return (7,) * most

    def forget(self, sequence: Sequence) -> None:
        pass


def decoding(knobs: Knobs) -> StepPlan:
    """A step of three decodes, of 40 + 9 tokens each."""
    scheduler = Scheduler(kv_blocks=64, block_size=16, drafter=Repeats())
    for i in range(3):
        params = SamplingParams()
        scheduler.add(Request(id=str(i), prompt=(i,) * 40, params=params, max_tokens=9, arrival=0.0))
    first = scheduler.schedule(0.0, LOOSE)
    scheduler.update(first, StepResult((0.1,)))
    return scheduler.schedule(0.1, knobs)


def test_the_scheduler_obeys_the_one_of_decodes() -> None:
    loose, tight, short = (decoding(LOOSE.with_(**{DRAFTED: n})) for n in (0, 3, 64))
    assert (loose.n_decode, loose.drafts) == (3, ())
    assert tight.n_decode == 0 and [len(draft.drafted) for draft in tight.drafts] == [3, 3, 3]
    assert [len(draft.drafted) for draft in short.drafts] == [7, 7, 7], "one token of eight comes without a draft"
    assert loose.limited_by is tight.limited_by is LimitedBy.DEMAND


@pytest.mark.parametrize("name", [name for name in NAMES if name != DRAFTED])
def test_the_scheduler_obeys_it(name: str) -> None:
    value, bound = TIGHT[name]
    loose, tight = plan(LOOSE), plan(LOOSE.with_(**{name: value}))
    assert (loose.prefill_tokens, loose.limited_by, loose.wake_at) == (120, LimitedBy.DEMAND, inf)
    assert tight.limited_by is bound
    assert tight.prefill_tokens < 120


def test_nothing_handles_a_knob_that_is_none() -> None:
    assert [*TIGHT, DRAFTED] == NAMES
    assert list(SEARCHED) == NAMES
    assert list(VLLM_DEFAULTS.as_dict()) == NAMES


@pytest.mark.parametrize("spec", KNOBS, ids=lambda spec: spec.name)
def test_it_is_searched_within_its_bounds(spec: KnobSpec) -> None:
    low, high = SEARCHED[spec.name]
    unasked = make_space(KnobLimits())
    if not spec.searched:
        assert unasked.pinned[spec.name] == getattr(Knobs(), spec.name) and spec.name not in unasked.distributions()
        unasked = make_space(KnobLimits(), ranges=[f"{spec.name}={low:g}:{high:g}"])
    assert unasked.ranges[spec.name] == (low, min(high, getattr(KnobLimits(), spec.name)))
    assert spec.low <= low < high and low < getattr(KnobLimits(), spec.name)
    assert spec.name in unasked.distributions()


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
