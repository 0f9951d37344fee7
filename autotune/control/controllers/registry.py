"""The controllers by name: those of an engine, and those of a batcher alone. The contract suite runs over all of them."""

from __future__ import annotations

from typing import Final, Protocol

from autotune.control.controllers.aimd import AimdController
from autotune.control.controllers.batching import BatchingController
from autotune.control.controllers.bisection import BisectionController
from autotune.control.controllers.gradient import GradientController
from autotune.control.controllers.length_table import LengthTableController
from autotune.control.controllers.predictive import PredictiveController
from autotune.control.controllers.protocol import Controller
from autotune.control.controllers.static import StaticController
from runtime.knobs import Knobs
from runtime.slo import SLO
from runtime.step_model import StepLearner


class Make(Protocol):
    """Makes a controller; ``model`` is one that knows the hardware already, if there is one."""

    def __call__(
        self, slo: SLO, start: Knobs, kv_tokens: int, block_size: int, model: StepLearner | None = None
    ) -> Controller: ...


def _predictive(
    slo: SLO, start: Knobs, kv_tokens: int, block_size: int, model: StepLearner | None = None
) -> Controller:
    return PredictiveController(slo, start, kv_tokens=kv_tokens, block_size=block_size, model=model)


def _static(slo: SLO, start: Knobs, kv_tokens: int, block_size: int, model: StepLearner | None = None) -> Controller:
    del slo, kv_tokens, block_size, model
    return StaticController(start)


def _aimd(slo: SLO, start: Knobs, kv_tokens: int, block_size: int, model: StepLearner | None = None) -> Controller:
    del kv_tokens, block_size, model
    return AimdController(slo, start)


def _gradient(slo: SLO, start: Knobs, kv_tokens: int, block_size: int, model: StepLearner | None = None) -> Controller:
    del slo, kv_tokens, block_size, model
    return GradientController(start)


def _bisection(slo: SLO, start: Knobs, kv_tokens: int, block_size: int, model: StepLearner | None = None) -> Controller:
    del kv_tokens, block_size, model
    return BisectionController(slo, start)


def _length_table(
    slo: SLO, start: Knobs, kv_tokens: int, block_size: int, model: StepLearner | None = None
) -> Controller:
    del slo, block_size, model
    return LengthTableController(start, kv_tokens=kv_tokens)


def _batching(
    slo: SLO, start: Knobs, kv_tokens: int, block_size: int, model: StepLearner | None = None
) -> BatchingController:
    del kv_tokens, block_size, model
    return BatchingController(slo, start)


CONTROLLERS: Final[dict[str, Make]] = {
    "predictive": _predictive,
    "static": _static,
    "aimd": _aimd,
    "gradient": _gradient,
    "bisection": _bisection,
    "length_table": _length_table,
}
"""Name → what makes one."""

OF_BATCHERS: Final[dict[str, Make]] = {"batching": _batching}
"""Those that know what a call is, and no more."""
