"""What the contract suites of controllers share."""

from __future__ import annotations

import json

from autotune.control.controllers.protocol import Controller
from autotune.control.controllers.registry import CONTROLLERS, OF_BATCHERS
from autotune.control.loop import Control
from runtime.knobs import Knobs
from runtime.slo import SLO
from tests.unit.control_world import VLLM, poisson

NAMES = list(CONTROLLERS)
ALL = [*NAMES, *OF_BATCHERS]
FALLS_BACK = {"predictive", "batching"}
"""Those that may find that nothing explains what they see."""
SLOS = [SLO(ttft_ms=500, tpot_ms=30), SLO(tpot_ms=1), SLO(itl_ms=40), SLO(ttft_ms=300), SLO(e2e_ms=5000, tpot_ms=40)]
LOAD = poisson(12, 12, 800, 100, seed=21)


def make(name: str, slo: SLO = SLOS[0], start: Knobs = VLLM) -> Controller:
    return (CONTROLLERS | OF_BATCHERS)[name](slo, start, 760_000, 16)


def explained(attached: Control) -> None:
    """Every decision says why in one line, for a person, and brings evidence that can be stored."""
    for number, decision in enumerate(attached.decisions):
        assert decision.cause and "\n" not in decision.cause, decision
        assert json.loads(decision.as_json())["evidence"] == dict(decision.evidence)
        beginning = decision.action == "set" and not decision.regime  # by the profile, or the operator's bounds
        if beginning:
            assert number == 1 and attached.decisions[0].action == "attach", decision
        elif decision.action in ("set", "hold", "observe"):
            assert decision.regime and decision.evidence, decision
        elif decision.action == "note":
            assert decision.evidence, decision
