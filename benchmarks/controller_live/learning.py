"""How much slower the machine is beside a second process."""

from __future__ import annotations

import contextlib
import random
import statistics

from benchmarks.controller_live.machine import taking
from benchmarks.live.machine import Machine
from runtime.knobs import Knobs
from runtime.llm.engine import Engine
from runtime.slo import SLO

_PATIENT = SLO(ttft_ms=600_000)


def slowdown(machine: Machine, *, repeats: int = 3) -> float:
    """How many times as long the same requests take while a second process takes a core: medians of alternating runs."""
    assert isinstance(machine.engine, Engine) and machine.core is not None
    rng = random.Random(77)
    took: dict[bool, list[float]] = {False: [], True: []}
    machine.engine.set_knobs(Knobs(8, 0, 256, 256))
    machine.engine.set_slo(_PATIENT)  # nobody leaves the queue
    for taken in [False, True] * repeats:
        prompts = [[rng.randrange(machine.facts.vocab_size) for _ in range(128)] for _ in range(8)]
        with taking(machine.core) if taken else contextlib.nullcontext():
            begun = machine.clock.now()
            machine.engine.generate(prompts, max_tokens=32, ignore_eos=True)
            took[taken].append(machine.clock.now() - begun)
    return statistics.median(took[True]) / statistics.median(took[False])
