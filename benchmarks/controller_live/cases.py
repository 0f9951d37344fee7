"""The five loads, and the SLO under which each is served.

Three are steady: *conversation* and *code* have the joint lengths of Azure's two traces, *chat* has short prompts and long
answers; all arrive by Poisson. Two shift in mid-run: *prompts* is the conversation, whose rate then halves while code
completions with their long prompts join; *core* is the conversation, and then a second process wants
the engine's core and gets half of it.

Lengths, SLO and rate follow from the machine by the rules of :mod:`benchmarks.live.loads`; the rate is 90% of what the machine
completes when it is kept full: the load at which ``autotune profile`` begins to compare settings, for that is where they matter.
In *prompts* that holds for either half; in *core* the rate stays what it is, and the machine is the average of what it is before
and after.
"""

from __future__ import annotations

from typing import Final

from autotune.cost.model import CostModel
from autotune.profiling.setup import LOAD
from benchmarks.live import loads
from benchmarks.live.loads import Case
from benchmarks.live.machine import Machine

STEADY: Final = {"conversation": loads.CONVERSATION, "code": loads.CODE, "chat": loads.CHAT}
PROMPTS, CORE = "prompts", "core"
SHIFTS = (PROMPTS, CORE)


def steady_cases(machine: Machine, cost: CostModel, load: float = LOAD) -> list[Case]:
    """The loads that do not shift."""
    return [loads.steady(name, spec, machine, cost, load) for name, spec in STEADY.items()]


def cases(machine: Machine, cost: CostModel, slowdown: float, duration: float, load: float = LOAD) -> list[Case]:
    """The loads for this machine. ``slowdown``: how many times as long steps take beside the process that takes a core;
    ``load``: the rate, as a share of what the engine completes when it is kept full."""
    found = steady_cases(machine, cost, load)
    conversation, code = found[0], found[1]
    workload, share = conversation.workload, (1 + 1 / slowdown) / 2
    said = (
        f"{share * workload.rate:.1f} conversations/s, after {duration / 2:g} s steps take {slowdown:.2f} times as long"
    )
    core = Case(CORE, workload.at_rate(share * workload.rate), conversation.slo, said, shifts=True, taken=True)
    return [*found, loads.joined(PROMPTS, conversation, code, duration), core]
