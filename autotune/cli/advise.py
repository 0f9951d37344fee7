"""``autotune advise``: what settings would do under the traffic of a server that is up and cannot be restarted just now."""

from __future__ import annotations

import json
import shlex
import threading
import time
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from autotune.cli import simulation_options as shared
from autotune.cli.exits import DONE, FELL_SHORT, INTERRUPTED
from autotune.cli.options import AsJsonOfARun, ProfiledSlo, checked, need_server_extra, seconds
from runtime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autotune.cli.display import Display
    from autotune.engines.named import NamedEngine, ServerMetrics
    from autotune.profile.parts import Point
    from runtime.knobs import Knobs
    from runtime.serving.scrape import Scrape

HELP = (
    "Suggest settings for a running vLLM server: read the server's metrics, then simulate the server's traffic with the present "
    "settings and with those of a profile. advise sends the server no requests and changes nothing on the server. "
    "Exit code 1: no setting meets the SLO, or there was too little traffic."
)
EXAMPLES = (
    "Examples:  autotune advise http://localhost:8000 mine.yaml --slo ttft=500ms,tpot=50ms  ·  "
    "autotune advise http://localhost:8000 mine.yaml --now max_batch_size=128,token_budget=4096 --watch 5m"
)
NOW = "now"
_INTERVAL_S = 1.0


def advise(
    url: Annotated[
        str, Argument(metavar="URL", help="Address of the server: http://localhost:8000.", show_default=False)
    ],
    profile: Annotated[
        str | None,
        Argument(
            metavar="PROFILE",
            help="A profile of the server's hardware: a file, or a name from `autotune profiles`.  (default: the shipped profile "
            "of the served model, if there is exactly one)",
            show_default=False,
        ),
    ] = None,
    slo: ProfiledSlo = None,
    now: Annotated[
        str | None,
        Option(
            metavar="KNOBS",
            help="The server's present settings: max_batch_size=128,token_budget=4096. Knobs not named are at vLLM's defaults.  "
            "(default: vLLM's defaults for the profile's machine)",
        ),
    ] = None,
    watch: Annotated[str, Option(help="How long to read the metrics: 60s, 5m.")] = "60s",
    seeds: shared.Seeds = 3,
    seed: shared.FirstSeed = 0,
    requests: shared.Requests = 2000,
    as_json: AsJsonOfARun = False,
) -> int:
    """Watch, simulate and print; 1 when nothing meets the SLO."""
    need_server_extra("advise")
    from autotune.advise.advice import advice, cautions, left_out, live, startable, without_counterpart
    from autotune.advise.traffic import Traffic
    from autotune.bench.contenders import parse_fixed
    from autotune.cli.display import Display, make_console, say
    from autotune.cli.interrupt import stop_on_interrupt
    from autotune.engines.defaults import VLLM_CPU_DEFAULTS, vllm_defaults
    from autotune.engines.named import ours
    from autotune.export import TARGETS
    from autotune.measure.evaluate import EvaluationError, Interrupted
    from autotune.profile import find_profile, load_profile
    from autotune.profiling.space import WIDEST
    from autotune.report.simulation_tables import point_data, simulated_table
    from runtime.slo import SLO, attained

    length = seconds(watch, option="--watch", least=_INTERVAL_S)
    if profile is None:
        profile = _profile_of(url)
    known = load_profile(find_profile(profile))
    target = known.slo if slo is None else checked("--slo", SLO.parse, slo)
    gpu = known.machine.gpu
    stock, whose = VLLM_CPU_DEFAULTS, f"vLLM's defaults for the machine of {known.name}"
    if known.baseline is not None and not ours(known.engine.name):
        stock, whose = known.baseline.knobs, f"the defaults that {known.name} was compared with"
    elif gpu is not None:
        stock = vllm_defaults(gpu.name, gpu.memory_gib)
    has = stock if now is None else checked("--now", parse_fixed, now, WIDEST, stock).knobs

    def options(workload: str | None) -> shared.SimulationOptions:
        return shared.SimulationOptions(
            profile, workload=workload, slo=slo, classes=None, scale=None, kv_tokens=None, price=None, controller=None, knobs={},
            requests=requests,
        )  # fmt: skip

    options(None)  # says what is wrong with the profile before anybody waits
    first, engine, metrics = _found(url)
    start = TARGETS[engine.name]  # what a server is started with
    dropped = without_counterpart(known, start)
    console = make_console(stderr=as_json)
    display = Display(console)
    with stop_on_interrupt() as stop:
        try:
            scrapes = _watched(url, first, length, metrics, engine.title, display, stop)
            traffic = Traffic.of(scrapes, metrics)
            seen = list(live(traffic, target))
            for line in seen:
                say(console, line)
            requested = options(traffic.spelled())
            rate = traffic.rate / traffic.engines
            others = shared.by_knobs(startable(known, dropped))
            settings = {NOW: has} | {name: knobs for name, knobs in others.items() if knobs != has}
            points = _simulated(requested, settings, rate, range(seed, seed + seeds), requests, display, stop)
        except Interrupted:
            say(console, "stopped before all was simulated")
            return INTERRUPTED
        except EvaluationError as error:
            say(console, f"nothing can be said: {error}")
            return FELL_SHORT
        finally:
            display.close()
    scenario = requested.scenario
    other = "" if known.engine.name == engine.in_facts else str(known.engine)
    offered = list(scenario.workload.arrivals(seed, limit=requests))
    lengths = fmean(a.prompt_tokens for a in offered), fmean(a.output_tokens for a in offered)

    def export(purpose: str) -> str:
        lossy = " --allow-lossy" if dropped[purpose] else ""
        return f"autotune export {shlex.quote(profile)} --to {start.name} --for {purpose}{lossy}"

    said = [
        *cautions(traffic, points[0], lengths, elsewhere=other),
        *left_out(dropped, start),
        *advice(points, scenario.slo, scenario.classes, export),
    ]
    say(console, requested.head((rate, "the server's")))
    say(console, f"{NOW}: {whose if now is None else '--now'}")
    once = scenario.repeated(requests) > 0
    console.print(
        simulated_table(points, scenario.slo, None, console.width, scenario.classes, repeated=once), soft_wrap=True
    )
    for line in said:
        say(console, line)
    if as_json:
        found = {
            "seconds": traffic.seconds, "rate": traffic.rate, "engines": traffic.engines, "ended": traffic.ended, "said": seen
        }  # fmt: skip
        rows = [point_data(point, None) for point in points]
        print(json.dumps(requested.data() | {"url": url, "live": found, "settings": rows, "advice": said}))
    return DONE if any(attained(point, scenario.slo, scenario.classes) for point in points) else FELL_SHORT


def _found(url: str) -> tuple[Scrape, NamedEngine, ServerMetrics]:
    """All metrics of the server at ``url``, its engine, and what that calls them. Raises :class:`InputError` where no engine that
    is known has such metrics."""
    from autotune.engines.named import engine_of_metrics
    from runtime.serving.scrape import scrape

    first = scrape(url)
    engine = engine_of_metrics(first.samples)
    if engine is None or engine.metrics is None:
        raise InputError(f"URL is {url}; it has no metrics of an engine that is known here: a vLLM server has them")
    return first, engine, engine.metrics


def _profile_of(url: str) -> str:
    """The name of the one shipped profile of the model that is served at ``url``. Raises :class:`InputError`."""
    from autotune.profile import load_profile, shipped_profiles

    first, engine, metrics = _found(url)
    models = sorted({labels.get(metrics.replica[0], "") for labels in first.labels[metrics.running]})
    if not any(models):
        raise InputError("PROFILE is not given, and the metrics do not name the model; name a PROFILE")
    short = {model.rpartition("/")[2].lower() for model in models}
    names = [name for name, path in shipped_profiles().items() if load_profile(path).model.name.lower() in short]
    if len(names) == 1:
        return names[0]
    served = " and ".join(models)
    if names:
        raise InputError(
            f"PROFILE is not given, and {' and '.join(names)} are of {served}; name the one of its machine"
        )
    raise InputError(
        f"PROFILE is not given, and no shipped profile is of {served}; on its machine, autotune profile --engine {engine.name} "
        f"--model {shlex.quote(served)} --out mine.yaml makes one"
    )


def _watched(
    url: str,
    first: Scrape,
    length: float,
    metrics: ServerMetrics,
    title: str,
    display: Display,
    stop: threading.Event,
) -> list[Scrape]:
    """A scrape each second, for so long. Raises :class:`Interrupted` at Ctrl-C, and what the last attempt to read it said where
    that failed; one that fails before is left out."""
    from autotune.measure.evaluate import Interrupted
    from runtime.serving.scrape import scrape

    display.stage("watching")
    scrapes, missed = [first], None
    while (left := first.at + length - time.monotonic()) > 0:
        if stop.wait(min(_INTERVAL_S, left)):
            raise Interrupted("interrupted")
        try:
            scrapes.append(scrape(url, metrics.names))
            missed = None
        except InputError as error:
            missed = error
        seen = time.monotonic() - first.at
        display.progress(min(1.0, seen / length), f"{seen:.0f} s", title, max(0.0, length - seen))
    display.stage_done(f"{scrapes[-1].at - first.at:.0f} s", "")
    if missed is not None:
        raise missed
    return scrapes


def _simulated(
    requested: shared.SimulationOptions,
    settings: Mapping[str, Knobs],
    rate: float,
    seeds: range,
    requests: int,
    display: Display,
    stop: threading.Event,
) -> list[Point]:
    from autotune.profiling.points import Run, point

    display.stage("simulating")
    scenario, points, done = requested.scenario, [], 0
    for knobs in settings.values():
        scenario = scenario.with_ceilings_for(knobs)
    for name, knobs in settings.items():
        runs = []
        for seed in seeds:
            score = scenario.measure(knobs, rate, seed, requests=requests, stop=stop.is_set)
            runs.append(Run(stage="simulation", label=name, trial=-1, score=score))
            done += 1
            display.progress(done / (len(settings) * len(seeds)), f"{done}/{len(settings) * len(seeds)}", name, None)
        points.append(point(runs, once=scenario.repeated(requests) > 0).model_copy(update={"knobs": knobs}))
    display.stage_done(f"{done}/{done}", "")
    return points
