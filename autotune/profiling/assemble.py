"""From findings to the profile, of an LLM engine with its sidecar of raw runs, or of a callable."""

from __future__ import annotations

import datetime as dt
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from autotune.profile import (
    SCHEMA_VERSION,
    Confidence,
    EngineFacts,
    Gain,
    LoadFacts,
    Machine,
    ModelFacts,
    Part,
    Point,
    SimulationFacts,
    Software,
)
from autotune.profile.callable import CallablePoint, Group, Inputs, ServiceTime, items_per_s
from autotune.profile.versions import CALLABLE_VERSION
from autotune.profiling.batcher_space import ONE_AT_A_TIME
from autotune.profiling.callable import SIMULATED_WARM_UP, CallableFindings, CallableQuestion, CallableSetup, ranked
from autotune.profiling.findings import Findings, Question
from autotune.profiling.objective import Objective
from autotune.profiling.points import callable_points, gain, pareto, points, share_interval
from autotune.profiling.setup import Comparison, Setup
from autotune.profiling.subject import Subject
from autotune.profiling.warnings import unseen, warnings
from runtime.knobs import Knobs
from runtime.slo import in_percent, share_met

_MOST_PARETO = 24
_MOST_SIMULATED = 10  # settings of a callable, when a run was stopped while simulating
_LONGER = "a longer --budget with --fresh tells more"

PartT = TypeVar("PartT", bound=Part)


def assemble(
    kind: type[PartT],
    findings: Findings[Any, Any, Any, Any],
    parts: Mapping[str, Any],
    *,
    name: str,
    command: str,
    machine: Machine,
    software: Software,
) -> PartT:
    """A profile of ``kind``: what every kind says of a run, and the ``parts`` that only this one has (:func:`of_engine`,
    :func:`of_callable`)."""
    assert findings.setup is not None
    return _with_setup(
        kind,
        findings.setup,
        **parts,
        name=name,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=command,
        status="stopped" if findings.stopped else "complete",
        machine=machine,
        software=software,
    )


def _with_setup(kind: type[PartT], setup: Comparison, /, **more: Any) -> PartT:
    """A part of ``kind``: what ``setup`` has under the same names, and ``more``."""
    names = kind.model_fields.keys() & type(setup).model_fields.keys()
    return kind(**{name: getattr(setup, name) for name in names} | more)


def _load(findings: Findings[Any, Any, Any, Any], question: Question[Any], spec: str, **more: Any) -> LoadFacts:
    assert findings.setup is not None
    return _with_setup(
        LoadFacts,
        findings.setup,
        spec=spec,
        description=question.workload.description,
        search_seed=question.seed,
        validation_seeds=tuple(sorted({run.score.seed for run in findings.runs if run.stage == "validation"})),
        **more,
    )


def of_engine(
    findings: Findings,
    question: Question,
    *,
    spec: str,
    engine: EngineFacts,
    model: ModelFacts,
    baseline: Knobs,
    points_file: Path,
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """What only the profile of an LLM engine has. ``findings`` must hold at least one run."""
    setup, settings = findings.setup, findings.settings()
    if setup is None or not settings:
        raise ValueError("nothing was measured, so there is nothing to recommend")
    balanced = settings["balanced"]
    met, verdict = judge(findings, balanced.point)
    return {
        "schema_version": SCHEMA_VERSION,
        "engine": engine,
        "model": model,
        "workload": _load(findings, question, spec, offered_rate=balanced.point.offered_rate),
        "knobs": balanced.knobs,
        "settings": settings,
        "baseline": next((p for p in findings.comparable() if p.knobs == baseline), None),
        "capacity": findings.capacity,
        "verdict": verdict,
        "slo_met": met,
        "seed": question.seed,
        "points": tuple(points(findings.runs)),
        "points_file": points_file.name,
        "cost_model": None if findings.cost is None else findings.cost.facts,
        "simulation": simulation_facts(findings),
        "simulated": _simulated_points(findings, [setting.point for setting in settings.values()]),
        "gain": gain_of(findings, balanced.knobs, baseline),
        "confidence": sure_of(findings),
        "price_per_hour": price_per_hour,
        "warnings": warnings(findings),
    }


def of_callable(found: CallableFindings, question: CallableQuestion, subject: Subject) -> dict[str, Any]:
    """What only the profile of a callable has. ``found`` must hold at least one setting."""
    setup, cost = found.setup, found.cost
    if setup is None or cost is None or not (best_first := ranked(found)):
        raise ValueError("nothing was tried, so there is nothing to recommend")
    best = best_first[0]
    simulated = callable_points(found.simulated)
    baselines = [p for p in simulated if p.setting in (found.space.as_it_comes, ONE_AT_A_TIME)]
    shown = best_first[:_MOST_SIMULATED]
    fixed = [p for p in simulated if p.strategy == "dynamic" and p.knobs.max_batch_size > 1]
    best_fixed = Objective.under(setup).ranked(fixed)[:1]  # for batchers that have no other strategy
    shown += [p for p in (*best_fixed, *baselines) if p.setting not in [r.setting for r in shown]]
    slo_met = not Objective.under(setup).refuted(best)
    is_measured = best.source == "measured"
    scores = [run.score for run in (found.runs if is_measured else found.simulated) if run.setting == best.setting]
    window = setup.window_s if is_measured else scores[0].window_s
    return {
        "kind": "callable",
        "schema_version": CALLABLE_VERSION,
        "function": subject.name,
        "inputs": Inputs(
            file=subject.inputs_name, items=len(subject.inputs), cost=subject.cost_name, mean_cost=subject.mean_cost
        ),
        "strategy": best.strategy,
        "knobs": best.knobs,
        "replicas": cost.workers,
        "service": ServiceTime(
            fixed_ms=cost.price.fixed * 1e3,
            per_item_ms=cost.price.per_item * 1e3,
            per_cost_ms=cost.price.per_cost * 1e3,
            error=cost.error,
            beside=cost.beside,
            groups=tuple(Group(items=t.items, cost=t.cost, ms=t.seconds * 1e3) for t in cost.timed),
            largest=cost.largest,
            ended=cost.ended,
            capacity=setup.capacity,
            capacity_size=setup.capacity_size,
        ),
        "workload": _load(
            found,
            question,
            question.workload.name,
            length_scale=1.0,
            cap_prompt=None,
            cap_output=None,
            mean_prompt=subject.mean_cost,
            mean_output=1.0,
            offered_rate=sum(score.offered for score in scores) / sum(score.window_s for score in scores),
            window_s=window,
            warmup_s=setup.warmup_s if is_measured else SIMULATED_WARM_UP * window,
        ),
        "points": tuple(shown),
        "simulated": len(found.simulated),
        "verdict": _callable_verdict(setup, best, slo_met),
        "slo_met": slo_met,
        "confidence": found.confidence,
    }


def gain_of(findings: Findings, recommended: Knobs, baseline: Knobs) -> Gain | None:
    """Of what was measured at the rate of the comparison; None where either was not, or both are one setting."""
    if findings.setup is not None and findings.setup.objective != "goodput":
        return None
    validated = [] if findings.setup is None else findings.validated_at(findings.setup.rate)
    mine = [run for run in validated if run.knobs == recommended]
    base = [run for run in validated if run.knobs == baseline]
    return gain(mine, base, findings.noise) if mine and base and recommended != baseline else None


def sure_of(findings: Findings) -> Confidence | None:
    """The confidence, with what the calibration did not see: the choice rests on simulations of it."""
    found, missing = findings.confidence, unseen(findings.steps) if findings.steps else ()
    if found is None or not missing:
        return found
    return found.model_copy(
        update={
            "sentence": f"{found.sentence} The recommendation is less certain than that, because the calibration saw "
            f"{', '.join(missing)}."
        }
    )


def simulation_facts(findings: Findings) -> SimulationFacts | None:
    if not findings.simulated:
        return None
    measured = {(p.knobs, p.rate): p.goodput.mean for p in points(findings.runs) if p.stage == "validation"}
    paired = paired_points(findings)
    compared = [p for p in paired if findings.setup is not None and p.rate == findings.setup.rate] or paired
    errors = [
        abs(p.goodput.mean - measured[p.knobs, p.rate]) / measured[p.knobs, p.rate]
        for p in compared
        if measured.get((p.knobs, p.rate))
    ]
    return SimulationFacts(
        trials=len(findings.simulated) + len(findings.failures),
        cpu_seconds=round(findings.cpu_s, 2),
        pareto=len(pareto(points(findings.simulated))),
        goodput_error=round(statistics.median(errors), 4) if errors else None,
        speed=1.0 if findings.setup is None else round(findings.setup.speed, 4),
    )


def _simulated_points(findings: Findings, chosen: Sequence[Point]) -> tuple[Point, ...]:
    """Those that were paired, the front, and those of ``chosen`` that were measured nowhere and are not among these."""
    shown = [*paired_points(findings), *pareto_points(findings)]
    known = {point.key for point in (*shown, *points(findings.runs))}
    further = {point.key: point for point in chosen if point.key not in known}
    return (*shown, *further.values())


def paired_points(findings: Findings) -> list[Point]:
    """The simulation of every validated setting, under the very requests it was measured with."""
    paired = {(run.knobs, run.score.rate, run.score.seed): run for run in findings.paired}
    validated = [run for run in findings.runs if run.stage == "validation"]
    keys = dict.fromkeys((run.knobs, run.score.rate, run.score.seed) for run in validated)
    return points(paired[key] for key in keys if key in paired)


def pareto_points(findings: Findings) -> list[Point]:
    """What no other simulated setting beats, at the rate of the comparison and under fresh seeds; the best first."""
    assert findings.setup is not None
    front = pareto(findings.candidates or points(findings.simulated))
    return sorted(front, key=Objective.under(findings.setup).value, reverse=True)[:_MOST_PARETO]


def sidecar(findings: Findings) -> str:
    """One JSON line for each kind of step, each simulated trial and each run; what failed, with its cause, at the end."""
    lines = [json.dumps({"kind": "step", **step.model_dump(mode="json")}) for step in findings.steps]
    lines += [run.model_dump_json() for run in (*findings.simulated, *findings.runs)]
    lines += [json.dumps({"stage": "simulation", "trial": n, "failed": cause}) for n, cause in findings.failures]
    lines += [
        json.dumps({"stage": stage, "trial": -1, "setting": knobs.as_dict(), "failed": cause})
        for stage, knobs, cause in findings.unmeasured
    ]
    return "".join(line + "\n" for line in lines)


def judge(findings: Findings, balanced: Point) -> tuple[bool, str]:
    """Whether the SLO's attainment was missed at no more than some of the rates tried, and the sentence that says it.

    Rates are those that came in, not those requested. "Serves" is said only where :func:`Objective.confirmed`.
    """
    setup: Setup | None = findings.setup
    assert setup is not None
    objective, simulated = Objective.under(setup), balanced.stage == "simulation"
    if objective.name == "mean-e2e":
        took = "unknown" if balanced.e2e_mean_ms is None else f"{balanced.e2e_mean_ms:.4g} ms"
        has = "would by simulation have" if simulated else "has"
        return True, f"the recommended setting {has} a mean E2E of {took} at {_rate(balanced)}; no SLO was aimed at"
    share = objective.shares
    if findings.capacity is None:
        return not objective.refuted(balanced), (
            f"stopped before the highest rate at which {share} meet the SLO was looked for; at {_rate(balanced)} offered, "
            f"the balanced setting {'would by simulation serve' if simulated else 'served'} {_share(objective, balanced)} "
            "within it"
        )
    tried = findings.capacity.tried
    missed = sorted((p for p in tried if objective.refuted(p)), key=lambda p: p.offered_rate)
    if findings.capacity.rate is None:
        best = max(missed, key=lambda p: p.attainment, default=balanced)
        above = max((p for p in tried if p not in missed), key=lambda p: p.offered_rate, default=None)
        luck = "" if above is None else f" ({_share(objective, above)} at {_rate(above)} must then have been luck)"
        return False, (
            f"the SLO was not met at any rate tried: at best {_share(objective, best)} at {_rate(best)}{luck}, "
            f"where the target is {share}; relax it (--slo), or send shorter requests"
        )
    at = next(p for p in tried if p.rate == findings.capacity.rate)
    beyond = next((p for p in missed if p.offered_rate > at.offered_rate), None)
    fell = "" if beyond is None else f"; at {_rate(beyond)} only {_few(objective, beyond)}"
    measured = _share(objective, at)
    if not objective.attained(at):
        return True, (
            f"balanced may serve {share} within the SLO up to about {_rate(at)}{fell}: {measured} is too short a measurement "
            f"to tell; {_LONGER}"
        )
    if not objective.confirmed(at):
        misses = at.offered - at.met
        seen = f"{misses} {'miss' if misses == 1 else 'misses'}" if misses else "no miss"
        return True, (
            f"balanced: {seen} in {at.offered} requests at {_rate(at)}{fell}: too few to tell whether {share} "
            f"meet the SLO; {_LONGER}"
        )
    if at.rate >= setup.most_rate:
        return True, (
            f"balanced serves {share} within the SLO at {_rate(at)} (measured {measured}), "
            "the most that can be offered here: the machine may do more"
        )
    if beyond is None:
        return True, (
            f"balanced serves {share} within the SLO up to at least {_rate(at)} (measured {measured}); no higher "
            "rate was found to miss it"
        )
    return True, f"balanced serves {share} within the SLO up to about {_rate(at)} (measured {measured}{fell})"


def _rate(p: Point) -> str:
    return f"{p.offered_rate:.3g} req/s"


def _few(objective: Objective, p: Point) -> str:
    """What share met the SLO, of each class."""
    if not p.classes:
        return f"{in_percent(share_met(p), target=objective.slo.attainment)} of {p.offered}"
    own = {one.name: one.slo.attainment for one in objective.classes}
    return ", ".join(
        f"{name} {in_percent(share_met(c), target=own.get(name, objective.slo.attainment))} of {c.offered}"
        for name, c in p.classes.items()
    )


def _share(objective: Objective, p: Point) -> str:
    few = _few(objective, p)
    if p.classes:
        return few
    return f"{few} (95% interval {share_interval(p.attainment_low, p.attainment_high)}%)"


def _callable_verdict(setup: CallableSetup, best: CallablePoint, met: bool) -> str:
    low, high = best.attainment_low, best.attainment_high
    met_it = in_percent(share_met(best), target=setup.slo.attainment)
    share = f"{met_it} of {best.offered} items (95% interval {low * 100:.1f}–{high * 100:.1f}%)"
    how = "in simulation, not measured" if best.source == "simulated" else "measured"
    target = f"{setup.slo.attainment * 100:g}%"
    at = f"{how}, {share} met it at {items_per_s(setup.rate)}"
    if not met:
        return f"violates the SLO at this rate: {at}, the target is {target}; ask for less (--slo, --rate)"
    if not Objective.under(setup).confirmed(best):
        return f"too short to tell whether the SLO is met: {at}, the target is {target}; a longer --budget tells more"
    return f"meets the SLO ({target}): {at}"
