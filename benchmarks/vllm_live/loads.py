"""The loads: one conversation at three shares of capacity, and one in which long prompts join in mid-run.

Lengths and SLO follow from the machine by the rules of :mod:`benchmarks.live.loads`. Capacity is what vLLM completes when it is
kept full with 32 sequences and 512 tokens, simulated on step times that were calibrated on the spot.
"""

from __future__ import annotations

from typing import Final

from autotune.cost.model import CostModel
from autotune.profiling.setup import LOAD
from benchmarks.live import loads
from benchmarks.live.loads import Case
from benchmarks.live.machine import Machine

SHARES: Final = {"light": 0.8, "full": 1.0, "over": 1.2}
"""Of capacity."""
PROMPTS: Final = "prompts"
NAMES: Final = (*SHARES, PROMPTS)


def cases(machine: Machine, cost: CostModel, duration: float) -> list[Case]:
    found = [loads.steady(name, loads.CONVERSATION, machine, cost, share) for name, share in SHARES.items()]
    conversation = loads.steady("conversation", loads.CONVERSATION, machine, cost, LOAD)
    code = loads.steady("code", loads.CODE, machine, cost, LOAD)
    return [*found, loads.joined(PROMPTS, conversation, code, duration)]
