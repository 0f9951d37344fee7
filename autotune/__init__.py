"""Tunes: profiles an engine offline, steers it online, exports what it found.

The names below are loaded when first used: importing this costs nothing, and none of them loads torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.profile import Profile as Profile
    from autotune.profile import load_profile as load_profile
    from autotune.profile import shipped_profiles as shipped_profiles

    __version__: str

_MODULE = {name: "autotune.profile" for name in ("Profile", "load_profile", "shipped_profiles")}

__all__ = ["Profile", "__version__", "load_profile", "shipped_profiles"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = version("gpu-autotune")
    elif name in _MODULE:
        value = getattr(import_module(_MODULE[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
