"""From what a run found to the profile it writes."""

from __future__ import annotations

import datetime as dt

from autotune.profile import Machine, Software
from autotune.profile.callable import CallableProfile, Group, Inputs, LoadFacts, Point, ServiceTime
from autotune.profiling.callable_space import AS_IT_COMES, ONE_AT_A_TIME
from autotune.profiling.callable_subject import Subject
from autotune.profiling.callable_sweep import Findings, Question
from autotune.profiling.objective import Objective

_KEPT = 10  # settings, at most, when a run was stopped while simulating


def assemble(
    found: Findings,
    subject: Subject,
    question: Question,
    *,
    name: str,
    command: str,
    machine: Machine,
    software: Software,
) -> CallableProfile:
    """The profile. ``found`` must hold at least one setting."""
    ranked = found.ranked[:_KEPT]
    best = ranked[0]
    baselines = [p for p in found.simulated if p.setting in (AS_IT_COMES, ONE_AT_A_TIME)]
    shown = [*ranked, *(p for p in baselines if p.setting not in [r.setting for r in ranked])]
    price = found.cost.price
    slo_met = not Objective(found.slo).refuted(best)
    return CallableProfile(
        kind="callable",
        schema_version=1,
        name=name,
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=command,
        status="stopped" if found.stopped else "complete",
        function=subject.name,
        inputs=Inputs(
            file=subject.inputs_name, items=len(subject.inputs), cost=subject.cost_name, mean_cost=subject.mean_cost
        ),
        machine=machine,
        software=software,
        slo=found.slo,
        slo_from=found.slo_from,
        strategy=best.strategy,
        knobs=best.knobs,
        replicas=found.cost.workers,
        service=ServiceTime(
            fixed_ms=price.fixed * 1e3,
            per_item_ms=price.per_item * 1e3,
            per_cost_ms=price.per_cost * 1e3,
            error=found.cost.error,
            beside=found.cost.beside,
            groups=tuple(Group(items=t.items, cost=t.cost, ms=t.seconds * 1e3) for t in found.cost.timed),
            largest=found.cost.largest,
            ended=found.cost.ended,
        ),
        load=LoadFacts(
            rate=found.rate,
            rate_from=found.rate_from,
            capacity=found.capacity,
            capacity_size=found.capacity_size,
            window_s=found.load.window_s if found.load else 0.0,
            warmup_s=found.load.warmup_s if found.load else 0.0,
            seed=question.seed,
        ),
        points=tuple(shown),
        simulated=found.tried,
        verdict=_verdict(found, best, slo_met),
        slo_met=slo_met,
    )


def _verdict(found: Findings, best: Point, met: bool) -> str:
    low, high = best.attainment_low, best.attainment_high
    share = f"{best.attainment * 100:.1f}% of {best.offered} items (95% interval {low * 100:.1f}–{high * 100:.1f}%)"
    how = "in simulation, not measured, it kept" if best.source == "simulated" else "measured, it kept"
    asked = f"{found.slo.attainment * 100:g}%"
    at = f"{how} {share} in SLO at {found.rate:.3g} items/s"
    if not met:
        return f"the SLO is missed at this rate: {at}, where {asked} are asked; ask for less (--slo, --rate)"
    if not Objective(found.slo).confirmed(best):
        return f"{at}: too short to tell whether {asked} are kept; a longer --budget tells more"
    return f"it keeps {asked}: {at}"
