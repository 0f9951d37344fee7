"""From findings to the profile and its sidecar of raw runs."""

from __future__ import annotations

import datetime as dt
import json
import statistics
from pathlib import Path

from autotune.profile import (
    Confidence,
    EngineFacts,
    Gain,
    LoadFacts,
    Machine,
    ModelFacts,
    Point,
    Profile,
    SimulationFacts,
    Software,
)
from autotune.profiling.coverage import lacking
from autotune.profiling.doubts import doubts
from autotune.profiling.findings import Findings, Question
from autotune.profiling.points import gain, pareto, points
from autotune.profiling.verdict import judge
from runtime.knobs import Knobs

_MOST_PARETO = 24


def assemble(
    findings: Findings,
    question: Question,
    *,
    name: str,
    command: str,
    spec: str,
    machine: Machine,
    software: Software,
    engine: EngineFacts,
    model: ModelFacts,
    baseline: Knobs,
    points_file: Path,
    price_per_hour: float | None = None,
) -> Profile:
    """The profile. ``findings`` must hold at least one run."""
    setup = findings.setup
    comparable = findings.comparable()
    settings = findings.settings()
    if setup is None or not settings:
        raise ValueError("nothing was measured, so there is nothing to recommend")
    met, verdict = judge(findings, settings["balanced"].point)
    validated = {run.score.seed for run in findings.runs if run.stage == "validation"}
    return Profile(
        schema_version=2,
        name=name,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=command,
        status="stopped" if findings.stopped else "complete",
        machine=machine,
        software=software,
        engine=engine,
        model=model,
        workload=LoadFacts(
            spec=spec,
            description=question.workload.description,
            length_scale=setup.length_scale,
            cap_prompt=setup.cap_prompt,
            cap_output=setup.cap_output,
            mean_prompt=setup.mean_prompt,
            mean_output=setup.mean_output,
            rate=setup.rate,
            offered_rate=settings["balanced"].point.offered_rate,
            rate_from=setup.rate_from,
            window_s=setup.window_s,
            warmup_s=setup.warmup_s,
            search_seed=question.seed,
            validation_seeds=tuple(sorted(validated)),
        ),
        slo=setup.slo,
        slo_from=setup.slo_from,
        calibration=setup.calibration,
        knobs=settings["balanced"].knobs,
        settings=settings,
        baseline=next((p for p in comparable if p.knobs == baseline), None),
        capacity=findings.capacity,
        verdict=verdict,
        slo_met=met,
        seed=question.seed,
        points=tuple(points(findings.runs)),
        points_file=points_file.name,
        cost_model=None if findings.cost is None else findings.cost.facts,
        simulation=simulation_facts(findings),
        simulated=(*twin_points(findings), *pareto_points(findings)),
        gain=gain_of(findings, settings["balanced"].knobs, baseline),
        confidence=sure_of(findings),
        price_per_hour=price_per_hour,
        doubts=doubts(findings),
    )


def gain_of(findings: Findings, recommended: Knobs, baseline: Knobs) -> Gain | None:
    """Of what was measured at the rate of the comparison; None where either was not, or both are one setting."""
    validated = [] if findings.setup is None else findings.validated_at(findings.setup.rate)
    mine = [run for run in validated if run.knobs == recommended]
    base = [run for run in validated if run.knobs == baseline]
    return gain(mine, base) if mine and base and recommended != baseline else None


def sure_of(findings: Findings) -> Confidence | None:
    """The confidence, with what the calibration did not see: the choice rests on simulations of it."""
    found, unseen = findings.confidence, lacking(findings.steps) if findings.steps else ()
    if found is None or not unseen:
        return found
    return found.model_copy(
        update={"sentence": f"{found.sentence}; less sure than that, for the calibration saw {', '.join(unseen)}"}
    )


def simulation_facts(findings: Findings) -> SimulationFacts | None:
    if not findings.simulated:
        return None
    measured = {(p.knobs, p.rate): p.goodput.mean for p in points(findings.runs) if p.stage == "validation"}
    twins = twin_points(findings)
    compared = [p for p in twins if findings.setup is not None and p.rate == findings.setup.rate] or twins
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


def twin_points(findings: Findings) -> list[Point]:
    """The simulation of every validated setting, under the very requests it was measured with."""
    twins = {(run.knobs, run.score.rate, run.score.seed): run for run in findings.twins}
    validated = [run for run in findings.runs if run.stage == "validation"]
    keys = dict.fromkeys((run.knobs, run.score.rate, run.score.seed) for run in validated)
    return points(twins[key] for key in keys if key in twins)


def pareto_points(findings: Findings) -> list[Point]:
    """What no other simulated setting beats, at the rate of the comparison and under fresh seeds; by goodput."""
    front = pareto(findings.finalists or points(findings.simulated))
    return sorted(front, key=lambda p: p.goodput.mean, reverse=True)[:_MOST_PARETO]


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
