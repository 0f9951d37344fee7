"""Attainment of each request class, by its own SLO, under the recommended setting and the baseline."""

from __future__ import annotations

from autotune.engines.defaults import VLLM_LABEL
from autotune.report.evidence import Evidence
from autotune.report.section import Section, Table
from autotune.report.wording import number, percent, target_share


def sections(evidence: Evidence) -> tuple[Section, ...]:
    """One, of a profile that has classes."""
    profile, chosen = evidence.profile, evidence.recommended
    if not profile.classes:
        return ()
    shown = [("recommended", chosen.point)]
    if profile.baseline is not None and profile.baseline.knobs != chosen.knobs:
        shown.append((VLLM_LABEL, profile.baseline))
    targets = {one.name: one.slo for one in profile.classes}
    columns = ["setting", "class", "SLO", "weight", "attainment", "target", "requests", "tokens/s"]
    columns += ["TTFT p99 (ms)", "TPOT p99 (ms)", "E2E p99 (ms)"]
    rows, short = [], []
    for label, point in shown:
        for name, seen in point.classes.items():
            slo = targets.get(name, profile.slo)
            latencies = (seen.ttft_p99_ms, seen.tpot_p99_ms, seen.e2e_p99_ms)
            rows.append(
                (
                    label,
                    name,
                    str(slo),
                    f"{seen.weight:g}",
                    percent(seen.attainment),
                    target_share(slo.attainment),
                    f"{seen.offered:,}",
                    number(seen.throughput, 4),
                    *("–" if ms is None else number(ms) for ms in latencies),
                )
            )
            if point is chosen.point and seen.offered and seen.attainment < slo.attainment:
                short.append(f"{name} falls short of its SLO at this rate ({percent(seen.attainment)})")
    title = "; ".join(short) or "Every class meets its SLO at this rate"
    lead = "Each class is judged by its own SLO, and counts in goodput by its weight."
    table = Table(columns, rows, frozenset(range(3, len(columns))))
    return (Section("classes", "Request classes", title, lead, tables=(table,)),)
