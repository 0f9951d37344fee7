"""``autotune.control``: a controller attached to a live engine in one line."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from autotune.control.actuator import check_live
from autotune.control.controllers.batching import BatchingController
from autotune.control.controllers.protocol import Controller
from autotune.control.controllers.registry import find
from autotune.control.guardrails import Guardrails
from autotune.control.loop import Control
from autotune.control.profile_drift import ProfileDrift
from autotune.engines import Adaptable, adapt
from autotune.profile import Profile, find_profile
from autotune.profile.callable import CallableProfile, load_either
from autotune.profile.serving import serving_cost, serving_knowledge
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.slo import SLO
from runtime.step_model import NO_GRAPHS, StepGraphs, StepLearner
from runtime.tunable import CallableInfo, Tunable


def warm_model(profile: Profile | CallableProfile | None, graphs: StepGraphs = NO_GRAPHS) -> StepLearner | None:
    """A learner that begins with what ``profile`` knows of the hardware, and with the ``graphs`` of the engine; None when
    nothing is known."""
    known = serving_knowledge(profile) if isinstance(profile, Profile) else None
    if known is not None:
        return StepLearner.warm_start(known, graphs=graphs)
    return StepLearner(graphs=graphs) if graphs else None


def _drift(profile: Profile | CallableProfile | None) -> ProfileDrift | None:
    """What compares steps with those of ``profile``; None when it knows nothing of them."""
    if not isinstance(profile, Profile) or profile.cost_model is None:
        return None
    return ProfileDrift(serving_cost(profile))


def attach(
    engine: Adaptable,
    *,
    slo: SLO | str | None = None,
    profile: str | Path | Profile | CallableProfile | None = None,
    start: Knobs | None = None,
    observe_only: bool = False,
    admission: AdmissionPolicy | bool | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    pinned: Mapping[str, float] | None = None,
    log: str | Path | None = None,
    interval_s: float = 0.25,
    controller: Controller | str | None = None,
    steer: bool | str | Path = False,
) -> Control:
    """What :func:`autotune.control` does; its arguments are described there.

    ``profile`` may also be one that the caller has loaded, and has checked against this machine: nobody is warned then.
    ``start``: the knobs to begin with, and to fall back on; the profile's unless given.
    """
    engine = adapt(engine)
    loaded = _loaded(profile, engine) if isinstance(profile, str | Path) else profile
    target = engine.slos.get("default") if slo is None else SLO.of(slo)
    if target is None and loaded is not None:
        target = loaded.own_slo if isinstance(loaded, Profile) else loaded.slo
    if target is None:
        such = "ttft=500ms,tpot=50ms" if engine.facts.callable is None else "e2e=200ms"
        made = "" if loaded is None else ", and the profile was made without one (objective mean-e2e)"
        raise ValueError(f'slo is None, and the engine has none either{made}; pass slo="{such}"')
    if loaded is not None and loaded is not profile and (mismatch := _mismatch(engine, loaded)):
        warnings.warn(f"{mismatch}; the controller starts from its knobs and corrects them", stacklevel=3)
    guardrails = Guardrails(bounds or {}, {**_fixed(engine, bounds or {}, pinned or {}), **(pinned or {})})
    if start is None and loaded is not None:
        start = loaded.knobs
    begin = engine.wanted_knobs if start is None else engine.limits.clamp(start)
    if controller is None or isinstance(controller, str):
        # what serves meanwhile
        fallback = engine.wanted_knobs if observe_only and controller in (None, "predictive") else begin
        controller = _named(controller, engine, target, fallback, loaded)
    attached = Control(
        engine,
        controller,
        target,
        start=None if start is None else begin,
        guardrails=guardrails,
        observe_only=observe_only,
        admission=admission,
        drift=_drift(loaded),
        interval_s=interval_s,
        log_path=log,
    )
    if steer:
        try:
            attached.steer(None if steer is True else steer)
        except BaseException:
            attached.close()
            raise
    return attached


def _fixed(engine: Tunable, bounds: Mapping[str, object], pinned: Mapping[str, object]) -> dict[str, float]:
    """The knobs that cannot be turned while ``engine`` runs, at their values. Raises ``ValueError`` where that leaves nothing
    to control by, or where the operator asks for one of them."""
    can = engine.capabilities
    fixed = {name: value for name, value in engine.wanted_knobs.as_dict().items() if can.knobs[name] != "live"}
    if not can.step_records or len(fixed) == len(can.knobs):
        lacks = "has no knob that can be turned while it runs" if can.step_records else "reports no steps"
        raise ValueError(f"engine {lacks}, so there is nothing to control")
    for name in fixed:
        if name in bounds or name in pinned:
            check_live(engine, name, "bounded or pinned")
    return fixed


def _named(
    name: str | None, engine: Tunable, slo: SLO, start: Knobs, profile: Profile | CallableProfile | None
) -> Controller:
    """The controller called ``name``, or what suits ``engine``."""
    facts = engine.facts
    if facts.callable is not None and name in (None, "batching"):
        blind = _strategy(facts.callable) in ("dynamic", "static")
        return BatchingController(slo, start, blind=blind, fixed_window=blind and facts.callable.slots == 1)
    name = name or "predictive"
    make = find(name, batcher=facts.callable is not None)
    return make(slo, start, facts.kv_tokens, facts.block_size, warm_model(profile, facts.graphs), facts.tile)


def _strategy(about: CallableInfo) -> str:
    """Its name, without what may be wrapped around it ("dynamic, memory-bounded")."""
    return about.strategy.partition(",")[0]


def _loaded(path: str | Path, engine: Tunable) -> Profile | CallableProfile:
    """The profile at ``path``, or the shipped one of that name.

    Raises InputError for a callable's on an engine, and a language model's on a batcher.
    """
    loaded = load_either(find_profile(path))
    batcher = engine.facts.callable is not None
    if isinstance(loaded, CallableProfile) and not batcher:
        raise InputError(f"{path}: is the profile of a callable ({loaded.function}); this engine runs a language model")
    if isinstance(loaded, Profile) and batcher:
        raise InputError(
            f"{path}: is the profile of a language model ({loaded.model.name}); `autotune profile --callable` makes one "
            "for a batcher"
        )
    return loaded


def _mismatch(engine: Tunable, profile: Profile | CallableProfile) -> str:
    """Why the profile may not be about ``engine``; empty if it is, or if ``engine`` is of no machine (a simulation)."""
    from autotune.profile.fingerprint import (
        gpu_available,
        measured_elsewhere,
        measured_on_another,
        measured_with_another,
        recorded_otherwise,
        stored_otherwise,
    )

    if isinstance(profile, CallableProfile):
        about = engine.facts.callable
        used = profile.strategy if about is None else _strategy(about)
        how = "" if used == profile.strategy else f"profile is for the {profile.strategy} strategy, not {used}"
        have = profile.replicas if about is None else about.workers
        many = "" if have == profile.replicas else f"profile is for {profile.replicas} workers, not {have}"
        simulated = engine.capabilities.virtual_time
        gpu = profile.machine.kind == "gpu" and gpu_available()
        elsewhere = "" if simulated else measured_elsewhere(profile.machine, gpu=gpu)
        return "; ".join(text for text in (elsewhere, how, many) if text)
    model = engine.facts.model
    if model is None or not model.device:
        return ""
    elsewhere = measured_elsewhere(profile.machine, gpu=model.device.startswith("cuda"), device=model.device)
    other = measured_with_another(profile.model, model.name)
    facts = engine.facts
    by = "" if engine.capabilities.virtual_time else measured_on_another(profile.engine, facts.engine, facts.version)
    ladder = recorded_otherwise(profile, facts.graphs, engine.limits)
    stored = stored_otherwise(profile.model, model.kv_cache_dtype)
    return "; ".join(text for text in (elsewhere, by, other, ladder, stored) if text)


__all__ = ["attach", "warm_model"]
