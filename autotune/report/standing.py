"""How the recommended setting stands against the baseline, in words that claim no more than was measured."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.profile import Point
from autotune.report.evidence import Evidence
from autotune.report.wording import number, plus_minus

_WORTH_SAYING = 1.02


@dataclass(frozen=True)
class Standing:
    """``ratio``: goodput over the baseline's, None without one; ``clear``: their 95% intervals do not overlap.

    ``short``: for a title; ``sentence``: for the headline, without its subject.
    """

    ratio: float | None
    clear: bool
    short: str
    sentence: str


def standing(evidence: Evidence) -> Standing:
    """The comparison at the rate both were measured at."""
    point, baseline = evidence.recommended.point, evidence.profile.baseline
    rate = f"{number(point.goodput.mean)} req/s in SLO"
    if baseline is None or baseline.stage != point.stage:
        return Standing(None, False, rate, "no baseline was measured beside it")
    if baseline.knobs == point.knobs:
        return Standing(
            1.0, False, f"{rate}, with the vLLM defaults themselves", "these are the vLLM defaults themselves"
        )
    base = baseline.goodput
    clear = point.goodput.low > base.high
    if base.mean <= 0:
        return Standing(
            None,
            clear,
            f"{rate}, none with the vLLM defaults",
            "the vLLM defaults answer none within it on this same engine",
        )
    ratio = point.goodput.mean / base.mean
    if clear and ratio >= _WORTH_SAYING:
        times = f"{number(ratio, 2)}×"
        return Standing(
            ratio, True, f"{rate}, {times} the vLLM defaults",
            f"{times} what the vLLM defaults reach on this same engine ({plus_minus(baseline)})",
        )  # fmt: skip
    if abs(ratio - 1) < 0.005:
        more = "as many as with the vLLM defaults"
        return Standing(ratio, False, f"{rate}, {more}", f"{more} on this same engine ({plus_minus(baseline)})")
    more = f"{abs(ratio - 1) * 100:.0f}% {'more' if ratio > 1 else 'fewer'} than with the vLLM defaults"
    apart = clear or base.low > point.goodput.high
    within = "" if apart else ", a difference within what repeated runs spread"
    return Standing(ratio, clear, f"{rate}, {more}", f"{more} on this same engine ({plus_minus(baseline)}){within}")


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
