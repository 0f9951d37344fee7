"""When a difference to vLLM's defaults is claimed: by the shares of the same requests, or by goodput."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.profile import Confidence, Gain, Point, Profile, Setting, Spread
from autotune.profile.parts import ClassPoint
from autotune.report import Evidence
from autotune.report.standing import Standing, compared_by, standing
from autotune.report.wording import compared
from runtime.knobs import Knobs
from runtime.slo import wilson_interval
from tests.sample_profile import SETTINGS, sample_point, sample_profile

VLLM = Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=8192, chunk_size=8192)


def measured(
    knobs: Knobs, met: int, offered: int, seeds: tuple[int, ...], runs: tuple[float, ...], **more: Any
) -> Point:
    """As profiles/cpu-2core-tiny.yaml has its points: windows of 17.73 s, goodput ± a tenth."""
    low, high = wilson_interval(met, offered)
    rate = met / (17.73 * len(set(seeds)))
    changes = {
        "offered": offered, "met": met, "attainment": met / offered, "attainment_low": low, "attainment_high": high,
        "offered_rate": offered / (17.73 * len(set(seeds))), "rate": 33.3, "seeds": seeds,
        "goodput": Spread(mean=rate, low=0.9 * rate, high=1.1 * rate, runs=runs),
    }  # fmt: skip
    return sample_point(knobs, "x").model_copy(update=changes | more)


def against(point: Point, baseline: Point, gain: Gain | None = None) -> Standing:
    profile: Profile = sample_profile({"balanced": SETTINGS["balanced"]})
    settings = {"balanced": Setting(knobs=point.knobs, why="best", point=point)}
    changes = {"settings": settings, "baseline": baseline, "gain": gain}
    return standing(Evidence(profile.model_copy(update=changes), "p.yaml"))


def chosen(**more: Any) -> Point:
    """The recommended setting of that profile, under a second seed too."""
    return measured(SETTINGS["balanced"], 1191, 1194, (29, 28), (33.2205, 33.9538)).model_copy(update=more)


BASE = measured(VLLM, 536, 589, (29,), (30.2312,))


def test_shares_of_the_same_requests_tell_what_goodput_does_not() -> None:
    """Of what was simulated, which has no gain."""
    alike = measured(SETTINGS["balanced"], 589, 589, (29,), (33.2205,), stage="simulation")
    base = BASE.model_copy(update={"stage": "simulation"})
    assert alike.goodput.low < base.goodput.high, "goodput alone does not tell them apart"
    for point in (alike, chosen(stage="simulation")):  # of the latter only the run under the common seed
        found = against(point, base)
        assert (
            found.clear
            and found.beside == "10% more than with the vLLM defaults"
            and found.ratio == pytest.approx(589 / 536)
        )
        assert found.sentence.endswith(", with 100% attainment on the same requests against 91.0%")
    worse = against(measured(SETTINGS["balanced"], 480, 589, (29,), (27.07,), stage="simulation"), base)
    assert not worse.clear and worse.beside == "10% fewer than with the vLLM defaults"


def test_measurements_without_a_gain_claim_nothing() -> None:
    """As of version 2, though the intervals of single requests lie apart."""
    for met in (589, 480):
        found = against(measured(SETTINGS["balanced"], met, 589, (29,), (met / 17.73,)), BASE)
        assert not found.clear and found.beside == "no clear difference to the vLLM defaults"
        assert found.sentence.endswith("a difference by intervals of either alone, which claim too much")
    none = measured(VLLM, 0, 589, (29,), (0.0,))
    found = against(chosen(), none)
    assert found.clear and found.beside == "none with the vLLM defaults", "no ratio is known, and none is needed"


def test_a_gain_of_different_requests_is_no_difference_within_an_interval() -> None:
    gain = Gain(ratio=1.8, low=1.8, high=1.8, requests=589, paired=False, block_s=4.0)
    found = against(chosen(), BASE, gain)
    assert not found.clear and found.sentence.endswith(", but the two met different requests")


def test_shares_of_the_same_requests_that_overlap_are_no_difference() -> None:
    close = against(measured(SETTINGS["balanced"], 549, 589, (29,), (30.96,)), BASE)
    assert not close.clear and close.beside == "no clear difference to the vLLM defaults"
    assert close.sentence.endswith("a difference within the 95% intervals")


def test_what_is_clear_is_what_the_terminal_says() -> None:
    """By the profile's gain, which compares block by block, though shares overlap, or do not."""
    close, far = (measured(SETTINGS["balanced"], met, 589, (29,), (met / 17.73,)) for met in (549, 589))
    found = against(close, BASE, Gain(ratio=1.024, low=1.01, high=1.04, requests=589, paired=True, block_s=4.0))
    assert found.clear and found.ratio == 1.024 and found.beside == "2% more than with the vLLM defaults"
    found = against(far, BASE, Gain(ratio=1.1, low=0.99, high=1.2, requests=589, paired=True, block_s=4.0))
    assert not found.clear and found.beside == "no clear difference to the vLLM defaults"
    found = against(far, BASE, Gain(ratio=1.1, low=1.05, high=1.2, requests=589, paired=True))
    assert not found.clear and found.beside == "no clear difference to the vLLM defaults", "of an earlier version"
    assert found.sentence.endswith("a difference by the rule of earlier versions, which claimed too much")


def test_a_gain_within_the_noise_of_the_profile_is_not_clear() -> None:
    point = measured(SETTINGS["balanced"], 589, 589, (29,), (33.2205,))
    profile = sample_profile({"balanced": SETTINGS["balanced"]}).model_copy(
        update={
            "settings": {"balanced": Setting(knobs=point.knobs, why="best", point=point)},
            "baseline": BASE,
            "gain": Gain(ratio=1.1, low=1.05, high=1.15, requests=589, paired=True, block_s=4.0),
        }
    )
    for noise, clear in ((0.03, True), (0.04, False)):
        sure = Confidence(noise=noise, best=0.9, regret=0.0, sentence="")
        found = standing(Evidence(profile.model_copy(update={"confidence": sure}), "p.yaml"))
        assert found.clear is clear, "of one run each: 1.96 · √2 · noise"


@pytest.mark.parametrize(
    "changes",
    [{"rate": 30.0}, {"seeds": (30, 28)}, {"goodput": chosen().goodput.model_copy(update={"runs": (33.5,)})}],
)
def test_of_other_requests_goodput_has_to_tell(changes: dict[str, Any]) -> None:
    point = chosen(**changes)
    assert point.attainment_low > BASE.attainment_high
    assert against(point, BASE).beside == "no clear difference to the vLLM defaults"
    both = BASE.model_copy(
        update={"seeds": (29, 30), "goodput": BASE.goodput.model_copy(update={"runs": (30.2, 30.3)})}
    )
    assert against(chosen(), both).beside == "no clear difference to the vLLM defaults", "each under a seed of its own"
    other = Spread(mean=60.0, low=50.0, high=70.0, runs=(60.0,))
    simulated = BASE.model_copy(update={"stage": "simulation", "goodput": other, "seeds": (30,)})
    assert against(chosen(stage="simulation"), simulated).beside == "44% fewer than with the vLLM defaults"


@pytest.mark.parametrize(("weight", "by_shares"), [(1.0, True), (0.2, False)])
def test_a_goodput_of_classes_that_weigh_differently_tells_no_share(weight: float, by_shares: bool) -> None:
    classes = {
        name: ClassPoint(
            weight=own, offered=597, met=595, attainment=595 / 597, throughput=1.0, ttft_p99_ms=1.0, tpot_p99_ms=1.0,
            e2e_p99_ms=1.0,
        )
        for name, own in (("chat", 1.0), ("batch", weight))
    }  # fmt: skip
    *_, shares = compared_by(chosen(classes=classes), BASE)
    assert shares is by_shares


def test_runs_repeated_under_a_common_seed_count_once() -> None:
    twice = measured(SETTINGS["balanced"], 1160, 1194, (29, 29, 28), (31.0, 32.2, 33.9))
    assert against(twice, BASE).ratio == pytest.approx(round(31.6 * 17.73) / 536)


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (22.88, "22.9 times as many requests as A"),
        (2188.0, "2,188 times as many requests as A"),
        (2.0, "2 times as many requests as A"),
        (1.31, "31% more requests than A"),
        (0.9, "10% fewer requests than A"),
        (1.004, "as many requests as A"),
    ],
)
def test_a_ratio_in_words(ratio: float, said: str) -> None:
    assert compared(ratio, "requests", "A") == said


def test_the_guide_says_by_which_rule_a_difference_is_claimed() -> None:
    """By the paired gain; of what was measured a profile without claims nothing."""
    text = " ".join((Path(__file__).parents[3] / "docs" / "how-to" / "report.md").read_text(encoding="utf-8").split())
    assert "only if the profile's `gain` does" in text
    assert "Nor does a profile without `gain`" in text
