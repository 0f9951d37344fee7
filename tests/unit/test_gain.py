"""The gain over vLLM's defaults: from runs of the same requests to a ratio with an interval, and to the first sentence."""

from __future__ import annotations

import random
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.special import stdtrit

from autotune.profile import Confidence, Profile
from autotune.profiling.points import Run, beyond_noise, gain, known_gain, likely_better, share_beside
from autotune.report.profile_table import conclusion, rows, table
from tests.unit.profiles import LARGE, SMALL, VLLM, findings, profile, run, setup


def of_seconds(met: list[int], seed: int = 0, **changes: Any) -> Run:
    """A run that met so many of ten requests in each second."""
    total = sum(met)
    times = {"window_s": float(len(met)), "goodput": total / len(met), "offered": 10 * len(met)}
    blocks = [(10, n) for n in met]
    return run(changes.pop("knobs", SMALL), total, blocks=blocks, seed=seed, **(times | changes))


def scattered(mean: float, seed: int, spread: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [max(0, min(10, round(mean + rng.randint(-spread, spread)))) for _ in range(40)]


def test_the_luck_of_the_arrivals_cancels_out_where_both_met_the_same_requests() -> None:
    base = scattered(5, 1)
    mine = [n + 1 for n in base]
    paired = gain([of_seconds(mine)], [of_seconds(base)])
    apart = gain([of_seconds(mine, seed=1)], [of_seconds(base, seed=2)])
    assert paired is not None and apart is not None
    assert paired.ratio == apart.ratio == pytest.approx(sum(mine) / sum(base), abs=1e-4)
    assert paired.paired and not apart.paired and paired.requests == 400
    assert paired.low <= paired.ratio <= paired.high
    assert paired.high - paired.low < 0.5 * (apart.high - apart.low)


def test_only_requests_that_both_met_are_compared_where_there_are_some() -> None:
    found = gain([of_seconds([8] * 20, 1), of_seconds([2] * 20, 2)], [of_seconds([4] * 20, 1)])
    assert found is not None and (found.ratio, found.low, found.high) == (2.0, 2.0, 2.0)


def test_runs_of_the_same_requests_count_once() -> None:
    once = gain([of_seconds(scattered(7, 3))], [of_seconds(scattered(5, 4))])
    twice = gain([of_seconds(scattered(7, 3))] * 2, [of_seconds(scattered(5, 4))])
    assert once == twice


def bursty(rng: random.Random) -> tuple[Run, Run]:
    """Two runs of one setting under the same requests: in each stretch of two or three seconds either is ahead by luck."""
    mine: list[int] = []
    base: list[int] = []
    while len(mine) < 40:
        seconds, ahead = rng.randint(2, 3), rng.choice((-2, 0, 2))
        mine += [7 + ahead] * seconds
        base += [7] * seconds
    return of_seconds(mine[:40]), of_seconds(base[:40])


def test_a_difference_by_luck_is_seldom_called_certain() -> None:
    """Not more often than in the 5% that an interval of 95% allows, by and large."""
    rng = random.Random(5)
    found = [made for _ in range(300) if (made := gain([(pair := bursty(rng))[0]], [pair[1]])) is not None]
    assert sum(made.low > 1 or made.high < 1 for made in found) < 0.09 * len(found)


def overloaded(seconds: int, seed: int, *, better: bool) -> tuple[Run, Run]:
    """Two runs of the same requests. The second falls behind for seconds at a time, the first too unless it is ``better``."""
    rng = random.Random(seed)
    mine: list[int] = []
    base: list[int] = []
    while len(base) < seconds:
        calm, late = rng.randint(1, 3), rng.randint(1, 3)
        mine += [rng.randint(9, 10) for _ in range(calm)]
        mine += [rng.randint(8, 9) if better else rng.randint(0, 5) for _ in range(late)]
        base += [rng.randint(9, 10) for _ in range(calm)] + [rng.randint(0, 5) for _ in range(late)]
    return of_seconds(mine[:seconds]), of_seconds(base[:seconds], knobs=VLLM)


@pytest.mark.parametrize(("seconds", "at_least"), [(6, 0.08), (16, 0.7)])
def test_a_real_gain_over_a_baseline_that_falls_behind_is_claimed(seconds: int, at_least: float) -> None:
    """Of some 40%; a baseline whose goodput changes from second to second makes it no noise."""

    def claimed(better: bool) -> float:
        pairs = [overloaded(seconds, seed, better=better) for seed in range(200)]
        found = [made for mine, base in pairs if (made := gain([mine], [base], 0.05)) is not None]
        if better:
            assert sum(made.ratio for made in found) / len(found) == pytest.approx(1.5, abs=0.1)
        return sum(made.clear for made in found) / len(found)

    assert claimed(better=True) >= at_least
    assert claimed(better=False) <= 0.025


def test_a_choice_takes_less_than_a_claim() -> None:
    """Measurements of a few seconds overrule what simulation expects far more often than they allow a claim."""
    pairs = [overloaded(6, seed, better=True) for seed in range(100)]
    claimed = sum((found := gain([mine], [base], 0.05)) is not None and found.clear for mine, base in pairs)
    chosen = sum(likely_better([mine], [base], 0.05) for mine, base in pairs)
    alike = [overloaded(6, seed, better=False) for seed in range(100)]
    assert chosen >= 3 * claimed and sum(likely_better([mine], [base], 0.05) for mine, base in alike) <= 10


def test_the_interval_is_that_of_the_ratio() -> None:
    """Each end is a ratio that the paired t-test just does not reject."""
    mine, base = scattered(8, 1, 2), scattered(5, 2, 2)
    found = gain([of_seconds(mine)], [of_seconds(base)])
    assert found is not None and found.bounded and found.block_s == 4.0
    above, below = (np.array(side).reshape(10, 4).sum(axis=1) for side in (mine, base))
    for end in (found.low, found.high):
        apart = above - end * below
        assert abs(apart.mean()) / (apart.std(ddof=1) / 10**0.5) == pytest.approx(stdtrit(9, 0.975), rel=2e-3)


def test_over_a_baseline_that_hardly_serves_the_interval_has_no_upper_end() -> None:
    made, text = told([9] * 8, [0] * 7 + [9])
    assert made.gain is not None and (made.gain.high, made.gain.bounded) == (1000.0, False)
    assert "(95% interval from " in text and " times as many, without an upper end; one run of 4 s)" in text
    one = gain([of_seconds([9])], [of_seconds([5])])
    assert one is not None and (one.low, one.high) == (0.0, 1000.0), "of one second"


def test_ratios_out_of_all_measure_have_a_place_in_a_profile() -> None:
    huge = gain([run(SMALL, 600_000, offered=600_000, blocks=[(10**5, 10**5)] * 6, window_s=6.0)],
                [run(VLLM, 1, offered=600_000, blocks=[(10**5, 0)] * 5 + [(10**5, 1)], window_s=6.0)], 0.5)  # fmt: skip
    assert huge is not None and huge.high == huge.ratio == 600_000
    assert beyond_noise(huge.model_copy(update={"ratio": 900.0, "high": 950.0}), 1.0, 1, 1).high == 1000
    tiny = gain([run(VLLM, 1, offered=600_000, blocks=[(10**5, 0)] * 5 + [(10**5, 1)], window_s=6.0)],
                [run(SMALL, 600_000, offered=600_000, blocks=[(10**5, 10**5)] * 6, window_s=6.0)], 0.0)  # fmt: skip
    assert tiny is not None and (tiny.ratio, tiny.low) == (0.0001, 0.0) and tiny.high >= tiny.ratio


def test_blocks_are_of_four_seconds_where_the_windows_hold_five_of_them() -> None:
    """Shorter ones elsewhere, of a second where windows last less than ten together; five at least in any case."""

    def length(*windows: int) -> float | None:
        runs = [of_seconds([9, 8] * (n // 2) + [9] * (n % 2), seed) for seed, n in enumerate(windows)]
        return None if (found := gain(runs, runs)) is None else found.block_s

    assert [length(n) for n in (6, 9, 10, 16, 20, 40, 240)] == [
        1.0,
        1.0,
        2.0,
        pytest.approx(16 / 6, abs=1e-4),
        4.0,
        4.0,
        8.0,
    ]
    assert (length(6, 6), length(6, 6, 6, 6)) == (2.0, 3.0)


def test_no_gain_is_clear_that_is_within_the_noise_of_the_runs_compared() -> None:
    mine, base = of_seconds([9] * 20), of_seconds([8] * 20, knobs=VLLM)
    quiet, noisy = gain([mine], [base], 0.01), gain([mine], [base], 0.1)
    assert quiet is not None and noisy is not None
    assert quiet.clear and likely_better([mine], [base], 0.01)
    assert not noisy.clear and not likely_better([mine], [base], 0.1) and noisy.low < 1 < noisy.ratio < noisy.high
    others = [of_seconds([9] * 20, seed) for seed in range(1, 9)]
    assert gain([mine, *others], [base], 0.1) == noisy, "runs that meet other requests make it no more certain"
    more = gain([mine, *others], [base, *(of_seconds([8] * 20, seed, knobs=VLLM) for seed in range(1, 9))], 0.05)
    assert more is not None and more.clear


def test_the_terminal_calls_no_gain_clear_that_is_within_the_noise() -> None:
    """Nor one by the rule of an earlier version."""
    made = profile(findings(of_seconds([9] * 20), of_seconds([8] * 20, knobs=VLLM), noise=0.1))
    assert conclusion(made).startswith("No clear gain over vLLM's defaults here.")
    sure = profile(findings(of_seconds([9] * 20), of_seconds([8] * 20, knobs=VLLM)))
    assert conclusion(sure).startswith("Set ") and sure.gain is not None
    believed = Confidence(noise=0.1, best=0.9, regret=0.0, sentence="sure")
    later = sure.model_copy(update={"confidence": believed})
    assert known_gain(later) == made.gain and conclusion(later).startswith("No clear gain")
    older = sure.model_copy(update={"gain": sure.gain.model_copy(update={"block_s": None})})
    text = conclusion(older)
    assert text.startswith("No clear gain")
    assert "%, by the rule of earlier versions, which claimed too much; one run of 4 s)" in text


def test_without_a_gain_intervals_of_either_claim_none() -> None:
    """As in profiles of version 2; but of a baseline that met none no ratio is known, and the gain is plain."""
    sure = profile(findings(of_seconds([9] * 20), of_seconds([7] * 20, knobs=VLLM)))
    assert conclusion(sure.model_copy(update={"gain": None})) == (
        "No clear gain over vLLM's defaults here. Best by measurement and simulation, max_batch_size=16, token_budget=128, "
        "chunk_size=128: 90% (85–93%) of requests within the SLO, with vLLM's defaults 70% (63–76%) (intervals of single "
        "requests)."
    )
    none = profile(findings(of_seconds([9] * 20), of_seconds([0] * 20, knobs=VLLM)))
    assert none.gain is None and conclusion(none).startswith("Set ") and "single requests" not in conclusion(none)
    few = profile(findings(of_seconds([1] + [0] * 19), of_seconds([0] * 20, knobs=VLLM)))
    assert conclusion(few).startswith("No clear gain")


def test_a_gain_of_different_requests_says_so() -> None:
    made = profile(findings(of_seconds([9] * 12, 1), of_seconds([5] * 12, 2, knobs=VLLM)))
    text = conclusion(made)
    assert made.gain is not None and not made.gain.paired
    assert text.startswith("No clear gain") and "; the two met different requests; one run of 4 s)" in text


def test_what_measured_more_than_the_defaults_that_are_recommended_is_said() -> None:
    best, other = of_seconds([7] * 40, knobs=VLLM), of_seconds([6] * 40, knobs=LARGE)
    burst = of_seconds([9] * 40)
    made = profile(findings(best, burst, other, expected={VLLM: 0.9, SMALL: 0.8, LARGE: 0.7}, noise=0.5))
    assert conclusion(made) == (
        "No setting beats vLLM's defaults beyond chance here. max_batch_size=16, token_budget=128, chunk_size=128 measured 90% "
        "of the same requests within the SLO against 70%: in a window of 4 s, a burst or two can make that difference."
    )
    nearly = profile(
        findings(best, of_seconds([10] * 39 + [9]), other, expected={VLLM: 0.9, SMALL: 0.8, LARGE: 0.7}, noise=0.5)
    )
    assert "measured 99.8% of the same requests within the SLO against 70%" in conclusion(nearly)
    points = [p.model_copy(update={"label": "TensorRT-LLM defaults"}) if p.knobs == SMALL else p for p in made.points]
    text = conclusion(made.model_copy(update={"points": tuple(points)}))
    assert text == "No setting beats vLLM's defaults here: none of the 2 others measured was clearly better.", (
        "defaults of another engine are no candidates, and pins may forbid them"
    )


def test_goodput_decides_nothing_where_the_mean_e2e_was_looked_for() -> None:
    best, other = of_seconds([7] * 40, knobs=VLLM, e2e_mean_ms=100.0), of_seconds([9] * 40, e2e_mean_ms=150.0)
    text = conclusion(profile(findings(best, other, setup=setup(objective="mean-e2e"))))
    assert text.startswith("No setting beats vLLM's defaults here: the one other setting measured was not ")


def test_a_share_lies_in_the_interval_that_stands_beside_it() -> None:
    assert [share_beside(0.9968, 0.993), share_beside(0.9968, 0.98), share_beside(1.0, 0.995)] == [
        "99.7%",
        "99.7%",
        "100%",
    ]
    made = profile(findings(of_seconds([10] * 119 + [9]), of_seconds([5] * 120, knobs=VLLM)))
    console = Console(width=200, record=True, file=StringIO())
    console.print(table(made, 200))
    assert "99.9% (99.5–100)" in console.export_text()


def test_nothing_met_on_either_side_is_no_ratio() -> None:
    assert gain([of_seconds([0] * 4)], [of_seconds([3] * 4)]) is None
    assert gain([of_seconds([3] * 4)], [of_seconds([0] * 4)]) is None


def told(mine: list[int], base: list[int]) -> tuple[Profile, str]:
    made = profile(findings(of_seconds(mine), of_seconds(base, knobs=VLLM)))
    return made, conclusion(made)


def test_a_clear_gain_is_the_first_sentence() -> None:
    made, text = told([9] * 10, [6] * 9 + [7])
    assert made.gain is not None and made.gain.paired
    assert text.startswith(
        "Set max_batch_size=16, token_budget=128, chunk_size=128: 48% more requests within the SLO than with vLLM's "
        "defaults (95% interval +"
    )


def test_the_knobs_of_vllm_have_its_names() -> None:
    made, _ = told([9] * 10, [6] * 9 + [7])
    engine = made.engine.model_copy(update={"name": "vllm"})
    text = conclusion(made.model_copy(update={"engine": engine}))
    assert text.startswith(
        "Set max_num_seqs=16, max_num_batched_tokens=128, long_prefill_token_threshold=128: 48% more"
    )


def test_twice_and_more_is_told_as_a_multiple() -> None:
    assert (
        "2.5 times as many requests within the SLO as with vLLM's defaults (95% interval 2.5–2.5; one run of 4 s)."
        in told([5] * 8, [2] * 8)[1]
    )


def test_what_could_be_chance_is_no_advice() -> None:
    text = told([9, 2, 9, 1, 9, 9], [8, 2, 9, 2, 8, 9])[1]
    assert text.startswith("No clear gain over vLLM's defaults here. Best by measurement and simulation, ")
    assert text.endswith("%; one run of 4 s).")
    assert "; both meet the SLO" not in text


def test_where_nothing_was_missed_no_interval_is_claimed() -> None:
    text = told([10] * 6, [10] * 6)[1]
    assert text.startswith(
        "No gain over vLLM's defaults to be seen here: with either, every request met the SLO at 10 req/s; 60 requests are "
        "too few to tell them apart; best by measurement and simulation, max_batch_size=16"
    )
    assert "too few" not in told([10] * 12, [10] * 12)[1]
    both = told([10] * 39 + [9], [10] * 38 + [9, 10])[1]
    assert both.endswith("; both meet the SLO at this rate.") and "95% interval" in both


def test_the_defaults_themselves_are_no_setting_to_change_to() -> None:
    best = of_seconds([9] * 8, knobs=VLLM)
    assert (
        conclusion(profile(findings(best)))
        == "No setting beats vLLM's defaults here: they were the only setting measured."
    )
    text = conclusion(profile(findings(best, of_seconds([5] * 8), of_seconds([4] * 8, knobs=LARGE))))
    assert text == "No setting beats vLLM's defaults here: none of the 2 others measured was better."
    three = profile(findings(best, of_seconds([5] * 8), of_seconds([4] * 8, knobs=LARGE)))
    points = [p.model_copy(update={"rate": p.rate / 2}) if p.knobs == LARGE else p for p in three.points]
    text = conclusion(three.model_copy(update={"points": tuple(points)}))
    assert text == "No setting beats vLLM's defaults here: the one other setting measured was not better."
    expected = {VLLM: 0.95, SMALL: 0.9}
    more = findings(best, of_seconds([10, 9] * 4), expected=expected, noise=0.2)
    assert (
        conclusion(profile(more))
        == "No setting beats vLLM's defaults here: the one other setting measured was not clearly better."
    )


def test_a_run_stopped_before_anything_was_measured_says_what_simulation_advises() -> None:
    found = run(SMALL, 40, "simulation"), run(VLLM, 20, "simulation")
    text = conclusion(profile(findings(*found, stopped=True)))
    assert text == (
        "By simulation alone: set max_batch_size=16, token_budget=128, chunk_size=128. Nothing has been measured."
    )
    text = conclusion(profile(findings(run(VLLM, 40, "simulation"), stopped=True)))
    assert text == "By simulation alone, no setting beats vLLM's defaults here. Nothing has been measured."


def test_several_runs_are_no_one_run() -> None:
    twice = (
        [of_seconds([9] * 10, seed) for seed in (1, 2)],
        [of_seconds([6] * 9 + [7], seed, knobs=VLLM) for seed in (1, 2)],
    )
    assert "one run" not in conclusion(profile(findings(*twice[0], *twice[1])))


def test_where_no_request_met_the_slo_nothing_is_advised() -> None:
    text = told([0] * 6, [0] * 6)[1]
    assert text.startswith("No setting can be advised: at 10 req/s no request met the SLO.")


def test_without_the_defaults_beside_it_there_is_nothing_to_claim() -> None:
    text = conclusion(profile(findings(of_seconds([9] * 8))))
    assert text.endswith("vLLM's defaults were not measured beside it.")


def test_purposes_with_one_setting_are_one_row() -> None:
    same = profile(findings(of_seconds([9] * 8), of_seconds([5] * 8, knobs=VLLM)))
    assert {s.knobs for s in same.settings.values()} == {SMALL}
    assert next((label, mark) for label, _, mark in rows(same)) == ("every purpose", "← recommended")
    two = profile(findings(run(SMALL, 40), run(LARGE, 30, throughput=900.0), run(VLLM, 20)))
    assert [label for label, _, _ in rows(two)][:3] == ["interactive, balanced", "throughput", "vLLM defaults"]


def test_a_large_end_of_the_interval_is_told_as_a_multiple() -> None:
    made, _ = told([9, 2, 9, 1, 9, 9], [8, 2, 9, 2, 8, 9])
    assert made.gain is not None
    wide = made.model_copy(update={"gain": made.gain.model_copy(update={"ratio": 1.4, "low": 0.83, "high": 22.88})})
    assert "40% more requests within the SLO than with vLLM's defaults (95% interval 0.83 to 22.9 times as many" in (
        conclusion(wide)
    )
