"""What ``simulate`` and ``capacity`` share: the scenario from their options, the settings to look at, the head of the page."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from autotune.cli.options import (
    WORKLOADS,
    check_classes,
    check_rate,
    checked,
    checked_knobs,
    classes_of,
    request_classes,
)
from autotune.control.controllers.registry import CONTROLLERS, find
from autotune.profile.fields import MOST_KV_TOKENS
from runtime.errors import InputError
from runtime.knobs import KNOBS

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.cli.display import Display
    from autotune.profile import Profile
    from autotune.profile.parts import CostFacts, Point
    from autotune.simulate.capacity import Best, SettingCapacity
    from autotune.simulate.scenario import Scenario
    from autotune.workload import Workload as Load
    from runtime.knobs import Knobs
    from runtime.slo import RequestClass

SimulatedProfile = Annotated[
    str | None,
    Argument(
        metavar="PROFILE",
        help="A profile with a cost model: a file, or a name from `autotune profiles`. Required, here or as --profile.",
        show_default=False,
    ),
]
ProfileOption = Annotated[str | None, Option("--profile", metavar="PROFILE", help="Another way to give PROFILE.")]
Workload = Annotated[str | None, Option(help=f"{WORKLOADS}  (default: the profile's)")]
ControllerName = Annotated[
    str | None,
    Option(help=f"Attach a controller, which starts from each setting: {', '.join(CONTROLLERS)}, or module:Class."),
]
Scale = Annotated[
    str | None,
    Option(
        help="Simulate another machine, by its speeds relative to the profile's machine: compute=0.5,bandwidth=0.4,overhead=1."
    ),
]
KvTokens = Annotated[
    int | None, Option(min=1, max=MOST_KV_TOKENS, help="Tokens in the KV pool.  (default: the profile's)")
]
Seeds = Annotated[int, Option(min=1, max=1000, help="How many independent sets of requests to simulate.")]
SeedsOfIntervals = Annotated[
    int,
    Option(min=1, max=1000, help="How many independent sets of requests to simulate; intervals are over these sets."),
]
FirstSeed = Annotated[
    int, Option(min=0, max=2**31, help="Seed of the first set of requests; the other sets have the seeds that follow.")
]
Requests = Annotated[int, Option(min=10, max=10_000_000, help="Requests in each simulation.")]
_ALIKE = 0.03  # relative difference of two capacities that is no difference


def one_profile(argument: str | None, option: str | None, verb: str) -> str:
    """The profile, which may be given as PROFILE and as --profile."""
    if argument is not None and option is not None and argument != option:
        raise InputError(f"PROFILE is {argument} and --profile is {option}; give one of them, or the same twice")
    found = option if argument is None else argument
    if found is None:
        raise InputError(
            f"name a profile, as PROFILE or --profile: a file, or a name from `autotune profiles`; see autotune {verb} --help"
        )
    return found


class SimulationOptions:
    """The options both verbs have, checked."""

    def __init__(
        self,
        profile: str,
        *,
        workload: str | None,
        slo: str | None,
        classes: Sequence[str] | None,
        scale: str | None,
        kv_tokens: int | None,
        price: str | None,
        controller: str | None,
        knobs: dict[str, float],
        requests: int,
    ) -> None:
        from autotune.cost.price import parse_price
        from autotune.profile import find_profile, load_profile
        from autotune.simulate.scenario import Scenario, load_of, parse_speeds
        from autotune.workload import named_options, named_rate, parse_workload
        from runtime.slo import SLO

        if controller is not None:
            checked("--controller", find, controller)
        speeds = None if scale is None else parse_speeds(scale)
        target = None if slo is None else checked("--slo", SLO.parse, slo)
        own = request_classes(classes or ())
        load = None if workload is None else checked("--workload", parse_workload, workload)
        money = None if price is None else parse_price(price)
        overrides = checked_knobs(knobs)
        self.profile: Profile = load_profile(find_profile(profile))
        self.price = self.profile.price_per_hour if money is None else money
        self.controller = controller
        self.scale = scale
        self.warnings = (
            *self.profile.warnings,
            *_unscaled(self.profile, speeds or {}),
            *_off(self.profile),
            *_above(self.profile, overrides),
        )
        if load is None:
            load = load_of(self.profile, profile)
        others: list[RequestClass] | None = None
        if workload is not None and self.profile.classes:  # another workload may know none of them
            there = classes_of(load)
            others = list(self.profile.classes) if any(one.name in there for one in self.profile.classes) else []
        scenario = checked(
            "", lambda: Scenario.of(
                self.profile, profile, workload=load, slo=target, classes=own or others, speeds=speeds, kv_tokens=kv_tokens,
            ),
        )  # fmt: skip
        check_classes(own, scenario.workload)
        facts = self.profile.workload
        self.spec = workload or facts.spec
        self.foreign = workload is not None and workload.strip() != facts.spec
        whole = load if self.foreign else load.scaled(cap_prompt=facts.cap_prompt, cap_output=facts.cap_output)
        self.warnings += (
            *_undrafted(overrides, scenario.workload.may_draft),
            *_cut(scenario.workload, whole),
            *_few(scenario.workload, requests),
        )
        plain = not overrides and all(option is None for option in (controller, speeds, kv_tokens))
        self.as_profiled = plain and not self.foreign and self._same_slos(scenario)
        """Whether nothing but the requests differs from what the profile measured."""
        self.named = named_options(workload) if workload is not None else set()
        self.rate = None if workload is None else named_rate(load)
        own_settings = {str(purpose): setting.knobs for purpose, setting in self.profile.settings.items()}
        self.settings = {"requested": self.profile.knobs.with_(**overrides)} if overrides else by_knobs(own_settings)
        self.scenario: Scenario = scenario
        for setting in self.settings.values():
            self.scenario = self.scenario.with_ceilings_for(setting)

    def _same_slos(self, scenario: Scenario) -> bool:
        return (scenario.slo, scenario.classes) == (self.profile.slo, self.profile.classes)

    @property
    def others(self) -> dict[str, Knobs]:
        """Every other setting the profile knows of, by a name of its own."""
        profile = self.profile
        points = [*profile.points, *profile.simulated, *([profile.baseline] if profile.baseline else [])]
        found: dict[str, Knobs] = {}
        for point in points:
            knobs = self.scenario.limits.clamp(point.knobs)
            if knobs not in found.values() and knobs not in self.settings.values():
                name = point.label
                found[name if name not in found else f"{name} {len(found)}"] = knobs
        return found

    def around(self, knobs: Knobs) -> list[Knobs]:
        """Settings a small step away from ``knobs``: the profile's were searched for under its own load, on its own machine."""
        from autotune.profiling.space import neighbours, whole_space

        return neighbours(whole_space(self.scenario.limits), knobs)

    def offered(self, rate: float | None) -> tuple[float, str]:
        """The rate to simulate and whose it is: ``rate`` (--rate), or the one --workload names, or the profile's."""
        if rate is not None:
            return rate, "--rate"
        if self.rate is not None:
            check_rate("--workload: rate", self.rate)
            return self.rate, "the workload's"
        return self.profile.workload.rate, "the profile's"

    def head(self, offered: tuple[float, str] | None = None) -> str:
        """What is simulated, a line each for machine, cost model and load; ``offered``: at which rate, and whose it is."""
        from autotune.profile.fingerprint import describe
        from autotune.workload import length_scale_in_words
        from runtime.version import __version__

        profile, load = self.profile, self.scenario.workload
        assert profile.cost_model is not None  # or there were no scenario
        own = not self.foreign or "length" in self.named
        whose = "" if own else " (the profile's)"
        scaled = length_scale_in_words(load)
        lengths = f", {scaled}{whose}" if scaled else ""
        rate = ""
        if offered is not None:
            another = "; --rate for another" if self.foreign and offered[1] == "the profile's" else ""
            rate = f" at {offered[0]:.4g} req/s ({offered[1]}{another})"
        speeds = f" × {self.scale}" if self.scale else ""
        control = f" · {self.controller} controller" if self.controller else ""
        classes = "".join(f"\nclass {one}" for one in self.scenario.classes)
        warning = f"\n{profile.warning}" if profile.warning else ""
        warning += "".join(f"\nwarning: {text}" for text in self.warnings[len(profile.warnings) :])
        return (
            f"autotune {__version__} · simulated: {profile.model.name} ({profile.model.dtypes}) on "
            f"{describe(profile.machine)}{speeds}\n"
            f"cost model {profile.cost_model.family}, {_as_served(profile.cost_model)}\n"
            f"workload {self.spec}{lengths}{rate} · KV {self.scenario.kv_tokens} tokens · SLO {self.scenario.slo}"
            f"{control}{classes}{warning}"
        )

    def beside_measured(self, offered: float, window: float, stop: Callable[[], bool]) -> str | None:
        """What ``autotune show`` says of the recommended setting, beside simulations of those very requests, and why runs of
        ``window`` seconds at ``offered`` requests/s may say something else. None where they are of something else."""
        from autotune.profile import RECOMMENDED

        setting, load = self.profile.settings.get(RECOMMENDED), self.profile.workload
        if (
            not self.as_profiled
            or setting is None
            or setting.point.stage == "simulation"
            or offered != setting.point.rate
        ):
            return None
        longer = ""
        if window > 1.5 * load.window_s:
            longer = " The simulations in the table are longer than these windows, and longer runs hold longer bursts."
        return f"{RECOMMENDED} setting, as profiled: {self._measured_and_simulated(setting.point, stop)}{longer}"

    def _measured_and_simulated(self, point: Point, stop: Callable[[], bool]) -> str:
        """What ``point`` measured, and what simulations of its very requests say, under several draws of the step-time noise:
        how much it differs, and that the simulation is off where no draw comes to what was measured."""
        from autotune.simulate.paired import DRAWS, paired_attainment
        from runtime.slo import in_percent, share_met

        load = self.profile.workload
        found = paired_attainment(self.scenario, point, load, stop)
        mean, low, high = found.mean, min(found.draws), max(found.draws)
        target = None if point.classes else self.scenario.slo.attainment
        measured, said = in_percent(share_met(point), target=target), in_percent(mean, target=target)
        if high - low > _ALIKE / 3:
            said += f" on average ({low:.1%} to {high:.1%} in {DRAWS} draws of the step-time noise)"
        if abs(found.even - mean) > _ALIKE / 3:
            said += f", and {found.even:.1%} if each step takes its mean time"
        said += "."
        if found.pessimistic or found.optimistic:
            how, steps = ("pessimistic", "less") if found.pessimistic else ("optimistic", "more")
            said += (
                f" Simulations of this machine are {how} by {abs(mean - point.attainment) * 100:.0f} points here: in the "
                f"measurement, steps took {steps} time, or scattered {steps}, than in the calibration."
            )
        return (
            f"{measured} of {point.offered} requests met the SLO when measured, in windows of {load.window_s:.3g} s. "
            f"A simulation of the same requests gives {said}"
        )

    def beside_capacity(self, found: Sequence[SettingCapacity], requests: int, stop: Callable[[], bool]) -> str | None:
        """Why the capacity ``found`` of the same setting differs from the one that ``autotune show`` tells; None where there is
        nothing to say."""
        from autotune.report.wording import number

        known = self.profile.capacity
        if known is None or not self.as_profiled:
            return None
        point = next((p for p in known.tried if p.rate == known.rate), None)
        same = next((one for one in found if one.knobs == known.knobs), None)
        if point is None or same is None or abs(same.rate / point.offered_rate - 1) < _ALIKE:
            return None
        lasts, window = requests / point.offered_rate, self.profile.workload.window_s
        longer = ", with longer bursts and more slow steps" if lasts > 1.5 * window else ""
        return (
            f"The profile has a capacity of {point.offered_rate:.3g} req/s: {self._measured_and_simulated(point, stop)} "
            f"At that rate, {requests} requests take {number(lasts)} s{longer}."
        )

    def at_no_rate(
        self,
        found: Sequence[SettingCapacity],
        requests: int,
        controller: str | None,
        stop: Callable[[], bool],
    ) -> str:
        """What is within the SLO at the lowest rate that was tried, where no setting meets it at any."""
        from runtime.slo import in_percent

        one, tried = min(((one, s) for one in found for s in one.seeds), key=lambda pair: pair[1].failed)
        score = self.scenario.measure(
            one.knobs, tried.failed, tried.seed, requests=requests, controller=controller, stop=stop
        )
        whose, do, relax = str(self.scenario.slo), "do", "--slo"
        if self.scenario.classes:
            whose, do, relax = "the SLO of every class", "meet their own", "--class"
        share = in_percent(
            score.weighted_attainment, target=None if self.scenario.classes else self.scenario.slo.attainment
        )
        return (
            f"No rate meets {whose}: with {one.label}, {share} of the requests {do} at "
            f"{tried.failed:.3g} req/s, the lowest tried. Relax {relax}."
        )

    def data(self) -> dict[str, Any]:
        """The head for scripts."""
        from autotune.workload import length_scale_as_data

        scenario = self.scenario
        return {
            "profile": self.profile.name,
            "model": self.profile.model.name,
            "workload": self.spec,
            **length_scale_as_data(scenario.workload),
            "cap_prompt": scenario.workload.cap_prompt,
            "cap_output": scenario.workload.cap_output,
            "slo": str(scenario.slo),
            "classes": [str(one) for one in scenario.classes],
            "kv_tokens": scenario.kv_tokens,
            "scale": self.scale,
            "controller": self.controller,
            "price_per_hour": self.price,
            "warnings": list(self.warnings),
        }


def _unscaled(profile: Profile, speeds: dict[str, float]) -> tuple[str, ...]:
    """What of ``speeds`` the profile's cost model cannot tell apart, a clause."""
    cost = profile.cost_model
    if cost is None or speeds.get("bandwidth", 1.0) == 1.0 or "weights_s" in cost.coefficients:
        return ()
    return (
        f"--scale bandwidth={speeds['bandwidth']:g} does not act on reading the weights: in a cost model of family {cost.family} "
        "that is part of the overhead (overhead= scales both)",
    )


def _off(profile: Profile) -> tuple[str, ...]:
    """How far off simulations were where this profile measured the same, a clause where that is far."""
    from autotune.report.wording import UNRELIABLE, error

    found = None if profile.simulation is None else profile.simulation.goodput_error
    if found is None or found <= UNRELIABLE:
        return ()
    return (f"where this profile also measured, simulated goodput was off by {error(found)} (median)",)


def _undrafted(given: dict[str, float], may_draft: bool) -> tuple[str, ...]:
    """A clause where drafts are requested and none is simulated."""
    drafts = given.get("draft_tokens", 0)
    if not drafts or may_draft:
        return ()
    return (
        f"--draft-tokens is {drafts:.10g}, and the workload does not say how often a draft is right: none is simulated; "
        "write --workload azure-conv:acceptance=0.6, say",
    )


def _cut(simulated: Load, whole: Load) -> tuple[str, ...]:
    """A clause where requests are ``simulated`` shorter than those of ``whole``."""
    from autotune.workload import cuts_in_words

    cuts = cuts_in_words(simulated, whole)
    return (f"{cuts}, the most that the profile and the KV pool leave room for",) if cuts else ()


def _few(workload: Load, requests: int) -> tuple[str, ...]:
    """A clause where ``workload`` holds fewer than the ``requests`` that are to be counted and their warm-up."""
    from autotune.simulate.scenario import with_warm_up

    if not workload.finite:
        return ()
    wanted = with_warm_up(requests)
    held = sum(1 for _ in workload.arrivals(0, limit=wanted))
    few = f"{workload.name} holds {held} requests, fewer than --requests {requests} and its warm-up"
    return (few,) if held < wanted else ()


def _above(profile: Profile, given: dict[str, float]) -> tuple[str, ...]:
    """A clause for each knob ``given`` that the profile's engine could not have been set to. It is no mistake: serve takes it."""
    clauses = []
    for spec in KNOBS:
        value, top = given.get(spec.name, 0), getattr(profile.engine.limits, spec.name)
        if value > top:
            clauses.append(
                f"--{spec.name.replace('_', '-')} is {value:.10g}, above engine.limits of the profile ({top:.10g} {spec.unit}): "
                "simulated is an engine started with that ceiling, as autotune serve would start it, and none was measured"
            )
    return tuple(clauses)


def _as_served(cost: CostFacts) -> str:
    """How far off step times are, what they take and how they scatter beyond the fit, a clause."""
    fit = f"error of step times {cost.error:.1%}"
    more = f"; serving adds {cost.serving_overhead_s * 1e3:.2g} ms to a step" if cost.serving_overhead_s else ""
    return fit + more + ("; step times scatter as measured in serving" if cost.jitter is not None else "")


def capacity_words(found: SettingCapacity) -> str:
    return "unbounded" if found.unbounded else f"{found.rate:.3g} req/s" if found.rate else "none"


def conclude(
    console: Console,
    requested: SimulationOptions,
    done: int,
    best: Best | None,
    found: dict[str, Any] | None,
    *,
    stopped: bool,
) -> None:
    """The end of the page: which setting is the cheapest, all of it as JSON (``found``: what a verb has to add), and that it
    was ``stopped`` with ``done`` settings."""
    from autotune.cli.display import say
    from autotune.report.simulation_tables import cheapest_data, cheapest_sentence

    price = requested.price
    if best is not None and price is not None:
        say(console, cheapest_sentence(best, requested.scenario.slo, price))
    if found is not None:
        print(json.dumps(requested.data() | found | {"cheapest": cheapest_data(best, price), "stopped": stopped}))
    if stopped:
        say_stopped(done, len(requested.settings), pricing=price is not None, priced=best is not None)


def say_stopped(done: int, total: int, *, pricing: bool, priced: bool = False) -> None:
    """On stderr, after what was found: a table that looks whole is not. ``priced``: the cheapest so far was said."""
    lacking = f"{done} of {total} settings are done" if done < total else "all settings are done"
    cheapest = "; settings not tried may be cheaper" if priced else "; the cheapest is not known" if pricing else ""
    print(f"stopped: {lacking}{cheapest}", file=sys.stderr)


def by_knobs(settings: Mapping[str, Knobs]) -> dict[str, Knobs]:
    """Settings by purpose, those of equal knobs as one: ``interactive, throughput``."""
    from autotune.profile import PURPOSES
    from autotune.report.profile_table import EVERY_PURPOSE

    names: dict[Knobs, list[str]] = {}
    for name, knobs in settings.items():
        names.setdefault(knobs, []).append(name)
    return {EVERY_PURPOSE if [*those] == [*PURPOSES] else ", ".join(those): knobs for knobs, those in names.items()}


@contextmanager
def control_errors_unlogged() -> Iterator[None]:
    """What a controller does wrong is the command's own error, and not in the log as well."""
    log = logging.getLogger("autotune.control.loop")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def progress(display: Display) -> Callable[[float, bool], None]:
    """Tells ``display`` of each simulation. How many it takes is not known before."""
    count = 0

    def advance(rate: float, held: bool) -> None:
        nonlocal count
        count += 1
        display.progress(1 - 0.94**count, f"{count} runs", f"{rate:.3g} req/s {'held' if held else 'missed'}", None)

    return advance
