"""``autotune profile``: from nothing to a YAML profile on this machine. Wiring only; the work is in autotune/profiling."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from autotune.cli.options import (
    WORKLOADS,
    Classes,
    Cpu,
    Dtype,
    EngineArguments,
    Gpu,
    KvCacheDtype,
    check_classes,
    check_device,
    check_kv_cache_dtype,
    check_rate,
    checked,
    request_classes,
    seconds,
)
from autotune.cli.profile_callable import DEFAULT_BUDGET as CALLABLE_BUDGET
from autotune.engines.named import DEFAULT, check_engine, choices, engine_named, load
from runtime.errors import InputError

if TYPE_CHECKING:
    from autotune.engines import Engine
    from autotune.profile.parts import ObjectiveName
    from autotune.profiling.findings import Findings

HELP = (
    "Measure this machine: find the knob settings that serve the most requests within the SLO, and write the settings to a "
    "profile. Exit code 1: the SLO was not met, or nothing could be measured."
)
EXAMPLES = (
    "Examples:  autotune profile  ·  "
    "autotune profile --model ./my-model --slo ttft=500ms,tpot=50ms --workload azure-code --budget 10m --out mine.yaml"
)
DEFAULT_BUDGET, GPU_BUDGET = "3m", "8m"
"""A GPU serves requests of their full length, some 200 of which a window must hold: minutes, where a CPU's are shortened."""

_DEFAULT_WORKERS = 8
_MOST_WORKERS = 256


def profile(
    context: Context,
    engine: Annotated[str, Option(help=f"{choices()}.")] = DEFAULT,
    engine_args: EngineArguments = None,
    cpu: Cpu = False,
    gpu: Gpu = False,
    model: Annotated[
        str | None,
        Option(
            help="A preset (nano, tiny, qwen3-0.6b, llama-3.1-8b, …), a directory, or a hub id.  "
            "(default: a preset that suits the machine)"
        ),
    ] = None,
    workload: Annotated[
        str,
        Option(help=WORKLOADS),
    ] = "azure-conv",
    slo: Annotated[
        str | None,
        Option(
            help="The SLO.  (default: ttft=500ms,tpot=50ms@99%; on a machine too slow for that, both times a round factor "
            "longer; with --callable, e2e of ten times a call of one item, at least 20ms)"
        ),
    ] = None,
    classes: Classes = None,
    objective: Annotated[
        str,
        Option(help="goodput: most requests/s within the SLO; mean-e2e: no SLO, lowest mean E2E at --rate."),
    ] = "goodput",
    sim_trials: Annotated[
        int | None, Option(help="How many settings to simulate. Takes at most a fifth of the budget.  (default: 240)")
    ] = None,
    trials: Annotated[
        int | None,
        Option(
            help="How many settings to measure on the hardware. With --trials alone, without --budget, there is no time limit."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        Option(
            help=f"Time for everything after loading the model, such as 90s.  (default: {DEFAULT_BUDGET}, {GPU_BUDGET} on a GPU; "
            f"{CALLABLE_BUDGET} with --callable)"
        ),
    ] = None,
    pin: Annotated[
        list[str] | None, Option(help="Fix a knob instead of searching it: token_budget=512. Repeatable.")
    ] = None,
    ranges: Annotated[
        list[str] | None, Option("--range", help="Search a knob only within a range: token_budget=64:2048. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None,
        Option(
            "--out",
            "-o",
            help="The profile to write.  (default: MODEL-cpu.yaml or MODEL-gpu.yaml; with --callable, FUNCTION.yaml)",
        ),
    ] = None,
    seed: Annotated[int, Option(min=0, max=2**31, help="Seed of the load, the search and random weights.")] = 0,
    rate: Annotated[
        float | None,
        Option(
            help="Requests/s at which to compare settings.  (default: the rate or time in --workload, else about what the best "
            "setting can serve; with --callable in items/s, about 0.8 of what calls of half the SLO can serve)"
        ),
    ] = None,
    price: Annotated[
        str | None,
        Option(help="Price of this machine, in any currency: 2.50/h. Adds the cost per million output tokens."),
    ] = None,
    workers: Annotated[
        int | None,
        Option(
            help="Processes that simulate, up to 8 at a time. The number does not change the result.  (default: half as many as "
            "there are cores)"
        ),
    ] = None,
    storage: Annotated[
        str | None,
        Option(
            envvar="AUTOTUNE_STORAGE",
            help="A database, to share the study with other machines: postgresql+psycopg://USER@HOST/DATABASE.",
        ),
    ] = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: KvCacheDtype = "auto",
    study: Annotated[
        Path | None,
        Option(help="Journal file of the study; with --storage, the study's name there.  (default: beside --out)"),
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="Discard an earlier study instead of resuming it.")] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print only one JSON object, the profile; progress goes to stderr.")
    ] = False,
    callable_name: Annotated[
        str | None,
        Option(
            "--callable",
            metavar="MODULE:FUNCTION",
            help="Instead of a language model, profile a Python function that takes a list, for the Batcher.",
        ),
    ] = None,
    inputs: Annotated[
        Path | None, Option(help="With --callable: the function's inputs, a file with one JSON value per line.")
    ] = None,
    cost: Annotated[
        str | None,
        Option(help="With --callable: the cost of an input: len, or MODULE:FUNCTION.  (default: 1 for every input)"),
    ] = None,
    strategy: Annotated[
        str | None, Option(help="With --callable: the batching strategy to try, adaptive or dynamic.  (default: both)")
    ] = None,
    most: Annotated[
        int | None, Option(help="With --callable: most items in one call.  (default: no bound; 256 in the calibration)")
    ] = None,
    replicas: Annotated[int, Option(help="With --callable: workers that call the function in parallel.")] = 1,
) -> int:
    """Profile the machine; the exit code says whether the SLO can be met."""
    from autotune.cli.profile_callable import profile_callable, refuse

    refuse(context, callable_given=callable_name is not None)
    if callable_name is not None:
        return profile_callable(
            callable_name, inputs=inputs, cost=cost, strategy=strategy, most=most, replicas=replicas, slo=slo, rate=rate,
            budget=budget, out=out, seed=seed, fresh=fresh, as_json=as_json, arguments=context.obj,
        )  # fmt: skip
    from autotune.cli.display import make_console, print_as_is
    from autotune.cli.interrupt import end_on_interrupt, stop_on_interrupt
    from autotune.cli.profile_output import Files, finish
    from autotune.cli.profile_study import Requested, stem, work
    from autotune.cli.target import (
        check_dtype,
        device_kind,
        heading,
        loading,
        model_facts,
        model_for,
        model_named,
        with_threads,
    )
    from autotune.cost.price import parse_price
    from autotune.profile.fingerprint import machine, usable_cores
    from autotune.profiling.findings import SIM_TRIALS, Question
    from autotune.profiling.space import WIDEST, make_space
    from autotune.profiling.storage import SharedStorage, check_system, without_passwords
    from autotune.workload import named_rate, parse_workload
    from runtime.slo import SLO

    check_system()
    check_device(cpu, gpu)
    check_kv_cache_dtype(kv_cache_dtype)
    if trials is not None and trials < 1:
        raise InputError(f"--trials is {trials}; it must be at least 1")
    if sim_trials is not None and sim_trials < 1:
        raise InputError(f"--sim-trials is {sim_trials}; it must be at least 1")
    if workers is None:
        workers = max(1, min(_DEFAULT_WORKERS, usable_cores() // 2))
    if not 1 <= workers <= _MOST_WORKERS:
        raise InputError(f"--workers is {workers}; it must be between 1 and {_MOST_WORKERS}")
    check_rate("--rate", rate)
    parsed = checked("--workload", parse_workload, workload)
    if rate is None:
        rate = named_rate(parsed)
        check_rate("--workload: rate", rate)
    aim = _objective(objective, rate, {"--slo": slo, "--class": classes})
    arguments = check_engine(engine, engine_args or ())
    chosen = engine_named(engine)
    model = model_named(chosen, model)
    question = Question(
        workload=parsed,
        slo=None if slo is None else checked("--slo", SLO.parse, slo),
        rate=rate,
        seed=seed,
        trials=trials,
        budget_s=seconds(budget or DEFAULT_BUDGET) if budget is not None or trials is None else None,
        space=make_space(WIDEST if chosen.limits is None else chosen.limits, pin or (), ranges or ()),
        sim_trials=SIM_TRIALS if sim_trials is None else sim_trials,
        workers=workers,
        classes=tuple(request_classes(classes or ())),
        objective=aim,
    )
    check_classes(question.classes, question.workload)
    if "draft_tokens" in question.space.ranges and not question.workload.may_draft:
        raise InputError(
            "--range: draft_tokens is searched in simulation, and the workload does not say how often a draft is right; "
            "write --workload azure-conv:acceptance=0.6, say, or --pin draft_tokens"
        )
    price_per_hour = None if price is None else parse_price(price)
    if storage is not None:
        SharedStorage.of(storage, "")  # complain before the model is loaded
    console = make_console(stderr=as_json)
    print_as_is(console, loading(model or "PyTorch", chosen.label), "dim")
    with end_on_interrupt():
        kind = device_kind(cpu, gpu)
        if kind == "gpu" and budget is None and trials is None:
            question = replace(question, budget_s=seconds(GPU_BUDGET))
        found_machine = machine(gpu=kind == "gpu")
        model = model_for(chosen, model, found_machine)
        name = "-".join(part for part in (stem(model), chosen.label, kind) if part)
        files = Files.of(out or Path(f"{name}.yaml"), None if storage else study)
        if not sys.stderr.isatty():
            from transformers.utils import logging

            logging.disable_progress_bar()  # of loading weights: control characters in a log
        device = "cuda" if kind == "gpu" else "cpu"
        check_dtype(chosen, dtype)
        source = load(
            engine, model, dtype=dtype, device=device, seed=seed, kv_cache_dtype=kv_cache_dtype, arguments=arguments
        )
    with stop_on_interrupt() as stop:
        limits = source.limits
        space = replace(make_space(limits, pin or (), ranges or ()), stock=source.stock)
        question = replace(question, space=space)
        print_as_is(console, heading(model, found_machine, requested=cpu or gpu))
        for line in source.introduction:
            print_as_is(console, line, "dim")
        requested = Requested(
            source, model_facts(source.model, seed), with_threads(found_machine), workload, price_per_hour, question
        )
        command = shlex.join(["autotune", *without_passwords(context.obj)])

        def write(found: Findings, live: Engine) -> int:
            return finish(found, requested, live, files, console, command, as_json)

        return work(
            requested, files, storage, study, console, limits=limits, fresh=fresh, stop=stop.is_set, write=write
        )


def _objective(name: str, rate: float | None, others: dict[str, object]) -> ObjectiveName:
    """``--objective``, which without an SLO goes with ``--rate`` alone. Raises :class:`InputError`."""
    if name == "goodput":
        return "goodput"
    if name != "mean-e2e":
        raise InputError(f"--objective is {name}; it must be goodput or mean-e2e")
    for option, value in others.items():
        if value:
            raise InputError(f"{option} is given; --objective mean-e2e is for those without an SLO: drop one of them")
    if rate is None:
        raise InputError("--objective mean-e2e compares settings at a load you name: add --rate, in requests/s")
    return "mean-e2e"
