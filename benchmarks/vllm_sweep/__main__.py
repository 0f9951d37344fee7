"""What profiling finds on live vLLM, and for how much of its time, against other ways to look for a setting.

vLLM's CPU build serves a model of random weights (57M parameters): a conversation at 90% (``--load``) of what it completes when
it is kept full, under the SLO of :mod:`benchmarks.live.loads`. Contenders take the engine in turns, and measure with the same
function:

- **grid**: every cell of 6 × 8 settings, once. What that takes is the unit of time.
- **ours**: a whole :class:`autotune.profiling.session.Session` on the running engine: calibrate, simulate, validate, choose.
  One start of vLLM is added to its time.
- **auto_tune**: the procedure of vLLM's ``benchmarks/auto_tune``, by a driver of our own
  (:func:`benchmarks.sweep.rivals.auto_tune`): a server for each pair of max-num-seqs and max-num-batched-tokens, requests all at
  once, then falling rates until the p99 of E2E meets its limit; the pair of the highest throughput. As much time as ours took.
- **tpe**: Optuna's TPE over a load generator's runs, as ``auto-tuning-vllm`` does it, by a driver of our own: a server and a run
  of the load for each trial. As much time as ours took. Either also without the time that restarts take.

A restart counts as long as this engine took to start; it is not waited for, as the knobs are live.

The *truth*: the best cells of the grid and all that was chosen take turns, in rounds that share their arrivals; goodput is
the mean over rounds. Regret is what ours falls short of the best of them, as a share of it. The best of several means is so by
luck, too: ``regret_held_out`` compares each round with the setting that is the best of the *other* rounds. Who finds nothing
keeps vLLM's defaults.

The rate is fixed at the beginning. ``speed`` says how fast the machine's steps were in the grid, in each seed's searches and in
each round of the truth, in units of what they were then; where these differ much, the truth is of another load than was
searched for, and the run is no measure (``drifted``).

The last line is JSON: ``regret`` (mean over seeds), ``time_share_of_grid``, ``vs_auto_tune`` and ``vs_tpe``: our true goodput
over theirs, geometric means over seeds; ``intervals``: of these three 95% by a bootstrap over the rounds of the truth, null of
a single round.

Run it by a Python that has vLLM: ``python -m benchmarks.vllm_sweep`` (about 80 minutes; ``--quick``: fifteen).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autotune.cost.model import CostModel
from autotune.measure.evaluate import Interrupted, recorded
from autotune.profiling.findings import Question
from autotune.profiling.reporting import Silent
from autotune.profiling.session import Session
from autotune.profiling.setup import LOAD
from autotune.profiling.space import make_space
from autotune.profiling.study import open_study
from benchmarks.command import command, exit_code, say, seconds, share
from benchmarks.live import loads
from benchmarks.live.learning import calibrate, served, speed_in
from benchmarks.live.machine import Machine
from benchmarks.live.ratios import DRAWS
from benchmarks.sweep.cases import Grid
from benchmarks.sweep.rivals import Choice, auto_tune, exhaustive, load_seed, tpe
from benchmarks.vllm.machine import live
from benchmarks.vllm.model import model_folder
from benchmarks.vllm.starting import DEFAULTS, LIMITS, prepared, vllm_options
from benchmarks.vllm_sweep.rig import Case, LiveRig
from runtime.knobs import Knobs

INTERRUPTED = 130
OURS, AUTO_TUNE, TPE = "ours", "auto_tune", "tpe"
FREE = "no restarts"
_TRUTH_SEED = 900_000_007  # the truth's requests; contenders' begin elsewhere
_LEAST = 1e-3  # of the best: what a choice that serves nothing counts as in a ratio
_DRIFT = 1.25  # the most between the slowest and the fastest part of a run that measures something


Rounds = dict[Knobs, list[float]]
"""Goodput of each setting in each round of the truth, requests/s."""

Part = Callable[[str], AbstractContextManager[object]]
"""What is done around a part of a run, by its name."""


class Plan(NamedTuple):
    """Seconds of calibration, of a window and its warm-up, and ours'; cells and rounds of the truth; requests that auto_tune
    sends at once."""

    grid: Grid
    calibration: float
    window: float
    warmup: float
    budget: float
    seeds: int
    cells: int
    rounds: int
    burst: int


FULL = Plan(
    Grid((4, 8, 16, 32, 64, 128), (24, 32, 64, 128, 256, 512, 1024, 2048), ()), 75.0, 20.0, 3.0, 140.0, 2, 5, 6, 200
)
QUICK = Plan(Grid((4, 16, 128), (32, 128, 512, 2048), ()), 30.0, 8.0, 1.0, 45.0, 1, 2, 1, 60)


@dataclass(frozen=True)
class Result:
    """What one search chose under one seed."""

    contender: str
    seed: int
    choice: Choice

    @property
    def knobs(self) -> Knobs:
        return DEFAULTS if self.choice.knobs is None else self.choice.knobs


@exit_code()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command("vllm_sweep", __doc__)
    parser.add_argument("--quick", action="store_true", help="12 cells, one seed, short windows")
    parser.add_argument(
        "--budget",
        type=seconds(30, 36000),
        help="that ours is given, s, beside a start of vLLM (default: 140, quick 45)",
    )
    parser.add_argument(
        "--load", type=share, default=LOAD, help=f"of what vLLM completes when it is kept full (default: {LOAD:g})"
    )
    parser.add_argument("--seeds", type=int, choices=range(1, 11), help="of the searches (default: 2, quick 1)")
    parser.add_argument("--rounds", type=int, choices=range(1, 21), help="of the truth (default: 6, quick 1)")
    vllm_options(parser)
    args = parser.parse_args(argv)
    preset = prepared(args)
    given = QUICK if args.quick else FULL
    plan = given._replace(
        budget=args.budget or given.budget, seeds=args.seeds or given.seeds, rounds=args.rounds or given.rounds
    )

    from autotune.cli.interrupt import stop_on_interrupt

    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vllm-sweep-") as kept, stop_on_interrupt() as stop:
        folder = model_folder(Path(kept) / preset, preset)
        with live(folder, preset) as machine:
            start_s = time.monotonic() - begun
            try:
                shape = _contest(machine, plan, args.load, start_s, stop.is_set)
            except Interrupted:
                say("stopped before all was measured")
                return INTERRUPTED
    print(f"took {time.monotonic() - begun:.0f} s")
    print(json.dumps(shape | {"load": args.load, "threads": args.threads}))
    return 0


def _contest(machine: Machine, plan: Plan, load: float, start_s: float, stop: Callable[[], bool]) -> dict[str, object]:
    say(f"vLLM started in {start_s:.0f} s; calibration, {plan.calibration:g} s")
    cost = calibrate(machine, plan.calibration, 0, stop)
    load_at = partial(loads.steady, "conversation", loads.CONVERSATION, machine)
    cost = served(machine, cost, [load_at(cost, load)], plan.window, stop)
    found = load_at(cost, load)
    case = Case(found.workload, found.slo, plan.grid, plan.window, plan.warmup)
    say(f"{found.said}; SLO {found.slo}")

    speeds = Speeds(machine, cost)
    with speeds.of("grid"):
        ((grid, cells),) = exhaustive(LiveRig(machine, case, stop), 1, load_seed(0))
    say(f"the grid of {len(cells)} took {grid.spent_s:.0f} s; its best {grid.knobs}")
    results = []
    for seed in range(1, plan.seeds + 1):
        with speeds.of(f"searches, seed {seed}"):
            results += _searched(partial(LiveRig, machine, case, stop), plan, seed, start_s, stop)
    best = sorted(cells, key=lambda knobs: cells[knobs], reverse=True)[: plan.cells]
    candidates = [*best, *(r.knobs for r in results), DEFAULTS]
    rounds = truth(LiveRig(machine, case, stop), candidates, plan.rounds, speeds.of)
    report(results, rounds, grid.spent_s)
    return summary(results, rounds, grid.spent_s) | speeds.said()


class Speeds:
    """How fast the steps of each part of a run were, in units of ``cost``."""

    def __init__(self, machine: Machine, cost: CostModel) -> None:
        self._machine, self._cost = machine, cost
        self.found: dict[str, float] = {}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        with recorded(self._machine.engine) as log:
            yield
        self.found[part] = round(speed_in(log.steps, self._cost), 3)
        say(f"{part}: steps at {self.found[part]:.0%} of the speed that the load was made for")

    def said(self) -> dict[str, object]:
        """For the JSON line."""
        known = [speed for speed in self.found.values() if speed > 0]
        return {"speed": self.found, "drifted": bool(known) and max(known) > _DRIFT * min(known)}


def _searched(
    rig: Callable[[], LiveRig], plan: Plan, seed: int, start_s: float, stop: Callable[[], bool]
) -> list[Result]:
    """Ours and then its rivals, with as much time as it took."""
    mine = ours(rig(), plan.budget, seed, start_s, stop)
    found = [Result(OURS, seed, mine)]
    searches: dict[str, Callable[[LiveRig, float, int], Choice]] = {
        AUTO_TUNE: partial(auto_tune, restart_s=start_s, burst=plan.burst),
        f"{AUTO_TUNE}, {FREE}": partial(auto_tune, restart_s=0.0, burst=plan.burst),
        TPE: partial(tpe, restart_s=start_s),
        f"{TPE}, {FREE}": tpe,
    }
    found += [Result(name, seed, search(rig(), mine.spent_s, seed)) for name, search in searches.items()]
    for r in found:
        say(f"{r.contender}, seed {seed}: {r.choice.spent_s:.0f} s, {r.choice.runs} runs: {r.choice.knobs}")
    return found


def ours(rig: LiveRig, budget_s: float, seed: int, start_s: float, stop: Callable[[], bool]) -> Choice:
    """The stages of ``autotune profile --budget … --rate … --slo …``, on the running engine."""
    case = rig.case
    rig.rest(start_s)
    question = Question(
        workload=case.workload, slo=case.slo, rate=case.workload.rate, seed=load_seed(seed), trials=None,
        budget_s=budget_s, space=make_space(LIMITS, pins=["max_wait_ms=0"]),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, open_study(Path(folder) / "journal", {"seed": seed}) as study:
        found = Session(rig.engine, rig.facts, question, study, Silent(), stop=stop).run()
    if found.stopped and stop():
        raise Interrupted("interrupted")
    settings = found.settings()
    knobs = settings["balanced"].knobs if settings else None
    return Choice(knobs, rig.spent_s, len(found.runs), len(found.runs))


def truth(rig: LiveRig, candidates: Sequence[Knobs], rounds: int, part: Part = nullcontext) -> Rounds:
    """``candidates`` by turns, in rounds that share their arrivals. Each round is a ``part``."""
    each = list(dict.fromkeys(rig.limits.clamp(knobs) for knobs in candidates))
    found: dict[Knobs, list[float]] = {knobs: [] for knobs in each}
    for number in range(rounds):
        at = number % len(each)
        with part(f"truth, round {number}"):
            for knobs in (*each[at:], *each[:at]):
                found[knobs].append(rig.measure(knobs, _TRUTH_SEED + number).goodput)
                say(f"  truth, round {number}: {knobs} {found[knobs][-1]:.2f} requests/s within the SLO")
    return found


def means(rounds: Rounds) -> dict[Knobs, float]:
    return {knobs: statistics.fmean(values) for knobs, values in rounds.items()}


def held_out(result: Result, rounds: Rounds) -> float:
    """Regret against settings that were the best without the round in which they are compared. NaN of a single round."""
    mine = rounds[LIMITS.clamp(result.knobs)]
    if len(mine) < 2:
        return math.nan
    theirs = []
    for left_out in range(len(mine)):
        without = {knobs: sum(values) - values[left_out] for knobs, values in rounds.items()}
        theirs.append(rounds[max(without, key=lambda knobs: without[knobs])][left_out])
    return 1 - sum(mine) / sum(theirs) if any(theirs) else 0.0


def regret(result: Result, shares: dict[Knobs, float]) -> float:
    best = max(shares.values())
    return 1 - shares[LIMITS.clamp(result.knobs)] / best if best else 0.0


def ratio(results: Sequence[Result], shares: dict[Knobs, float], rival: str) -> float:
    """Our true goodput over the rival's: geometric mean over seeds."""
    worth = {(r.contender, r.seed): max(1 - regret(r, shares), _LEAST) for r in results}
    seeds = sorted({r.seed for r in results})
    return math.exp(statistics.fmean(math.log(worth[OURS, seed] / worth[rival, seed]) for seed in seeds))


def summary(results: Sequence[Result], rounds: Rounds, grid_s: float) -> dict[str, object]:
    """The JSON line."""
    shares = means(rounds)
    mine = [r for r in results if r.contender == OURS]
    rivals = [name for name in dict.fromkeys(r.contender for r in results) if name != OURS]
    compared = _compared(results, rivals, shares)
    return {
        "regret": round(compared.pop("regret"), 4),
        "regret_held_out": round(statistics.fmean(held_out(r, rounds) for r in mine), 4)
        if len(rounds[DEFAULTS]) > 1
        else None,
        "time_share_of_grid": round(statistics.fmean(r.choice.spent_s for r in mine) / grid_s, 4),
        **{name: round(value, 3) for name, value in compared.items()},
        "intervals": _intervals(results, rivals, rounds),
        "grid_s": round(grid_s, 1),
        "defaults_share": round(shares[DEFAULTS] / max(shares.values()), 4) if max(shares.values()) else None,
    }


def _compared(results: Sequence[Result], rivals: Sequence[str], shares: dict[Knobs, float]) -> dict[str, float]:
    mine = [r for r in results if r.contender == OURS]
    found = {f"vs_{name.replace(', ', '_').replace(' ', '_')}": ratio(results, shares, name) for name in rivals}
    return {"regret": statistics.fmean(regret(r, shares) for r in mine), **found}


def _intervals(
    results: Sequence[Result], rivals: Sequence[str], rounds: Rounds
) -> dict[str, tuple[float, float]] | None:
    """95% percentile intervals of :func:`_compared`: rounds are drawn with replacement, the same of every setting."""
    count = len(rounds[DEFAULTS])
    if count < 2:
        return None
    tables = {knobs: np.array(values) for knobs, values in rounds.items()}
    found: dict[str, list[float]] = {}
    for picked in np.random.default_rng(11).integers(0, count, size=(DRAWS, count)):
        shares = {knobs: float(table[picked].mean()) for knobs, table in tables.items()}
        for name, value in _compared(results, rivals, shares).items():
            found.setdefault(name, []).append(value)
    ends = {name: np.percentile(values, [2.5, 97.5]) for name, values in found.items()}
    return {name: (round(float(low), 4), round(float(high), 4)) for name, (low, high) in ends.items()}


def report(results: Sequence[Result], rounds: Rounds, grid_s: float) -> None:
    shares = means(rounds)
    for knobs, goodput in sorted(shares.items(), key=lambda one: one[1], reverse=True):
        each = ", ".join(f"{value:.2f}" for value in rounds[knobs])
        print(f"{goodput:7.2f} requests/s within the SLO ({each}): {knobs}")
    for r in results:
        print(
            f"{r.contender:24s} seed {r.seed}  regret {regret(r, shares):7.1%}  time {r.choice.spent_s / grid_s:6.3f} of the "
            f"grid's  {r.choice.runs:3} runs  {r.choice.knobs or 'nothing found'}"
        )


if __name__ == "__main__":
    sys.exit(main())
