"""One case of the sweep, from the grid to the truth: what a process of its own does, and hands back.

Beside the command and not in it: what another process is sent must have a name that it can import.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Self

from autotune.profile.parts import ModelFacts
from autotune.profiling.findings import SIM_TRIALS, Question
from autotune.profiling.reporting import Silent
from autotune.profiling.session import Session
from autotune.profiling.space import make_space
from autotune.profiling.study import open_study
from autotune.profiling.timing import Schedule
from benchmarks.sweep.cases import CASES, LIMITS, VOCABULARY, Machine
from benchmarks.sweep.rivals import (
    OPTUNA_STARTUP,
    VLLM_DEFAULTS,
    Choice,
    auto_tune,
    exhaustive,
    expert,
    halving,
    load_seed,
    random_search,
    tpe,
)
from benchmarks.sweep.truth import Truth

OURS = "ours"
_MEASURED = 8  # settings ours measures on the machine, some of them more than once
_CALIBRATION, _CALIBRATION_S = 0.6, 20.0  # what its calibration may take: of a measurement's window, and at least, s


@dataclass(frozen=True)
class Result:
    """One contender in one case under one seed. ``time``: of the machine, in rounds of the grid."""

    contender: str
    seed: int
    knobs: str
    regret: float
    time: float
    runs: int

    @property
    def share(self) -> float:
        """True goodput, as a share of the best's."""
        return 1 - self.regret


@dataclass(frozen=True)
class CaseResult:
    case: str
    best: str
    attainment: float
    round_s: float
    cpu_s: float
    results: list[Result]

    @classmethod
    def of_json(cls, part: dict[str, Any]) -> Self:
        """From what ``asdict`` makes of one, once it has been JSON."""
        return cls(**{**part, "results": [Result(**result) for result in part["results"]]})

    def of(self, contender: str) -> list[Result]:
        return [r for r in self.results if r.contender == contender]


def ours(machine: Machine, seed: int, *, measured: int = _MEASURED, sim_trials: int = SIM_TRIALS) -> Choice:
    """The stages of ``autotune profile --rate … --slo …``, in virtual time; windows are the case's, of 500 requests."""
    case = machine.case
    model = ModelFacts(
        name=case.name, architecture="formula", parameters=1, dtype="bfloat16", random_weights=True, seed=None,
        max_model_len=32768, vocab_size=VOCABULARY, kv_bytes_per_token=1,
    )  # fmt: skip
    question = Question(
        workload=case.load(), slo=case.slo, rate=case.rate, seed=load_seed(seed), trials=measured, budget_s=None,
        space=make_space(LIMITS, pins=["max_wait_ms=0"]), sim_trials=sim_trials,
    )  # fmt: skip
    schedule = Schedule(None, case.window_s, case.warmup_s, max(_CALIBRATION_S, _CALIBRATION * case.window_s))
    with tempfile.TemporaryDirectory() as folder, open_study(Path(folder) / "journal", {"case": case.name}) as study:
        found = Session(machine.engine, model, question, study, Silent(), schedule=schedule).run()
    return Choice(found.settings()["balanced"].knobs, machine.spent_s, len(found.runs), len(found.runs))


def play(name: str, seeds: Sequence[int], rounds: int, truth_seeds: int, drift: float = 0.0) -> CaseResult:
    """Everything about one case; on a machine whose speed has a deviation of ``drift``."""
    begun = time.process_time()
    case = replace(next(c for c in CASES if c.name == name), drift=drift)
    table = exhaustive(Machine(case, seeds[0]), rounds, seeds[0])
    round_s = table[0][0].spent_s
    choices: list[tuple[str, int, Choice]] = []
    for number, (choice, _) in enumerate(table):
        choices.append((("grid once", "grid twice", "grid thrice")[number], seeds[0], choice))
    for seed in seeds:
        mine = ours(Machine(case, seed), seed)
        contenders: dict[str, Callable[[Machine, float, int], Choice]] = {
            "random": random_search,
            "tpe": tpe,
            "tpe, 10 start-up": partial(tpe, random_trials=OPTUNA_STARTUP),
            "halving": partial(halving, window_s=case.window_s, warmup_s=case.warmup_s),
            "expert": partial(expert, kv_tokens=case.kv_tokens),
            "auto_tune": auto_tune,
            "auto_tune, no restarts": partial(auto_tune, restart_s=0.0),
        }
        choices.append((OURS, seed, mine))
        choices += [(n, seed, look(Machine(case, seed), mine.spent_s, seed)) for n, look in contenders.items()]
    choices.append(("vLLM defaults", seeds[0], Choice(VLLM_DEFAULTS, 0.0, 0, 0)))
    choices.append(("auto_tune, to its end", seeds[0], auto_tune(Machine(case, seeds[0]), inf, seeds[0])))
    truth = Truth(case, truth_seeds)
    taken = [choice.knobs or VLLM_DEFAULTS for _, _, choice in choices]
    best, share = truth.best(table[-1][1], taken)
    results = [
        Result(n, seed, str(choice.knobs), 1 - truth.share(knobs) / share, choice.spent_s / round_s, choice.runs)
        for (n, seed, choice), knobs in zip(choices, taken, strict=True)
    ]
    return CaseResult(name, str(best), share, round_s, time.process_time() - begun, results)
