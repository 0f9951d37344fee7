"""``autotune capacity``: the highest rate that meets the SLO, by bisection in simulation."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from autotune.cli import simulation_options as shared
from autotune.cli.exits import DONE, FELL_SHORT, INTERRUPTED
from autotune.cli.options import AsJsonOfARun, Price, ProfiledClasses, ProfiledSlo, with_knobs

if TYPE_CHECKING:
    from autotune.simulate.capacity import Best, SettingCapacity

HELP = (
    "Find the highest rate at which a profiled machine meets an SLO, by simulation: for the profile's settings, for one setting "
    "given by knob options, or under a controller. Exit code 1: no rate meets the SLO."
)
EXAMPLES = (
    "Examples:  autotune capacity mine.yaml --slo ttft=500ms,tpot=50ms  ·  "
    "autotune capacity mine.yaml --workload azure-code --scale compute=0.5,bandwidth=0.4 --price 2.50/h --json"
)


@with_knobs
def capacity(
    profile: shared.SimulatedProfile = None,
    profile_option: shared.ProfileOption = None,
    slo: ProfiledSlo = None,
    classes: ProfiledClasses = None,
    workload: shared.Workload = None,
    knobs: dict[str, float] | None = None,
    controller: shared.ControllerName = None,
    scale: shared.Scale = None,
    kv_tokens: shared.KvTokens = None,
    price: Price = None,
    seeds: shared.SeedsOfIntervals = 3,
    seed: shared.FirstSeed = 0,
    requests: shared.Requests = 2000,
    as_json: AsJsonOfARun = False,
) -> int:
    """Search and print; 1 when no rate meets the SLO."""
    profile = shared.one_profile(profile, profile_option, "capacity")
    requested = shared.SimulationOptions(
        profile, workload=workload, slo=slo, classes=classes, scale=scale, kv_tokens=kv_tokens, price=price,
        controller=controller, knobs=knobs or {}, requests=requests,
    )  # fmt: skip
    from autotune.cli.display import Display, make_console, say
    from autotune.cli.interrupt import stop_on_interrupt
    from autotune.measure.evaluate import Interrupted
    from autotune.profiling.objective import Objective
    from autotune.report.simulation_tables import (
        capacity_data,
        capacity_table,
        interval_words,
        unbounded_sentence,
    )
    from autotune.simulate.capacity import Search, best_so_far

    console = make_console(stderr=as_json)
    say(console, requested.head())
    scenario, start = requested.scenario, requested.profile.workload.rate
    display = Display(console)
    known: dict[str, SettingCapacity] = {}
    best: Best | None = None
    stopped = False
    with stop_on_interrupt() as stop, shared.control_errors_unlogged():
        taken = scenario.distinct(range(seed, seed + seeds), requests)
        search = Search.of(scenario, taken, requests, controller=controller, stop=stop.is_set)
        try:
            for name, setting in requested.settings.items():
                display.stage(name)
                known[name] = found = search.capacity(name, setting, start, shared.progress(display))
                display.stage_done("", shared.capacity_words(found))
            if requested.price is not None:
                display.stage("others")
                best = search.best(known, requested.others, shared.progress(display), requested.around)
                stopped = not best.whole
                display.stage_done("", "")
        except Interrupted:
            stopped = True
            best = best_so_far(known) if requested.price is not None else None
        finally:
            display.close()
    if known:
        console.print()
        shown = list(known.values())
        top = max(shown, key=lambda one: one.worth) if best is None else best.setting
        console.print(capacity_table(shown, top, requested.price, console.width), soft_wrap=True)
        meeting = Objective(scenario.slo, classes=scenario.classes).shares
        interval = interval_words(len(taken), repeated=scenario.repeated(requests))
        offered = max((score.offered for one in shown for score in one.scores), default=requests)
        slo = "their SLO" if scenario.classes else str(scenario.slo)
        say(
            console,
            f"Capacity: the highest rate at which {meeting} of {offered} requests meet {slo}, to within "
            f"{search.precision:.0%}.{f' {interval}' if top.rate else ''}",
            "dim",
        )
        if not top.rate and not stopped:
            with contextlib.suppress(Interrupted):
                say(console, requested.at_no_rate(shown, requests, controller, stop.is_set))
        endless = unbounded_sentence(shown, scenario.slo, offered)
        if endless is not None:
            say(console, endless)
        with contextlib.suppress(Interrupted):
            beside = None if endless or stopped else requested.beside_capacity(shown, offered, stop.is_set)
            if beside is not None:
                say(console, beside)
    settings = [capacity_data(one, requested.price) for one in known.values()]
    shared.conclude(console, requested, len(known), best, {"settings": settings} if as_json else None, stopped=stopped)
    if stopped:
        return INTERRUPTED
    return DONE if any(one.rate for one in known.values()) else FELL_SHORT
