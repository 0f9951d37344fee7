"""From runs to points, from points to recommendations, and the sentences about them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from autotune.measure.score import Latency
from autotune.profile import Capacity, Point
from autotune.profile.callable import BatcherSetting
from autotune.profiling.assemble import judge, sidecar, simulation_facts
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run, goodput_spread, pareto, point, points, share_interval
from autotune.profiling.space import alike, make_space
from autotune.profiling.stages.candidates import shortlist
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO, attained, wilson_interval
from tests.unit.profiles import LARGE, SMALL, TARGETS, VLLM, findings, run, setup

OBJECTIVE = Objective(TARGETS)
OTHER = Knobs(4, 0, 32, 32)


def at(
    knobs: Knobs, met: int, tokens: float = 200.0, ttft: float = 300.0, tpot: float = 30.0, rate: float = 10.0
) -> Point:
    return point(
        [
            run(
                knobs,
                met,
                throughput=tokens,
                ttft_ms=Latency(p50=1, p99=ttft),
                tpot_ms=Latency(p50=1, p99=tpot),
                rate=rate,
            )
        ]
    )


def test_runs_of_one_setting_are_pooled_and_kept_apart_by_stage_and_rate() -> None:
    made = points(
        [
            run(SMALL, 40, seed=1),
            run(LARGE, 30),
            run(SMALL, 20, seed=2),
            run(SMALL, 40, "simulation"),
            run(SMALL, 40, rate=5.0),
        ]
    )
    assert [(p.knobs, p.stage, p.rate) for p in made] == [
        (SMALL, "validation", 10.0), (LARGE, "validation", 10.0), (SMALL, "simulation", 10.0), (SMALL, "validation", 5.0)
    ]  # fmt: skip
    both = made[0]
    assert (both.met, both.offered, both.attainment, both.seeds) == (60, 80, 0.75, (1, 2))
    assert both.attainment_low < 0.75 < both.attainment_high
    assert both.goodput.mean == 7.5 and both.goodput.runs == (10.0, 5.0)
    assert both.offered_rate == 10.0


def test_the_same_requests_met_twice_count_once() -> None:
    once = point([run(SMALL, 40, seed=1)])
    twice = point([run(SMALL, 40, seed=1), run(SMALL, 40, seed=1)])
    assert (twice.met, twice.offered, twice.attainment_low) == (40, 40, once.attainment_low)
    assert twice.offered_rate == once.offered_rate and twice.seeds == (1, 1)
    assert OBJECTIVE.confirmed(point([run(SMALL, 60, offered=60, seed=1)] * 2)) is False
    apart = point([run(SMALL, 40, seed=1), run(SMALL, 36, seed=1), run(SMALL, 40, seed=2)])
    assert (apart.met, apart.offered) == (78, 80)
    assert apart.goodput.mean == 9.75 and apart.goodput.runs == (10.0, 9.0, 10.0)


def test_the_goodput_interval_follows_the_bursts_not_the_requests() -> None:
    bursts = np.array([(20.0, 20.0), (0.0, 0.0)] * 2)
    steady = goodput_spread(np.array([(10.0, 10.0)] * 4), 4.0, (10.0,))
    bursty = goodput_spread(bursts, 4.0, (10.0,))
    assert steady.mean == bursty.mean == steady.low == steady.high == 10.0
    assert bursty.low < 6 and bursty.high > 14
    longer = goodput_spread(np.tile(bursts, (8, 1)), 32.0, (10.0,) * 8)
    assert longer.high - longer.low < (bursty.high - bursty.low) / 2
    alone = goodput_spread(bursts[:1], 1.0, (20.0,))
    assert (alone.low, alone.mean, alone.high) == (20.0, 20.0, 20.0)


def burst(stage: str = "validation", **changes: Any) -> Point:
    """Of 20 seconds with ten requests each, the first five of which met nothing."""
    seconds = [(10, 0)] * 5 + [(10, 10)] * 15
    options: dict[str, Any] = {"blocks": seconds, "offered": 200, "window_s": 20.0}
    return point([run(SMALL, 150, cast(Any, stage), **options | changes)])


def test_the_interval_of_an_attainment_follows_the_bursts_not_the_requests() -> None:
    low, high = wilson_interval(150, 200)
    made = burst()
    assert made.attainment_high - made.attainment_low > 3 * (high - low) and made.attainment_low > 0
    scattered = burst(blocks=[(10, 7), (10, 8)] * 10)
    assert (scattered.attainment_low, scattered.attainment_high) == pytest.approx((low, high), abs=1e-4), "no narrower"
    clean = point([run(SMALL, 200, offered=200, blocks=[(10, 10)] * 20, window_s=20.0)])
    assert clean.attainment_low == pytest.approx(wilson_interval(200, 200)[0], abs=1e-4)


def test_simulated_seeds_are_what_varies() -> None:
    """Three of a thousand requests each, that met 60, 80 and 99% of them."""
    seeds = [
        run(SMALL, met, "simulation", offered=1000, blocks=[(10, met / 100)] * 100, window_s=100.0, seed=seed)
        for seed, met in enumerate((600, 800, 990))
    ]
    made = point(seeds)
    assert made.attainment_low < 0.4 and made.attainment_high > 0.93
    other = point([r.model_copy(update={"stage": "validation"}) for r in seeds])
    assert made.attainment_high - made.attainment_low > other.attainment_high - other.attainment_low
    again = point([r.model_copy(update={"score": r.score.model_copy(update={"seed": 0})}) for r in seeds])
    assert again.attainment_high - again.attainment_low < 0.1, "of one seed its blocks: they are alike"


@pytest.mark.parametrize(
    ("low", "high", "said"), [(0.97, 0.982, "97–98"), (0.9961, 1.0, "99.6–100"), (0.991, 0.997, "99.1–99.7")]
)
def test_an_interval_of_a_share_has_a_digit_more_where_it_matters(low: float, high: float, said: str) -> None:
    assert share_interval(low, high) == said


def test_the_three_purposes() -> None:
    best, quick, quickest, full = (
        at(SMALL, 40),
        at(LARGE, 36, ttft=200, tpot=10),
        at(OTHER, 30, ttft=9, tpot=9),
        at(VLLM, 10, 900.0),
    )
    chosen = OBJECTIVE.choose([best, quick, quickest, full])
    assert chosen["balanced"].point is best
    assert chosen["interactive"].point is quick  # the quickest gives up a quarter of the goodput
    assert chosen["throughput"].point is full


def test_of_equals_the_balanced_one_is_quicker() -> None:
    assert OBJECTIVE.choose([at(SMALL, 40, ttft=400), at(LARGE, 40, ttft=200)])["balanced"].knobs == LARGE


def test_latency_is_the_worst_p99_in_units_of_its_target() -> None:
    assert OBJECTIVE.latency(at(SMALL, 1, ttft=250, tpot=40)) == pytest.approx(0.8)
    assert Objective(SLO(ttft_ms=500)).latency(at(SMALL, 1, ttft=250, tpot=40)) == pytest.approx(0.5)
    nothing: dict[str, Any] = dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms"), Latency(p50=None, p99=None))
    assert OBJECTIVE.latency(point([run(SMALL, 0, **nothing)])) == float("inf")


def test_alike_settings_are_not_worth_two_measurements() -> None:
    near = Knobs(17, 0, 130, 130)
    assert alike(SMALL, near) and not alike(SMALL, LARGE) and not alike(SMALL, SMALL.with_(max_wait_ms=5))


def test_the_shortlist_has_the_best_of_each_kind_without_doubles() -> None:
    near = Knobs(17, 0, 130, 130)
    found = [at(SMALL, 40), at(near, 39), at(LARGE, 20, 900.0), at(OTHER, 38, ttft=10, tpot=1), at(VLLM, 37)]
    assert shortlist(found, setup(), 3) == [SMALL, LARGE, OTHER]
    assert set(shortlist(found, setup(), 9)) == {SMALL, LARGE, OTHER, VLLM}


def test_the_pareto_set_comes_first_on_the_shortlist() -> None:
    """What another trial beats in everything waits for those that are best at something, if they serve nearly as much."""
    best, beaten = at(SMALL, 40, ttft=200, tpot=20), at(LARGE, 39, ttft=300, tpot=30)
    quick, poor = at(OTHER, 38, ttft=90, tpot=9), at(VLLM, 20, ttft=5, tpot=5)
    assert shortlist([best, beaten, quick, poor], setup(), 2) == [SMALL, OTHER]
    assert shortlist([best, beaten, quick, poor], setup(), 4) == [SMALL, OTHER, LARGE, VLLM]
    others = [at(Knobs(n, 0, 16 * n, 16 * n), met, ttft=200 - n, tpot=20 - n) for n, met in ((2, 39), (8, 38))]
    assert LARGE not in shortlist([best, *others, beaten], setup(), 3)
    slower = [at(Knobs(n, 0, 16 * n, 16 * n), 36 - n // 4, ttft=200 - n, tpot=20 - n) for n in (2, 4, 8)]
    assert LARGE in shortlist([best, *slower, beaten], setup(), 3), "it serves more than those"


def test_what_is_expected_outweighs_what_was_measured_once() -> None:
    lucky, steady = at(SMALL, 40), at(LARGE, 39)
    assert OBJECTIVE.choose([lucky, steady])["balanced"].point is lucky
    chosen = OBJECTIVE.choose([lucky, steady], {SMALL: 0.8, LARGE: 0.95})["balanced"]
    assert chosen.point is steady and "taken together" in chosen.why


def test_pareto_drops_what_another_beats_in_everything() -> None:
    best, worse, other = at(SMALL, 40), at(LARGE, 30), at(OTHER, 20, ttft=10)
    assert pareto([best, worse, other]) == [best, other]
    assert pareto([best, best]) == [best, best]


@pytest.mark.parametrize(
    ("met", "offered", "expected"),
    [
        (14, 14, False),
        (13, 14, False),
        (12, 14, True),
        (39, 40, False),
        (37, 40, True),
        (396, 400, False),
        (388, 400, True),
    ],
)
def test_an_slo_is_refuted_only_beyond_bad_luck(met: int, offered: int, expected: bool) -> None:
    assert OBJECTIVE.refuted(point([run(SMALL, met, offered=offered)])) is expected


def test_nothing_offered_shows_nothing_met() -> None:
    empty = at(SMALL, 40).model_copy(update={"offered": 0, "met": 0})
    assert OBJECTIVE.refuted(empty)


def brought(offered_rate: float, met: int, offered: int = 40, rate: float | None = None) -> Point:
    """A point of ``offered`` requests that came at ``offered_rate``, asked for as ``rate``."""
    measured = run(SMALL, met, offered=offered, rate=rate or offered_rate, window_s=offered / offered_rate)
    return point([measured])


def test_the_capacity_is_the_highest_rate_held_below_every_one_missed() -> None:
    held, missed = brought(10.0, 40), brought(12.0, 20)
    assert OBJECTIVE.capacity([held]) is held and OBJECTIVE.capacity([missed]) is None
    assert OBJECTIVE.capacity([held, missed]) is held
    lucky = brought(14.0, 40)
    assert OBJECTIVE.capacity([held, missed, lucky]) is held  # above a rate that was missed: luck


def test_rates_are_ordered_by_what_came_not_by_what_was_asked() -> None:
    held, missed = brought(31.07, 55, 55, rate=31.9), brought(29.4, 48, 52, rate=41.4)
    assert OBJECTIVE.capacity([held, missed]) is None
    lower = brought(24.0, 60, 60, rate=23.0)
    assert OBJECTIVE.capacity([held, missed, lower]) is lower
    capacity = Capacity(knobs=SMALL, rate=None, tried=(held, missed))
    met, text = judge(findings(capacity=capacity), held)
    assert not met and "at best 92.3% of 52" in text and "at 29.4 req/s" in text and "luck" in text


@pytest.mark.parametrize(
    ("met", "offered", "expected"),
    [(7, 7, False), (99, 99, False), (100, 100, True), (99, 100, True), (394, 400, False)],
)
def test_only_requests_enough_tell_that_a_share_is_met(met: int, offered: int, expected: bool) -> None:
    assert OBJECTIVE.confirmed(point([run(SMALL, met, offered=offered)])) is expected


def test_an_attainment_is_judged_by_what_was_counted_not_by_what_was_rounded() -> None:
    """296 of 299 are 98.997%, and a miss; a profile of before has 0.99."""
    made = point([run(SMALL, 296, offered=299)])
    assert made.attainment == made.model_dump(mode="json")["attainment"] == 296 / 299
    for seen in (made, Point.model_validate(made.model_dump() | {"attainment": 0.99})):
        assert not OBJECTIVE.attained(seen) and not attained(seen, TARGETS)
        assert seen.weighted_attainment == 296 / 299
    assert attained(point([run(SMALL, 297, offered=300)]), TARGETS)
    _, text = judge(findings(capacity=Capacity(knobs=SMALL, rate=10.0, tried=(made,))), made)
    assert text.startswith("balanced may serve 99%") and "98.997% of 299" in text


def test_the_verdict_in_words() -> None:
    def verdict(rate: float | None, *tried: Point) -> tuple[bool, str]:
        return judge(findings(capacity=Capacity(knobs=SMALL, rate=rate, tried=tried)), tried[0])

    kept, missed = brought(8.0, 200, 200), brought(12.0, 20)
    met, text = verdict(8.0, missed, kept)
    assert met and text.startswith("balanced serves 99% within the SLO up to about 8 req/s (measured 100.0% of 200")
    assert text.endswith("; at 12 req/s only 50.0% of 40)")
    met, text = verdict(8.0, kept)
    assert met and text.startswith("balanced serves 99% within the SLO up to at least 8 req/s")
    met, text = verdict(5.0, brought(5.0, 7, 7))
    assert met and "keeps" not in text
    assert text.startswith("balanced: no miss in 7 requests at 5 req/s: too few to tell whether 99% meet the SLO")
    assert text.endswith("; a longer --budget with --fresh tells more"), "an extended study keeps its windows"
    met, text = verdict(8.0, brought(8.0, 39))
    assert met and "may serve 99%" in text and "97.5% of 40" in text
    met, text = verdict(None, missed)
    assert not met and text.startswith("the SLO was not met at any rate tried: at best 50.0% of 40")
    met, text = verdict(300.0, brought(298.0, 400, 400, rate=300.0))
    assert met and "the most that can be offered here" in text
    met, text = judge(findings(capacity=None, stopped=True), kept)
    assert met and text.startswith("stopped before") and "the balanced setting served " in text
    _, text = judge(findings(capacity=None, stopped=True), kept.model_copy(update={"stage": "simulation"}))
    assert "the balanced setting would by simulation serve " in text


def test_settings_are_compared_at_one_rate_measured_if_there_is_any() -> None:
    simulated = run(SMALL, 40, "simulation"), run(OTHER, 40, "simulation")
    elsewhere = run(OTHER, 40, rate=5.0)
    found = findings(*simulated, run(SMALL, 30, seed=1), run(LARGE, 30, seed=1), run(SMALL, 40, seed=2), elsewhere)
    assert {p.knobs for p in found.comparable()} == {SMALL, LARGE}
    assert {p.stage for p in findings(*simulated).comparable()} == {"simulation"}


def by_second(knobs: Knobs, met: list[int], seed: int = 1) -> Run:
    """A run that met so many of ten requests in each second."""
    times = {"window_s": float(len(met)), "goodput": sum(met) / len(met), "offered": 10 * len(met), "seed": seed}
    return run(knobs, sum(met), blocks=[(10, n) for n in met], **times)


def test_what_measured_clearly_less_than_another_is_not_recommended_whatever_is_expected_of_it() -> None:
    """87% of the requests that another setting served to 96%: a simulation of other requests does not outweigh that."""
    worse, better = by_second(SMALL, [9, 9, 8] * 20), by_second(LARGE, [10, 10, 9] * 20)
    expected = {SMALL: 0.95, LARGE: 0.90}
    found = findings(worse, better, expected=expected, noise=0.02)
    setting = found.settings()["balanced"]
    assert setting.knobs == LARGE
    assert f"more is expected of {SMALL}, which measured clearly less than {LARGE}" in setting.why


def test_what_measured_less_within_the_noise_may_be_recommended_and_the_profile_says_why() -> None:
    worse, better = by_second(SMALL, [9, 9, 8] * 20), by_second(LARGE, [10, 10, 9] * 20)
    expected = {SMALL: 0.95, LARGE: 0.90}
    noisy = findings(worse, better, expected=expected, noise=0.2).settings()["balanced"]  # a repeat may differ as much
    assert noisy.knobs == SMALL and f"{LARGE} measured 96.7% within the SLO against 86.7%" in noisy.why
    elsewhere = findings(worse, by_second(LARGE, [10, 10, 9] * 20, seed=2), expected=expected, noise=0.02)
    assert elsewhere.settings()["balanced"].knobs == SMALL  # other requests: luck of the arrivals
    bursts = [by_second(SMALL, [10, 0] * 3), by_second(LARGE, [6, 10, 6, 0, 6, 10])]
    assert findings(*bursts, expected=expected, noise=0.02).settings()["balanced"].knobs == SMALL  # six seconds


def test_only_what_was_allowed_is_recommended() -> None:
    space = make_space(KnobLimits(), ["max_batch_size=64"])
    found = findings(run(VLLM, 40), run(LARGE, 30), space=space)
    assert found.settings()["balanced"].knobs == LARGE
    assert findings(run(VLLM, 40), run(LARGE, 30)).settings()["balanced"].knobs == VLLM


def test_equal_is_what_differs_by_less_than_the_noise_or_one_request() -> None:
    found = {p.knobs: p for p in (at(SMALL, 40), at(LARGE, 40), at(OTHER, 38), at(VLLM, 39))}
    expected = {SMALL: 1.02, LARGE: 0.99, OTHER: 0.96, VLLM: 0.985}
    assert OBJECTIVE.equals(found, SMALL, expected, 0.02) == [SMALL, LARGE, VLLM]
    assert OBJECTIVE.equals(found, SMALL, expected, 0.0) == [SMALL]
    assert OBJECTIVE.equals(found, LARGE, expected, 0.02) == [SMALL, LARGE, VLLM]
    two_apart = {knobs: found[knobs] for knobs in (SMALL, OTHER)}
    assert OBJECTIVE.equals(two_apart, SMALL, {}, 0.2) == [SMALL], "whatever the noise"


def test_of_a_batchers_equals_the_first_stands_unless_another_is_clearly_quicker() -> None:
    """Two settings of a batcher may have the same knobs: they are told apart by their strategy."""
    held, free = BatcherSetting("dynamic", SMALL), BatcherSetting("adaptive", SMALL)
    objective = Objective(SLO(e2e_ms=400), same_p99=0.05)
    for faster, chosen in ((0.97, held), (0.9, free)):
        found = {
            setting: at(SMALL, 40).model_copy(update={"e2e_p99_ms": 100 * factor, "ttft_p99_ms": 100 * factor})
            for setting, factor in ((held, 1.0), (free, faster))
        }
        expected = {held: 1.0, free: 0.99}
        assert objective.balanced(found, expected, noise=0.02)[0] == chosen
        assert Objective(SLO(e2e_ms=400)).balanced(found, expected, noise=0.02)[0] == free, "of an engine the quickest"
        assert objective.balanced(found, expected)[0] == held, "no noise: what is expected"


def test_where_all_meet_everything_the_quicker_is_balanced() -> None:
    slow, quick, worse = at(SMALL, 40, ttft=400), at(LARGE, 40, ttft=200), at(OTHER, 38, ttft=100)
    expected = {SMALL: 1.02, LARGE: 0.99, OTHER: 0.98}
    assert OBJECTIVE.choose([slow, quick, worse], expected, noise=0.02)["balanced"].point is quick
    assert OBJECTIVE.choose([slow, quick, worse], expected)["balanced"].point is slow  # no noise: what is expected


def test_noise_does_not_outweigh_misses() -> None:
    best, quick = at(SMALL, 38, ttft=400), at(LARGE, 36, ttft=200)
    expected = {SMALL: 0.95, LARGE: 0.90}
    assert OBJECTIVE.choose([best, quick], expected, noise=0.1)["balanced"].point is best  # two requests apart


def test_what_the_baseline_outdoes_is_not_balanced() -> None:
    def lats(knobs: Knobs, met: int, factor: float) -> Point:
        """``factor``: of the p99s; the p50s are the lower for it."""
        times = {"ttft_ms": 100, "tpot_ms": 10, "e2e_ms": 300}
        slower: dict[str, Any] = {name: Latency(p50=ms / factor, p99=3 * ms * factor) for name, ms in times.items()}
        return point([run(knobs, met, **slower)])

    mine, plain = lats(SMALL, 40, 1.2), lats(VLLM, 40, 1.0)
    expected = {SMALL: 0.99, VLLM: 0.9}
    assert OBJECTIVE.choose([mine, plain], expected, baseline=VLLM)["balanced"].point is plain
    assert OBJECTIVE.choose([mine, plain], expected)["balanced"].point is mine
    assert OBJECTIVE.choose([lats(SMALL, 40, 1.05), plain], expected, baseline=VLLM)["balanced"].knobs == SMALL
    fewer = lats(VLLM, 39, 1.0)
    assert OBJECTIVE.choose([mine, fewer], expected, baseline=VLLM)["balanced"].point is mine


def test_what_measurements_rule_out_is_not_among_the_possible_best() -> None:
    def measured(knobs: Knobs, p99: float) -> Run:
        latency = Latency(p50=1, p99=p99)
        return run(knobs, 40, ttft_ms=latency, tpot_ms=latency, e2e_ms=latency)

    found = findings(measured(SMALL, 100), measured(VLLM, 100), measured(LARGE, 120))
    found.baseline, found.noise = VLLM, 0.02
    for more, ruled_out in ((0.1, True), (0.01, False)):
        found.expected = {SMALL: 0.85, VLLM: 0.84, LARGE: 0.85 + more}
        assert found.measured_worse(LARGE, SMALL) == ruled_out, "slower than the defaults, where more is expected of it"
        assert not found.measured_worse(VLLM, SMALL)
    assert found.settings()["balanced"].knobs == SMALL


def test_the_sidecar_has_a_line_for_each_run_and_each_failure() -> None:
    import json

    found = findings(run(SMALL, 40, "simulation"), run(), run(LARGE), failures=[(3, "oom")])
    found.unmeasured.append(("validation", OTHER, "gone"))
    lines = [json.loads(line) for line in sidecar(found).splitlines()]
    assert [line["stage"] for line in lines] == ["simulation", "validation", "validation", "simulation", "validation"]
    assert lines[0]["score"]["setting"]["token_budget"] == 128
    assert lines[3] == {"stage": "simulation", "trial": 3, "failed": "oom"}
    assert lines[4]["failed"] == "gone" and lines[4]["setting"]["token_budget"] == 32


def test_how_far_simulated_goodput_is_off_is_of_the_rate_compared() -> None:
    runs = [run(SMALL, 20, rate=39.0), run(SMALL, 40), run(LARGE, 40)]
    paired = [run(SMALL, 40, "simulation", rate=39.0), run(SMALL, 39, "simulation"), run(LARGE, 38, "simulation")]
    found = findings(*runs, run(SMALL, 40, "simulation"), paired=paired)
    facts = simulation_facts(found)
    assert facts is not None and facts.goodput_error == pytest.approx(0.0375), "of 2.5% and 5%, not of 100% too"
    only = simulation_facts(findings(runs[0], run(SMALL, 40, "simulation"), paired=paired[:1]))
    assert only is not None and only.goodput_error == 1.0, "where nothing was measured at that rate, of what was"
