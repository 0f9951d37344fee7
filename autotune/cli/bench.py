"""``autotune bench``: the live engine with and without a controller, taking turns. Wiring only; the work is in autotune/bench."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from autotune.cli.exits import DONE, FELL_SHORT, INTERRUPTED
from autotune.cli.options import (
    WORKLOADS,
    AsJsonOfARun,
    Controller,
    Cpu,
    Dtype,
    EngineArguments,
    Gpu,
    ProfiledClasses,
    ProfiledKvCacheDtype,
    check_classes,
    check_device,
    check_kv_cache_dtype,
    check_rate,
    checked,
    engine_of,
    profiled,
    profiled_kv_cache_dtype,
    request_classes,
    seconds,
)
from autotune.engines.named import DEFAULT, choices_briefly, engine_named, load
from runtime.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.bench import Contender, Failure, PairedComparison, Result
    from autotune.bench.loads import BenchLoad
    from autotune.cli.display import Display
    from autotune.engines import Engine
    from autotune.profile import ModelFacts, Profile
    from runtime.slo import RequestClass

HELP = (
    "Replay a workload on a live engine, in turns: under a controller, with vLLM's defaults, and at fixed settings. "
    "Exit code 1: not every turn could be measured."
)
EXAMPLES = (
    "Examples:  autotune bench  ·  autotune bench --workload azure-code --slo ttft=500ms,tpot=50ms --rounds 5 --out bench.html"
    "  ·  autotune bench --profile mine.yaml --fixed max_batch_size=64,token_budget=512"
)
_SHORTEST_S = 1.0


def bench(
    model: Annotated[
        str | None,
        Option(
            help="A preset, a directory, or a hub id.  (default: the profile's, or a preset that suits the machine)"
        ),
    ] = None,
    engine: Annotated[str | None, Option(help=f"{choices_briefly()}.  (default: the profile's, or {DEFAULT})")] = None,
    engine_args: EngineArguments = None,
    workload: Annotated[
        str | None,
        Option(help=f"{WORKLOADS}  (default: the profile's, or azure-conv)"),
    ] = None,
    slo: Annotated[
        str | None,
        Option(
            help="The SLO: ttft=500ms,tpot=50ms@99%.  (default: the profile's, or one that the engine can meet, by a calibration)"
        ),
    ] = None,
    classes: ProfiledClasses = None,
    rate: Annotated[
        float | None,
        Option(
            help="Requests/s.  (default: the rate in --workload, else the profile's, else 80% of what saturates the engine)"
        ),
    ] = None,
    duration: Annotated[str, Option(help="How long requests arrive in each turn: 30s or 2m.")] = "30s",
    rounds: Annotated[
        int,
        Option(
            min=1,
            max=1000,
            help="How many turns each contender has; each round has other requests, but for those of a trace.",
        ),
    ] = 3,
    fixed: Annotated[
        list[str] | None,
        Option(
            help="A setting to compare: max_batch_size=64,token_budget=512. Knobs not named are at the defaults. Repeatable."
        ),
    ] = None,
    profile: Annotated[
        str | None,
        Option(
            help="Use the load of this profile. Also compare the profile's setting, and a controller that starts from the "
            "profile's setting and step times."
        ),
    ] = None,
    reject_late: Annotated[
        bool,
        Option(
            "--reject-late",
            help="Also compare the defaults and the controller with early rejection: requests that can no longer meet their TTFT "
            "target are rejected, and the queue is ordered by deadline.",
        ),
    ] = False,
    controller: Controller = None,
    cpu: Cpu = False,
    gpu: Gpu = False,
    dtype: Dtype = "auto",
    kv_cache_dtype: ProfiledKvCacheDtype = None,
    seed: Annotated[int, Option(min=0, max=2**31, help="Seed of the load and of random weights.")] = 0,
    out: Annotated[
        Path | None, Option("--out", "-o", help="An HTML page of plots to write, such as bench.html.")
    ] = None,
    as_json: AsJsonOfARun = False,
) -> int:
    """Compare, print, and plot; 1 when not every turn could be measured."""
    from autotune.bench import controlled, defaults, parse_fixed, plotting
    from autotune.bench import fixed as at
    from autotune.bench.loads import check_lasts
    from autotune.cli.display import make_console, print_as_is
    from autotune.cli.interrupt import end_on_interrupt, stop_on_interrupt
    from autotune.cli.target import (
        check_dtype,
        device_kind,
        heading,
        loading,
        model_facts,
        model_for,
        model_named,
        running,
    )
    from autotune.control.controllers.registry import find
    from autotune.engines.defaults import VLLM_DEFAULTS
    from autotune.profile.fingerprint import (
        machine,
        measured_elsewhere,
        measured_on_another,
        measured_with_another,
        recorded_otherwise,
        stored_otherwise,
    )
    from autotune.profiling.space import WIDEST
    from autotune.report.page import is_page
    from autotune.workload import named_rate, parse_workload
    from autotune.writing import replaceable
    from runtime.knobs import KnobLimits, Knobs
    from runtime.slo import SLO

    check_device(cpu, gpu)
    if kv_cache_dtype is not None:
        check_kv_cache_dtype(kv_cache_dtype)
    check_rate("--rate", rate)
    length = seconds(duration, option="--duration", least=_SHORTEST_S)
    target = None if slo is None else checked("--slo", SLO.parse, slo)
    own_classes = request_classes(classes or ())
    if workload is not None:
        parsed = checked("--workload", parse_workload, workload)
        check_rate("--workload: rate", named_rate(parsed) if rate is None else None)
        check_classes(own_classes, parsed)
    if controller is not None:
        checked("--controller", find, controller)
    if out is not None:
        plotting.check(out)
        replaceable("--out", out, is_page, "is no page of autotune's")
    given = None if profile is None else _profile(profile)
    if given is not None and given.own_slo is None and target is None:
        raise InputError(
            f"--slo: {profile} was made without an SLO (objective mean-e2e); add one, as ttft=500ms,tpot=50ms"
        )
    aim = given.slo if target is None and given is not None else target  # None: a calibration's, which has a TTFT
    if reject_late and aim is not None and aim.ttft_ms is aim.e2e_ms is None:
        raise InputError("--reject-late needs to know what is late: add a TTFT, as in --slo ttft=500ms,tpot=50ms")
    by, arguments = engine_of(given, engine, engine_args, without={"kv_cache_dtype"} if kv_cache_dtype else ())
    stored = kv_cache_dtype or "auto"
    if kv_cache_dtype is None and given is not None:
        stored = profiled("kv_cache_dtype", given, arguments, "with --kv-cache-dtype auto that of --engine-arg holds")
    if workload is None:
        spec = "azure-conv" if given is None else given.workload.spec
        check_classes(own_classes, checked("", parse_workload, spec))
    with_classes = tuple(own_classes) or (() if given is None else given.classes)

    def compared(limits: KnobLimits, stock: Knobs) -> list[Contender]:
        contenders = [defaults(limits, stock), controlled(limits, stock=stock, controller=controller)]
        if reject_late:
            contenders += [contender.rejecting() for contender in contenders]
        if given is not None:
            same = model is None or model == given.model.name  # steps of another model say nothing
            contenders += [
                at(limits.clamp(given.knobs), "profile"),
                controlled(limits, given.knobs, controller=controller, profile=given if same else None),
            ]
        contenders += [checked("--fixed", lambda text: parse_fixed(text, limits, stock), text) for text in fixed or ()]
        names = [c.name for c in contenders]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"--fixed: {twice} is compared already")
        return contenders

    chosen = engine_named(by)
    compared(WIDEST if chosen.limits is None else chosen.limits, VLLM_DEFAULTS)  # complain before the model is loaded

    console = make_console(stderr=as_json)
    named = model_named(chosen, model or (None if given is None else given.model.name))
    print_as_is(console, loading(named or "PyTorch", chosen.label), "dim")
    with end_on_interrupt():
        kind = device_kind(cpu, gpu)
        found = machine(gpu=kind == "gpu")
        check_dtype(chosen, dtype)
        with profiled_kv_cache_dtype(kv_cache_dtype):
            source = load(
                by, model_for(chosen, named, found), dtype=dtype, device="cuda" if kind == "gpu" else "cpu", seed=seed,
                kv_cache_dtype=stored, arguments=arguments,
            )  # fmt: skip
    with stop_on_interrupt() as stop:
        limits = source.limits
        contenders = compared(limits, source.stock)
        print_as_is(console, heading(source.model.name, found, requested=cpu or gpu))
        others = [] if given is None else [
            measured_elsewhere(given.machine, gpu=kind == "gpu"),
            measured_with_another(given.model, source.model.name),
            measured_on_another(given.engine, source.name, source.version),
            stored_otherwise(given.model, source.model.kv_cache_dtype),
        ]  # fmt: skip
        for line in [*source.introduction, *(f"note: {other}" for other in others if other)]:
            print_as_is(console, line, "dim")
        tokens = source.default_kv_tokens()
        if tokens is not None:
            source = source.with_kv_tokens(tokens)
        if with_classes:
            source = source.with_classes(with_classes)
        with running(source.start(limits=limits, seed=seed)) as live:
            if given is not None and (ladder := recorded_otherwise(given, live.facts.graphs, live.limits)):
                print_as_is(console, f"note: {ladder}", "dim")
            run = _Run(
                live, model_facts(source.model, seed), contenders, length, rounds, seed, console, stop, controller
            )
            found_load = run.load(workload, target, rate, given, with_classes)
            if found_load is not None:
                check_lasts(found_load.workload, seed, rounds, length)
                found_load = found_load.planned(seed, rounds, length)
                run.measure(found_load)
        return _finish(run, found_load, out, as_json)


class _Run:
    """One command's measurements, and what it says meanwhile."""

    def __init__(
        self,
        engine: Engine,
        facts: ModelFacts,
        contenders: list[Contender],
        duration: float,
        rounds: int,
        seed: int,
        console: Console,
        stop: Any,
        controller: str | None = None,
    ) -> None:
        self.controller = controller
        self.engine, self.facts, self.contenders = engine, facts, contenders
        self.duration, self.rounds, self.seed = duration, rounds, seed
        self.console, self.stop = console, stop
        self.crowding: str | None = None
        """That other programs were busy while turns were measured, if so."""
        self.results: list[Result] = []
        self.failures: list[Failure] = []

    @property
    def planned(self) -> int:
        """Turns, of all contenders."""
        return self.rounds * len(self.contenders)

    def load(
        self, spec: str | None, slo: Any, rate: float | None, profile: Profile | None, classes: Sequence[RequestClass]
    ) -> BenchLoad | None:
        """The load; None when stopped before it was known."""
        from autotune.bench import loads
        from autotune.measure.evaluate import Interrupted

        if profile is not None:
            return loads.of_profile(self.engine, self.facts, profile, spec, slo, rate, classes)
        display = self._display()
        display.stage("calibrating")
        try:
            return loads.calibrated(
                self.engine,
                self.facts,
                spec or "azure-conv",
                slo,
                rate,
                self.seed,
                duration=self.duration,
                rounds=self.rounds,
                stop=self.stop.is_set,
                advance=lambda share, note: display.progress(share, "", note, None),
                classes=classes,
            )
        except Interrupted:
            return None
        finally:
            display.stage_done("", "")
            display.close()

    def measure(self, load: BenchLoad) -> None:
        from autotune.bench import Failure, measure, turns
        from autotune.cli.display import print_as_is
        from autotune.profile.fingerprint import OtherWork
        from autotune.profiling.warnings import crowding
        from runtime.slo import in_percent

        planned = turns(self.contenders, self.rounds, self.seed)
        print_as_is(self.console, self._head(load))
        display = self._display()
        display.stage("measuring")
        begun, done, work = time.monotonic(), 0, OtherWork()
        options: dict[str, Any] = {
            "vocab_size": self.facts.vocab_size,
            "duration": self.duration,
            "stop": self.stop.is_set,
        }
        options["classes"] = load.classes
        try:
            self._say(display, done, planned, begun, "")
            for found in measure(self.engine, planned, load.workload, load.slo, **options):
                done += 1
                name = f"round {found.turn.round + 1} {found.turn.contender.name}"
                if isinstance(found, Failure):
                    self.failures.append(found)
                    display.note(f"{name} could not be measured: {found.cause}")
                else:
                    self.results.append(found)
                    what = "weighted attainment" if load.classes else "attainment"
                    name += f": {in_percent(found.score.weighted_attainment, 0)} {what}"
                self._say(display, done, planned, begun, name)
            display.stage_done(f"{done}/{len(planned)}", "")
        finally:
            self.crowding = crowding(work.cores())
            display.close()

    @property
    def warnings(self) -> list[str]:
        """What makes the figures worth less."""
        return [] if self.crowding is None else [self.crowding]

    def compare(self, load: BenchLoad) -> tuple[PairedComparison, bool]:
        """What was measured, compared, and whether Ctrl-C said to leave the intervals out."""
        from autotune.bench import PairedComparison
        from autotune.cli.interrupt import stop_on_interrupt

        found = PairedComparison(self.results, self.duration, repeated=load.repeated)
        display = self._display()
        display.stage("comparing")
        try:
            with stop_on_interrupt() as stop:
                total = len(found.contenders)
                for done, contender in enumerate(found.contenders):
                    display.progress(done / total, f"{done}/{total}", contender.name, None)
                    found.summary(contender)
                    found.difference(contender, self.contenders[0])
                    if stop.is_set():
                        break
            display.stage_done("", "")
        finally:
            display.close()
        if stop.is_set():
            found = PairedComparison(self.results, self.duration, repeated=load.repeated, intervals=False)
        return found, stop.is_set()

    def _say(self, display: Display, done: int, planned: list[Any], begun: float, note: str) -> None:
        each = (time.monotonic() - begun) / done if done else self.duration + 1
        display.progress(done / len(planned), f"{done}/{len(planned)}", note, each * (len(planned) - done))

    def _display(self) -> Display:
        from autotune.cli.display import Display

        return Display(self.console)

    def _head(self, load: BenchLoad) -> str:
        from autotune.workload import length_scale_in_words

        scaled = length_scale_in_words(load.workload)
        lengths = f", {scaled}" if scaled else ""
        classes = "".join(f"class {one}\n" for one in load.classes)
        why = {"given": "", "default": " (default)"}.get(load.slo_from, f" ({load.slo_from})")
        rate = load.at("" if load.rate_from == "given" else f" ({load.rate_from})")
        return (
            f"model {self.facts.name} ({self.facts.dtypes}) · workload {load.spec}{lengths} · {rate}\n"
            f"SLO {load.slo}{why}\n{classes}"
            f"{self.rounds} round{'' if self.rounds == 1 else 's'} of {', '.join(c.name for c in self.contenders)}; "
            f"{self.duration:g} s a turn"
            + (f"; control is {self.controller}" if self.controller else "")
            + (f"\nwarning: {load.cuts}" if load.cuts else "")
        )


def _finish(run: _Run, load: BenchLoad | None, out: Path | None, as_json: bool) -> int:
    from autotune.bench import plotting
    from autotune.bench.table import show
    from autotune.report.wording import sentence
    from autotune.writing import write_whole

    stopped = run.stop.is_set()
    if load is None or not run.results:
        run.console.print("stopped before the first turn was done" if stopped else "nothing could be measured")
        return INTERRUPTED if stopped else FELL_SHORT
    comparison, hurried = run.compare(load)
    stopped = stopped or hurried
    baseline = run.contenders[0]
    show(comparison, load.slo, run.console, baseline=baseline, classes=load.classes, notes=load.notes)
    for warning in run.warnings:
        run.console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    if as_json:  # ahead of the page, which a disk may not take
        print(json.dumps(_shape(run, load, comparison, baseline, stopped)))
    if out is not None:
        judged = "the SLO of each class" if load.classes else f"SLO {load.slo}"
        title = f"{run.facts.name}, {load.spec} at {load.at()}, {judged}"
        notes = [sentence(text) for text in (*load.notes, *run.warnings)]
        write_whole(out, plotting.render(comparison, load.slo, title, classes=load.classes, notes=notes))
        run.console.print(f"plot  {out}", markup=False, highlight=False)
    if stopped or len(run.results) < run.planned:
        measured = f"{len(run.results)} of {run.planned} turns were measured"
        run.console.print(f"stopped; {measured}" if stopped else measured, highlight=False)
    return INTERRUPTED if stopped else DONE if len(run.results) == run.planned else FELL_SHORT


def _shape(
    run: _Run, load: BenchLoad, comparison: PairedComparison, baseline: Contender, stopped: bool
) -> dict[str, Any]:
    from autotune.workload import length_scale_as_data

    others = [c for c in comparison.contenders if c != baseline]
    differences = [comparison.difference(c, baseline) for c in others]
    return {
        "status": "complete" if len(run.results) == run.planned and not stopped else "stopped",
        "planned": run.planned,
        "failures": [
            {"contender": f.turn.contender.name, "round": f.turn.round, "cause": f.cause} for f in run.failures
        ],
        "model": run.facts.model_dump(mode="json"),
        "workload": load.spec,
        **length_scale_as_data(load.workload),
        "rate": load.workload.rate,
        "offered_rate": load.offered_rate,
        "cap_prompt": load.workload.cap_prompt,
        "cap_output": load.workload.cap_output,
        "warnings": [*([load.cuts] if load.cuts else []), *run.warnings],
        "slo": str(load.slo),
        "classes": [str(one) for one in load.classes],
        "controller": run.controller or "predictive",
        "duration_s": run.duration,
        "repeated": load.repeated,
        "seed": run.seed,
        "contenders": [comparison.summary(c).as_dict() for c in comparison.contenders],
        "differences": [d.as_dict() for d in differences if d is not None],
        "turns": [
            {
                "contender": r.turn.contender.name,
                "round": r.turn.round,
                "weighted_attainment": r.score.weighted_attainment,
                "score": r.score.model_dump(mode="json"),
            }
            for r in run.results
        ],
    }


def _profile(name: str) -> Profile:
    from autotune.profile import find_profile, load_profile

    return load_profile(find_profile(name))
