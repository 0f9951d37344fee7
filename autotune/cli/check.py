"""``autotune check``: is a profile still true on this machine? Wiring only; the work is in autotune/profiling/check.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from autotune.cli.exits import DONE, FELL_SHORT, INTERRUPTED
from autotune.cli.options import (
    AsJsonOfARun,
    EngineArguments,
    ProfileArgument,
    engine_of,
    profiled,
    profiled_kv_cache_dtype,
    seconds,
)
from autotune.engines.named import DEFAULT, either, label, load, named
from runtime.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.profile import ModelFacts, Profile
    from autotune.profile.callable import CallableProfile
    from autotune.profiling.check import Check

HELP = (
    "Check that a profile still fits this machine: measure a few steps again (for a callable's profile: calls), and compare "
    "their times. Exit code 0: the profile fits; 1: the profile is stale, or the machine is too noisy to tell."
)
EXAMPLES = (
    "Examples:  autotune check cpu-2core-tiny  ·  autotune check mine.yaml --budget 30s --threshold 5% --json"
    "  ·  autotune check embed.yaml --inputs texts.jsonl"
)


def check(
    profile: ProfileArgument,
    budget: Annotated[
        str,
        Option(help="Time for measuring; warming up takes half as much again, loading the model comes on top."),
    ] = "10s",
    threshold: Annotated[
        str,
        Option(
            help="How much slower or faster steps may be. A threshold below the measurement noise cannot be checked."
        ),
    ] = "10%",
    model: Annotated[
        str | None,
        Option(help="The profile's model on this machine: a directory or hub id.  (default: as in the profile)"),
    ] = None,
    engine: Annotated[str | None, Option(help=f"{either()}.  (default: the profile's)")] = None,
    engine_args: EngineArguments = None,
    inputs: Annotated[
        Path | None, Option(help="For a callable's profile: the inputs, a file with one JSON value per line.")
    ] = None,
    anyway: Annotated[
        bool, Option("--anyway", help="Check even if the profile was measured on another machine or engine.")
    ] = False,
    as_json: AsJsonOfARun = False,
) -> int:
    """Compare this machine with the profile."""
    from autotune.cli.display import make_console, print_as_is
    from autotune.cli.output import stdout_alone
    from autotune.cli.target import loading
    from autotune.measure.evaluate import Interrupted
    from autotune.profile import find_profile
    from autotune.profile.callable import CallableProfile, load_either
    from autotune.profile.fingerprint import gpu_available, measured_elsewhere, software

    path = find_profile(profile)
    loaded = load_either(path)
    of_callable = isinstance(loaded, CallableProfile)
    of_a_model = {"--model": model, "--engine": engine, "--engine-arg": engine_args or None}
    for option, value in (of_a_model if of_callable else {"--inputs": inputs}).items():
        if value is not None:
            other = "callable" if of_callable else "language model"
            raise InputError(f"{option} is given; it says nothing about a {other}, and {path} is the profile of one")
    budget_s, most = seconds(budget, least=1.0), share(threshold)
    by, arguments = DEFAULT, dict[str, str]()
    if not isinstance(loaded, CallableProfile):
        if loaded.cost_model is None:
            raise InputError(f"{path}: holds no cost model to compare with; profile again: {loaded.command}")
        by, arguments = engine_of(loaded, engine, engine_args)
        if by != named(loaded.engine.name) and not anyway:
            raise InputError(
                f"profile was measured on {loaded.engine}, not on {by}; pass --anyway to check it all the same"
            )
    console = make_console(stderr=as_json)
    subject = loaded.function if isinstance(loaded, CallableProfile) else model or loaded.model.name
    print_as_is(console, loading(subject, label(by)), "dim")
    gpu = loaded.machine.kind == "gpu" and gpu_available()
    elsewhere = measured_elsewhere(loaded.machine, gpu=gpu)
    if elsewhere and not anyway:
        raise InputError(f"{elsewhere}; pass --anyway to check it all the same")
    changed = loaded.software.differences(software())
    warnings, warning = ((), "") if isinstance(loaded, CallableProfile) else (loaded.warnings, loaded.warning)
    notes = [*(f"note: {text}" for text in (elsewhere, ", ".join(changed)) if text), *([warning] if warning else [])]
    of_engine = list[str]()
    try:
        if isinstance(loaded, CallableProfile):
            with stdout_alone(as_json):
                found = _calls(loaded, path, inputs, budget_s, most, console)
        else:
            found = _measured(loaded, by, arguments, model, gpu, budget_s, most, console, of_engine)
    except Interrupted:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(f"{path}: {error}") from None
    if as_json:
        print(
            json.dumps(
                {
                    "file": str(path),
                    **found.as_dict(),
                    "elsewhere": elsewhere,
                    "software": changed,
                    "engine": of_engine,
                    "warnings": list(warnings),
                }
            )
        )
    else:
        for note in [*notes, *(f"note: {text}" for text in of_engine)]:
            print_as_is(console, note)
        _show(found, console)
    return DONE if found.verdict == "fits" else FELL_SHORT


def _calls(
    profile: CallableProfile,
    path: Path,
    inputs: Path | None,
    budget_s: float,
    threshold: float,
    console: Console,
) -> Check:
    """Import the profile's function, and time it with ``inputs``."""
    from autotune.cli.display import Display
    from autotune.cli.interrupt import end_on_interrupt, stop_on_interrupt
    from autotune.profile.fingerprint import OtherWork
    from autotune.profiling.check import check_calls
    from autotune.profiling.subject import load_subject

    if inputs is None:
        raise InputError(
            f"{path}: is the profile of a callable ({profile.function!r}), and --inputs is missing; name the file with its "
            f"inputs, {profile.inputs.file} at the time"
        )
    with end_on_interrupt():
        subject = load_subject(profile.function, inputs, profile.inputs.cost)
    display, work = Display(console), OtherWork()
    with stop_on_interrupt() as stop:
        display.stage("checking")
        try:
            found = check_calls(
                profile,
                subject,
                budget_s=budget_s,
                threshold=threshold,
                stop=stop.is_set,
                advance=lambda share, note: display.progress(share, note, "", None),
                taken=lambda: work.taken(profile.machine.threads or 1),
            )
            display.stage_done(f"{found.rounds} rounds", "")
        finally:
            display.close()
    return found


def _measured(
    profile: Profile,
    by: str,
    arguments: Mapping[str, str],
    model: str | None,
    gpu: bool,
    budget_s: float,
    threshold: float,
    console: Console,
    differs: list[str],
) -> Check:
    """Load the profile's model, start its engine, or the one it is to be held against, and compare. How the engine is another
    than the profile's is appended to ``differs``."""
    from autotune.cli.display import Display
    from autotune.cli.interrupt import end_on_interrupt, stop_on_interrupt
    from autotune.cli.target import model_facts, running
    from autotune.profile.fingerprint import OtherWork, measured_on_another, recorded_otherwise
    from autotune.profiling.check import check_steps

    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()  # of loading weights: control characters in a log
    facts, then = profile.engine, profile.model
    instead = "check it as it was measured, or profile again"
    dtype = profiled("dtype", profile, arguments, instead)
    kv_cache_dtype = profiled("kv_cache_dtype", profile, arguments, instead)
    assert profile.cost_model is not None
    again = "check it as it was measured, or profile again with --kv-cache-dtype auto"
    with end_on_interrupt(), profiled_kv_cache_dtype(None, again):
        source = load(
            by,
            model or then.name,
            dtype=dtype,
            device="cuda" if gpu else "cpu",
            seed=then.seed or 0,
            max_model_len=then.max_model_len,
            kv_cache_dtype=kv_cache_dtype,
            arguments=arguments,
        )
    if other := measured_on_another(facts, source.name, source.version):
        differs.append(other)
    here = model_facts(source.model, then.seed or 0)
    _same_model(then, here)
    pool, threads = facts.kv_pool, profile.machine.threads
    if source.name == facts.name:
        source = source.as_profiled(pool.tokens, facts.block_size_given, facts.prefix_cache, threads)
    else:
        source = source.with_kv_tokens(pool.tokens)
    display, work = Display(console), OtherWork()
    needs = 1 if gpu else threads or 1
    with stop_on_interrupt() as stop, running(source.start(limits=facts.limits, seed=profile.seed)) as engine:
        if ladder := recorded_otherwise(profile, engine.facts.graphs, engine.limits):
            differs.append(ladder)
        display.stage("checking")
        try:
            found = check_steps(
                engine,
                here,
                profile.cost_model,
                budget_s=budget_s,
                threshold=threshold,
                seed=profile.seed,
                stop=stop.is_set,
                advance=lambda share, note: display.progress(share, note, "", None),
                taken=lambda: work.taken(needs),
            )
            display.stage_done(f"{found.rounds} rounds", "")
        finally:
            display.close()
    return found


def _same_model(then: ModelFacts, now: ModelFacts) -> None:
    """Raise :class:`InputError` if what was loaded is another model than the profile's."""
    for name in ("architecture", "parameters", "dtype", "vocab_size", "kv_bytes_per_token"):
        before, here = getattr(then, name), getattr(now, name)
        if before != here:
            raise InputError(
                f"model {now.name}: {name} is {here}; the profile's model has {before}: it is another one (--model says where "
                "the profile's is)"
            )


def _show(found: Check, console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in (f"{found.kind}s", "measured", "profile says", "difference", "±", ""):
        table.add_column(title, justify="left" if title in ("steps", "calls", "") else "right", no_wrap=True)
    words = {"fits": "fits", "stale": "stale", "unclear": "cannot tell"}
    for r in found.regions:
        times = (f"{r.measured_ms:.3g} ms", f"{r.predicted_ms:.3g} ms")
        name = r.region if r.noun == "steps" else f"{r.region} {r.noun}"
        table.add_row(name, *times, f"{r.difference:+.0%}", f"{r.uncertainty:.0%}", words[r.verdict])
    console.print(table)
    print(found.sentence)


def share(text: str) -> float:
    """``10%`` or ``0.1``. Raises :class:`InputError`."""
    stripped = text.strip()
    try:
        value = float(stripped.removesuffix("%")) / (100 if stripped.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise InputError(f'--threshold: "{text}" is not a share; it must be above 0% and below 100%, like 10% or 0.1')
    return value
