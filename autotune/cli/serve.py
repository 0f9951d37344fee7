"""``autotune serve``: the engine behind an OpenAI-compatible API. Wiring only; the server is in runtime/serving."""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from autotune.cli.options import (
    Controller,
    ProfiledKvCacheDtype,
    ProfiledSlo,
    Purpose,
    check_decision_log,
    check_kv_cache_dtype,
    checked,
    checked_knobs,
    given_options,
    need_server_extra,
    of_decision_log,
    profiled_kv_cache_dtype,
    request_classes,
    with_knobs,
)
from autotune.engines.model_folder import context_length, same_model
from autotune.engines.named import (
    DEFAULT,
    ByCommand,
    InProcess,
    ToServe,
    check_engine,
    check_serving,
    choices_to_serve,
    engine_named,
)
from runtime.errors import InputError
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.ordering import ORDERINGS
from runtime.slo import SLO

if TYPE_CHECKING:
    from autotune.profile import Profile

HELP = (
    "Serve a model over HTTP: OpenAI's completions and chat completions, health, and metrics for Prometheus. With an SLO, a "
    "controller tunes the knobs meanwhile."
)
EXAMPLES = (
    "Examples:  autotune serve tiny  ·  autotune serve ./my-model --slo ttft=500ms,tpot=50ms --port 9000 --token-budget 512"
    "  ·  autotune serve --profile mine.yaml"
)
_MOST_GRACE_S = 86_400


@with_knobs
def serve(
    context: Context,
    model: Annotated[
        str | None,
        Argument(
            help="A preset (tiny, qwen3-0.6b, llama-3.1-8b, …), a directory, or a hub id.  (default: the profile's)"
        ),
    ] = None,
    more: Annotated[
        list[str] | None,
        Argument(metavar="[-- VLLM OPTIONS]", help="With --engine vllm: options to pass to `vllm serve`."),
    ] = None,
    engine: Annotated[str, Option(help=f"{choices_to_serve()}.")] = DEFAULT,
    slo: ProfiledSlo = None,
    classes: Annotated[
        list[str] | None,
        Option(
            "--class",
            metavar="NAME:SLO[*WEIGHT]",
            help="Requests whose field request_class is NAME have an SLO and a weight of their own: "
            "chat:ttft=300ms,tpot=30ms*2. Repeatable.  (default: the profile's classes, unless --slo is given)",
        ),
    ] = None,
    host: Annotated[
        str,
        Option(
            help="Address to listen on. The server has no authentication: do not expose it without a proxy that authenticates."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, Option(min=0, max=65535, help="Port to listen on. 0 takes a free port and prints its number.")
    ] = 8000,
    profile: Annotated[
        Path | None,
        Option(
            help="Start with a profile's knobs, SLO, dtype and KV pool. Options on the command line take precedence."
        ),
    ] = None,
    purpose: Purpose = "balanced",
    anyway: Annotated[
        bool, Option("--anyway", help="Use the profile even if it was measured on another machine.")
    ] = False,
    knobs: dict[str, float] | None = None,
    dtype: Annotated[
        str | None,
        Option(help="dtype of the model: auto, float32, bfloat16 or float16.  (default: the profile's, or auto)"),
    ] = None,
    device: Annotated[str, Option(help="Where the model runs: auto, cpu, cuda or cuda:N.")] = "auto",
    kv_cache_dtype: ProfiledKvCacheDtype = None,
    max_model_len: Annotated[
        int | None, Option(min=1, help="Longest context, in tokens, if shorter than the model's.")
    ] = None,
    kv_tokens: Annotated[
        int | None,
        Option(min=1, help="Size of the KV pool, in tokens.  (default: the profile's, or what the memory allows)"),
    ] = None,
    max_queue: Annotated[int, Option(min=1, help="Most requests that may wait. Further requests get HTTP 429.")] = 4096,
    ordering: Annotated[
        str | None,
        Option(
            help=f"Order in which waiting requests are served: {', '.join(ORDERINGS)}.  (default: priority, or deadline with "
            "--reject-late or --relegate-late)"
        ),
    ] = None,
    threads: Annotated[int | None, Option(min=1, max=1024, help="CPU threads of the model.")] = None,
    served_model_name: Annotated[str | None, Option(help="The name clients use.  (default: MODEL)")] = None,
    grace: Annotated[
        float, Option(min=0, max=_MOST_GRACE_S, help="Seconds that running requests have to finish after SIGTERM.")
    ] = 30.0,
    reject_late: Annotated[
        bool,
        Option(
            "--reject-late/--no-reject-late",
            help="Reject (HTTP 429) requests that can no longer meet their TTFT target, and order the queue by deadline unless "
            "--ordering is given. Late requests of a class with a weight below 1 are relegated instead, as by --relegate-late. "
            "Needs an SLO with a TTFT or E2E target.",
        ),
    ] = False,
    relegate_late: Annotated[
        bool,
        Option(
            "--relegate-late/--no-relegate-late",
            help="Compute requests that can no longer meet their TTFT target after all requests that can, and order the queue by "
            "deadline unless --ordering is given. Needs an SLO with a TTFT or E2E target.",
        ),
    ] = False,
    controlled: Annotated[
        bool | None,
        Option(
            "--control/--no-control",
            help="Attach a controller, which changes the knobs to meet the SLO.  (default: if there is an SLO)",
        ),
    ] = None,
    controller: Controller = None,
    decisions: Annotated[
        Path | None, Option(help="File to append the controller's decisions to, for autotune explain.")
    ] = None,
    records: Annotated[Path | None, Option(help="File to append every ended request to, one JSON line each.")] = None,
    seed: Annotated[int, Option(min=0, max=2**31, help="Seed of sampling, and of a preset's random weights.")] = 0,
    as_json: Annotated[
        bool, Option("--json", help="Print the address, the model and the knobs as one line of JSON.")
    ] = False,
) -> int:
    """Serve until stopped."""
    if model is not None and model.startswith("-"):  # what follows -- begins with the model, where none was named
        more, model = [model, *(more or [])], None
    by = engine_named(engine)
    serving = by.serving
    check_serving(by, given_options(context), more or ())
    if kv_cache_dtype is not None:
        check_kv_cache_dtype(kv_cache_dtype)
    if ordering is not None and ordering not in ORDERINGS:
        raise InputError(f"--ordering is {ordering}; it must be one of {', '.join(ORDERINGS)}")
    start_with = _profile(profile, purpose)
    name = model or (start_with.model.name if start_with else None)
    if name is None:
        raise InputError("name a model, such as tiny, or a --profile that does; see autotune serve --help")
    if model is not None:
        _check_no_profile(model)
    # steps of another model say nothing
    known = start_with if start_with and same_model(name, start_with.model.name) else None
    if start_with is not None and known is None:
        steps = (
            "SLO and KV pool are used, its step times are not"
            if isinstance(serving, InProcess)
            else "SLO and step times are what the controller starts with, its dtypes are left out"
        )
        print(
            f"note: {profile} was measured with {start_with.model.name}, not with {name}: its knobs, {steps}",
            file=sys.stderr,
        )
    target = checked("--slo", SLO.parse, slo) if slo is not None else start_with.own_slo if start_with else None
    setting, limits = _setting(start_with, purpose, knobs or {})
    if reject_late and relegate_late:
        raise InputError(
            "--reject-late and --relegate-late do not go together: a late request is rejected or relegated"
        )
    if (reject_late or relegate_late) and (target is None or target.ttft_ms is target.e2e_ms is None):
        option = "--relegate-late" if relegate_late else "--reject-late"
        raise InputError(f"{option} needs to know what is late: add --slo ttft=500ms,tpot=50ms")
    if controlled and target is None:
        raise InputError("--control needs an SLO: add --slo ttft=500ms,tpot=50ms")
    if controller is not None:
        if controlled is False or target is None:
            raise InputError(f"--controller is {controller}; it goes with --slo and without --no-control")
        from autotune.control.controllers.registry import find

        checked("--controller", find, controller)  # now, not when the model has been loaded
    if decisions is not None and (controlled is False or target is None):
        raise InputError(
            f"--decisions is {decisions}, but no controller is attached; it goes with --slo and without --no-control"
        )
    if decisions is not None and records is not None and decisions.resolve() == records.resolve():
        raise InputError(f"--records: {records} is where --decisions writes; name another file")
    if profile is None and purpose != "balanced":
        raise InputError(f"--for is {purpose}; it chooses among a profile's settings: add --profile")
    if profile is None and anyway:
        raise InputError("--anyway is given without --profile; add the profile that it is to use")
    if not classes and slo is None and start_with is not None:
        classes = [str(one) for one in start_with.classes]
    if request_classes(classes or []) and target is None:
        raise InputError("--class goes with an SLO for all other requests: add --slo ttft=500ms,tpot=50ms")
    check_engine(engine)
    from autotune.cli.target import check_dtype, loading

    if isinstance(serving, InProcess):
        need_server_extra("serve")
        print(loading(name, by.label), file=sys.stderr, flush=True)  # stdout is for whoever waits for the address
    if start_with is not None:
        _check_machine(start_with, device, anyway, controlled=target is not None and controlled is not False)
    if decisions is not None:
        check_decision_log(decisions)
    from autotune.profile import find_profile
    from autotune.profile.fingerprint import measured_on_another
    from autotune.profile.serving import prefill_rate

    facts = start_with.engine if start_with else None
    if facts is not None and (another := measured_on_another(facts, by.in_facts, by.version())):
        print(f"note: {another}", file=sys.stderr)
    if start_with is not None and target is None and controlled is not False and isinstance(serving, InProcess):
        print(
            f"note: {profile} was made without an SLO (objective mean-e2e), so no controller is attached; --slo names one",
            file=sys.stderr,
        )
    by_hand = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "max_model_len": max_model_len}
    theirs = facts.options if facts and facts.name == by.in_facts else {}
    stored = start_with if isinstance(serving, InProcess) else known  # of whose model the dtypes are used
    timed = known if known and known.engine.name == by.in_facts else None  # steps of another engine set no limit
    requested = ToServe(
        model=name,
        slo=target,
        classes=tuple(classes or ()),
        reject_late=reject_late,
        relegate_late=relegate_late,
        knobs=setting,
        limits=limits,
        pinned=knobs or {},
        dtype=dtype or (stored.model.dtype if stored else None),
        device=device,
        kv_cache_dtype=kv_cache_dtype or (stored.model.kv_cache_dtype if stored else "auto"),
        seed=seed,
        max_model_len=max_model_len,
        kv_tokens=kv_tokens or (facts.kv_pool.tokens if facts else None),
        block_size=facts.kv_pool.block_size if facts else None,
        prefix_cache=facts.prefix_cache if facts else True,
        max_queue=max_queue,
        ordering=ordering,
        threads=threads or (start_with.machine.threads if start_with else None),
        host=host,
        port=port,
        served_model_name=served_model_name,
        controlled=controlled is not False,
        controller=controller,
        decisions=decisions,
        grace_s=grace,
        profile=None if profile is None else find_profile(profile),
        prefill_rate=prefill_rate(timed) if timed and isinstance(serving, ByCommand) else None,
        longest=known.model.max_model_len if known else context_length(name),
        another_model=start_with is not None and known is None,
        arguments={option: value for option, value in theirs.items() if by_hand.get(option) is None},
        more=tuple(more or ()),
    )
    if isinstance(serving, ByCommand):
        serving.become(requested)
    if dtype is not None:
        check_dtype(by, dtype)
    with profiled_kv_cache_dtype(kv_cache_dtype):
        return _serve_here(serving, requested, known, records, as_json)


def _serve_here(
    serving: InProcess, requested: ToServe, profile: Profile | None, records: Path | None, as_json: bool
) -> int:
    """Serve by this process until it is stopped. ``profile``: of what is served, if there is one."""
    from autotune.control.attach import attach
    from autotune.measure.frozen_heap import frozen_heap
    from autotune.profile.fingerprint import recorded_otherwise, stored_otherwise
    from runtime.serving.app import Api
    from runtime.serving.record_log import RecordLog
    from runtime.serving.run import bind, end_if_lost, serve_until_stopped, url_of, warm_up

    with ExitStack() as last, ExitStack() as stack:
        bound = stack.enter_context(bind(requested.host, requested.port))
        log = None if records is None else stack.enter_context(RecordLog(records))
        engine = stack.enter_context(serving.start(requested))
        last.callback(end_if_lost, engine)  # when all else is closed
        if profile is not None and (ladder := recorded_otherwise(profile, engine.facts.graphs, engine.limits)):
            print(f"note: {ladder}", file=sys.stderr)
        if profile is not None and (stored := stored_otherwise(profile.model, requested.kv_cache_dtype)):
            print(f"note: {stored}", file=sys.stderr)
        warm_up(engine)
        gc.collect()
        stack.enter_context(frozen_heap())
        if log is not None:
            engine.subscribe(log)
        made = None
        if requested.slo is not None and requested.controlled:
            try:
                attached = attach(
                    engine,
                    slo=requested.slo,
                    profile=profile,
                    start=engine.wanted_knobs,
                    pinned=requested.pinned,  # knobs given by hand are the operator's word
                    log=requested.decisions,
                    controller=requested.controller,
                )
            except ValueError as error:
                raise of_decision_log(error) from None
            made = stack.enter_context(attached)
            try:
                made.steer()
            except InputError as error:  # no place for a socket is no reason not to serve
                print(
                    f"note: {error}; autotune watch, pause and set will not find this server",
                    file=sys.stderr,
                    flush=True,
                )
        keep = () if log is None else (log.flush,)
        api = Api(
            engine,
            served_name=requested.served_model_name,
            keep=keep,
            regime=None if made is None else lambda: made.regime,
        )

        def ready() -> None:
            how = "controlled" if requested.controlled else "not controlled"
            with_slo = f" · SLO {requested.slo}, {how}" if requested.slo else ""
            if as_json:
                said = {
                    "url": url_of(bound), "pid": os.getpid(), "model": api.name,
                    "slo": None if requested.slo is None else str(requested.slo), "controlled": made is not None,
                    "knobs": engine.knobs.as_dict(),
                }  # fmt: skip
                print(json.dumps(said), flush=True)
            else:
                print(f"serving {api.name} at {url_of(bound)}{with_slo} · {engine.knobs}", flush=True)
            if own := engine.model.sampling_defaults:
                named = ", ".join(f"{name} {value:g}" for name, value in own.items())
                print(
                    f"note: requests that do not say get {named}: the model's generation config",
                    file=sys.stderr,
                    flush=True,
                )
            if requested.slo and requested.slo.ttft_ms and not (requested.reject_late or requested.relegate_late):
                print(f"note: {_KEEPS_LATE}", file=sys.stderr, flush=True)

        return serve_until_stopped(api, bound, grace_s=requested.grace_s, ready=ready)


_KEEPS_LATE = (
    "requests that can no longer meet their TTFT are served all the same; past capacity most of what can be gained is to "
    "reject them (--reject-late) or to compute them last (--relegate-late)"
)


def _profile(path: Path | None, purpose: str) -> Profile | None:
    if path is None:
        return None
    from autotune.profile import find_profile, load_profile

    profile = load_profile(find_profile(path))
    if purpose not in profile.settings:
        raise InputError(f"--for is {purpose}; {path} holds {', '.join(profile.settings)}")
    return profile


def _check_no_profile(model: str) -> None:
    """Raise one line if ``model`` is a profile's file or name."""
    from autotune.profile import shipped_profiles

    file = os.path.isfile(model) and Path(model).suffix in (".yaml", ".yml")
    if file or (model in shipped_profiles() and not os.path.isdir(model)):
        raise InputError(f"MODEL is {model}, a profile; it must be a directory or a hub id; --profile takes profiles")


def _check_machine(profile: Profile, device: str, anyway: bool, *, controlled: bool) -> None:
    """Raise one line if the profile is of another machine, unless an option says that this is known."""
    from autotune.profile.fingerprint import gpu_available, measured_elsewhere

    named = device.startswith("cuda")
    gpu = named or (device == "auto" and gpu_available())
    elsewhere = measured_elsewhere(profile.machine, gpu=gpu, device=device if named else "cuda")
    if elsewhere and not anyway:
        then = "start from it (the controller will correct it)" if controlled else "use it all the same"
        raise InputError(f"{elsewhere}; pass --anyway to {then}")
    if elsewhere:
        print(f"note: {elsewhere}", file=sys.stderr)


def _setting(profile: Profile | None, purpose: str, given: dict[str, float]) -> tuple[Knobs, KnobLimits]:
    """Knobs to start with, and ceilings: the profile's or the usual ones, raised where an option asks for more."""
    limits = profile.engine.limits if profile else KnobLimits()
    start = profile.settings[purpose].knobs if profile else limits.clamp(Knobs())  # type: ignore[index]  # checked
    knobs = start.with_(**checked_knobs(given))
    top = {spec.name: max(getattr(limits, spec.name), getattr(knobs, spec.name)) for spec in KNOBS}
    return knobs, KnobLimits(**top)
