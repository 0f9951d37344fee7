"""The controllers by name. The contract suite runs over all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from autotune.controllers.predictive import PredictiveController
from autotune.controllers.protocol import Controller
from autotune.controllers.static import StaticController
from runtime.knobs import Knobs
from runtime.slo import SLO


def _predictive(slo: SLO, start: Knobs, kv_tokens: int, block_size: int) -> Controller:
    return PredictiveController(slo, start, kv_tokens=kv_tokens, block_size=block_size)


def _static(slo: SLO, start: Knobs, kv_tokens: int, block_size: int) -> Controller:
    del slo, kv_tokens, block_size
    return StaticController(start)


CONTROLLERS: Final[dict[str, Callable[[SLO, Knobs, int, int], Controller]]] = {
    "predictive": _predictive,
    "static": _static,
}
"""Name → what makes one from (SLO, starting knobs, tokens of the KV pool, tokens of a KV block)."""
