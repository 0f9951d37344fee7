"""How the recommended setting stands against the baseline, in words that claim no more than was measured."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from statistics import fmean

from autotune.engines.defaults import VLLM_LABEL
from autotune.profile import Gain, Point, Spread
from autotune.profiling.objective import Objective
from autotune.profiling.points import known_gain
from autotune.report import wording
from autotune.report.evidence import Evidence
from autotune.report.wording import ms, percent, plus_minus, reached
from runtime.slo import share_met, wilson_interval

_BASELINE = f"the {VLLM_LABEL}"


@dataclass(frozen=True)
class Standing:
    """``ratio``: how many times as good as the baseline, None without one; ``clear``: it is better beyond chance.

    ``short``: for a title; ``beside``: its second half, None without a baseline; ``sentence``: for the headline, without its
    subject. The profile's ``gain`` says what is clear, as it does on the terminal. Profiles without claim nothing of what
    was measured, as they know intervals of either alone, in earlier versions over single requests. Where the baseline met none,
    or all is simulated, intervals that do not overlap claim a difference: those of attainment where both met the same requests,
    of which as many were offered to each, elsewhere those of goodput.
    Of a mean E2E no interval is known: both figures are given, and nothing is claimed.
    """

    ratio: float | None
    clear: bool
    short: str
    beside: str | None
    sentence: str


def standing(evidence: Evidence) -> Standing:
    """The comparison at the rate both were measured at."""
    point, baseline, objective = evidence.recommended.point, evidence.profile.baseline, Objective.of(evidence.profile)
    rate = reached(objective, point)
    if baseline is None or baseline.stage != point.stage:
        how = "simulated" if evidence.simulated else "measured"
        return Standing(None, False, rate, None, f"no baseline was {how} beside it")
    if baseline.knobs == point.knobs:
        same = f"{_BASELINE} themselves"
        return Standing(1.0, False, f"{rate}, with {same}", f"with {same}", f"these are {same}")
    if objective.measure.lowest:
        return _by_mean(objective, rate, point, baseline)
    mine, base, shares = compared_by(point, baseline)
    gain = known_gain(evidence.profile)  # of requests that both met: None of versions that did not compare so
    if gain is None or not base.mean:
        by_interval = evidence.simulated or not base.mean
        clear = by_interval and mine.low > base.high
        apart = clear or (by_interval and base.low > mine.high)
        ratio = mine.mean / base.mean if base.mean > 0 else None
    else:
        clear, apart, ratio = gain.clear, gain.certain and (gain.low > 1 or gain.high < 1), gain.ratio
    alike = ratio is not None and abs(ratio - 1) < 0.005
    here = f"on this same engine ({plus_minus(baseline)})"
    if ratio is None and mine.mean == 0:
        compared, sentence = f"none with {_BASELINE} either", f"nor do {_BASELINE} on this same engine"
    elif ratio is None:
        compared, sentence = (
            f"none with {_BASELINE}",
            f"{_BASELINE} answer none within it on this same engine",
        )
    elif alike:
        compared = f"as many as with {_BASELINE}"
        sentence = f"{compared} {here}"
    else:
        compared = wording.compared(ratio, "", f"with {_BASELINE}")
        sentence = f"{compared} {here}"
    if not apart and not alike and (base.mean or mine.mean):
        compared = f"no clear difference to {_BASELINE}"
        sentence += _uncertain(gain, mine, base)
    elif shares and not alike and base.mean:
        met, with_baseline = (percent(found.mean, target=wording.required(objective)) for found in (mine, base))
        sentence += f", with {met} attainment on the same requests against {with_baseline}"
    return Standing(ratio, clear, f"{rate}, {compared}", compared, sentence)


def _uncertain(gain: Gain | None, mine: Spread, base: Spread) -> str:
    """Why a difference that was measured is not claimed."""
    if gain is not None and not gain.paired:
        return ", but the two met different requests"
    apart = mine.low > base.high or base.low > mine.high if gain is None else not gain.low <= 1 <= gain.high
    if not apart:
        return ", a difference within the 95% intervals"
    rule = "intervals of either alone, which claim" if gain is None else "the rule of earlier versions, which claimed"
    return f", a difference by {rule} too much"


def ahead(point: Point, baseline: Point) -> bool:
    """Whether the interval of ``point`` lies above that of ``baseline``, each by itself: less than :attr:`Gain.clear`."""
    mine, base, _ = compared_by(point, baseline)
    return mine.low > base.high


def compared_by(point: Point, baseline: Point) -> tuple[Spread, Spread, bool]:
    """The attainments of both where they met the same requests (then true), else their goodputs."""
    shares = _of_same_requests(point, baseline)
    return (*shares, True) if shares else (point.goodput, baseline.goodput, False)


def _by_mean(objective: Objective, rate: str, point: Point, baseline: Point) -> Standing:
    """Of two mean E2Es."""
    share = objective.share(point, baseline)
    change = f" ({1 / share - 1:+.0%})" if share else ""
    there = ms(objective.figure(baseline))
    beside = f"{there} with {_BASELINE}{change}"
    return Standing(
        share or None, False, f"{rate}, {beside}", beside, f"{there} with {_BASELINE} on this same engine{change}"
    )


def _of_same_requests(point: Point, baseline: Point) -> tuple[Spread, Spread] | None:
    """The attainment of the requests that both met, with 95% intervals: those of equal seeds at one rate.

    None where one has no run under the other's seeds, or each has some that the other has not: a profile tells how many requests
    came under all seeds of a point, not under some. Nor are they known from a goodput in which classes weigh differently.
    """
    common = set(point.seeds) & set(baseline.seeds)
    whole = next((p for p in (baseline, point) if set(p.seeds) == common), None)
    if whole is None or not whole.offered or not math.isclose(point.rate, baseline.rate):
        return None
    for p in (point, baseline):
        weighted = any(one.weight != 1 for one in p.classes.values())
        if set(p.seeds) != common and (weighted or len(p.seeds) != len(p.goodput.runs)):
            return None
    return _share(point, common, whole), _share(baseline, common, whole)


def _share(point: Point, seeds: Set[int], whole: Point) -> Spread:
    """Of ``point``, under ``seeds`` alone, which are all of ``whole``. Windows are equally long: rates do for counts."""
    if set(point.seeds) == seeds:
        return Spread(mean=share_met(point), low=point.attainment_low, high=point.attainment_high, runs=())
    runs = list(zip(point.seeds, point.goodput.runs, strict=True))
    rate = fmean(fmean(goodput for seed, goodput in runs if seed == one) for one in seeds)
    met = min(whole.offered, round(rate / whole.offered_rate * whole.offered))
    low, high = wilson_interval(met, whole.offered)
    return Spread(mean=met / whole.offered, low=low, high=high, runs=())


def limit(evidence: Evidence) -> tuple[Point | None, list[Point]]:
    """The point at the highest rate that met the SLO, and those at lower rates that fell short of it, by rate."""
    profile = evidence.profile
    if profile.capacity is None:
        return None, []
    tried = sorted(profile.capacity.tried, key=lambda p: p.offered_rate)
    kept = next((p for p in tried if p.rate == profile.capacity.rate), None)
    if kept is None:
        return None, []
    return kept, [p for p in tried if p.offered_rate < kept.offered_rate and not Objective.of(profile).attained(p)]
