"""How much the recommended setting carries: attainment over the offered rate."""

from __future__ import annotations

from autotune.profile import Profile
from autotune.profiling.objective import Objective
from autotune.report.evidence import Evidence
from autotune.report.figure import Label, Plot, View, axis, dots, error_bars, layout, line, rule
from autotune.report.section import Section, absent
from autotune.report.standing import limit
from autotune.report.wording import listed, ms, number, percent, required
from runtime.slo import share_met

KEY, TOPIC = "capacity", "How much it carries"


def section(evidence: Evidence) -> Section:
    found, objective = evidence.profile.capacity, Objective.of(evidence.profile)
    target = required(objective)
    if found is None:
        return absent(KEY, TOPIC, "The run was stopped before it looked for the highest rate that meets the SLO.")
    if len(found.tried) < 2:
        return absent(KEY, TOPIC, f"Only one rate was tried{_why_one(evidence.profile)}, so there is no curve to show.")
    tried = sorted(found.tried, key=lambda p: p.offered_rate)
    xs, ys = [p.offered_rate for p in tried], [100 * share_met(p) for p in tried]
    hover = [
        f"<b>{number(p.offered_rate)} req/s offered</b>"
        f"<br>{percent(share_met(p), target=target)} of {p.offered:,} requests met the SLO"
        f"<br>95% interval {percent(p.attainment_low, 0)} to {percent(p.attainment_high, 0)}"
        f"<br>p99: TTFT {ms(p.ttft_p99_ms)}, TPOT {ms(p.tpot_p99_ms)}"
        for p in tried
    ]
    points = dots(xs, ys, hover, colour="@accent", size=10)
    points["error_y"] = error_bars(
        ys, [100 * p.attainment_low for p in tried], [100 * p.attainment_high for p in tried], "@accent"
    )
    low = max(0.0, min(100 * p.attainment_low for p in tried) - 5)
    x = axis("offered rate (req/s)", range=[0.9 * min(xs), 1.06 * max(xs)], nticks=8)
    y = axis("attainment", range=[low, 103], ticksuffix="%", nticks=6)
    at = [] if target is None else [100 * target]
    labels = [Label(0.93 * min(xs), share, f"target: {objective.shares}", "@target") for share in at]
    shapes = [rule(y=share) for share in at]
    view = View("", [line(xs, ys, colour="@accent"), points], layout(x, y, shapes=shapes), labels)
    met, missed = limit(evidence)
    if met is None:
        title = "The SLO was not met at any rate tried"
    elif missed:
        below = listed(number(p.offered_rate) for p in missed)
        title = f"The SLO was met at {number(met.offered_rate)} req/s, yet missed at {below}: its limit is not certain"
    elif not objective.confirmed(met):
        title = f"The SLO is perhaps met up to about {number(met.offered_rate)} req/s: too few requests to tell"
    else:
        title = f"The SLO is met up to about {number(met.offered_rate)} req/s"
    lead = (
        "The balanced setting at other rates. Bars are 95% intervals: with few requests, a share below the SLO may be bad "
        "luck, and one above it good luck."
    )
    if objective.classes:
        lead += f" Requests of all classes together, each by its own SLO, which must be met by {objective.shares}."
    return Section(KEY, TOPIC, title, lead, (Plot("capacity", "", f"{TOPIC}. {title}.", [view], 300),))


def _why_one(profile: Profile) -> str:
    """Why no rate but that of the comparison was tried, as far as the profile tells."""
    if profile.workload.rate_from == "user":
        return ", as requested"
    return " before the run was stopped" if profile.status == "stopped" else ""
