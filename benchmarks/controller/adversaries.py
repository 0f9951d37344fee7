"""Do no harm: knobs alone against the knobs they started from, where a controller is most likely to be wrong.

The engine is a foreign one: no budgets of single steps, no admission, no order of ours. What remains is the controller's word
on knobs. In each window of a minute, from ten seconds after the start on, it must meet the SLO of at least 0.97 times as many
requests as the starting knobs do.

Both serve the same requests, and what disturbs steps comes at the same times for both, whatever steps they make; only stalls
and scatter strike single steps. A window pools the seeds, and counts requests by when they arrived. Windows in which the
starting knobs meet fewer than :data:`FEWEST` are left out. A ratio scatters by chance: :class:`Window` has its standard
error, by a jackknife over blocks of ten seconds.

Run ``python -m benchmarks.controller.adversaries`` (a few minutes; ``--seeds 4``: on those that constants were tuned on); the
last line is JSON.
"""

from __future__ import annotations

import json
import math
import random
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from autotune import control
from autotune.control.controllers.registry import CONTROLLERS
from autotune.engines.defaults import VLLM_DEFAULTS
from autotune.profile import load_profile
from autotune.profile.serving import serving_cost
from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival, Workload, parse_workload
from benchmarks.attached import at_work
from benchmarks.command import command, exit_code
from benchmarks.controller.contenders import KnobsOnly
from benchmarks.controller.hardware import Weather, h200
from benchmarks.controller.run import BIN_S, Outcome
from runtime.clock import Clock
from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.step_model import StepFeatures, StepModel

BOUND = 0.97
FEWEST = 300
"""Requests that the starting knobs must meet in a window for its ratio to say anything."""
FIRST_S, WINDOW_S, BLOCK_S, SECONDS = 10, 60, 10, 120
REPORTED = tuple(range(201, 205))
"""Seeds of the figures reported; constants of the controller were tuned on 1 to 4."""

_SEED = 7_100_003  # apart from all that other benchmarks draw


class Disturbed(StepModel):
    """Step times of ``cost``, each longer by the factor of when the step begins, on the clock that :meth:`follow` gives."""

    def __init__(self, cost: StepModel, factor: Callable[[float], float]) -> None:
        self._cost, self._factor = cost, factor
        self._clock: Clock | None = None

    def follow(self, clock: Clock) -> None:
        self._clock = clock

    def predict(self, step: StepFeatures) -> float:
        return self._cost.predict(step) * self._factor(0.0 if self._clock is None else self._clock.now())


def calm(seed: int) -> Callable[[float], float]:
    """A machine that nothing disturbs."""
    return lambda now: 1.0


def neighbour(seed: int) -> Callable[[float], float]:
    """Half of the time another process slows steps 1 to 10 times, in bursts of 0.1 to 3 s."""
    dice = random.Random(f"neighbour {_SEED} {seed}")
    begins, factors, now = [0.0], [1.0], 0.0
    while now < 10 * SECONDS:
        quiet, burst = dice.uniform(0.1, 3.0), dice.uniform(0.1, 3.0)
        begins += [now + quiet, now + quiet + burst]
        factors += [dice.uniform(1, 10), 1.0]
        now = begins[-1]
    return lambda at: factors[bisect_right(begins, at) - 1]


def crowded(seed: int) -> Callable[[float], float]:
    """Five processes want two cores: a step waits for its turns, so each takes a factor with a heavy tail (lognormal, median 2,
    σ 0.9), drawn anew every 10 ms, and no model can tell the next one."""
    dice = random.Random(f"crowded {_SEED} {seed}")
    factors = [max(1.0, dice.lognormvariate(math.log(2.0), 0.9)) for _ in range(4096)]
    return lambda at: factors[int(at / 0.01) % 4096]


@dataclass(frozen=True)
class Adversary:
    """``workloads``: one for each control period of :data:`PERIOD_S`, in turns; requests/s are theirs. ``start``: the
    knobs that the controller starts from, and that it is compared with. ``scatter`` and ``stalls``: the ``noise`` of
    ``SimulatedEngine`` and the ``stalls`` of ``Weather``."""

    name: str
    about: str
    cost: Callable[[], StepModel]
    kv_tokens: int
    start: Knobs
    slo: SLO
    workloads: tuple[str, ...]
    factor: Callable[[int], Callable[[float], float]] = calm
    scatter: float = 0.0
    stalls: float = 0.0

    def arrivals(self, seed: int, seconds: float) -> list[Arrival]:
        """The requests of ``seed``, by time."""
        streams = [
            iter(_parsed(text).arrivals(_SEED + seed + i, duration=seconds)) for i, text in enumerate(self.workloads)
        ]
        found = [a for i, stream in enumerate(streams) for a in stream if int(a.time / PERIOD_S) % len(streams) == i]
        return sorted(found, key=lambda arrival: arrival.time)


PERIOD_S = 0.25
"""A control period: how often the controller decides."""


@cache
def _parsed(text: str) -> Workload:
    return parse_workload(text)


@cache
def _two_cores() -> StepModel:
    """Of a profile of 22 November 2026: the one that ships is made anew when steps get faster; scenarios must not change."""
    return serving_cost(load_profile(Path(__file__).parents[1] / "data" / "two_cores.yaml"))


def _cpu(
    name: str, about: str, rate: float, start: Knobs = VLLM_DEFAULTS, *, slo: SLO | None = None,
    workloads: tuple[str, ...] = (), **disturbance: Any,
) -> Adversary:  # fmt: skip
    """``tiny`` on two CPU cores, by a profile: conversations a sixteenth as long as Azure's."""
    chosen = workloads or (f"poisson:lengths=azure-conv,length=0.0625,rate={rate:g}",)
    return Adversary(
        name, about, _two_cores, 131_072, start, slo or SLO(ttft_ms=380, tpot_ms=19), chosen, **disturbance
    )


def _gpu(
    name: str, about: str, rate: float, start: Knobs = VLLM_DEFAULTS, *, slo: SLO | None = None,
    workloads: tuple[str, ...] = (), **disturbance: Any,
) -> Adversary:  # fmt: skip
    """An 8B model on an H200: Azure's conversations."""
    chosen = workloads or (f"poisson:lengths=azure-conv,rate={rate:g}",)
    return Adversary(name, about, h200, 760_000, start, slo or SLO(ttft_ms=500, tpot_ms=30), chosen, **disturbance)


CPU_BEST, GPU_BEST = Knobs(16, 0, 256, 256), Knobs(256, 0, 1024, 1024)
"""The best fixed settings of either machine undisturbed: where who has a profile starts."""
SLACK = SLO(ttft_ms=1140, tpot_ms=57)
"""For steps three times as long, as they are on average beside a neighbour or in a crowd."""

_BOTH = ("poisson:lengths=azure-conv,rate={0:g}", "poisson:lengths=azure-code,rate={0:g}")
_BOTH_SHORT = tuple(f"{text},length=0.0625" for text in _BOTH)

ADVERSARIES = {
    a.name: a
    for a in (
        _gpu("neighbour-gpu", "a noisy neighbour", 9.0, factor=neighbour),
        _gpu("neighbour-gpu-best", "the same, from the best fixed setting", 9.0, GPU_BEST, factor=neighbour),
        _gpu("neighbour-gpu-slack", "the same, with an SLO for steps three times as long", 6.0, slo=SLO(ttft_ms=1500, tpot_ms=90),
             factor=neighbour),
        _cpu("neighbour-cpu", "a noisy neighbour", 18.0, factor=neighbour),
        _cpu("neighbour-cpu-best", "the same, from the best fixed setting", 18.0, CPU_BEST, factor=neighbour),
        _cpu("neighbour-cpu-slack", "the same, with an SLO for steps three times as long", 18.0, slo=SLACK, factor=neighbour),
        _cpu("crowded-cpu", "five processes on two cores", 18.0, slo=SLACK, factor=crowded),
        _cpu("crowded-cpu-best", "the same, from the best fixed setting", 18.0, CPU_BEST, slo=SLACK, factor=crowded),
        _cpu("crowded-cpu-tight", "the same, with the SLO of the machine undisturbed", 18.0, factor=crowded),
        _gpu("stalls-gpu", "1% of steps take ten times as long", 18.0, stalls=0.01),
        _gpu("stalls-gpu-best", "the same, from the best fixed setting", 18.0, GPU_BEST, stalls=0.01),
        _cpu("stalls-cpu", "1% of steps take ten times as long", 50.0, stalls=0.01),
        _cpu("stalls-cpu-best", "the same, from the best fixed setting", 50.0, CPU_BEST, stalls=0.01),
        _gpu("scatter-gpu", "steps scatter by 30%", 18.0, scatter=0.3),
        _gpu("scatter-gpu-best", "the same, from the best fixed setting", 18.0, GPU_BEST, scatter=0.3),
        _cpu("scatter-cpu", "steps scatter by 30%", 50.0, scatter=0.3),
        _cpu("scatter-cpu-best", "the same, from the best fixed setting", 50.0, CPU_BEST, scatter=0.3),
        _gpu("flips-gpu", "conversations and code in turns, every control period", 0,
             workloads=tuple(t.format(14.0) for t in _BOTH)),
        _gpu("flips-gpu-best", "the same, from the best fixed setting", 0, GPU_BEST,
             workloads=tuple(t.format(14.0) for t in _BOTH)),
        _cpu("flips-cpu", "conversations and code in turns, every control period", 0,
             workloads=tuple(t.format(40.0) for t in _BOTH_SHORT)),
        _cpu("flips-cpu-best", "the same, from the best fixed setting", 0, CPU_BEST,
             workloads=tuple(t.format(40.0) for t in _BOTH_SHORT)),
        _cpu("infeasible-cpu", "a TTFT that half of the prompts miss on an idle machine", 40.0, slo=SLO(ttft_ms=15, tpot_ms=40)),
        _cpu("impossible-cpu", "a TPOT that a decode alone exceeds: only TTFT is left", 50.0, slo=SLO(ttft_ms=380, tpot_ms=4)),
        _cpu("full-cpu", "conversations at nine tenths of what the machine completes", 65.5),
        _cpu("full-cpu-best", "the same, from the best fixed setting", 65.5, CPU_BEST),
    )
}  # fmt: skip


class Window(NamedTuple):
    """One window of one adversary: seconds at which it begins, what was offered, what either met and completed, and the standard
    error of the ratio of what they met."""

    begin: float
    offered: int
    ours: int
    theirs: int
    completed_ours: int
    completed_theirs: int
    error: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs if self.theirs else math.nan

    @property
    def completed(self) -> float:
        return self.completed_ours / self.completed_theirs if self.completed_theirs else math.nan


class Counts:
    """(offered, met, completed) of each second in which requests arrived."""

    def __init__(self, slo: SLO, seconds: int) -> None:
        self.by_second = [[0, 0, 0] for _ in range(seconds)]
        self._slo = slo

    def on_step(self, record: StepRecord) -> None:
        """Requests say all."""

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        """This only listens."""

    def on_request(self, record: RequestRecord) -> None:
        count = self.by_second[min(int(record.arrival), len(self.by_second) - 1)]
        count[0] += 1
        count[1] += self._slo.met(record)
        count[2] += record.completed


def serve(adversary: Adversary, seed: int, *, controlled: bool, seconds: int = SECONDS) -> Counts:
    """Serve the requests of ``seed`` to the last answer, from ``start`` on, with or without the controller."""
    steps = Disturbed(adversary.cost(), adversary.factor(seed))
    cost = Weather(steps, stalls=adversary.stalls, seed=seed) if adversary.stalls else steps
    engine = SimulatedEngine(
        cost, kv_tokens=adversary.kv_tokens, knobs=adversary.start, slo=adversary.slo, prefix_cache=False,
        max_queue=1_000_000, noise=adversary.scatter, seed=seed, ordering="fcfs",
        admission=AdmissionPolicy(late=None, queue_timeout="ttft", order=None), fast_forward=adversary.factor is calm,
    )  # fmt: skip
    steps.follow(engine.clock)
    counts = Counts(adversary.slo, seconds)
    engine.subscribe(counts)
    made = CONTROLLERS["predictive"](adversary.slo, engine.knobs, engine.kv_tokens, engine.block_size)
    with at_work(control(engine, slo=adversary.slo, controller=KnobsOnly(made))) if controlled else nullcontext():
        engine.serve(adversary.arrivals(seed, seconds), shared=False)
        engine.run()
    return counts


def windows(adversary: Adversary, seeds: Sequence[int], seconds: int = SECONDS) -> list[Window]:
    """Those that begin every five seconds, from :data:`FIRST_S` on; of a shorter run, all that is left of it."""
    ours, theirs = (
        [serve(adversary, seed, controlled=c, seconds=seconds).by_second for seed in seeds] for c in (True, False)
    )
    length = min(WINDOW_S, seconds - FIRST_S)
    return [_window(ours, theirs, begin, length) for begin in range(FIRST_S, seconds - length + 1, 5)]


Run = Sequence[Sequence[int]]


def _window(ours: Sequence[Run], theirs: Sequence[Run], begin: int, length: int) -> Window:
    def total(runs: Sequence[Run], what: int) -> int:
        return sum(second[what] for run in runs for second in run[begin : begin + length])

    met = total(ours, 1), total(theirs, 1)
    return Window(
        begin, total(theirs, 0), *met, total(ours, 2), total(theirs, 2), _error(ours, theirs, begin, length, *met)
    )


def _error(ours: Sequence[Run], theirs: Sequence[Run], begin: int, length: int, met: int, base: int) -> float:
    """The standard error of ``met / base``, by how blocks of :data:`BLOCK_S` differ from it."""
    if not base:
        return math.nan
    blocks = [
        tuple(sum(second[1] for second in run[i : min(i + BLOCK_S, begin + length)]) for run in pair)
        for pair in zip(ours, theirs, strict=True)
        for i in range(begin, begin + length, BLOCK_S)
    ]
    n = len(blocks)
    spread = sum((a - met / base * b) ** 2 for a, b in blocks)
    return math.sqrt(spread * n / max(1, n - 1)) / base


def worst(found: Sequence[Window]) -> Window | None:
    """The window with the least ratio, of those that hold enough; None if none does."""
    return min((w for w in found if w.theirs >= FEWEST), key=lambda w: w.ratio, default=None)


def harm_of_bins(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """The least ratio of any window of a scenario, from (offered, met) of each :data:`BIN_S` of each seed; nan if none holds
    enough."""
    mine, base = ([sum(run[i][1] for run in runs) for i in range(len(runs[0]))] for runs in (ours, theirs))
    length = int(WINDOW_S / BIN_S)
    pairs = [
        (sum(mine[i : i + length]), sum(base[i : i + length]))
        for i in range(int(FIRST_S / BIN_S), len(base) - length + 1)
    ]
    return min((a / b for a, b in pairs if b >= FEWEST), default=math.nan)


def harm(seeds: Sequence[int], names: Sequence[str], say: Callable[[str], None]) -> dict[str, Window | None]:
    """The worst window of each adversary, told as it comes."""
    found: dict[str, Window | None] = {}
    for name in names:
        seen = windows(ADVERSARIES[name], seeds)
        least = found[name] = worst(seen)
        ours, theirs, offered = (sum(getattr(w, part) for w in seen) for part in ("ours", "theirs", "offered"))
        done = min((w.completed for w in seen if not math.isnan(w.completed)), default=math.nan)
        text = (
            "too few in any window"
            if least is None
            else f"{least.ratio:>7.3f} ± {least.error:.3f} from {least.begin} s"
        )
        say(f"{name:<20}{theirs / offered:>9.1%}{ours / offered:>9.1%}   {text:<28}{done:>8.3f}")
    return found


def harm_min(
    found: Mapping[tuple[str, str], Mapping[int, Outcome]], say: Callable[[str], None], *, everything: bool
) -> dict[str, float]:
    """The least ratio of any window of the scenarios ``found``, and of all adversaries if ``everything`` is requested."""
    ratios = []
    for scenario in dict.fromkeys(name for name, _ in found):
        ours, theirs = (found.get((scenario, who), {}) for who in ("predictive-knobs", "vllm-1024"))
        if seeds := sorted(ours.keys() & theirs.keys()):
            ratios.append(harm_of_bins([ours[s].bins for s in seeds], [theirs[s].bins for s in seeds]))
            say(f"{scenario:<20}{ratios[-1]:.3f} worst window of knobs alone ÷ starting knobs")
    if everything:
        say(HEADER)
        ratios += [w.ratio for w in harm(REPORTED, list(ADVERSARIES), say).values() if w is not None]
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    return {"harm_min": round(min(known), 4)} if known else {}


HEADER = f"{'':<20}{'start':>9}{'ours':>9}   {'worst window, ours ÷ start':<28}{'completed':>8}"


@exit_code()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("controller.adversaries", __doc__)
    parser.add_argument(
        "--adversary", action="append", choices=list(ADVERSARIES), help="only this one; may be given several times"
    )
    parser.add_argument(
        "--seeds",
        help=f"4: seeds 1 to 4, for tuning; 201-201 for one seed; 4,7 (default: {REPORTED[0]} to {REPORTED[-1]})",
    )
    args = parser.parse_args(arguments)
    from benchmarks.controller.__main__ import seeds_of  # which imports this

    seeds = seeds_of(args.seeds) if args.seeds else REPORTED
    print(HEADER, flush=True)
    found = harm(seeds, args.adversary or list(ADVERSARIES), lambda text: print(text, flush=True))
    ratios = [w.ratio for w in found.values() if w is not None]
    print(json.dumps({"harm_min": round(min(ratios), 4)} if ratios else {}))


if __name__ == "__main__":
    sys.exit(main())
