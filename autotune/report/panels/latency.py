"""How latencies are distributed: the recommended setting beside the baseline, with the targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autotune.engines.defaults import VLLM_LABEL
from autotune.measure.score import CDF_AT, Latency
from autotune.profile import Point
from autotune.profiling.points import Run
from autotune.report.evidence import Evidence, LatencyBound, targets
from autotune.report.figure import Label, Plot, Trace, View, axis, layout, line, log_axis, rule
from autotune.report.section import Section, absent
from autotune.report.wording import ms, number

KEY, TOPIC = "latency", "Latency of the requests"
_WORDS = {
    "TTFT": "time to first token",
    "TPOT": "time per output token",
    "E2E": "from arrival to the last token",
}


def section(evidence: Evidence) -> Section:
    point, baseline = evidence.recommended.point, evidence.profile.baseline
    ours = evidence.runs_of(point)
    if not ours:
        why = (
            evidence.lacking[0] if evidence.lacking else "No run of the recommended setting is in the file of raw runs."
        )
        return absent(KEY, TOPIC, f"{why} Only it holds the distributions.")
    if not any(_curves(run, name) for run in ours for name in _WORDS):
        return absent(
            KEY, TOPIC, "These runs were recorded by a version that kept no distributions, only medians and p99."
        )
    series: list[tuple[str, str, list[Run]]] = [("recommended", "@accent", ours)]
    if baseline is not None and baseline.knobs != point.knobs:
        series.append((VLLM_LABEL, "@baseline", evidence.runs_of(baseline)))
    classes = evidence.profile.classes
    bounds = {} if classes else {t.name: t for t in targets(evidence.profile.slo)}
    plots = tuple(made for name in _WORDS if (made := _plot(name, bounds.get(name), series)) is not None)
    runs = len(ours)
    what = "simulated requests" if evidence.simulated else "requests"
    lead = (
        f"How many {what} were at least this fast. {'One run' if runs == 1 else f'Median of {runs} runs'} of each setting"
        f"{'; the shaded band is the range of the runs' if runs > 1 else ''}. Requests that never got that far are not in "
        "the curves."
    )
    if classes:
        lead += " Requests of all classes are in one curve, which has no target: each class has its own."
    title = _title(point, baseline, list(bounds.values()))
    return Section(KEY, TOPIC, f"By simulation, {title}" if evidence.simulated and bounds else title, lead, plots)


def _title(point: Point, baseline: Point | None, bounds: Sequence[LatencyBound]) -> str:
    if not bounds:
        return TOPIC
    ratios = {t: (t.of(baseline or point) or 0.0) / t.bound for t in bounds}
    bound = max(bounds, key=lambda t: ratios[t])  # where it is told apart best
    text = f"{bound.name} p99 {ms(bound.of(point))}, target {bound.bound:,g} ms"
    if baseline is not None and baseline.knobs != point.knobs:
        text += f"; {VLLM_LABEL} {ms(bound.of(baseline))}"
    return text


def _curves(run: Run, name: str) -> tuple[float, ...]:
    found: Latency = {"TTFT": run.score.ttft_ms, "TPOT": run.score.tpot_ms, "E2E": run.score.e2e_ms}[name]
    return found.cdf if len(found.cdf) == len(CDF_AT) else ()


def _plot(name: str, target: LatencyBound | None, series: Sequence[tuple[str, str, list[Run]]]) -> Plot | None:
    data: list[Trace] = []
    labels: list[Label] = []
    values: list[float] = []
    for place, (who, colour, runs) in enumerate(series):
        curves = [curve for run in runs if (curve := _curves(run, name))]
        if not curves:
            continue
        quantiles = list(zip(*curves, strict=True))
        middle = [statistics.median(q) for q in quantiles]
        if len(curves) > 1:
            lows, highs = [min(q) for q in quantiles], [max(q) for q in quantiles]
            data.append(
                {
                    **line([*lows, *reversed(highs)], [*CDF_AT, *reversed(CDF_AT)], colour=colour, width=0),
                    "fill": "toself",
                    "fillcolor": colour,
                    "opacity": 0.18,
                }
            )
        hover = [f"{who}: {q:g}% of requests within {number(v)} ms" for q, v in zip(CDF_AT, middle, strict=True)]
        curve_ = line(middle, list(CDF_AT), colour=colour, width=2.5, line={"dash": "solid" if place == 0 else "dash"})
        data.append({**curve_, "hoverinfo": None, "text": hover, "hovertemplate": "%{text}<extra></extra>"})
        at = CDF_AT.index(75) if place == 0 else CDF_AT.index(50)
        labels.append(Label(middle[at], CDF_AT[at], who, colour))
        values += [v for curve in curves for v in curve]
    if not data:
        return None
    shapes = []
    if target is not None:
        shapes.append(rule(x=target.bound))
        values.append(target.bound)
        labels.append(Label(target.bound, 4, f"target {target.bound:,g} ms", "@target"))
    low = max(1e-3, min(v for v in values if v > 0) if any(v > 0 for v in values) else 1e-3)
    x = log_axis(f"{name}: {_WORDS[name]} (ms)", [max(low, v) for v in values], pad=1.15)
    y = axis("% of requests", range=[-2, 103], ticksuffix="%", nticks=6)
    return Plot(
        f"cdf-{name.lower()}",
        "",
        f"Share of requests by {name}; {'; '.join(label.text for label in labels)}.",
        [View("", data, layout(x, y, shapes=shapes), labels)],
        300,
    )
