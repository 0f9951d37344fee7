"""A whole profiling run that can be killed, and tells by an append-only file what it measured on its hardware."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import autotune.profiling.target as measuring
from autotune.profiling.findings import Question
from autotune.profiling.reporting import Silent
from autotune.profiling.session import Session
from autotune.profiling.space import make_space
from autotune.profiling.study import SweepStudy, open_study
from autotune.profiling.timing import Schedule
from autotune.simulate import SimulatedEngine
from autotune.workload import parse_workload
from runtime.clock import VirtualClock
from runtime.knobs import KnobLimits
from runtime.slo import SLO
from runtime.step_model import StepFeatures
from tests.unit.paced import FACTS
from tests.unit.simulating import note

LIMITS = KnobLimits(max_batch_size=128, max_wait_ms=50, token_budget=2048, chunk_size=2048)
SIMULATED_TRIALS = 24


@dataclass(frozen=True)
class Truth:
    """A machine of another family than those that are fitted: everything added up, and a step at every 64th token."""

    def predict(self, step: StepFeatures) -> float:
        tokens = step.decodes + step.prefill_tokens
        attention = 3e-8 * (step.decode_context + step.prefill_attention)
        return 4e-3 + 2e-3 * -(-tokens // 64) + 5e-5 * tokens + attention


def noting(real: Any, log: Path) -> Any:
    """``real``, an ``evaluate``, with a line at the begin and the end of each measurement in ``log``; warm-ups are none."""

    def evaluate(engine: Any, knobs: Any, load: Any, slo: Any, **options: Any) -> Any:
        if options["label"].startswith("warm-up"):
            return real(engine, knobs, load, slo, **options)
        what = f"{knobs} at {load.rate:g} seed {options['seed']}"
        note(log, f"begin {what}")
        found = real(engine, knobs, load, slo, **options)
        note(log, f"end {what}")
        return found

    return evaluate


def profile(journal: Path, log: Path) -> None:
    """One session with a simulated machine as the hardware, until it is done."""
    measuring.evaluate = noting(measuring.evaluate, log)  # type: ignore[attr-defined]  # in a process of its own
    engine = SimulatedEngine(Truth(), kv_tokens=60_000, limits=LIMITS, noise=0.02, seed=5)
    question = Question(
        workload=parse_workload("poisson:rate=20,prompt=120,output=20"), slo=SLO(ttft_ms=400, tpot_ms=30), rate=None,
        seed=0, trials=4, budget_s=None, space=make_space(LIMITS), sim_trials=SIMULATED_TRIALS,
    )  # fmt: skip
    schedule = Schedule(None, window_s=10.0, warmup_s=1.0, calibrate_s=5.0, simulate_s=0.5)  # loads of few requests
    with open_study(journal, {"q": 1}) as study:
        host = VirtualClock()  # stands still: as many trials as were asked for, however slow the host
        found = Session(engine, FACTS, question, study, Silent(), schedule=schedule, host=host).run()
        assert not found.stopped and found.runs and found.capacity is not None
        for run in found.simulated:
            note(log.with_suffix(".simulated"), f"{run.trial} {run.label} {run.knobs} {run.score.goodput}")
        study.finish(question.trials, question.budget_s, question.sim_trials)


def command(folder: Path, model: Path, log: Path, *also: str) -> None:
    """``autotune profile`` in ``folder``, until it is done; its process ends with 0 if a profile was made."""
    from autotune.cli.main import run

    measuring.evaluate = noting(measuring.evaluate, log)  # type: ignore[attr-defined]
    os.chdir(folder)
    words = "profile --cpu --dtype float32 --workload poisson:rate=20,prompt=24,output=6 --slo ttft=400ms,tpot=100ms"
    more = "--rate 20 --trials 2 --sim-trials 8 --budget 15s --out a.yaml --model"
    code = run([*words.split(), *more.split(), str(model), *also])
    sys.exit(0 if code in (0, 1) else code)


MOMENTS = ("both files ready", "one file of two", "profile written", "study finished")


def command_that_dies(folder: Path, model: Path, log: Path, moment: str) -> None:
    """:func:`command`, killed at one of :data:`MOMENTS` of its end."""
    replace, finish = os.replace, SweepStudy.finish

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def replacing(source: Path, target: Path) -> None:
        if (moment, Path(target).name) in (("both files ready", "a.points.jsonl"), ("one file of two", "a.yaml")):
            die()
        replace(source, target)

    def finishing(study: SweepStudy, *bounds: Any) -> None:
        if moment == "profile written":
            die()
        finish(study, *bounds)
        die()

    os.replace, SweepStudy.finish = replacing, finishing  # type: ignore[assignment,method-assign]  # in a process of its own
    command(folder, model, log)
