"""What is served and by whom: the loads, the contenders, and the fixed settings among which the best is looked for.

The loads are one conversation at three shares of capacity, and one in which long prompts join in mid-run.

Lengths and SLO follow from the machine by the rules of :mod:`benchmarks.live.loads`. Capacity is what vLLM completes when it is
kept full with 32 sequences and 512 tokens, simulated on step times that were calibrated on the spot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from autotune.bench import Contender, fixed
from autotune.cost.model import CostModel
from autotune.profiling.setup import LOAD
from benchmarks.live import loads
from benchmarks.live.contenders import admitted, ours, ours_knobs_only
from benchmarks.live.loads import Case
from benchmarks.live.machine import Machine
from benchmarks.vllm.starting import DEFAULTS, LIMITS
from benchmarks.vllm_live.stock import Stock
from runtime.knobs import Knobs

SHARES: Final = {"light": 0.8, "full": 1.0, "over": 1.2}
"""Of capacity."""
PROMPTS: Final = "prompts"
NAMES: Final = (*SHARES, PROMPTS)
NEIGHBOURS: Final[Mapping[str, Sequence[str]]] = {
    "light": ("full",), "full": ("light", "over"), "over": ("full",), PROMPTS: ("light", "full")
}  # fmt: skip
"""Of each load those that are most like it: what is good there is measured here too. The one that shifts begins between two."""

AT_DEFAULTS: Final = fixed(DEFAULTS, "defaults")
STOCK: Final = Stock("stock", DEFAULTS)
OURS: Final = replace(ours(LIMITS), knobs=DEFAULTS)
KNOBS_ONLY: Final = replace(ours_knobs_only(LIMITS), knobs=DEFAULTS)

GRID: Final = tuple(
    Knobs(batch, 0, budget, budget)
    for batch, budget in product((128, 64, 32, 16, 8), (32, 48, 64, 96, 128, 192, 256, 512, 2048))
) + tuple(Knobs(batch, 0, budget, 64) for batch, budget in product((128, 32), (128, 256, 2048)))


def cases(machine: Machine, cost: CostModel, duration: float) -> list[Case]:
    found = [loads.steady(name, loads.CONVERSATION, machine, cost, share) for name, share in SHARES.items()]
    conversation = loads.steady("conversation", loads.CONVERSATION, machine, cost, LOAD)
    code = loads.steady("code", loads.CODE, machine, cost, LOAD)
    return [*found, loads.joined(PROMPTS, conversation, code, duration)]


def rivals(name: str, best: Mapping[str, Sequence[Contender]], winners: Collection[str] = ()) -> list[Contender]:
    """The fixed settings of one kind that the load ``name`` is served at, those from which most is expected first.

    ``best``: of this load and its :data:`NEIGHBOURS`, the best in simulation, each best first. What is a little worse in
    simulation may be the best by what is measured, so those of the neighbours take part as well. ``winners``: names of settings,
    as they are or with admission, that were the best by what was measured at some load.
    """
    kind = admitted if any(contender.control for contender in best[name]) else fixed
    near = [contender for one in NEIGHBOURS[name] for contender in best[one]]
    proven = [kind(knobs) for knobs in GRID if {fixed(knobs).name, admitted(knobs).name} & {*winners}]
    return list(dict.fromkeys((*best[name], *near, *proven)))
