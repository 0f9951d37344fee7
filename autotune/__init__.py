"""Tunes: profiles an engine offline, steers it online, exports what it found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.version import __version__

if TYPE_CHECKING:
    from autotune.attach import Control, control
    from autotune.callables.profile import CallableProfile, load_callable_profile
    from autotune.profile import Profile, load_profile, save_profile, shipped_profiles
    from autotune.score import Score

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
    "CallableProfile": "autotune.callables.profile",
    "Control": "autotune.attach",
    "Profile": "autotune.profile",
    "Score": "autotune.score",
    "control": "autotune.attach",
    "load_callable_profile": "autotune.callables.profile",
    "load_profile": "autotune.profile",
    "save_profile": "autotune.profile",
    "shipped_profiles": "autotune.profile",
}


def __getattr__(name: str) -> Any:
    """Public names load their module when first used, so that ``import autotune`` is quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
