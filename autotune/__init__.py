"""Tunes: profiles an engine offline, steers it online, exports what it found."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from runtime.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from autotune.control.controllers.protocol import Controller
    from autotune.control.loop import Control
    from autotune.engines import Adaptable
    from autotune.measure.score import Score
    from autotune.profile import Profile, load_profile, save_profile, shipped_profiles
    from autotune.profile.callable import CallableProfile, load_callable_profile
    from runtime.llm.admission import AdmissionPolicy
    from runtime.slo import SLO

__all__ = [
    "CallableProfile",
    "Control",
    "Profile",
    "Score",
    "__version__",
    "control",
    "load_callable_profile",
    "load_profile",
    "save_profile",
    "shipped_profiles",
]

_HOMES = {
    "CallableProfile": "autotune.profile.callable",
    "Control": "autotune.control.loop",
    "Profile": "autotune.profile",
    "Score": "autotune.measure.score",
    "load_callable_profile": "autotune.profile.callable",
    "load_profile": "autotune.profile",
    "save_profile": "autotune.profile",
    "shipped_profiles": "autotune.profile",
}

import_module("autotune.control")  # the room, before the function below takes its name here


def control(
    engine: Adaptable,
    *,
    slo: SLO | str | None = None,
    profile: str | Path | None = None,
    observe_only: bool = False,
    admission: AdmissionPolicy | bool | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    pinned: Mapping[str, float] | None = None,
    log: str | Path | None = None,
    interval_s: float = 0.25,
    controller: Controller | str | None = None,
    steer: bool | str | Path = False,
) -> Control:
    """Attach a controller to ``engine`` so that ``slo`` holds; use as ``with autotune.control(engine, slo=…) as control:``.

    ``slo`` becomes the engine's, unless the controller only observes; without it the engine's own (class ``default``) is kept, or
    the profile's taken, if it was made for one.
    ``profile``: a profile (a file, or the name of a shipped one) whose knobs to start from, and whose step times to begin
    with (for a batcher: the knobs, from the profile of a callable); one of another machine or model is a start all the same,
    with a warning. ``observe_only`` recommends in the log and sets nothing. ``admission``: True ends requests that can no
    longer meet their TTFT target, and orders those that wait by deadline, while the controller is attached; an
    :class:`~runtime.llm.admission.AdmissionPolicy` says more exactly what; False ends none meanwhile; None leaves it to the
    engine. ``bounds`` and ``pinned`` are the operator's bounds on single knobs: (least, most), and the one value allowed.
    ``log``: a JSONL file of decisions, appended to. ``interval_s``: seconds on the engine's clock from one decision about the
    knobs to the next, above 0. ``controller``: the name of one, or one of your own, which no other engine has; None:
    ``predictive``, and for a batcher ``batching``. ``steer``: open a local socket for ``autotune watch``, ``pause`` and ``set``,
    in a private directory or at the path given.

    Raises :class:`~runtime.errors.LeaseError` when another controller holds the engine, ``ValueError`` or
    :class:`~runtime.errors.InputError` for input that cannot be used.
    """
    from autotune.control.attach import attach

    return attach(
        engine,
        slo=slo,
        profile=profile,
        observe_only=observe_only,
        admission=admission,
        bounds=bounds,
        pinned=pinned,
        log=log,
        interval_s=interval_s,
        controller=controller,
        steer=steer,
    )


def __getattr__(name: str) -> Any:
    """Public names load their module when first used, so that ``import autotune`` is quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
