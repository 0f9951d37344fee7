"""Attainment of each request class, by its own SLO, under the recommended setting and the baseline."""

from __future__ import annotations

from autotune.engines.defaults import VLLM_LABEL
from autotune.report.evidence import Evidence
from autotune.report.section import Section, Table
from autotune.report.tables import class_rows
from autotune.report.wording import number, percent, target_share
from runtime.slo import share_met


def sections(evidence: Evidence) -> tuple[Section, ...]:
    """One, of a profile that has classes."""
    profile, chosen = evidence.profile, evidence.recommended
    if not profile.classes:
        return ()
    shown = [("recommended", chosen.point)]
    if profile.baseline is not None and profile.baseline.knobs != chosen.knobs:
        shown.append((VLLM_LABEL, profile.baseline))
    columns = ["setting", "class", "SLO", "weight", "attainment", "target", "requests", "tokens/s"]
    columns += ["TTFT p99 (ms)", "TPOT p99 (ms)", "E2E p99 (ms)"]
    found = class_rows(shown, profile.slo, profile.classes)
    rows = [
        (
            row.label,
            row.name,
            str(row.slo),
            f"{row.seen.weight:g}",
            percent(share_met(row.seen), target=row.slo.attainment) if row.seen.offered else "–",
            target_share(row.slo.attainment),
            f"{row.seen.offered:,}",
            number(row.seen.throughput, 4),
            *(number(ms) for ms in (row.seen.ttft_p99_ms, row.seen.tpot_p99_ms, row.seen.e2e_p99_ms)),
        )
        for row in found
    ]
    short = [
        f"{row.name} falls short of its SLO at this rate ({percent(share_met(row.seen), target=row.slo.attainment)})"
        for row in found
        if row.point is chosen.point and row.missed
    ]
    absent = [
        f"No request of class {row.name} came" for row in found if row.point is chosen.point and not row.seen.offered
    ]
    title = "; ".join([*short, *absent]) or "Every class meets its SLO at this rate"
    if evidence.simulated:
        title = f"By simulation: {title}"
    lead = "Each class is judged by its own SLO, and counts in goodput by its weight."
    table = Table(columns, rows, frozenset(range(3, len(columns))))
    return (Section("classes", "Request classes", title, lead, tables=(table,)),)
