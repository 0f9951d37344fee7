"""How the recommended setting stands against the baseline, in words that claim no more than was measured."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.profile import Point
from autotune.report.evidence import Evidence
from autotune.report.wording import number, plus_minus

_WORTH_SAYING = 1.02  # as a multiple; less is a percentage


@dataclass(frozen=True)
class Standing:
    """``ratio``: goodput over the baseline's, None without one; ``clear``: the setting's 95% interval lies above the baseline's.

    ``short``: for a title; ``beside``: its second half, None without a baseline; ``sentence``: for the headline, without its
    subject. A difference is claimed only where the intervals do not overlap.
    """

    ratio: float | None
    clear: bool
    short: str
    beside: str | None
    sentence: str


def standing(evidence: Evidence) -> Standing:
    """The comparison at the rate both were measured at."""
    point, baseline = evidence.recommended.point, evidence.profile.baseline
    rate = f"{number(point.goodput.mean)} req/s in SLO"
    if baseline is None or baseline.stage != point.stage:
        return Standing(None, False, rate, None, "no baseline was measured beside it")
    if baseline.knobs == point.knobs:
        same = "the vLLM defaults themselves"
        return Standing(1.0, False, f"{rate}, with {same}", f"with {same}", f"these are {same}")
    base = baseline.goodput
    clear = point.goodput.low > base.high
    apart = clear or base.low > point.goodput.high
    ratio = point.goodput.mean / base.mean if base.mean > 0 else None
    alike = ratio is not None and abs(ratio - 1) < 0.005
    here = f"on this same engine ({plus_minus(baseline)})"
    if ratio is None and point.goodput.mean == 0:
        told, sentence = "none with the vLLM defaults either", "nor do the vLLM defaults on this same engine"
    elif ratio is None:
        told, sentence = "none with the vLLM defaults", "the vLLM defaults answer none within it on this same engine"
    elif alike:
        told = "as many as with the vLLM defaults"
        sentence = f"{told} {here}"
    elif clear and ratio >= _WORTH_SAYING:
        times = f"{number(ratio, 2)}×"
        told, sentence = f"{times} the vLLM defaults", f"{times} what the vLLM defaults reach {here}"
    else:
        told = f"{abs(ratio - 1) * 100:.0f}% {'more' if ratio > 1 else 'fewer'} than with the vLLM defaults"
        sentence = f"{told} {here}"
    if not apart and not alike and (base.mean or point.goodput.mean):
        told = "no clear difference to the vLLM defaults"
        sentence += ", a difference within what repeated runs spread"
    return Standing(ratio, clear, f"{rate}, {told}", told, sentence)


def limit(evidence: Evidence) -> tuple[Point | None, list[Point]]:
    """The point at the highest rate that kept the SLO, and those at lower rates that fell short of it, by rate."""
    profile = evidence.profile
    if profile.capacity is None:
        return None, []
    tried = sorted(profile.capacity.tried, key=lambda p: p.offered_rate)
    kept = next((p for p in tried if p.rate == profile.capacity.rate), None)
    if kept is None:
        return None, []
    return kept, [p for p in tried if p.offered_rate < kept.offered_rate and p.attainment < profile.slo.attainment]
