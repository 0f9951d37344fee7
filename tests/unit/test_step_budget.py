"""The budget of a single step: prompts that go on behind long prefixes, and prompts that had better come together."""

from __future__ import annotations

import math

import pytest

from autotune.control.controllers.parts.targets import SLOTargets
from autotune.control.controllers.predictive import constants
from autotune.control.controllers.predictive.feedback import FeedbackGain
from autotune.control.controllers.predictive.step_budget import StepBudget
from autotune.control.controllers.predictive.traffic import Traffic
from autotune.control.controllers.predictive.trusted_model import TrustedModel
from runtime.knobs import KnobLimits, Knobs
from runtime.records import LimitedBy, StepRecord
from runtime.slo import SLO
from runtime.step_model import StepFeatures, StepLearner
from runtime.tunable import SchedulerView
from tests.building import request_record
from tests.unit.control_world import h200

TARGET = SLO(ttft_ms=500, tpot_ms=30)


def learned() -> StepLearner:
    learner = StepLearner(warm_up=0)
    for k in range(600):
        n, behind, decodes = (17 * k) % 1200, (311 * k) % 8000, 4 + k % 30
        chunk = StepFeatures(decodes, 900 * decodes, n, n + behind, n * behind + n * (n + 1) // 2) if n else None
        features = chunk or StepFeatures(decodes, 900 * decodes, 0, 0, 0)
        learner.observe(features, h200(features))
    return learner


def made(tile: int = 1) -> StepBudget:
    steps = StepBudget(TrustedModel(learned()), Traffic(), SLOTargets({"default": TARGET}), FeedbackGain())
    steps.tile = tile
    return steps


def view(
    slack: float, *, computed: int = 0, waiting: int = 3, oldest: float = 9.9, tokens: int = 3000
) -> SchedulerView:
    knobs = Knobs(256, 0, 4096, 4096)
    return SchedulerView(
        10.0, 10, 1, waiting, tokens, 800, 9000, 1000, 2000, oldest, slack, slack, knobs, 0, KnobLimits(), 0.03,
        ((computed, 2000),),
    )  # fmt: skip


def test_the_attention_of_a_prompt_far_along_is_paid_for() -> None:
    """So that a chunk behind 7,000 tokens takes no longer than a fresh one."""
    steps = made()
    fresh, behind = (steps.budget(view(0.03, computed=n)) - 10 for n in (0, 7000))
    times = [h200(StepFeatures(10, 9000, n, n + s, n * s + n * (n + 1) // 2)) for n, s in ((fresh, 0), (behind, 7000))]
    assert behind < 0.95 * fresh
    assert max(times) < 0.032, "6 ms more would be those of the same tokens behind so many"
    assert min(times) > 0.025


def test_where_prompts_come_together_a_step_holds_all_or_none_of_a_prefill_quantum() -> None:
    steps = made()
    steps.prefill_quantum = 1500  # 39 ms here
    assert steps.budget(view(0.05)) == 10 + 1500
    assert steps.budget(view(0.035)) == 10, "slack that does not pay for it yet"
    assert steps.budget(view(math.inf)) == 10 + 1500, "nobody whose pace it could break"


def test_one_behind_its_schedule_does_not_hold_back_a_queue_that_would_be_late() -> None:
    steps = made()
    steps.prefill_quantum = 1500
    assert steps.budget(view(0.01, oldest=9.99, tokens=1000)) == 10, "the queue has time"
    assert steps.budget(view(0.01, oldest=9.55, tokens=6000)) == 10 + 1500


def test_batch_that_has_waited_long_is_no_queue_that_suffers() -> None:
    steps = made()
    steps._targets.change({"default": TARGET, "batch": SLO(e2e_ms=60_000)})
    steps._targets.saw("default", 20)  # no batch request has ended yet
    behind = view(0.004, oldest=2.0, tokens=30_000)
    new, waited = (behind._replace(prompt_slack=left) for left in (0.45, 0.3))  # of the TTFT of whoever is in a hurry
    for seen, seconds in ((new, 0.015), (waited, 0.03)):
        n = steps.budget(seen) - 10
        assert h200(StepFeatures(10, 9000, n, n, n * (n + 1) // 2)) == pytest.approx(seconds, rel=0.06)
    steps.prefill_quantum = 1500
    assert (steps.budget(new), steps.budget(waited)) == (10, 10 + 1500)


def test_no_step_is_held_to_a_mean_for_an_e2e_target_that_the_ceiling_is_for() -> None:
    steps = made()
    steps._targets.change({"default": SLO(e2e_ms=3_000)})
    for _ in range(8):
        steps._traffic.request(request_record([0.1] * 100))  # 20 ms for each token
    seen = view(math.inf)._replace(step_time_target=math.inf)
    n = steps.budget(seen) - 10
    assert h200(StepFeatures(10, 9000, n, n, n * (n + 1) // 2)) == pytest.approx(0.02, rel=0.06)
    steps.by_ceiling = True
    assert steps.budget(seen) == seen.knobs.token_budget
    seen = seen._replace(step_time_target=0.03, decode_slack=0.03)
    n = steps.budget(seen) - 10
    assert h200(StepFeatures(10, 9000, n, n, n * (n + 1) // 2)) == pytest.approx(0.03, rel=0.06), "a TPOT beside it"


def test_the_rate_of_prompts_is_that_of_steps_as_long_as_the_slack_allows() -> None:
    """Else a prompt is rejected that a long step would serve, which all that decode can wait for."""

    def rate(slack: float, waiting: int = 3) -> float:
        steps = made()
        steps.budget(view(slack, waiting=waiting))
        return steps.prefill_rate

    assert rate(0.3) > 1.05 * rate(0.03)
    assert rate(0.3, waiting=0) == rate(0.3), "whether or not one waits: the next asks before it does"
    assert rate(0.01) == rate(0.03), "who is behind schedule holds nobody back who would be late"


def test_the_rate_of_prompts_counts_the_steps_between_prefill_quanta() -> None:
    steps = made()
    steps.prefill_quantum = 1500
    steps.budget(view(0.05))
    rate = steps.prefill_rate
    pairs = 1500 * 1501 // 2
    whole = h200(StepFeatures(10, 9000, 1500, 1500, pairs))
    alone = h200(StepFeatures(10, 9000, 0, 0, 0))
    waits = (whole - 0.03) / (0.03 - alone)
    work = 1500 + steps._learned.model.pair_tokens * pairs
    assert 1500 < work < 1800
    assert 0.85 < rate / (work / (whole + waits * alone)) < 1.05


def test_prompts_that_share_a_step_are_counted_by_what_one_may_have_of_it() -> None:
    steps = made()
    whole = view(0.03)
    steps.budget(whole)
    assert steps.prompts_per_step == 1, "a chunk is the whole step"
    cut = whole._replace(knobs=whole.knobs.with_(chunk_size=200))
    steps.budget(cut)
    assert steps.prompts_per_step in (4, 5)


@pytest.mark.parametrize(
    ("slack", "queue", "seconds"),
    [
        (0.030, (9.99, 1000), 0.030),  # on schedule: the target
        (0.050, (9.99, 1000), 0.040),  # ahead by 20 ms: half of it may be spent
        (0.060, (9.99, 1000), 0.045),
        (0.024, (9.99, 1000), 0.024),  # behind: what is left,
        (0.004, (9.99, 1000), 0.015),  # but half of the target at least,
        (0.024, (9.55, 6000), 0.030),  # and all of it where the queue would be late
    ],
)
def test_a_step_spends_half_of_what_the_tightest_request_is_ahead(
    slack: float, queue: tuple[float, int], seconds: float
) -> None:
    steps = made()
    n = steps.budget(view(slack, oldest=queue[0], tokens=queue[1])) - 10
    granted = h200(StepFeatures(10, 9000, n, n, n * (n + 1) // 2))
    assert granted == pytest.approx(seconds, rel=0.06)


@pytest.mark.parametrize(
    ("prompt_slack", "nearly", "share"),
    [
        (0.4, 0.75, 1.0),  # a prompt that has no more time than the tightest TTFT,
        (-math.inf, 0.75, 1.0),  # or it is not known
        (5.0, 0.75, 0.5),
        (math.inf, 0.75, 0.5),
        (5.0, 0.99, 1.0),  # shorter steps compute fewer prompt tokens a second than that of longer ones
    ],
)
def test_steps_of_prompts_that_all_have_long_are_short_so_that_who_comes_next_waits_less(
    prompt_slack: float, nearly: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "NEARLY", nearly)
    steps = made()
    n = steps.budget(view(0.03, tokens=1000)._replace(prompt_slack=prompt_slack)) - 10
    assert h200(StepFeatures(10, 9000, n, n, n * (n + 1) // 2)) == pytest.approx(share * 0.03, rel=0.06)


@pytest.mark.parametrize("changes", [0.0, 2.0], ids=["steady", "the speed keeps changing"])
def test_a_step_holds_whole_tiles_unless_the_speed_keeps_changing(changes: float) -> None:
    steps, exact = made(tile=256), made()
    steps._learned.unsteady = changes
    granted, most = steps.budget(view(0.03)), exact.budget(view(0.03))
    assert most > 512 and most % 256 > 0
    assert granted == (most if changes else most // 256 * 256)


# -- before anything is known ---------------------------------------------------------------------------------------------


def record(prompt: int, seconds: float, decodes: int = 5) -> StepRecord:
    return StepRecord(
        0.0, seconds, 1, decodes, 900 * decodes, 1, prompt, prompt, prompt * (prompt + 1) // 2, decodes, decodes, 0, 0, 1000, 0,
        0, 4096, LimitedBy.BUDGET,
    )  # fmt: skip


def cold(slo: SLO = TARGET) -> StepBudget:
    steps = StepBudget(TrustedModel(StepLearner()), Traffic(), SLOTargets({"default": slo}), FeedbackGain())
    steps.tile = 1
    return steps


def test_the_first_steps_beside_decodes_grow_to_what_the_target_has_room_for() -> None:
    """Twice as many tokens at most, from the second step on as many as the time of those before says."""
    steps = cold()
    sizes = []
    for _ in range(5):
        sizes.append(steps.budget(view(math.inf)) - 10)
        steps.saw(record(sizes[-1], 0.006 + 20e-6 * sizes[-1]), 0.006 + 20e-6 * sizes[-1])
    assert (
        sizes[:2] == [256, 512] and 750 < sizes[2] < 1100 and all(0.02 < 0.006 + 20e-6 * n < 0.032 for n in sizes[2:])
    )


def test_one_stalled_step_shrinks_no_first_step() -> None:
    steps = cold()
    for seconds in (0.012, 0.012, 0.5, 0.012):
        steps.saw(record(500, seconds), seconds)
    assert steps.budget(view(math.inf)) > 900
    for _ in range(constants.LATEST):  # they are all so long
        steps.saw(record(500, 0.5), 0.5)
    assert steps.budget(view(math.inf)) <= 10 + constants.FLOOR


def test_where_no_target_bounds_a_step_the_first_ones_are_as_long_as_knobs_allow() -> None:
    steps = StepBudget(
        TrustedModel(StepLearner()), Traffic(), SLOTargets({"default": SLO(ttft_ms=500)}), FeedbackGain()
    )
    assert steps.budget(view(math.inf)._replace(step_time_target=math.inf)) == 4096
