"""``autotune simulate``: what settings do under a load, on a profiled machine or one like it, in seconds of simulation."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from autotune.cli import simulation_options as shared
from autotune.cli.exits import DONE, FELL_SHORT, INTERRUPTED
from autotune.cli.options import (
    AsJsonOfARun,
    Price,
    ProfiledClasses,
    ProfiledSlo,
    check_decision_log,
    check_rate,
    of_decision_log,
    with_knobs,
)
from runtime.errors import InputError

if TYPE_CHECKING:
    from autotune.profile.parts import Point
    from autotune.simulate.capacity import Best, SettingCapacity

HELP = (
    "Simulate a profiled machine under a load: with the profile's settings, with one setting given by knob options, or under a "
    "controller. Exit code 1: no setting meets the SLO."
)
EXAMPLES = (
    "Examples:  autotune simulate mine.yaml --workload azure-code --rate 12  ·  "
    "autotune simulate mine.yaml --token-budget 512 --scale compute=0.5,bandwidth=0.4 --price 2.50/h  ·  "
    "autotune simulate mine.yaml --token-budget 512 --seeds 1 --controller predictive --decisions run.jsonl"
)


@with_knobs
def simulate(
    profile: shared.SimulatedProfile = None,
    profile_option: shared.ProfileOption = None,
    workload: shared.Workload = None,
    slo: ProfiledSlo = None,
    classes: ProfiledClasses = None,
    rate: Annotated[
        float | None, Option(help="Requests/s.  (default: the rate in --workload, else the profile's)")
    ] = None,
    knobs: dict[str, float] | None = None,
    controller: shared.ControllerName = None,
    decisions: Annotated[
        Path | None,
        Option(
            help="File to append the controller's decisions to, for autotune explain: a run for each setting and seed, with "
            "times in seconds of virtual time."
        ),
    ] = None,
    scale: shared.Scale = None,
    kv_tokens: shared.KvTokens = None,
    price: Price = None,
    seeds: shared.Seeds = 3,
    seed: shared.FirstSeed = 0,
    requests: shared.Requests = 2000,
    as_json: AsJsonOfARun = False,
) -> int:
    """Simulate and print; 1 when nothing meets the SLO."""
    profile = shared.one_profile(profile, profile_option, "simulate")
    check_rate("--rate", rate)
    if decisions is not None and controller is None:
        raise InputError(f"--decisions is {decisions}, but no controller is attached; it goes with --controller")
    requested = shared.SimulationOptions(
        profile, workload=workload, slo=slo, classes=classes, scale=scale, kv_tokens=kv_tokens, price=price,
        controller=controller, knobs=knobs or {}, requests=requests,
    )  # fmt: skip
    from autotune.cli.display import Display, make_console, say
    from autotune.cli.interrupt import stop_on_interrupt
    from autotune.measure.evaluate import Interrupted
    from autotune.profiling.points import Run, point
    from autotune.report.simulation_tables import offered_sentence, point_data, simulated_table
    from autotune.report.tables import class_table
    from autotune.simulate.capacity import Search, best_so_far
    from runtime.slo import attained

    if decisions is not None:
        check_decision_log(decisions)
    console = make_console(stderr=as_json)
    offered, whose = requested.offered(rate)
    say(console, requested.head((offered, whose)))
    scenario = requested.scenario
    taken = scenario.distinct(range(seed, seed + seeds), requests)
    display = Display(console)
    points: list[Point] = []
    known: dict[str, SettingCapacity] = {}
    best: Best | None = None
    beside: str | None = None
    stopped = False
    with stop_on_interrupt() as stop, shared.control_errors_unlogged():
        display.stage("simulating")
        done, total, begun = 0, len(requested.settings) * len(taken), time.monotonic()
        once = scenario.repeated(requests) > 0
        try:
            for name, setting in requested.settings.items():
                runs = []
                for one in taken:
                    try:
                        score = scenario.measure(
                            setting,
                            offered,
                            one,
                            requests=requests,
                            controller=controller,
                            log=decisions,
                            stop=stop.is_set,
                        )
                    except InputError as error:
                        raise of_decision_log(error) from error.__cause__
                    runs.append(Run(stage="simulation", label=name, trial=-1, score=score))
                    done += 1
                    left = (time.monotonic() - begun) / done * (total - done)
                    display.progress(done / total, f"{done}/{total}", name, left)
                points.append(point(runs, once=once).model_copy(update={"knobs": setting}))
            beside = requested.beside_measured(offered, runs[-1].score.window_s, stop.is_set)
            display.stage_done(f"{done}/{total}", "")
            if requested.price is not None:
                display.stage("pricing")
                search = Search.of(scenario, taken, requests, controller=controller, stop=stop.is_set)
                advance = shared.progress(display)
                for name, setting in requested.settings.items():
                    known[name] = search.capacity(name, setting, offered, advance)
                best = search.best(known, requested.others, advance, requested.around)
                stopped = not best.whole
                display.stage_done("", "")
        except Interrupted:
            stopped = True
            best = best_so_far(known)
        finally:
            display.close()
    if points:
        console.print()
        console.print(
            simulated_table(points, scenario.slo, requested.price, console.width, scenario.classes, repeated=once),
            soft_wrap=True,
        )
        if (drawn := class_table([(p.label, p) for p in points], scenario.slo, scenario.classes)) is not None:
            console.print(drawn)
        say(console, offered_sentence(offered, points, repeated=scenario.repeated(requests)), "dim")
        if beside is not None:
            say(console, beside)
    if decisions is not None:
        order = ", setting by setting and seed by seed," if total > 1 else ""
        shows = shlex.join(["autotune", "explain", str(decisions)])
        say(console, f"decisions{order} were appended to {decisions}: {shows} shows them", "dim")
    found = {"rate": offered, "settings": [point_data(p, requested.price) for p in points]} if as_json else None
    shared.conclude(console, requested, len(points), best, found, stopped=stopped)
    if stopped:
        return INTERRUPTED
    return DONE if any(attained(p, scenario.slo, scenario.classes) for p in points) else FELL_SHORT
