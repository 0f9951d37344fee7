"""How well a calibration knows a GPU: the project's own, in virtual time, on hardware composed from public measurements.

Eight pairs of GPU and model (:mod:`benchmarks.gpu_truth`), each as measured (``base``) and with what graphs and hosts add
(``all``: padding to a ladder of batch sizes, 4 ms more for a step with prompts, decodes that attend 1.6 times as long there;
``recorded``: the same with steps with prompts recorded as well, up to 512 tokens, which then need no 4 ms and are padded).
Each is calibrated as ``autotune profile`` does in its default budget. Then the model is asked for random steps of serving and
held against the truth. Batch sizes, contexts and chunks of these are log-uniform, up to the ceilings and nine tenths of the KV
pool: the calibration's plan has no part in them.

- *decode*: sequences that decode alone; *mixed*: one to three chunks beside them; *prefill*: one to four chunks alone. Half of
  the chunks stand behind computed tokens.
- *error*: |predicted ÷ true − 1|, median and 90th percentile; *expected*: the median error that the calibration expects there.
- *budget*: the largest prompt chunk beside decodes that the model says keeps a step within its target (50 ms, or 1.5 × the
  decodes alone), over what the truth says, the median; and the share of such steps that exceed the target by over 10%.
- *learner*: the controller's online learner, cold, after 1,000 steps of a served load (the Azure conversations at 80% of
  capacity, the token budget turned every 50 steps), on the 500 that follow; warm: begun with what the calibration knows.

Run ``python -m benchmarks.calibration`` (a minute or two; ``--truth h100-llama3-8b`` takes seconds); the last line is JSON.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from autotune.cli.options import seconds as budget_seconds
from autotune.cli.profile import DEFAULT_BUDGET
from autotune.cost.model import CostModel
from autotune.profile.parts import ModelFacts
from autotune.profiling.calibrate import full_rate, request_alone
from autotune.profiling.steps import measure_steps
from autotune.profiling.timing import Schedule
from autotune.simulate import SimulatedEngine
from autotune.workload import parse_workload
from benchmarks.command import command, exit_code
from benchmarks.gpu_truth import ALL, BASE, RECORDED, Flags, Truth, load, names, simulated_engine
from benchmarks.gpu_truth.engine import LIMITS
from benchmarks.gpu_truth.truth import Chunks
from runtime.errors import InputError
from runtime.knobs import Knobs
from runtime.records import RequestRecord, StepRecord, percentile
from runtime.step_model import Knowledge, StepFeatures, StepLearner, StepModel

VARIANTS: dict[str, Flags] = {"base": BASE, "all": ALL, "recorded": RECORDED}
REGIONS = ("decode", "mixed", "prefill")
STEPS = 500
NOISE = 0.02
_CONTEXT = 16_384  # tokens of a sequence
_LONGEST = 8192  # context of a sequence in the random steps
_SHARE = 0.9  # of the KV pool
_TARGET_S = 0.05
_BUDGETED = 100  # of the decode steps
_FILLING, _LEARNED, _PREDICTED, _TURN = 500, 1000, 500, 50  # steps
_BUDGETS = (256, 512, 1024, 2048, 4096)


class Step(NamedTuple):
    """A step to be predicted: ``chunks`` are (computed before, computed now)."""

    decodes: int
    context: int
    chunks: Chunks

    @property
    def features(self) -> StepFeatures:
        tokens = sum(count for _, count in self.chunks)
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in self.chunks)
        reads = sum(start + count for start, count in self.chunks)
        return StepFeatures(self.decodes, self.context, tokens, reads, pairs, len(self.chunks))


class Errors(NamedTuple):
    """|predicted ÷ true − 1| over a set of steps; ``expected``: the median that the calibration expects, if it expects any."""

    median: float
    p90: float
    expected: float | None = None

    @property
    def expected_over_true(self) -> float:
        return self.expected / self.median if self.expected and self.median else math.nan


class Budgets(NamedTuple):
    """Largest chunks within a step-time target: predicted ÷ true, the median, and the share of steps over target by > 10%."""

    ratio: float
    missed: float


class Found(NamedTuple):
    """What came of one calibration. ``seconds``: that it took on the GPU's clock; ``host_s``: of this machine."""

    regions: dict[str, Errors]
    budgets: Budgets
    cold: Errors
    warm: Errors
    seconds: float
    host_s: float
    family: str


def random_steps(truth: Truth, region: str, seed: int, count: int = STEPS) -> list[Step]:
    """``count`` steps of serving, log-uniform within the ceilings and the pool of ``truth``."""
    rng = random.Random(f"{truth.name} {region} {seed}")

    def drawn(low: float, high: float) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    most, made = int(truth.kv_tokens * _SHARE), list[Step]()
    while len(made) < count:
        decodes = context = 0
        chunks: list[tuple[int, int]] = []
        if region != "prefill":
            decodes = drawn(1, LIMITS.max_batch_size - 4)
            context = decodes * drawn(64, _LONGEST)
        if region != "decode":
            prompts = rng.randint(1, 3 if decodes else 4)
            for _ in range(prompts):
                start = drawn(64, _LONGEST) if rng.random() < 0.5 else 0
                chunks.append((start, drawn(16, (2048 if decodes else _LONGEST) / prompts)))
        if context + sum(map(sum, chunks)) <= most:
            made.append(Step(decodes, context, chunks))
    return made


def errors(model: StepModel, truth: Truth, steps: Sequence[Step], expected: float | None = None) -> Errors:
    """Of what ``model`` says of ``steps``."""
    off = [abs(model.predict(s.features) / truth.step_seconds(*s) - 1) for s in steps]
    return Errors(statistics.median(off), percentile(off, 90) or 0.0, expected)


def facts_of(truth: Truth) -> ModelFacts:
    return ModelFacts(
        name=truth.name, architecture="llama", parameters=1, dtype=truth.meta["dtype"], random_weights=True, seed=0,
        max_model_len=_CONTEXT, vocab_size=32_000, kv_bytes_per_token=1,
    )  # fmt: skip


def calibrated(truth: Truth, budget_s: float, seed: int) -> CostModel:
    """The cost model of ``truth``, as ``autotune profile`` makes it in ``budget_s`` seconds of calibration."""
    engine = simulated_engine(truth, noise=NOISE, seed=seed)
    begun, facts = engine.clock.now(), facts_of(truth)
    request_alone(engine, facts, seed=seed)
    spent = engine.clock.now() - begun
    found = measure_steps(engine, facts, budget_s=max(budget_s - spent, budget_s / 2), seed=seed)
    return found.cost(engine.clock.now() - begun)


def expected(cost: CostModel, steps: Sequence[Step]) -> float:
    """The median of the errors that the calibration expects of its model on ``steps``."""
    return statistics.median(cost.uncertainty(step.features) for step in steps)


def largest_chunk(model: StepModel, beside: Step, target_s: float) -> int:
    """The most tokens of a fresh prompt that ``model`` says fit into ``target_s`` beside the decodes; 0: none does."""
    fits, over = 0, LIMITS.token_budget
    while over - fits > 1:
        middle = (fits + over) // 2
        step = Step(beside.decodes, beside.context, [(0, middle)])
        fits, over = (middle, over) if model.predict(step.features) <= target_s else (fits, middle)
    return fits


def budgets(model: StepModel, truth: Truth, steps: Sequence[Step]) -> Budgets:
    """What ``model`` makes of step-time targets beside the decodes of ``steps``."""
    ratios, missed = [], 0
    for step in steps:
        target = max(_TARGET_S, 1.5 * truth.step_seconds(*step))
        predicted, true = largest_chunk(model, step, target), largest_chunk(truth, step, target)
        if predicted and true:
            ratios.append(predicted / true)
            missed += truth.step_seconds(step.decodes, step.context, [(0, predicted)]) > 1.1 * target
    return Budgets(statistics.median(ratios), missed / len(ratios)) if ratios else Budgets(math.nan, math.nan)


def served(truth: Truth, seed: int) -> list[tuple[StepFeatures, float, float]]:
    """Steps of the Azure conversations at 80% of capacity while the token budget is turned every few of them: counts, seconds
    that they took, and seconds without noise. The first few hundred, while the engine fills, are left out."""
    engine = simulated_engine(truth, noise=NOISE, seed=seed)
    workload = parse_workload(f"azure-conv:cap_prompt={_LONGEST},cap_output={_LONGEST // 4}")
    lengths = list(workload.at_rate(1.0).arrivals(seed, limit=400))
    rate = 0.8 * full_rate(truth, lengths, LIMITS, engine.facts)
    log = Turning(engine, seed)
    engine.subscribe(log)
    engine.serve(workload.at_rate(rate).arrivals(seed, limit=20_000), shared=False, stop=lambda: log.full)
    counted = [StepFeatures.of(record) for record in log.steps]
    return [(step, r.duration, truth.predict(step)) for step, r in zip(counted, log.steps, strict=True)][_FILLING:]


class Turning:
    """Keeps the steps of ``engine`` and turns its token budget every few of them."""

    def __init__(self, engine: SimulatedEngine, seed: int) -> None:
        self._engine, self._rng = engine, random.Random(seed)
        self.steps: list[StepRecord] = []

    @property
    def full(self) -> bool:
        return len(self.steps) >= _FILLING + _LEARNED + _PREDICTED

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)
        if len(self.steps) % _TURN == 0:
            budget = self._rng.choice(_BUDGETS)
            self._engine.set_knobs(Knobs(LIMITS.max_batch_size, 0, budget, budget))

    def on_request(self, record: RequestRecord) -> None:
        """Says nothing of a step's time."""


def learned(learner: StepLearner, stream: Sequence[tuple[StepFeatures, float, float]]) -> Errors:
    """The errors of ``learner`` on the last steps of ``stream``, each asked before it is learned, behind the first thousand."""
    off = []
    for number, (step, seconds, truth) in enumerate(stream[: _LEARNED + _PREDICTED]):
        if number >= _LEARNED:
            off.append(abs(learner.predict(step) / truth - 1))
        learner.observe(step, seconds)
    return Errors(statistics.median(off), percentile(off, 90) or 0.0)


def measured(truth: Truth, budget_s: float, seed: int) -> Found:
    """Everything about one truth."""
    begun = time.process_time()
    cost = calibrated(truth, budget_s, seed)
    host_s = time.process_time() - begun
    sampled = {region: random_steps(truth, region, seed) for region in REGIONS}
    regions = {region: errors(cost, truth, steps, expected(cost, steps)) for region, steps in sampled.items()}
    chosen = budgets(cost, truth, sampled["decode"][:_BUDGETED])
    stream, known = served(truth, seed), cost.facts.learner
    assert known is not None  # a model that was just fitted has one
    warm = StepLearner.warm_start(
        Knowledge(known.unit_s, known.decode, known.decode_covariance, known.mixed, known.mixed_covariance),
        graphs=truth.flags.graphs,
    )
    cold = learned(StepLearner(graphs=truth.flags.graphs), stream)
    return Found(regions, chosen, cold, learned(warm, stream), cost.facts.seconds, host_s, cost.facts.family)


def off_by(expected_over_true: float) -> float:
    """The factor between them, whichever is the larger; inf where nothing was expected."""
    return max(expected_over_true, 1 / expected_over_true) if expected_over_true > 0 else math.inf


def summary(found: dict[tuple[str, str], Found]) -> dict[str, float]:
    """The line of JSON. ``…_worst_region``: of each region the median over the truths, then the worst region; ``…_worst_truth``:
    the worst region of the worst truth; ``told_vs_true``: the factor between the error that was expected and the true one,
    whichever is larger, over regions and truths."""
    made: dict[str, float] = {}
    for variant in dict.fromkeys(variant for _, variant in found):
        of = [f for (_, v), f in found.items() if v == variant]
        tail = "" if variant == "base" else f"_{variant}"
        by_region = {r: [f.regions[r] for f in of] for r in REGIONS}
        factors = [off_by(e.expected_over_true) for each in by_region.values() for e in each]
        made |= {
            f"median_worst_region{tail}": max(statistics.median(e.median for e in each) for each in by_region.values()),
            f"p90_worst_region{tail}": max(statistics.median(e.p90 for e in each) for each in by_region.values()),
            f"median_worst_truth{tail}": max(e.median for each in by_region.values() for e in each),
            f"p90_worst_truth{tail}": max(e.p90 for each in by_region.values() for e in each),
            f"told_vs_true{tail}": statistics.median(factors),
            f"told_vs_true_p90{tail}": percentile(factors, 90) or 0.0,
            f"told_vs_true_worst{tail}": max(factors),
            f"budget_over_true{tail}": statistics.median(f.budgets.ratio for f in of),
            f"budget_missed{tail}": statistics.median(f.budgets.missed for f in of),
            f"learner_median{tail}": max(f.cold.median for f in of),
            f"learner_p90{tail}": max(f.cold.p90 for f in of),
            f"learner_warm_median{tail}": max(f.warm.median for f in of),
            f"learner_warm_p90{tail}": max(f.warm.p90 for f in of),
            f"calibration_s{tail}": max(f.seconds for f in of),
        }
    return {name: round(value, 4) for name, value in made.items()}


HEADER = (
    f"{'truth':<24}{'variant':<8}"
    + "".join(f"{region + ' (expected)':>22}" for region in REGIONS)
    + f"{'budget, missed':>16}{'learner':>14}{'warm':>14}{'GPU s':>8}{'host s':>8}  family"
)


def row(name: str, variant: str, found: Found) -> str:
    """Medians / 90th percentiles in %."""

    def said(e: Errors) -> str:
        return f"{100 * e.median:.1f} / {100 * e.p90:.1f}"

    regions = "".join(f"{f'{said(e)} ({100 * (e.expected or 0):.1f})':>22}" for e in found.regions.values())
    chosen = f"{found.budgets.ratio:.2f}, {found.budgets.missed:.0%}"
    return (
        f"{name:<24}{variant:<8}{regions}{chosen:>16}{said(found.cold):>14}{said(found.warm):>14}{found.seconds:>8.1f}"
        f"{found.host_s:>8.1f}  {found.family}"
    )


@exit_code()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("calibration", __doc__)
    parser.epilog = "example: python -m benchmarks.calibration --truth h100-llama3-8b --variant all --budget 8m"
    parser.add_argument("--truth", action="append", metavar="NAME", help=f"only this one of {', '.join(names())}")
    parser.add_argument("--variant", action="append", metavar="NAME", help=f"only this one of {', '.join(VARIANTS)}")
    parser.add_argument(
        "--budget", default=DEFAULT_BUDGET, help=f"that of `autotune profile`, such as 90s or 8m ({DEFAULT_BUDGET})"
    )
    parser.add_argument("--seed", type=int, default=1, help="of noise, plan and random steps (1)")
    args = parser.parse_args(arguments)
    for option, known in (("truth", names()), ("variant", list(VARIANTS))):
        for name in getattr(args, option) or ():
            if name not in known:
                raise InputError(f"--{option} is {name}; it must be one of {', '.join(known)}")
    budget_s = Schedule.of(budget_seconds(args.budget)).calibrate_s
    print(f"calibrations of {budget_s:g} s on the GPU's clock; errors: median / p90 in %\n\n{HEADER}", flush=True)
    found: dict[tuple[str, str], Found] = {}
    begun = time.monotonic()
    for name in args.truth or names():
        for variant in args.variant or VARIANTS:
            found[name, variant] = measured(load(name, VARIANTS[variant]), budget_s, args.seed)
            print(row(name, variant, found[name, variant]), flush=True)
    print(f"\nseed {args.seed}; {time.monotonic() - begun:.0f} s")
    print(json.dumps(summary(found)))


if __name__ == "__main__":
    sys.exit(main())
