"""What the simulator says of workloads that its calibration never saw, against what the live engine does.

In rounds: before each, a calibration (:mod:`autotune.profiling.steps`) gives a cost model. Then the CPU engine serves each
workload, and the simulator, by that cost model, the same arrivals under the same knobs, limits and KV pool. Nothing that was
measured during a round or after it is used: the figures are those of somebody who calibrates and then simulates. Rates are
shares of what the engine, simulated by the first model, serves of each workload when flooded; three workloads also come at 0.9
and 1.05 of that. All real runs, the calibrations' too, are on a
clock that follows reference steps run between their own, so that a machine whose speed drifts counts as one whose
speed does not, and that stands still, for a while, where it is slow (:mod:`benchmarks.clocks.drift_corrected`).

An engine gets faster while its libraries meet the shapes of its products for the first time. So both engines work for a while
before the first calibration, and before the first round they serve each workload once, half as long and (but for the traces)
with other arrivals.

The fit is of medians and clean steps; requests feel means. So each simulated step takes longer by what serving added to the short
steps of the calibration's loads, and scatters as those did: by the scenario that ``autotune simulate`` and the search of
``autotune profile`` measure settings with. Of a simulation the mean of eight draws of that noise is compared.

What is compared, each as a signed error, which says in which direction the simulator is off, and as an absolute one, in which
luck to both sides does not cancel:

- *steps*: each served step's time, from the end of the one before, with what the cost model says such a step usually takes
  (``step_error``: a median), and with what it takes in a simulation (``step_error_simulated``: in the middle; ``in
  all``: on average);
- *TPOT* (p50, p99) and *throughput* of each run;
- *TTFT* and *E2E* (p50, p99): within 15%, or within 1.5 × the range over the repeated real runs, whichever is more. Near capacity
  a queue multiplies every error in step time; up to 0.9 of it the worst p50 is told by itself.

A figure of a workload is the median over its rounds of simulated ÷ real − 1 (``signed``), and the median of its size
(``absolute``). The JSON line holds medians over the workloads' absolute figures, and under the same names with ``_signed`` those
of the signed ones; ``ttft_e2e_p50_worst`` is the largest absolute error of TTFT p50 and E2E p50 at loads up to 0.9.

With ``--conv`` and ``--code`` (Azure's 2023 trace files) slices of the traces are replayed, without them the presets fitted to
them. ``--undisturbed`` leaves out the time for which the kernel kept the engine's thread waiting.

Run ``python -m benchmarks.fidelity`` (an hour or so; ``--quick``: a quarter of one); the last line is JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from autotune.cli.target import model_facts
from autotune.cost.model import CostModel
from autotune.measure.evaluate import evaluate, recorded
from autotune.measure.score import Score
from autotune.profile.parts import ModelFacts
from autotune.profiling.steps import measure_steps
from autotune.workload import Workload, parse_workload
from autotune.writing import write_whole
from benchmarks.clocks.drift_corrected import (
    BLOCK,
    REFERENCE_BLOCKS,
    DriftCorrectedClock,
    DriftCorrectingExecutor,
    ReferenceStep,
)
from benchmarks.clocks.undisturbed import UndisturbedClock, others
from benchmarks.command import command, exit_code
from benchmarks.fidelity.cases import KV_TOKENS, PATIENT, TIGHT_KV_TOKENS, Case, capacity, cases, simulated
from benchmarks.fidelity.table import (
    Compared,
    Costs,
    StepPair,
    bias,
    mean_metrics,
    median_error,
    metrics,
    relative_error,
    report,
    step_pairs,
)
from runtime.clock import Clock, MonotonicClock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.engine import Engine
from runtime.records import StepRecord

WARM_UP = 20.0  # seconds of each engine before anything counts
_TOGETHER = 60  # requests sent at once meanwhile


class Timed(NamedTuple):
    """An engine, the clock it runs on, and the executor that corrects that clock."""

    engine: Engine
    clock: Clock
    executor: DriftCorrectingExecutor

    def looked(self) -> tuple[int, float]:
        """How many slowdowns were measured, and how long it has waited, s."""
        return len(self.executor.slowdowns), self.executor.waited

    def since(self, looked: tuple[int, float]) -> str:
        """Reference steps over the fastest ever, since ``looked``: median, and the middle nine tenths; what was waited."""
        count, waited = looked
        slowdowns = self.executor.slowdowns[count:]
        if len(slowdowns) < 3:
            return "not known"
        cuts = statistics.quantiles(slowdowns, n=20)
        waited = self.executor.waited - waited
        return f"{statistics.median(slowdowns):.2f} ({cuts[0]:.2f}–{cuts[-1]:.2f}), waited {waited:.1f} s"


class Bench:
    """Two engines of one model, the roomy one and one with a small pool; and what was found."""

    def __init__(self, roomy: Timed, tight: Timed, facts: ModelFacts, duration: float, seed: int) -> None:
        self.roomy, self.tight, self.facts = roomy, tight, facts
        self.duration, self.seed = duration, seed
        self.loads: dict[str, float] = {}
        self.real: dict[tuple[str, str], list[float]] = {}
        self.ratios: dict[tuple[str, str], list[float]] = {}
        self.steps: dict[str, list[StepPair]] = {}
        self.costs: list[Costs] = []
        self._runs = 0

    def warm_up(self, seconds: float) -> None:
        """Have both engines work for a while, on none of the workloads: users' engines have been up for longer, too."""
        rng = random.Random(self.seed)
        for engine, clock, _ in (self.roomy, self.tight):
            begun = clock.now()
            while clock.now() - begun < seconds:
                engine.set_knobs(Knobs(rng.choice((8, 24, 48)), 0, 512, rng.choice((128, 512))))
                streams = []
                for _ in range(_TOGETHER):
                    prompt, output = (max(1, min(1000, round(rng.lognormvariate(mu, 1.0)))) for mu in (4.5, 3.0))
                    ids = [rng.randrange(self.facts.vocab_size) for _ in range(prompt)]
                    streams.append(engine.submit(ids, max_tokens=output, ignore_eos=True))
                for stream in streams:
                    stream.result()

    def calibrate(self, budget_s: float) -> CostModel:
        """What simulations go by from now on."""
        engine, _, _ = self.roomy
        looked = self.roomy.looked()
        found = measure_steps(engine, self.facts, budget_s=budget_s, seed=self._prompts())
        cost = found.cost(found.seconds)
        facts = cost.facts
        print(
            f"calibration: {facts.points} kinds of steps in {facts.seconds:.0f} s, family {facts.family}, cross-validated error "
            f"{facts.error:.1%} ({', '.join(f'{r.region} {r.median:.1%}' for r in facts.regions)}); "
            f"the machine's slowdown {self.roomy.since(looked)}, "
            f"its own reference steps differed by up to {found.unevenness - 1:.0%}; "
            f"served, steps took {found.served - 1:+.1%}, "
            f"serving adds {facts.serving_overhead_s * 1e3:.2f} ms to each{_scatter(cost)}",
            flush=True,
        )
        self.costs.append(Costs(cost, cost.serving()))
        return cost.serving()

    def _prompts(self) -> int:
        self._runs += 1
        return (self.seed << 16) + self._runs

    def run(self, number: int, case: Case, workload: Workload) -> None:
        """One real run, compared with what is simulated by the calibration before it. ``number`` 0 does not count; its arrivals
        are others, if not from a trace."""
        timed = self.tight if case.tight else self.roomy
        busy, looked = others(), timed.looked()
        with recorded(timed.engine) as log:
            real = evaluate(
                timed.engine,
                case.knobs,
                workload,
                PATIENT,
                vocab_size=self.facts.vocab_size,
                seed=self.seed if number else self.seed + 1,
                prompt_seed=self._prompts(),  # tokens of its own: no earlier run's prefixes are found in the cache
                duration=self.duration if number else self.duration / 2,
                label=f"{case.name}-{number}",
            )
        if not number:
            return
        spent = others()
        cores = (spent[1] - busy[1]) / (spent[0] - busy[0])
        print(
            f"  round {number} {case.name:<26} {real.offered:4} requests, {len(log.steps):5} steps, "
            f"{sum(r.preemptions for r in log.steps):3} preemptions, slowdown {timed.since(looked)}, "
            f"others use {cores:.2f} cores",
            flush=True,
        )
        self._compare(number, case, workload, real, log.steps)

    def _compare(self, number: int, case: Case, workload: Workload, real: Score, steps: Sequence[StepRecord]) -> None:
        name, costs = case.name, self.costs[-1]
        self.loads[name] = case.load
        predicted = mean_metrics(simulated(costs.serving, case, workload, self.seed, self.duration))
        for metric, value in metrics(real).items():
            self.real.setdefault((name, metric), []).append(value)
            self.ratios.setdefault((name, metric), []).append(relative_error(predicted[metric], value))
        pairs = step_pairs(steps, costs)
        self.steps.setdefault(name, []).extend(pairs)
        print(
            f"  round {number} {name}: step error {median_error(pairs):.1%}, in all {bias(pairs):+.1%}, "
            f"TPOT {self.ratios[name, 'TPOT p50'][-1]:+.1%}",
            flush=True,
        )

    def compared(self) -> list[Compared]:
        return [
            Compared.of(case, self.loads[case], metric, values, self.ratios[case, metric])
            for (case, metric), values in self.real.items()
        ]


def _scatter(cost: CostModel) -> str:
    if (jitter := cost.facts.jitter) is None:
        return ""
    low, high = jitter.four_in_five()
    autocorrelation = f"{jitter.persistent:.0%} autocorrelated (memory {jitter.memory:.2f})"
    return f", four in five of them {low:.2f} to {high:.2f} of that, {autocorrelation}"


@exit_code()
def main(argv: Sequence[str] | None = None) -> None:
    parser = command("fidelity", __doc__)
    parser.add_argument("--quick", action="store_true", help="shorter and fewer runs: about a quarter of an hour")
    parser.add_argument("--rounds", type=int, help="real runs of each workload (default: 4, quick 2)")
    parser.add_argument("--duration", type=float, help="seconds of arrivals in a run (default: 20, quick 8)")
    parser.add_argument(
        "--calibrate", type=float, help="seconds of a calibration, before each round (default: 60, quick 25)"
    )
    parser.add_argument("--conv", help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("--code", help="AzureLLMInferenceTrace_code.csv")
    parser.add_argument("--threads", type=int, default=1, help="of the model; the sender needs a core too (default: 1)")
    parser.add_argument("--undisturbed", action="store_true", help="leave out time that other processes took")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="a file for every figure, JSON")
    args = parser.parse_args(argv)
    rounds = args.rounds or (2 if args.quick else 4)
    duration = args.duration or (8.0 if args.quick else 20.0)
    if args.undisturbed and args.threads > 1:
        parser.error("--undisturbed follows one thread; leave out --threads")
    begun = time.monotonic()

    import torch

    from runtime.torch_backend.executor import TorchExecutor
    from runtime.torch_backend.loading import load_model

    made: list[Timed] = []
    torch.set_num_threads(args.threads)
    loaded = load_model("tiny", device="cpu")
    reference_step = ReferenceStep(TorchExecutor(loaded, kv_blocks=REFERENCE_BLOCKS), loaded.vocab_size)
    usual = reference_step.fastest()
    if not (args.conv and args.code):
        print("without --conv and --code: presets fitted to the Azure 2023 traces take the place of slices of them")
    with ExitStack() as stack:
        for kv_tokens in (KV_TOKENS, TIGHT_KV_TOKENS):
            loaded = load_model("tiny", device="cpu")
            base = UndisturbedClock() if args.undisturbed else MonotonicClock()
            clock = DriftCorrectedClock(base)
            real = TorchExecutor(loaded, kv_blocks=kv_tokens // BLOCK, clock=clock)
            executor = DriftCorrectingExecutor(real, reference_step, clock, usual, patient=True)
            known = set(threading.enumerate())
            engine = Engine(loaded, limits=KnobLimits(), kv_tokens=kv_tokens, executor=executor, clock=clock)
            made.append(Timed(stack.enter_context(engine), clock, executor))
            if isinstance(base, UndisturbedClock):
                base.follow(next(t for t in threading.enumerate() if t not in known and t.name.startswith("engine ")))
        facts = model_facts(loaded.info, seed=0)
        bench = Bench(made[0], made[1], facts, duration, args.seed)
        bench.warm_up(WARM_UP / 4 if args.quick else WARM_UP)
        budget_s = args.calibrate or (25.0 if args.quick else 60.0)
        cost = bench.calibrate(budget_s)
        loads: list[tuple[Case, Workload]] = []
        for case in cases(args.conv, args.code):
            workload = parse_workload(case.spec)
            served = capacity(cost, case, workload, args.seed)
            loads.append((case, workload.at_rate(case.load * served)))
            print(f"{case.name:<26} {case.load:.0%} of {served:.3g} requests/s, {case.knobs}: {case.spec}")
        for number in range(rounds + 1):
            if number:
                bench.calibrate(budget_s)
            for case, workload in random.Random(args.seed + number).sample(loads, len(loads)):
                bench.run(number, case, workload)
    found = bench.compared()
    summary = report(found, bench.steps)
    if args.save is not None:
        every: dict[str, Any] = {
            "summary": summary,
            "cost_models": [costs.serving.facts.model_dump(mode="json") for costs in bench.costs],
            "real": {f"{case}: {metric}": values for (case, metric), values in bench.real.items()},
            "ratios": {f"{case}: {metric}": values for (case, metric), values in bench.ratios.items()},
            "compared": [each._asdict() for each in found],
        }
        write_whole(args.save, json.dumps(every, indent=1) + "\n")
    print(f"took {time.monotonic() - begun:.0f} s")
    print(json.dumps(summary))


if __name__ == "__main__":
    sys.exit(main())
