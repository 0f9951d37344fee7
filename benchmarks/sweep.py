"""How good a setting ``autotune profile`` finds, and for how much of the machine's time, against other ways to look for one.

Eight cases (:mod:`benchmarks.sweep_cases`): a machine whose step times follow formulas that no fitted cost model has, with 3%
noise, its load, and the promise. The machines exist in virtual time only; every second they would be busy is counted,
calibration and restarts included. In each case:

- **grid**: all 98 cells, three rounds. What one round takes is the unit of hardware time.
- **ours**: a whole :class:`autotune.profiling.session.Session`: calibrate, simulate, validate, choose. Its time is what passes
  on the machine's clock from the first probe to the choice.
- **random**, **tpe**, **auto_tune** (:mod:`benchmarks.sweep_rivals`): as much time as ours took under the same seed. auto_tune
  also without the time that restarts take, and run to its end whatever that takes.

The *truth* about a setting is its goodput over long runs without noise (:mod:`benchmarks.sweep_truth`). Regret is what the
choice falls short of the best setting that anybody found, as a share of it. Who finds nothing keeps vLLM's defaults.

Run ``python -m benchmarks.sweep``; ``--quick`` takes three cases and one seed, ``--jobs N`` works on N cases at a time, ``--keep
FILE`` keeps each case as it is done, and does not do it again (FILE is of this code; begin another when that changes). The
last line is JSON: ``regret`` (mean over cases and seeds), ``hardware_share`` (of one round of the grid), and ``vs_random``,
``vs_tpe``, ``vs_auto_tune``: our true goodput over theirs, geometric mean over cases and seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path

from autotune.profile.parts import ModelFacts
from autotune.profiling.findings import SIM_TRIALS, Question
from autotune.profiling.reporting import Silent
from autotune.profiling.session import Session
from autotune.profiling.space import make_space
from autotune.profiling.study import open_study
from autotune.profiling.timing import Schedule
from benchmarks.sweep_cases import CASES, LIMITS, VOCABULARY, Machine
from benchmarks.sweep_rivals import (
    VLLM_DEFAULTS,
    Choice,
    auto_tune,
    exhaustive,
    load_seed,
    random_search,
    tpe,
)
from benchmarks.sweep_truth import Truth

SEEDS = (101, 102, 103)
"""Those reported. The cases, the profiler and this file were worked on with seeds below 100."""

QUICK = ("code-experts", "strict-stalls", "tiny-cpu")
ROUNDS = 3
OURS = "ours"
RIVALS = ("random", "tpe", "auto_tune")
ORDER = (OURS, *RIVALS, "auto_tune, no restarts", "auto_tune, to its end", "grid once", "grid twice", "grid thrice")
_MEASURED = 4  # settings ours measures on the machine, some of them more than once
_CALIBRATION, _CALIBRATION_S = 0.6, 20.0  # what its calibration may take: of a measurement's window, and at least, s
_LEAST = 1e-3  # of the best: what a choice that serves nothing counts as in a ratio


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
    kept: float
    round_s: float
    cpu_s: float
    results: list[Result]

    def of(self, contender: str) -> list[Result]:
        return [r for r in self.results if r.contender == contender]


def ours(machine: Machine, seed: int, *, measured: int = _MEASURED, sim_trials: int = SIM_TRIALS) -> Choice:
    """What ``autotune profile --rate … --slo …`` does, on a machine in virtual time."""
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


def play(name: str, seeds: Sequence[int], rounds: int, truth_seeds: int) -> CaseResult:
    """Everything about one case."""
    begun = time.process_time()
    case = next(c for c in CASES if c.name == name)
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
            "auto_tune": auto_tune,
            "auto_tune, no restarts": partial(auto_tune, restart_s=0.0),
        }
        choices.append((OURS, seed, mine))
        choices += [(n, seed, look(Machine(case, seed), mine.spent_s, seed)) for n, look in contenders.items()]
    choices.append(("auto_tune, to its end", seeds[0], auto_tune(Machine(case, seeds[0]), inf, seeds[0])))
    truth = Truth(case, truth_seeds)
    taken = [choice.knobs or VLLM_DEFAULTS for _, _, choice in choices]
    best, share = truth.best(table[-1][1], taken)
    results = [
        Result(n, seed, str(choice.knobs), 1 - truth.share(knobs) / share, choice.spent_s / round_s, choice.runs)
        for (n, seed, choice), knobs in zip(choices, taken, strict=True)
    ]
    return CaseResult(name, str(best), share, round_s, time.process_time() - begun, results)


def mean(results: Iterable[Result], what: Callable[[Result], float]) -> float:
    return statistics.fmean(map(what, results))


def ratio(cases: Sequence[CaseResult], rival: str) -> float:
    """Our true goodput over the rival's: geometric mean over cases and seeds."""
    logs = [
        math.log(max(mine.share, _LEAST) / max(theirs.share, _LEAST))
        for case in cases
        for mine in case.of(OURS)
        for theirs in case.of(rival)
        if theirs.seed == mine.seed
    ]
    return math.exp(statistics.fmean(logs))


class Kept:
    """Cases that are done, in a file of one JSON object a line; what was asked of them is their key."""

    def __init__(self, path: Path | None, asked: dict[str, object]) -> None:
        self._path, self._asked = path, json.loads(json.dumps(asked))

    def known(self) -> dict[str, CaseResult]:
        """By name. A line that a kill cut short is passed over."""
        if self._path is None or not self._path.exists():
            return {}
        found = {}
        for line in self._path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                kept = json.loads(line)
                if kept.pop("asked") == self._asked:
                    kept["results"] = [Result(**result) for result in kept["results"]]
                    found[kept["case"]] = CaseResult(**kept)
        return found

    def add(self, case: CaseResult) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write("\n" * self._cut_short() + json.dumps({"asked": self._asked, **asdict(case)}) + "\n")

    def _cut_short(self) -> bool:
        assert self._path is not None
        return self._path.exists() and not self._path.read_bytes().endswith(b"\n")


def report(cases: Sequence[CaseResult]) -> None:
    """Tables: by case, and over all."""
    for case in cases:
        print(f"\n{case.case}: best {case.best}")
        print(f"  keeps {case.kept:.1%} in the long run; one round of the grid takes {case.round_s / 3600:.2f} h "
              f"of the machine ({case.cpu_s:.0f} s of CPU here)")  # fmt: skip
        for contender in ORDER:
            found = case.of(contender)
            if found:
                print(_row(contender, found))
    print(f"\nall {len(cases)} cases")
    for contender in ORDER:
        found = [r for case in cases for r in case.of(contender)]
        if found:
            print(_row(contender, found))


def _row(contender: str, found: Sequence[Result]) -> str:
    regrets = sorted(r.regret for r in found)
    return (
        f"  {contender:24s} regret {statistics.fmean(regrets):7.1%}  median {statistics.median(regrets):7.1%}  "
        f"{regrets[0]:7.1%} to {regrets[-1]:7.1%}   time {mean(found, lambda r: r.time):6.3f}   "
        f"{mean(found, lambda r: r.runs):5.1f} runs"
    )


def summary(cases: Sequence[CaseResult]) -> dict[str, object]:
    """The JSON line."""
    mine = [r for case in cases for r in case.of(OURS)]
    by_case = {case.case: round(mean(case.of(OURS), lambda r: r.regret), 4) for case in cases}
    return {
        "regret": round(mean(mine, lambda r: r.regret), 4),
        "hardware_share": round(mean(mine, lambda r: r.time), 4),
        **{f"vs_{rival}": round(ratio(cases, rival), 3) for rival in RIVALS},
        "vs_auto_tune_no_restarts": round(ratio(cases, "auto_tune, no restarts"), 3),
        "worst_case": max(by_case, key=lambda name: by_case[name]),
        "regret_by_case": by_case,
        "largest_share": round(max(r.time for r in mine), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three cases, one seed, two rounds of the grid")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time, each a process of its own (default 1)")
    parser.add_argument("--cases", nargs="*", choices=[c.name for c in CASES], help="only these")
    parser.add_argument("--seeds", nargs="*", type=int, help=f"other than {SEEDS}")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep each case that is done, and go on from those kept"
    )
    given = parser.parse_args()
    names = given.cases or (list(QUICK) if given.quick else [c.name for c in CASES])
    seeds = tuple(given.seeds or (SEEDS[:1] if given.quick else SEEDS))
    rounds, truth_seeds = (2, 3) if given.quick else (ROUNDS, 6)
    work = partial(play, seeds=seeds, rounds=rounds, truth_seeds=truth_seeds)
    kept = Kept(given.keep, {"seeds": seeds, "rounds": rounds, "truth_seeds": truth_seeds})
    done = kept.known()
    left = [name for name in names if name not in done]
    with ProcessPoolExecutor(given.jobs) as pool:
        for future in as_completed([pool.submit(work, name) for name in left]):
            case = future.result()
            kept.add(case)
            done[case.case] = case
            print(
                f"{case.case} is done, {len(done)} of {len(names)} ({case.cpu_s:.0f} s of CPU)",
                file=sys.stderr,
                flush=True,
            )
    cases = [done[name] for name in names]
    report(cases)
    print(json.dumps(summary(cases)))


if __name__ == "__main__":
    main()
