"""Which settings to recommend, and whether a promise is kept. The rules, in full, are in docs/how-to/profile.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from scipy.stats import binom

from autotune.profile import Point, Purpose, Setting
from runtime.knobs import KNOBS, Knobs
from runtime.slo import SLO

GIVE_UP = 0.15
"""Goodput the interactive setting may cost, as a share of the best."""

SIGNIFICANCE = 0.05
_SLOWER, _FASTER = 0.75, 1.15

ALIKE = 1.2
"""Two settings whose logarithmic knobs all lie within this ratio are not worth two validations."""


def alike(a: Knobs, b: Knobs) -> bool:
    for spec in KNOBS:
        x, y = getattr(a, spec.name), getattr(b, spec.name)
        if spec.log and not 1 / ALIKE <= x / y <= ALIKE:
            return False
        if not spec.log and abs(x - y) > 1:
            return False
    return True


def latency(point: Point, slo: SLO) -> float:
    """The point's worst p99 in units of its target; lower is better, inf when nothing finished."""
    pairs = (
        (point.ttft_p99_ms, slo.ttft_ms),
        (point.tpot_p99_ms, slo.tpot_ms or slo.itl_ms),
        (point.e2e_p99_ms, slo.e2e_ms),
    )
    ratios = [float("inf") if value is None else value / target for value, target in pairs if target is not None]
    return max(ratios, default=float("inf"))


def choose(
    found: Sequence[Point],
    slo: SLO,
    expected: Mapping[Knobs, float] | None = None,
    *,
    noise: float = 0.0,
    baseline: Knobs | None = None,
) -> dict[Purpose, Setting]:
    """Interactive, balanced and throughput from points at one and the same rate. They may be one setting.

    ``expected``: share of the offered rate that each is believed to serve in SLO; without it, what it measured.
    ``noise``: shares that differ by less are taken as equal where all requests were met, elsewhere if they differ by
    less than one request too; the quicker of equals is balanced. ``baseline``: what measures worse than it in every
    latency, and no better in goodput, is not balanced.
    """
    known = expected or {}
    worth = {p.knobs: _worth(p, known) for p in found}
    yardstick = next((p for p in found if p.knobs == baseline), None)
    fair = [p for p in found if yardstick is None or p is yardstick or not outdone(p, yardstick)]
    best = max(fair, key=lambda p: (worth[p.knobs], -latency(p, slo)))
    balanced = min(equals(fair, best, known, noise), key=lambda p: (latency(p, slo), -worth[p.knobs]))
    enough = [p for p in found if worth[p.knobs] >= (1 - GIVE_UP) * worth[balanced.knobs] - noise]
    interactive = min(enough, key=lambda p: (latency(p, slo), -worth[p.knobs]))
    throughput = max(found, key=lambda p: (p.throughput.mean / max(p.offered_rate, 1e-9), worth[p.knobs]))
    together = ", measured and simulated taken together" if expected else ""
    why = f"highest goodput{together}"
    if balanced is not best:
        why = f"the quickest of those whose goodput{together or ', as measured,'} is not told apart from the highest"
    return {
        "interactive": Setting(
            knobs=interactive.knobs,
            why=f"lowest p99 against its targets among those within {GIVE_UP:.0%} of the best goodput",
            point=interactive,
        ),
        "balanced": Setting(knobs=balanced.knobs, why=why, point=balanced),
        "throughput": Setting(knobs=throughput.knobs, why="most output tokens/s, SLO or not", point=throughput),
    }


def equals(found: Sequence[Point], point: Point, expected: Mapping[Knobs, float], noise: float) -> list[Point]:
    """Those of ``found`` whose goodput is not told apart from that of ``point``, itself among them; as in :func:`choose`."""
    here = _worth(point, expected)
    return [p for p in found if abs(here - _worth(p, expected)) <= _tolerance(p, point, noise)]


def outdone(point: Point, other: Point) -> bool:
    """Whether ``other`` measured no less goodput and was quicker by every latency known of both."""
    pairs = (
        (point.ttft_p50_ms, other.ttft_p50_ms),
        (point.ttft_p99_ms, other.ttft_p99_ms),
        (point.tpot_p50_ms, other.tpot_p50_ms),
        (point.tpot_p99_ms, other.tpot_p99_ms),
        (point.e2e_p99_ms, other.e2e_p99_ms),
    )
    both = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
    return bool(both) and other.attainment >= point.attainment and all(mine > theirs for mine, theirs in both)


def _worth(point: Point, expected: Mapping[Knobs, float]) -> float:
    """The share a setting is believed to serve; without a belief, the one it measured."""
    return min(1.0, max(0.0, expected.get(point.knobs, point.attainment)))


def _tolerance(a: Point, b: Point, noise: float) -> float:
    """By how much expected shares may differ and yet be equal: the noise at the ceiling, else one request at most."""
    if all(p.offered and p.met == p.offered for p in (a, b)):
        return noise
    return min(noise, 1 / max(1, min(a.offered, b.offered)))


def refuted(point: Point, slo: SLO) -> bool:
    """Whether this point shows that the share is not kept.

    By the binomial tail: were the share kept, so many misses would be seen less than once in twenty times. (Of 14
    requests one may miss a 99% promise by bad luck, of 400 hardly 12.)
    """
    if not point.offered:
        return True
    misses = point.offered - point.met
    return misses > 0 and float(binom.sf(misses - 1, point.offered, 1 - slo.attainment)) < SIGNIFICANCE


def tells(point: Point, slo: SLO) -> bool:
    """Whether this point has requests enough to say that the share is kept, and kept it.

    Enough: a share that is just kept brings one miss among them. If none came, three times as many misses as promised
    are ruled out (the rule of three: 95% upper bound 3/n); of 100% promised, 3%.
    """
    return point.attainment >= slo.attainment and point.offered * max(1 - slo.attainment, 0.01) >= 1 - 1e-9


def highest_held(tried: Sequence[Point], slo: SLO) -> tuple[Point | None, float]:
    """The point of the highest rate not missed below every rate that was (None: none), and the rate to try next.

    Rates are those that came in: with few requests they may be far from, and in another order than, those asked for.
    Up while the share is kept, down (or to what was served in SLO, if less) while it is not, then in between.
    """
    missed = [p.offered_rate for p in tried if refuted(p, slo)]
    below = [p for p in tried if not refuted(p, slo) and p.offered_rate < min(missed, default=inf)]
    held = max(below, key=lambda p: p.offered_rate, default=None)
    if held is None:
        lowest = min((p for p in tried if refuted(p, slo)), key=lambda p: p.offered_rate)
        rate = lowest.offered_rate or lowest.rate
        return None, max(rate / 3, min(_SLOWER * rate, 0.95 * rate * lowest.attainment))
    return held, (held.offered_rate * min(missed)) ** 0.5 if missed else held.offered_rate * _FASTER
