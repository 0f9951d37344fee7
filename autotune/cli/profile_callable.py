"""``autotune profile --callable``: wiring only; the work is in autotune/profiling."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from autotune.cli.exits import DONE, FELL_SHORT, INTERRUPTED
from autotune.cli.options import check_rate, checked, given_options, seconds
from runtime.errors import InputError
from runtime.slo import SLO

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.profile import Machine
    from autotune.profiling.callable import CallableQuestion
    from autotune.profiling.study import SweepStudy
    from autotune.profiling.subject import Subject

DEFAULT_BUDGET = "60s"
SHORTEST_BUDGET_S = 3.0
MOST_RATE = 20_000.0
MOST_ITEMS = 4096
MOST_REPLICAS = 64
ALSO = {
    "callable_name",
    "inputs",
    "cost",
    "strategy",
    "most",
    "replicas",
    "slo",
    "rate",
    "budget",
    "out",
    "seed",
    "fresh",
    "as_json",
}
"""The options of ``autotune profile`` that mean something for a callable."""
ONLY = ("inputs", "cost", "strategy", "most", "replicas")
"""Those that mean nothing without ``--callable``."""


def refuse(context: Any, *, callable_given: bool) -> None:
    """Raises :class:`InputError` for an option that belongs to the other kind of profile."""
    for option, name in given_options(context).items():
        if callable_given and name not in ALSO:
            raise InputError(f"{option} is given; it says nothing about a callable, leave it out with --callable")
        if not callable_given and name in ONLY:
            raise InputError(f"{option} is given without --callable; add --callable package.module:function")


def profile_callable(
    name: str,
    *,
    inputs: Path | None,
    cost: str | None,
    strategy: str | None,
    most: int | None,
    replicas: int,
    slo: str | None,
    rate: float | None,
    budget: str | None,
    out: Path | None,
    seed: int,
    fresh: bool,
    as_json: bool,
    arguments: list[str],
) -> int:
    """Profile the callable; 0, or 1 if the SLO is missed, or 130 if stopped."""
    from autotune.cli.display import make_console
    from autotune.cli.interrupt import end_on_interrupt, stop_on_interrupt
    from autotune.cli.output import stdout_alone
    from autotune.measure.evaluate import EvaluationError
    from autotune.profile.text import is_profile
    from autotune.profiling.callable import identity
    from autotune.profiling.calls import FunctionFailed
    from autotune.profiling.storage import check_system
    from autotune.profiling.study import open_study
    from autotune.profiling.subject import load_subject
    from autotune.writing import replaceable, writable

    check_system()
    question = _question(strategy, most, replicas, slo, rate, budget, seed)
    if inputs is None:
        raise InputError("--inputs is missing; name a file with one JSON value a line, an input of the callable each")
    place = out or Path(re.sub(r"[^A-Za-z0-9._-]+", "-", name.rpartition(":")[2] or "callable") + ".yaml")
    if place.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out: {place} must end in .yaml")
    journal = place.with_suffix(".journal")
    for path in (place, journal):
        writable("--out", path)
    replaceable("--out", place, is_profile, "is no profile")
    console = make_console(stderr=as_json)
    with stdout_alone(as_json) as stdout:
        with end_on_interrupt():
            subject = load_subject(name, inputs, cost)
        command = shlex.join(["autotune", *arguments])
        about = identity(subject, question, inputs, _machine(used=False), replicas=replicas)
        with stop_on_interrupt() as stop, open_study(journal, about, fresh=fresh) as study:
            code = None
            json_to = stdout if as_json else None
            try:
                code = _sweep(subject, replicas, question, study, place, command, console, stop.is_set, json_to)
            except (FunctionFailed, EvaluationError):  # it, or its inputs, will be others next time
                code = FELL_SHORT
                raise
            finally:  # kept is what a run that was stopped, or died, can be gone on with
                if code in (DONE, FELL_SHORT) or not study.measurements.results():
                    journal.unlink(missing_ok=True)
            return code


def _sweep(
    subject: Subject,
    replicas: int,
    question: CallableQuestion,
    study: SweepStudy,
    place: Path,
    command: str,
    console: Console,
    stop: Callable[[], bool],
    json_to: TextIO | None,
) -> int:
    """Work on the study, write what was found, and say how it went; the exit code. ``json_to``: for the profile as JSON."""
    from autotune.cli.display import Display, print_as_is
    from autotune.cli.profile_output import left_alone, unmeasured_beside
    from autotune.profile.callable import CallableProfile, save_callable_profile
    from autotune.profile.fingerprint import software
    from autotune.profiling.assemble import assemble, of_callable
    from autotune.profiling.callable import CallableSession, CallableTarget
    from autotune.report.callable_table import show

    display = Display(console)
    display.note(f"{subject.name} · {len(subject.inputs)} inputs of {subject.inputs_name}")
    try:
        found = CallableSession(CallableTarget(subject, replicas), question, study, display, stop=stop).run()
    finally:
        display.close()
    if not found.simulated and not found.runs:
        console.print(
            f"stopped before the first setting was tried; nothing written to {place}. Run the same command to go on.",
            highlight=False,
            markup=False,
        )
        return INTERRUPTED
    made = assemble(
        CallableProfile,
        found,
        of_callable(found, question, subject),
        name=place.stem,
        command=command,
        machine=_machine(used=True),
        software=software(),
    )
    if found.stopped and unmeasured_beside(place, made):
        if json_to is not None:
            print(json.dumps({"file": str(place), "status": made.status}), file=json_to)
        print_as_is(console, left_alone(place))
        return INTERRUPTED
    save_callable_profile(made, place)
    if json_to is not None:
        shape = {"file": str(place), "status": made.status, "slo_met": made.slo_met}
        print(json.dumps(shape | {"profile": made.model_dump(mode="json")}), file=json_to)
    console.print()
    show(made, console)
    if found.stopped:
        stopped = f"stopped; best so far written to {place}. Run the same command to go on."
        print_as_is(console, stopped)
        return INTERRUPTED
    for line in (
        f"\nprofile  {place}",
        f"next     autotune.load_callable_profile({str(place)!r}).options  what Batcher(fn, **options) is given",
        f"         autotune.control(batcher, profile={str(place)!r})        start a live batcher from it",
        f"         autotune export {shlex.quote(str(place))} --to triton{'' if made.inputs.cost is None else ' --allow-lossy'}"
        "        take it along, or --to ray-serve",
    ):
        print_as_is(console, line)
    return DONE if made.slo_met else FELL_SHORT


def _machine(*, used: bool) -> Machine:
    """This one, with the GPU that PyTorch sees where the function has brought that along; ``used``: only if it was put to use."""
    from autotune.profile.fingerprint import machine

    cuda = torch.cuda if (torch := sys.modules.get("torch")) is not None else None
    return machine(gpu=cuda is not None and (cuda.is_initialized() if used else cuda.is_available()))


def _question(
    strategy: str | None,
    most: int | None,
    replicas: int,
    slo: str | None,
    rate: float | None,
    budget: str | None,
    seed: int,
) -> CallableQuestion:
    from autotune.profiling.batcher_space import STRATEGIES, BatcherSpace
    from autotune.profiling.callable import ITEMS
    from autotune.profiling.findings import Question

    if strategy is not None and strategy not in STRATEGIES:
        raise InputError(f"--strategy is {strategy}; it must be {' or '.join(STRATEGIES)}")
    if most is not None and not 1 <= most <= MOST_ITEMS:
        raise InputError(f"--most is {most}; it must be between 1 and {MOST_ITEMS} items")
    if not 1 <= replicas <= MOST_REPLICAS:
        raise InputError(f"--replicas is {replicas}; it must be between 1 and {MOST_REPLICAS} workers")
    check_rate("--rate", rate, most=MOST_RATE, of="items")
    target = None
    if slo is not None:
        target = checked("--slo", SLO.parse, slo)
        others = [name for name, ms in target.targets_ms.items() if ms is not None and name != "e2e"]
        if target.e2e_ms is None or others:
            raise InputError(f"--slo is {slo}; the SLO of a callable has e2e alone, such as e2e=200ms@99%")
    return Question(
        workload=ITEMS,
        slo=target,
        rate=rate,
        seed=seed,
        trials=None,
        budget_s=seconds(budget or DEFAULT_BUDGET, least=SHORTEST_BUDGET_S),
        space=BatcherSpace(tuple(s for s in STRATEGIES if strategy in (None, s)), most),
    )
