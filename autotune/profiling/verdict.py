"""The verdict: whether the SLO's share is kept, up to which rate, and how much the measurements can tell of it."""

from __future__ import annotations

from autotune.profile import Point
from autotune.profiling.choice import refuted, tells
from autotune.profiling.findings import Findings
from autotune.profiling.setup import Setup

_LONGER = "a longer --budget tells more"


def judge(findings: Findings, balanced: Point) -> tuple[bool, str]:
    """Whether the SLO's share was missed at no more than some of the rates tried, and the sentence that says it.

    Rates are those that came in, not those asked for. "Keeps" is said only where :func:`choice.tells`.
    """
    setup: Setup | None = findings.setup
    assert setup is not None
    slo = setup.slo
    share = f"{slo.attainment * 100:g}%"
    if findings.capacity is None:
        return not refuted(balanced, slo), (
            f"stopped before the highest rate that keeps {share} was looked for; at {_rate(balanced)} offered, "
            f"the balanced setting kept {_share(balanced)}"
        )
    tried = findings.capacity.tried
    missed = sorted((p for p in tried if refuted(p, slo)), key=lambda p: p.offered_rate)
    if findings.capacity.rate is None:
        best = max(missed, key=lambda p: p.attainment, default=balanced)
        above = max((p for p in tried if p not in missed), key=lambda p: p.offered_rate, default=None)
        luck = "" if above is None else f" ({_share(above)} at {_rate(above)} must then have been luck)"
        return False, (
            f"the SLO was not met at any rate tried: at best {_share(best)} at {_rate(best)}{luck}, "
            f"where {share} are asked; ask for less (--slo), or for shorter requests"
        )
    at = next(p for p in tried if p.rate == findings.capacity.rate)
    beyond = next((p for p in missed if p.offered_rate > at.offered_rate), None)
    fell = "" if beyond is None else f"; at {_rate(beyond)} only {beyond.attainment * 100:.1f}% of {beyond.offered}"
    if at.attainment < slo.attainment:
        return True, (
            f"balanced may keep {share} in SLO up to about {_rate(at)}{fell}: {_share(at)} is too short a measurement "
            f"to tell; {_LONGER}"
        )
    if not tells(at, slo):
        misses = at.offered - at.met
        seen = f"{misses} {'miss' if misses == 1 else 'misses'}" if misses else "no miss"
        return True, (
            f"balanced: {seen} in {at.offered} requests at {_rate(at)}{fell}: too few to tell whether {share} are kept; {_LONGER}"
        )
    if at.rate >= setup.most_rate:
        return True, (
            f"balanced keeps {share} in SLO at {_rate(at)} (measured {_share(at)}), "
            "the most that can be offered here: the machine may do more"
        )
    if beyond is None:
        return True, (
            f"balanced keeps {share} in SLO up to at least {_rate(at)} (measured {_share(at)}); it was missed at no higher rate"
        )
    return True, f"balanced keeps {share} in SLO up to about {_rate(at)} (measured {_share(at)}{fell})"


def _rate(p: Point) -> str:
    return f"{p.offered_rate:.3g} req/s"


def _share(p: Point) -> str:
    return f"{p.attainment * 100:.1f}% of {p.offered} (95% interval {p.attainment_low * 100:.0f}–{p.attainment_high * 100:.0f}%)"
