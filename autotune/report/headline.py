"""The top of the page: what to set, how sure it is, and what it means in two sentences."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune.cost.price import money
from autotune.engines.defaults import VLLM_LABEL
from autotune.profile import PURPOSES, RECOMMENDED, Point
from autotune.profile.fingerprint import describe
from autotune.profiling.objective import GOODPUT, Objective, Tails
from autotune.report.evidence import Evidence, LatencyBound, of_run, targets
from autotune.report.profile_table import cheapest, warnings
from autotune.report.section import Table
from autotune.report.standing import limit, standing
from autotune.report.wording import (
    counted,
    mean_cell,
    mean_title,
    ms,
    number,
    percent,
    plus_minus,
    required,
    sentence,
    target_share,
)
from autotune.workload.options import fraction
from runtime.knobs import KNOBS
from runtime.slo import SLO, share_met

_BY_SIMULATION = "By simulation alone (nothing was measured)"


@dataclass(frozen=True)
class Figure:
    """A number that counts: ``value`` with ``unit``, what it is, and a word on how it stands (``tone``: good, bad or empty)."""

    name: str
    value: str
    unit: str
    beside: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Headline:
    """``status``: in a few words, with its ``tone``; ``meaning``: two sentences; ``sure``: how sure the choice is; ``cost``:
    given a price, the cheapest setting that meets the SLO; ``gave``: the heading of ``figures``; ``definitions``: of the figures
    of the page; ``warnings``: what about the run makes its figures unreliable."""

    title: str
    status: str
    tone: str
    meaning: tuple[str, ...]
    sure: str
    cost: str | None
    knobs: tuple[Figure, ...]
    gave: str
    figures: tuple[Figure, ...]
    facts: tuple[tuple[str, str], ...]
    purposes: Table
    notes: tuple[str, ...]
    definitions: str
    warnings: tuple[str, ...] = ()


def headline(evidence: Evidence) -> Headline:
    profile, chosen = evidence.profile, evidence.recommended
    point, stands = chosen.point, standing(evidence)
    status, tone = _status(evidence)
    purpose = "recommended" if RECOMMENDED in profile.settings else next(iter(profile.settings))
    objective, offered = Objective.of(profile), number(point.offered_rate)
    simulated = evidence.simulated
    does = (
        f"{'would have' if simulated else 'has'} a mean E2E of {ms(point.e2e_mean_ms)} at {offered} req/s offered"
        if objective.measure.lowest
        else f"{'would answer' if simulated else 'answers'} {plus_minus(point)} requests a second within the SLO"
        f"{objective.weighed or f', of {offered} offered'}"
    )
    with_it = f"{_BY_SIMULATION}: with" if simulated else "With"
    meaning = (
        f"{with_it} the {purpose} setting, {profile.model.name} on {_machine(evidence)} {does}: {stands.sentence}.",
        sentence(profile.verdict),
    )
    return Headline(
        title=f"{_BY_SIMULATION}: {stands.short}" if simulated else stands.short,
        status=status,
        tone=tone,
        meaning=meaning,
        sure=_sure(evidence),
        cost=None if (said := cheapest(profile)) is None else sentence(said),
        knobs=tuple(Figure(s.name, f"{getattr(chosen.knobs, s.name):,g}", s.unit, s.doc) for s in KNOBS),
        gave="What they give by simulation" if simulated else "What they gave",
        figures=_figures(evidence),
        facts=_facts(evidence),
        purposes=_purposes(evidence),
        notes=evidence.lacking,
        definitions=" ".join(dict.fromkeys((objective.measure.definition, GOODPUT.definition))),
        warnings=warnings(profile),
    )


def _machine(evidence: Evidence) -> str:
    machine = evidence.profile.machine
    return machine.gpu.name if machine.gpu else f"{counted(machine.cores, 'core')} of {machine.cpu}"


def _status(evidence: Evidence) -> tuple[str, str]:
    profile = evidence.profile
    stopped = " (run stopped early)" if profile.status == "stopped" else ""
    if evidence.simulated:
        return f"simulated, nothing was measured{stopped}", "unsure"
    if profile.objective == "mean-e2e":
        return f"the lowest mean E2E at this rate{stopped}", "good"
    if not profile.slo_met:
        return f"SLO not met{stopped}", "bad"
    if profile.capacity is None or profile.status == "stopped":
        return f"SLO not missed so far{stopped}", "unsure"
    met, missed = limit(evidence)
    if met is not None and missed:
        return f"SLO met at {number(met.offered_rate)} req/s, missed at {number(missed[0].offered_rate)}", "unsure"
    if met is not None and not Objective.of(profile).confirmed(met):
        return f"SLO perhaps met up to {number(met.offered_rate)} req/s: too few requests to tell", "unsure"
    return ("SLO met" if met is None else f"SLO met up to {number(met.offered_rate)} req/s"), "good"


def _sure(evidence: Evidence) -> str:
    found = evidence.profile.confidence
    if found is not None:
        return sentence(found.sentence)
    if evidence.simulated:
        return "Nothing was measured: the choice rests on simulation alone."
    if evidence.recommended.point.stage == "search":
        return "Not validated: the choice rests on one short measurement of each setting."
    return "How sure the choice is was not worked out for this profile."


def _figures(evidence: Evidence) -> tuple[Figure, ...]:
    profile, point, stands = evidence.profile, evidence.recommended.point, standing(evidence)
    objective = Objective.of(profile)
    figure, interval = objective.figure(point), objective.interval(point)
    compared_by = Figure(
        objective.measure.name,
        number(figure),
        objective.measure.unit,
        stands.beside or ("" if interval is None else f"{number(interval.low)} to {number(interval.high)}"),
        "good" if stands.clear else "",
    )
    share = Figure(
        "attainment",
        percent(share_met(point), target=required(Objective.of(profile))),
        "of requests",
        f"at {number(point.offered_rate)} req/s offered; target {Objective.of(profile).shares}",
        "good" if Objective.of(profile).attained(point) else "",
    )
    found = [compared_by, share]
    for name, slo in _slos(evidence).items():
        of = f" of {name}" if name else ""
        for target in targets(slo):
            value = target.of(_tails(point, name))
            words, tone = _against(evidence, target, name)
            found.append(
                Figure(
                    f"{target.name} p99{of}",
                    "–" if value is None else number(value),
                    "ms",
                    f"target {target.bound:,g} ms, {words}",
                    tone,
                )
            )
        if slo.itl_ms is not None:
            beside = f"target {slo.itl_ms:,g} ms; profiles do not keep the ITL"
            found.append(Figure(f"ITL p99{of}", "–", "ms", beside))
    found.append(Figure("throughput", number(point.throughput.mean, 4), "tokens/s out", *_price_words(evidence, point)))
    if evidence.simulated:
        found = [replace(one, tone="unsure") if one.tone else one for one in found]
    return tuple(found)


def _slos(evidence: Evidence) -> dict[str, SLO]:
    """What p99s are held against: the SLO of each class that was offered, by its name; without classes the only one, by ""."""
    profile, seen = evidence.profile, evidence.recommended.point.classes
    if not profile.classes:
        return {"": profile.slo}
    own = {one.name: one.slo for one in profile.classes}
    return {name: own.get(name, profile.slo) for name, one in seen.items() if one.offered}


def _tails(point: Point, request_class: str) -> Tails:
    return point.classes[request_class] if request_class else point


def _against(evidence: Evidence, target: LatencyBound, request_class: str) -> tuple[str, str]:
    """Whether the p99 meets its target, and how many of the runs say otherwise than their median."""
    point = evidence.recommended.point
    seen = _tails(point, request_class)
    value = target.of(seen)
    if value is None:
        return ("nothing finished", "bad") if seen.e2e_p99_ms is None else ("no request has one", "")
    tried = (of_run(run, request_class) for run in evidence.runs_of(point))
    runs = [target.of(one) for one in tried if one is not None]
    missed = sum(v is None or v > target.bound for v in runs)
    if missed and missed < len(runs):
        return f"missed in {missed} of {len(runs)} runs", "unsure"
    return ("met", "good") if value <= target.bound else ("missed", "bad")


def _price_words(evidence: Evidence, point: Point) -> tuple[str, ...]:
    price = evidence.profile.price_per_hour
    cost = Objective.of(evidence.profile).cost(point.throughput.mean)
    return () if cost is None else (f"{money(cost)} per million, at {money(price or 0)} an hour",)


def _facts(evidence: Evidence) -> tuple[tuple[str, str], ...]:
    profile = evidence.profile
    model, load = profile.model, profile.workload
    scale = "" if load.length_scale == 1 else f", lengths × {fraction(load.length_scale)}"
    bounds = ", ".join(
        f"{name.upper()} {value:,g} ms" for name, value in profile.slo.targets_ms.items() if value is not None
    )
    return (
        ("Machine", describe(profile.machine)),
        ("Model", f"{model.name}, {model.size}, {model.dtypes}{', random weights' if model.random_weights else ''}"),
        ("Workload", f"{load.spec}{scale}: {load.description}"),
        ("SLO", f"{bounds} for {target_share(profile.slo.attainment)} of requests"),
        *((f"Class {one.name}", f"{one.slo}, weight {one.weight:g}") for one in profile.classes),
    )


def _purposes(evidence: Evidence) -> Table:
    """The settings for each purpose beside the baseline, at the same load."""
    profile = evidence.profile
    priced = profile.price_per_hour is not None
    columns = [
        "for",
        *(s.name for s in KNOBS),
        *mean_title(Objective.of(profile)),
        "attainment",
        "goodput (req/s)",
        "tokens/s",
        "TTFT p99 (ms)",
        "TPOT p99 (ms)",
    ]
    columns += ["price/M tokens"] if priced else []
    listed = [(p, profile.settings[p].point) for p in PURPOSES if p in profile.settings]
    rows = [(str(purpose), point) for purpose, point in listed]
    if profile.baseline is not None:
        rows.append((VLLM_LABEL, profile.baseline))
    cells = []
    for name, p in rows:
        cells.append(
            (
                name,
                *(f"{getattr(p.knobs, s.name):,g}" for s in KNOBS),
                *mean_cell(Objective.of(profile), p),
                percent(share_met(p), target=required(Objective.of(profile))),
                plus_minus(p),
                number(p.throughput.mean, 4),
                *(number(value) for value in (p.ttft_p99_ms, p.tpot_p99_ms)),
                *([money(Objective.of(profile).cost(p.throughput.mean))] if priced else []),
            )
        )
    marked = frozenset(n for n, (name, _) in enumerate(rows) if name == RECOMMENDED)
    return Table(columns, cells, frozenset(range(1, len(columns))), marked)
