"""The options that several verbs have, and what is given to them, checked; errors name the option."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from typer import Argument, Option

from autotune.engines.named import DEFAULT, check_engine, named
from autotune.profile.fields import LEAST_RATE, MOST_RATE
from runtime import slo
from runtime.errors import InputError
from runtime.knobs import KNOBS
from runtime.slo import RequestClass
from runtime.tunable import KV_CACHE_DTYPES

if TYPE_CHECKING:
    from autotune.profile import Profile
    from autotune.workload import Workload

SHORTEST_BUDGET_S = 10.0
_LONGEST_H = 168  # a week
_BUDGET = re.compile(r"^(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?$")
LOOKED_AT = 2000  # requests of a workload
_IN_PROGRAMS = ", or a Controller"  # where an error allows what no command line can give

WORKLOADS = (
    "A preset, a trace FILE, azure-conv:FILE to replay a trace, or a mix of classes: "
    "chat=azure-conv@0.8+batch=azure-code@0.2."
)
_CLASS_HELP = (
    "Requests of class NAME have an SLO and a weight of their own: chat:ttft=300ms,tpot=30ms, "
    "batch:e2e=60s*0.2. Repeatable."
)
_CLASS_METAVAR = "NAME:SLO[*WEIGHT]"
_OF_PROFILE = "  (default: the profile's)"
Classes = Annotated[list[str] | None, Option("--class", metavar=_CLASS_METAVAR, help=_CLASS_HELP)]
ProfiledClasses = Annotated[list[str] | None, Option("--class", metavar=_CLASS_METAVAR, help=_CLASS_HELP + _OF_PROFILE)]
EngineArguments = Annotated[
    list[str] | None,
    Option(
        "--engine-arg",
        metavar="NAME=VALUE",
        help="An engine argument of vLLM, by vLLM's name: dtype=float32, gpu_memory_utilization=0.8. Repeatable.",
    ),
]
ProfiledSlo = Annotated[
    str | None, Option("--slo", help="The SLO: ttft=500ms,tpot=50ms@99%.  (default: the profile's)")
]
Dtype = Annotated[str, Option(help="dtype of the model: auto, float32, bfloat16 or float16.")]
_KV_CACHE_HELP = "dtype of the KV cache: auto (as computed), or fp8 (with this project's own engine only on CUDA)."
KvCacheDtype = Annotated[str, Option(help=_KV_CACHE_HELP)]
ProfiledKvCacheDtype = Annotated[str | None, Option(help=f"{_KV_CACHE_HELP}  (default: the profile's, or auto)")]
Price = Annotated[
    str | None,
    Option(
        help="Price of the machine, in any currency: 2.50/h, 40/day or 900/month. Adds the cost per million output tokens.  "
        "(default: the profile's price, if any)"
    ),
]
Controller = Annotated[
    str | None, Option("--controller", help="The controller, by name or as module:Class.  (default: predictive)")
]
Cpu = Annotated[bool, Option("--cpu", help="Run on the CPU.  (default: the GPU if PyTorch sees one, else the CPU)")]
Gpu = Annotated[bool, Option("--gpu", help="Run on the GPU. It is an error if PyTorch sees none.")]
ProfileArgument = Annotated[str, Argument(metavar="PROFILE", help="A file, or a name from `autotune profiles`.")]
Purpose = Annotated[str, Option("--for", help="Which of the profile's settings: interactive, balanced or throughput.")]
AsJson = Annotated[bool, Option("--json", help="Print only one JSON object.")]
AsJsonOfARun = Annotated[bool, Option("--json", help="Print only one JSON object; progress goes to stderr.")]


def check_device(cpu: bool, gpu: bool) -> None:
    """Raise :class:`InputError` where both are named."""
    if cpu and gpu:
        raise InputError("--cpu and --gpu are both given; choose one, or neither for what the machine has")


def check_kv_cache_dtype(requested: str) -> None:
    """Raise :class:`InputError` for what --kv-cache-dtype does not take."""
    if requested not in KV_CACHE_DTYPES:
        raise InputError(f"--kv-cache-dtype is {requested}; it must be {' or '.join(KV_CACHE_DTYPES)}")


@contextmanager
def profiled_kv_cache_dtype(given: str | None, instead: str = "--kv-cache-dtype auto takes another") -> Iterator[None]:
    """Where none is ``given`` it is the profile's: errors in here that refuse it say so, and what to do ``instead``."""
    try:
        yield
    except InputError as error:
        if given is not None or not str(error).startswith("kv_cache_dtype is "):
            raise
        raise InputError(f"the profile's {error}; {instead}") from None


def check_rate(option: str, rate: float | None, *, most: float = MOST_RATE, of: str = "requests") -> None:
    """Raise :class:`InputError` for a ``rate`` that nobody can wait for, or that no sender sends."""
    if rate is not None and not LEAST_RATE <= rate <= most:
        raise InputError(f"{option} is {rate:g}; it must be a number from {LEAST_RATE:g} to {most:g} {of}/s")


def checked(option: str, parse: Any, *arguments: Any) -> Any:
    """``parse(*arguments)``, its errors as :class:`InputError` of ``option``."""
    try:
        return parse(*arguments)
    except ValueError as error:
        text = str(error).removesuffix(_IN_PROGRAMS)
        if not option or (isinstance(error, InputError) and text.startswith("--")):
            raise InputError(text) from None
        named = text.startswith(f"{option.removeprefix('--')} is ")
        raise InputError(f"--{text}" if named else f"{option}: {text}") from None


def seconds(text: str, *, option: str = "--budget", least: float = SHORTEST_BUDGET_S) -> float:
    """``90s``, ``2m``, ``1h30m`` in seconds, from ``least`` to a week: the value of ``option``. Raises :class:`InputError`."""
    match = _BUDGET.match(text.strip())
    if match is None or not text.strip():
        hint = f"; write {text.strip()}s or {text.strip()}m" if text.strip().isdigit() else ", such as 90s, 2m or 1h30m"
        raise InputError(f'{option}: "{text}" is not a time{hint}')
    total = sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True))
    if total < least:
        raise InputError(f"{option} is {text}; it must be at least {least:g}s")
    if total > _LONGEST_H * 3600:
        raise InputError(f"{option} is {text}; it must be at most {_LONGEST_H}h")
    return total


def engine_of(
    profile: Profile | None, engine: str | None, given: Sequence[str] | None, *, without: Collection[str] = ()
) -> tuple[str, dict[str, str]]:
    """The name of the engine, and its arguments: those of ``profile`` but ``without`` those that an option stands for, unless
    others are given. Without a profile: our own."""
    theirs = DEFAULT if profile is None else named(profile.engine.name)
    name = engine or theirs
    arguments = check_engine(name, given or ())
    if profile is not None and name == theirs:
        kept = {name: value for name, value in profile.engine.options.items() if name not in without}
        arguments = {**kept, **arguments}
    return name, arguments


def profiled(
    name: Literal["dtype", "kv_cache_dtype"], profile: Profile, arguments: Mapping[str, str], instead: str
) -> str:
    """The ``name`` that ``profile`` was measured with; ``auto`` where its own engine arguments, among ``arguments``, say it.

    Raises :class:`InputError` where another is among ``arguments``, with what to do ``instead``.
    """
    value = profile.model.dtype if name == "dtype" else profile.model.kv_cache_dtype
    said = arguments.get(name, value)
    if value == "auto" or said == value:
        return value
    if said == profile.engine.options.get(name):
        return "auto"
    raise InputError(f"the profile's {name} is {value} and --engine-arg {name} is {said}; {instead}")


def request_classes(texts: Sequence[str]) -> list[RequestClass]:
    """As :func:`runtime.slo.request_classes`. Raises :class:`InputError`."""
    try:
        return slo.request_classes(texts, where="--class")
    except ValueError as error:
        raise InputError(str(error)) from None


def classes_of(workload: Workload) -> list[str]:
    """The names of the classes that its first requests are of."""
    return list(dict.fromkeys(a.request_class for a in islice(workload.arrivals(0, limit=LOOKED_AT), LOOKED_AT)))


def check_classes(classes: Sequence[RequestClass], workload: Workload) -> None:
    """Raise :class:`InputError` for a class of which ``workload`` has no request."""
    if not classes:
        return
    found = classes_of(workload)
    for one in classes:
        if one.name not in found:
            raise InputError(
                f"--class {one.name}: the workload has no request of that class; its classes are {', '.join(found)} "
                f"(--workload {one.name}=azure-conv@0.8+… names them)"
            )


def with_knobs(command: Callable[..., int]) -> Callable[..., int]:
    """``command`` with an option for every knob in place of its argument ``knobs``, a dict of those that were given."""

    def run(**arguments: Any) -> int:
        given = {spec.name: value for spec in KNOBS if (value := arguments.pop(spec.name)) is not None}
        return command(knobs=given, **arguments)

    hints = get_type_hints(command, include_extras=True)
    options = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name != "knobs":
            options.append(parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY))
            continue
        for spec in KNOBS:
            kind = int if spec.integer else float
            option = Option(f"--{spec.name.replace('_', '-')}", help=f"Knob, in {spec.unit}: {spec.doc}.")
            options.append(
                inspect.Parameter(
                    spec.name, parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
                )
            )
    run.__signature__ = inspect.Signature(options, return_annotation=int)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {option.name: option.annotation for option in options} | {"return": int}
    run.__doc__ = command.__doc__
    return run


def given_options(context: Any) -> dict[str, str]:
    """The options that stand on the command line, whatever their values: ``--engine``, …, each with its parameter's name."""
    said = (p for p in context.command.params if context.get_parameter_source(p.name).name == "COMMANDLINE")
    return {max(parameter.opts, key=len): parameter.name for parameter in said}


def checked_knobs(given: Mapping[str, float]) -> dict[str, float]:
    """``given``, within the knobs' own bounds. Raises :class:`InputError` that names the option."""
    for spec in KNOBS:
        if spec.name in given:
            try:
                spec.check(given[spec.name])
            except ValueError as error:
                raise InputError(f"--{str(error).replace(spec.name, spec.name.replace('_', '-'), 1)}") from None
    return dict(given)


def of_decision_log(error: ValueError) -> InputError:
    """``error``, which calls a decision log ``log``, as one of the option."""
    return InputError(re.sub("^log: ", "--decisions: ", str(error)))


def check_decision_log(decisions: Path) -> None:
    """Raise one line if the log cannot be written: now, not when a model has been loaded."""
    from autotune.control.decision_log import open_to_append

    try:
        file = open_to_append(decisions)
    except InputError as error:
        raise of_decision_log(error) from None
    if file is not None:
        file.close()


def need_server_extra(verb: str) -> None:
    """Raise one line that says which extra ``verb`` needs, if it is not there."""
    try:
        importlib.import_module("runtime.serving.run")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("runtime", "autotune"):
            raise
        raise InputError(
            f"autotune {verb} needs the extra serve: pip install '.[serve]' in a checkout ({error.name} is not installed)"
        ) from None
