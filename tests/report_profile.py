"""A profile with everything a report can show: calibrated, simulated, validated. Made with the real simulator, from formulas.

The hardware is a formula of another shape than the cost model that is fitted to it, with noise, so simulated and measured
figures differ as they do on a machine. The same arguments give the same profile and sidecar. For people to look at:
``python -m tests.report_profile FOLDER``.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.cost.model import CostModel, fit_cost_model
from autotune.measure.evaluate import evaluate
from autotune.measure.score import Score
from autotune.profile import Capacity, Confidence, Point, Profile, Setting, SimulationFacts, save_profile
from autotune.profile.parts import StepPoint
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run, Stage, pareto, point, points
from autotune.simulate import SimulatedEngine
from autotune.workload import Workload, parse_workload
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO
from runtime.step_model import StepFeatures, StepModel
from tests.sample_profile import sample_profile

SLO_ = SLO(ttft_ms=1000, tpot_ms=40)
LIMITS = KnobLimits(max_batch_size=1024, max_wait_ms=10000, token_budget=16384, chunk_size=16384)
DEFAULTS = {
    "vLLM defaults": Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=8192, chunk_size=8192),
    "SGLang defaults, small GPU": Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=16384, chunk_size=8192),
    "TensorRT-LLM defaults": Knobs(max_batch_size=1024, max_wait_ms=0, token_budget=8192, chunk_size=8192),
}
RATE = 19.5
LOAD = "poisson:prompt=1155~0.8,output=211~0.8"


class Hardware:
    """A large GPU serving a model of 8 billion parameters, roughly: weights read once, memory and compute overlapping."""

    def predict(self, step: StepFeatures) -> float:
        tokens = step.decodes + step.prefill_tokens
        memory = 16.1e9 / 3.6e12 + 131072 * (step.decode_context + step.prefill_context) / 3.6e12
        compute = 16.1e9 * tokens / 5.2e14 + 5.2e5 * step.prefill_attention / 5.2e14
        return 0.0021 + (memory**4 + compute**4) ** 0.25 + 2.5e-6 * tokens

    def predict_run(self, decodes: int, context: int, count: int) -> list[float]:
        return [self.predict(StepFeatures(decodes, context + i * decodes, 0, 0, 0)) for i in range(count)]


def report_profile(folder: Path, *, trials: int = 200, window_s: float = 30.0, seed: int = 0) -> Path:
    """Write ``example.yaml`` and its sidecar into ``folder``; the path of the profile. About 10 ms of CPU a trial."""
    steps = tuple(calibration(seed))
    cost = fit_cost_model(steps, seconds=41.0)
    simulated = list(simulate(cost, trials, window_s, seed))
    stage = points(run for run in simulated if run.trial >= 0)
    best = sorted(pareto(stage), key=lambda p: -p.goodput.mean)[:12]
    chosen = [*dict.fromkeys([p.knobs for p in best[:6]] + list(DEFAULTS.values()))]
    label = {p.knobs: p.label for p in stage}
    validated = [
        run_one(Hardware(), "validation", label[knobs], knobs, window_s, RATE, validation_seed, noise=0.03)
        for validation_seed in (1, 2, 3)
        for knobs in chosen
    ]
    compared = points(validated)
    settings = Objective(SLO_).choose(compared)
    balanced = settings["balanced"]
    paired = [run_one(cost, "simulation", "paired", run.knobs, window_s, RATE, run.score.seed) for run in validated]
    capacity = [
        run_one(Hardware(), "capacity", "balanced", balanced.knobs, window_s, RATE * share, 101 + i, noise=0.03)
        for i, share in enumerate((0.6, 0.75, 0.87))
    ]
    made = finished(compared, settings, points(paired), best, capacity, cost, trials, window_s)
    path = folder / "example.yaml"
    save_profile(made, path)
    lines = [json.dumps({"kind": "step", **step.model_dump(mode="json")}) for step in steps]
    lines += [run.model_dump_json() for run in (*simulated, *validated, *capacity)]
    cause = "out of memory: the engine's limits fell to max_batch_size 512"
    lines += [json.dumps({"stage": "simulation", "trial": n, "failed": cause}) for n in (trials, trials + 1)]
    (folder / made.points_file).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def finished(
    compared: list[Point],
    settings: dict[str, Setting],
    paired: list[Point],
    best: list[Point],
    capacity: list[Run],
    cost: CostModel,
    trials: int,
    window_s: float,
) -> Profile:
    knobs = settings["balanced"].knobs
    tried = (settings["balanced"].point, *(point([run]) for run in capacity))
    held = max((p for p in tried if p.attainment >= 0.99), key=lambda p: p.rate, default=None)
    base = sample_profile()
    workload = base.workload.model_copy(
        update={
            "spec": LOAD,
            "description": "independent users",
            "rate": RATE,
            "offered_rate": compared[0].offered_rate,
            "window_s": window_s,
            "validation_seeds": (1, 2, 3),
        }
    )
    gpu = base.machine.gpu and base.machine.gpu.model_copy(update={"count": 1, "name": "Example GPU"})
    met = held is not None
    verdict = (
        f"balanced serves 99% within the SLO up to about {held.offered_rate:.3g} req/s"
        if held
        else "the SLO was not met at any rate tried"
    )
    changes = dict[str, Any](
        name="example",
        points_file="example.points.jsonl",
        slo=SLO_,
        engine=base.engine.model_copy(update={"limits": LIMITS}),
        command="autotune profile --gpu --model llama-3.1-8b --slo ttft=1s,tpot=40ms --budget 10m --price 3.60/h",
        machine=base.machine.model_copy(update={"gpu": gpu}),
        workload=workload,
        knobs=knobs,
        settings=settings,
        baseline=next(p for p in compared if p.knobs == DEFAULTS["vLLM defaults"]),
        capacity=Capacity(knobs=knobs, rate=held and held.rate, tried=tried),
        verdict=verdict,
        slo_met=met,
        points=(*compared, *(point([run]) for run in capacity)),
        cost_model=cost.facts,
        simulation=SimulationFacts(trials=trials, cpu_seconds=19.0, pareto=len(best), goodput_error=0.021),
        simulated=(*paired, *best),
        confidence=Confidence(
            noise=0.012, best=0.71, regret=0.004,
            sentence="best of the validated settings with probability 71%; expected to lie 0.4% below the best of them",
        ),
        price_per_hour=3.6,
    )  # fmt: skip
    return Profile(**{name: getattr(base, name) for name in Profile.model_fields} | changes)


def calibration(seed: int) -> Iterable[StepPoint]:
    """38 kinds of steps, each measured with 1% noise, with what a fit without it would say (3% off at most)."""
    dice, hardware = random.Random(seed), Hardware()
    decodes = [(n, context) for n in (1, 4, 16, 64, 128, 256) for context in (256, 1024, 4096) if n * context <= 786432]
    chunks = [(tokens, before) for tokens in (64, 256, 1024, 4096, 8192) for before in (0, 4096)]
    plan = [("decode", StepFeatures(n, n * context, 0, 0, 0)) for n, context in decodes]
    plan += [("prefill", StepFeatures(0, 0, t, t + b, t * b + t * (t + 1) // 2)) for t, b in chunks]
    plan += [
        ("mixed", StepFeatures(n, n * 1024, t, t, t * (t + 1) // 2)) for n in (8, 64, 192) for t in (128, 512, 2048)
    ]
    for region, step in plan:
        seconds = hardware.predict(step) * dice.gauss(1, 0.01)
        off = dice.gauss(0, {"decode": 0.012, "prefill": 0.02, "mixed": 0.03}[region])
        yield StepPoint(
            region=region, **step._asdict(), seconds=seconds, spread=0.008, repeats=7, predicted=seconds * (1 + off)
        )


def simulate(cost: StepModel, trials: int, window_s: float, seed: int) -> Iterable[Run]:
    """The defaults of other engines, then settings drawn around ever better ones, as a sampler does."""
    dice = random.Random(seed)
    best: tuple[float, Knobs] = (-1.0, Knobs())
    tried = list(DEFAULTS.items())
    for number in range(trials):
        label, knobs = tried[number] if number < len(tried) else ("search", drawn(dice, best[1], number / trials))
        run = run_one(cost, "simulation", label, knobs, window_s, RATE, seed, trial=number)
        best = max(best, (run.score.goodput, knobs), key=lambda pair: pair[0])
        yield run


def drawn(dice: random.Random, best: Knobs, share: float) -> Knobs:
    """Anywhere at first, near the best later."""
    if dice.random() > share:
        budget = round(2 ** dice.uniform(6, 13.5))
        return Knobs(
            max_batch_size=round(2 ** dice.uniform(3, 10)), max_wait_ms=round(10 * dice.random() ** 2, 1),
            token_budget=budget, chunk_size=min(budget, round(2 ** dice.uniform(5, 13))),
        )  # fmt: skip
    near = {
        name: max(8, min(16384, round(getattr(best, name) * 2 ** dice.gauss(0, 0.6))))
        for name in ("max_batch_size", "token_budget", "chunk_size")
    }
    near["max_batch_size"] = min(1024, near["max_batch_size"])
    return Knobs(max_wait_ms=round(abs(dice.gauss(0, 1)), 1), **near)


def run_one(
    cost: StepModel,
    stage: Stage,
    label: str,
    knobs: Knobs,
    window_s: float,
    rate: float,
    seed: int,
    *,
    noise: float = 0.0,
    trial: int = -1,
) -> Run:
    score = scored(cost, knobs, window_s, rate, seed, noise)
    return Run(stage=stage, label=label, trial=trial, score=score)


def scored(cost: StepModel, knobs: Knobs, window_s: float, rate: float, seed: int, noise: float) -> Score:
    engine = SimulatedEngine(cost, kv_tokens=54000 * 16, limits=LIMITS, slo=SLO_, noise=noise, seed=seed)
    return evaluate(engine, knobs, load(rate), SLO_, vocab_size=128256, seed=seed, duration=window_s, warmup=4.0)


@functools.cache
def load(rate: float) -> Workload:
    return parse_workload(LOAD).at_rate(rate)


if __name__ == "__main__":
    print(report_profile(Path(sys.argv[1])))
