"""``autotune.control``: a controller attached to a live engine in one line."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from autotune.control.controllers.batching import BatchingController
from autotune.control.controllers.protocol import Controller
from autotune.control.controllers.registry import find
from autotune.control.guardrails import Guardrails
from autotune.control.loop import Control
from autotune.control.profile_drift import ProfileDrift
from autotune.cost.model import serving_cost, serving_knowledge
from autotune.engines.controllable import Controllable
from autotune.profile import Profile
from autotune.profile.callable import CallableProfile, load_either
from runtime.batching.decorator import Batched
from runtime.batching.tuning import TunableBatcher
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.slo import SLO
from runtime.step_model import StepLearner


def warm_model(profile: Profile | CallableProfile | None) -> StepLearner | None:
    """A learner that begins with what ``profile`` knows of the hardware; None when it knows nothing."""
    known = serving_knowledge(profile) if isinstance(profile, Profile) else None
    return None if known is None else StepLearner.warm_start(known)


def _drift(profile: Profile | CallableProfile | None) -> ProfileDrift | None:
    """What compares steps with those of ``profile``; None when it knows nothing of them."""
    if not isinstance(profile, Profile) or profile.cost_model is None:
        return None
    return ProfileDrift(serving_cost(profile))


def attach(
    engine: Controllable | Batched,
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
    if isinstance(engine, Batched):  # what @batch makes of a function
        engine = engine.batcher
    loaded = _loaded(profile, engine) if isinstance(profile, str | Path) else profile
    target = engine.slos.get("default") if slo is None else SLO.of(slo)
    if target is None and loaded is not None:
        target = loaded.slo
    if target is None:
        such = "e2e=200ms" if isinstance(engine, TunableBatcher) else "ttft=500ms,tpot=50ms"
        raise ValueError(f'slo is None, and the engine has none either; pass slo="{such}"')
    if loaded is not None and loaded is not profile and (mismatch := _mismatch(engine, loaded)):
        warnings.warn(f"{mismatch}; the controller starts from its knobs and corrects them", stacklevel=3)
    guardrails = Guardrails(bounds or {}, pinned or {})
    if start is None and loaded is not None:
        start = loaded.knobs
    begin = engine.knobs if start is None else engine.effective_limits.clamp(start)
    if controller is None or isinstance(controller, str):
        controller = _named(controller, engine, target, begin, loaded)
    attached = Control(
        engine,
        controller,
        target,
        start=None if start is None else begin,
        guardrails=guardrails,
        observe_only=observe_only,
        admission=AdmissionPolicy.of(admission),
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


def _named(
    name: str | None, engine: Controllable, slo: SLO, start: Knobs, profile: Profile | CallableProfile | None
) -> Controller:
    """The controller called ``name``, or what suits ``engine``."""
    if isinstance(engine, TunableBatcher) and name in (None, "batching"):
        blind = _strategy(engine) in ("dynamic", "static")
        return BatchingController(slo, start, blind=blind, fixed_window=blind and engine.slots == 1)
    name = name or "predictive"
    make = find(name, batcher=isinstance(engine, TunableBatcher))
    return make(slo, start, engine.kv_tokens, engine.block_size, warm_model(profile))


def _strategy(batcher: TunableBatcher) -> str:
    """Its name, without what may be wrapped around it ("dynamic, memory-bounded")."""
    return batcher.strategy.name.partition(",")[0]


def _loaded(path: str | Path, engine: Controllable) -> Profile | CallableProfile:
    """The profile at ``path``. Raises InputError for a callable's on an engine, and a language model's on a batcher."""
    loaded = load_either(path)
    batcher = isinstance(engine, TunableBatcher)
    if isinstance(loaded, CallableProfile) and not batcher:
        raise InputError(f"{path}: is the profile of a callable ({loaded.function}); this engine runs a language model")
    if isinstance(loaded, Profile) and batcher:
        raise InputError(
            f"{path}: is the profile of a language model ({loaded.model.name}); `autotune profile --callable` makes one "
            "for a batcher"
        )
    return loaded


def _mismatch(engine: Controllable, profile: Profile | CallableProfile) -> str:
    """Why the profile may not be about ``engine``; empty if it is, or if ``engine`` is of no machine (a simulation)."""
    from autotune.profile.fingerprint import measured_elsewhere

    if isinstance(profile, CallableProfile):
        used = _strategy(engine) if isinstance(engine, TunableBatcher) else profile.strategy
        how = "" if used == profile.strategy else f"profile is for the {profile.strategy} strategy, not {used}"
        have = engine.workers if isinstance(engine, TunableBatcher) else profile.replicas
        many = "" if have == profile.replicas else f"profile is for {profile.replicas} workers, not {have}"
        elsewhere = measured_elsewhere(profile.machine, gpu=profile.machine.kind == "gpu")
        return "; ".join(text for text in (elsewhere, how, many) if text)
    model = getattr(engine, "model", None)
    device = getattr(model, "device", None)
    if model is None or device is None:
        return ""
    elsewhere = measured_elsewhere(profile.machine, gpu=device.type == "cuda")
    other = (
        "" if model.name == profile.model.name else f"profile was measured with {profile.model.name}, not {model.name}"
    )
    return "; ".join(text for text in (elsewhere, other) if text)


__all__ = ["attach", "warm_model"]
