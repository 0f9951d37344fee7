"""Figures and settings in words, the same everywhere in a report."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autotune.engines.defaults import VLLM_LABEL
from autotune.profile import PURPOSES, Point
from autotune.profiling.objective import Objective, Performance
from autotune.report.evidence import Evidence
from autotune.report.tables import SHORTER
from runtime.knobs import Knobs
from runtime.slo import SLO, first_target, in_percent

STAGES = {
    "simulation": "simulated",
    "search": "search",
    "validation": "validated",
    "capacity": "other rate",
}

_DEFAULTS = " defaults"  # behind the name of the engine whose they are


def number(value: float | None, digits: int = 3) -> str:
    """``digits`` significant ones, but no whole number cut: 0.123, 11.2, 1,904. – for None and what is no number."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    after = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{round(value, after):,.{after}f}"
    return text.rstrip("0").rstrip(".") if abs(value) < 1 and "." in text else text


def ms(value: float | None) -> str:
    return "–" if value is None else f"{number(value)} ms"


def percent(share: float, after: int | None = None, *, target: float | None = None) -> str:
    """99.4%, 71%: a digit behind the point where it can matter, and more where :func:`runtime.slo.in_percent` says so."""
    if after is not None:
        return f"{share * 100:.{after}f}%"
    return in_percent(share, 1 if 0.9 < share < 1 else 0, target=target)


def required(objective: Objective) -> float | None:
    """The attainment that all requests are to have; None where each class has its own."""
    return None if objective.classes else objective.slo.attainment


def target_share(share: float) -> str:
    """The attainment that an SLO requires, as it is spelled: 99%, 99.9%."""
    return f"{share * 100:g}%"


def error(share: float) -> str:
    """A relative error: 2.1%, 14%, a factor of 22.9 (what is more than 100% off is too high)."""
    if share > 1:
        return f"a factor of {times(1 + share)}"
    return f"{share * 100:.1f}%" if share < 0.0995 else f"{share * 100:.0f}%"


def times(ratio: float) -> str:
    """A large ratio: 2.5, 22.9, 2,188."""
    return f"{ratio:.3g}" if ratio < 999.5 else f"{ratio:,.0f}"


def compared(ratio: float, what: str, other: str) -> str:
    """``31% more requests than A``, ``as many requests as A``, ``22.9 times as many requests as A``; ``what`` may be empty."""
    what = f" {what}" if what else ""
    if ratio >= 2:
        return f"{times(ratio)} times as many{what} as {other}"
    if abs(ratio - 1) < 0.005:
        return f"as many{what} as {other}"
    return f"{abs(ratio - 1) * 100:.0f}% {'more' if ratio > 1 else 'fewer'}{what} than {other}"


UNRELIABLE = 0.1
"""A typical error above which simulated or modelled figures are nothing to rely on."""


def off(what: str, middle: float, worst: float | None) -> str:
    """A title that says how far ``what`` (plural) are off, and warns where that is far: errors as shares."""
    far = "" if worst is None else f", at worst by {error(worst)}"
    said = f"typically off by {error(middle)} (median){far}"
    return f"{what} are {said}" if middle <= UNRELIABLE else f"{what} are not to be relied on: {said}"


def plus_minus(point: Point) -> str:
    """Goodput with half its 95% interval, if it has one."""
    mean, half = point.goodput.mean, point.goodput.half
    return number(mean) if half is None else f"{number(mean)} ± {number(half, 2)}"


def reached(objective: Objective, found: Performance) -> str:
    """``12.3 req/s within the SLO``, or ``mean E2E 812 ms``."""
    figure = objective.figure(found)
    return f"{objective.measure.name} unknown" if figure is None else objective.measure.reads.format(number(figure))


def mean_title(objective: Objective) -> tuple[str, ...]:
    """The column of what settings are compared by, where that is not the goodput, which every table has."""
    return (f"{objective.measure.name} ({objective.measure.unit})",) if objective.measure.lowest else ()


def mean_cell(objective: Objective, found: Performance) -> tuple[str, ...]:
    """The cell of :func:`mean_title`'s column."""
    return (number(objective.figure(found)),) if objective.measure.lowest else ()


def setting(knobs: Knobs) -> str:
    """The knobs with their values."""
    return ", ".join(f"{spec.name} {getattr(knobs, spec.name):,g}" for spec in knobs.shown)


def short_setting(knobs: Knobs) -> str:
    """For a hover text: ``batch 32 · wait 0 ms · budget 256 · chunk 256``."""
    parts = (f"{SHORTER[s.name]} {getattr(knobs, s.name):,g}{' ms' if s.unit == 'ms' else ''}" for s in knobs.shown)
    return " · ".join(parts)


def counted(number: int, what: str) -> str:
    """1 core, 2 cores."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def cut(text: str, most: int) -> str:
    """``text``, of which no more than ``most`` letters are shown."""
    return text if len(text) <= most else text[: most - 1] + "…"


def sentence(text: str) -> str:
    """A capital first and a full stop last."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def listed(words: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = list(words)
    return f"{', '.join(first)} and {last}" if first else last


def lateness(late_ms: float, *slos: SLO) -> str | None:
    """That requests were sent so late (``late_ms``: the p99 of the worst run) that it matters against the tightest target that a
    wait counts towards; None where it does not."""
    target_ms = 1e3 * min(map(first_target, slos))
    if late_ms <= max(target_ms / 10, 5.0):
        return None
    return (
        f"the load generator was late: in one run, 1 in 100 was sent more than {late_ms:.0f} ms late, which the latencies "
        "include; is the machine busy?"
    )


def names(evidence: Evidence) -> dict[Knobs, str]:
    """What each compared setting is called: its purposes, whose defaults it is, or the trial it came from."""
    purposes: dict[Knobs, list[str]] = {}
    for purpose in PURPOSES:
        if purpose in evidence.profile.settings:
            purposes.setdefault(evidence.profile.settings[purpose].knobs, []).append(purpose)
    found = {knobs: listed(words) for knobs, words in purposes.items()}
    for knobs, owner in defaults(evidence).items():
        found[knobs] = f"{found[knobs]} ({owner})" if knobs in found else owner
    tried = {t.knobs: t.number for stage in ("search", "simulation") for t in evidence.trials(stage)}
    for p in evidence.compared:
        found.setdefault(p.knobs, f"trial {tried[p.knobs]}" if tried.get(p.knobs, -1) >= 0 else p.label)
    return found


def defaults(evidence: Evidence) -> dict[Knobs, str]:
    """Settings that are another engine's defaults, by the labels they were tried under."""
    profile = evidence.profile
    labelled = [(r.label, r.knobs) for r in evidence.runs]
    labelled += [(p.label, p.knobs) for p in (*profile.points, *profile.simulated)]
    found: dict[Knobs, list[str]] = {}
    for label, knobs in labelled:
        owner, theirs, on = label.partition(_DEFAULTS)  # as in "vLLM defaults, small GPU"
        if not theirs:
            continue
        owner += f" ({on.lstrip(', ')})" if on else ""
        if owner not in found.setdefault(knobs, []):
            found[knobs].append(owner)
    if profile.baseline is not None:
        found.setdefault(profile.baseline.knobs, [VLLM_LABEL.removesuffix(_DEFAULTS)])
    return {knobs: f"{listed(owners)}{_DEFAULTS}" for knobs, owners in found.items()}
