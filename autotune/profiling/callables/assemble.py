"""From what a run found to the profile it writes."""

from __future__ import annotations

import datetime as dt

from autotune.profile import Machine, Software
from autotune.profile.callable import CallableProfile, Group, Inputs, LoadFacts, Point, ServiceTime
from autotune.profiling.callables.outcome import Outcome
from autotune.profiling.callables.settings import AS_IT_COMES, ONE_AT_A_TIME
from autotune.profiling.callables.subject import Subject
from autotune.profiling.callables.sweep import Findings, Question

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
    yardsticks = [o for o in found.simulated if o.setting in (AS_IT_COMES, ONE_AT_A_TIME)]
    shown = [*ranked, *(o for o in yardsticks if o.setting not in [r.setting for r in ranked])]
    price = found.calibration.price
    slo_met = not best.missed(found.slo)
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
        strategy=best.setting.strategy,
        knobs=best.setting.knobs,
        replicas=found.calibration.workers,
        service=ServiceTime(
            fixed_ms=price.fixed * 1e3,
            per_item_ms=price.per_item * 1e3,
            per_cost_ms=price.per_cost * 1e3,
            error=found.calibration.error,
            beside=found.calibration.beside,
            groups=tuple(Group(items=t.items, cost=t.cost, ms=t.seconds * 1e3) for t in found.calibration.timed),
            largest=found.calibration.largest,
            ended=found.calibration.ended,
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
        points=tuple(_point(o) for o in shown),
        simulated=found.tried,
        verdict=_verdict(found, best, slo_met),
        slo_met=slo_met,
    )


def _point(o: Outcome) -> Point:
    low, high = o.interval
    return Point(
        source="simulated" if o.simulated else "measured",
        strategy=o.setting.strategy,
        knobs=o.setting.knobs,
        offered=o.offered,
        met=o.met,
        attainment=o.share,
        attainment_low=low,
        attainment_high=high,
        goodput=o.goodput,
        e2e_p50_ms=o.latency_ms(50),
        e2e_p99_ms=o.latency_ms(99),
        items_per_call=o.batch,
        calls_per_s=o.calls / o.seconds if o.seconds else 0.0,
        lateness_p99_ms=o.lateness_p99_ms,
        seeds=tuple(o.seeds),
    )


def _verdict(found: Findings, best: Outcome, met: bool) -> str:
    low, high = best.interval
    share = f"{best.share * 100:.1f}% of {best.offered} items (95% interval {low * 100:.1f}–{high * 100:.1f}%)"
    how = "in simulation, not measured, it kept" if best.simulated else "measured, it kept"
    asked = f"{found.slo.attainment * 100:g}%"
    at = f"{how} {share} in SLO at {found.rate:.3g} items/s"
    if not met:
        return f"the SLO is missed at this rate: {at}, where {asked} are asked; ask for less (--slo, --rate)"
    if best.share < found.slo.attainment or best.offered * max(1 - found.slo.attainment, 0.01) < 1:
        return f"{at}: too short to tell whether {asked} are kept; a longer --budget tells more"
    return f"it keeps {asked}: {at}"
