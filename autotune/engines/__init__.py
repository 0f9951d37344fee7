"""What can be measured and tuned: the one protocol of an engine, and the engines behind it.

Whoever measures, profiles, controls or serves knows :class:`Engine` and asks its ``capabilities``; only the modules of this
room know an engine by name. The simulated engine stands behind the same protocol in :mod:`autotune.simulate`.
"""

from __future__ import annotations

from autotune.engines.adapting import Adaptable, adapt
from autotune.engines.protocol import Engine, EngineSource, Handle, VirtualEngine, virtual, waiting

__all__ = ["Adaptable", "Engine", "EngineSource", "Handle", "VirtualEngine", "adapt", "virtual", "waiting"]
