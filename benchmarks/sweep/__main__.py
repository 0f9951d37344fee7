"""How good a setting ``autotune profile`` finds, and for how much of the machine's time, against other ways to look for one.

Eight cases (:mod:`benchmarks.sweep.cases`): a machine whose step times follow formulas that no fitted cost model has, with 3%
noise, its load, and the SLO. The machines exist in virtual time only; every second they would be busy is counted,
calibration and restarts included. In each case:

- **grid**: all 98 cells, three rounds. What one round takes is the unit of hardware time.
- **ours**: a whole :class:`autotune.profiling.session.Session`: calibrate, simulate, validate, choose. Its time is what passes
  on the machine's clock from the first probe to the choice.
- **random**, **tpe**, **auto_tune** (:mod:`benchmarks.sweep.rivals`): as much time as ours took under the same seed. auto_tune
  also without the time that restarts take, and run to its end whatever that takes.

The *truth* about a setting is its goodput over long runs without noise (:mod:`benchmarks.sweep.truth`). Regret is what the
choice falls short of the best setting that anybody found, as a share of it. Who finds nothing keeps vLLM's defaults.

Run ``python -m benchmarks.sweep``; ``--quick`` takes three cases and one seed, ``--jobs N`` works on N cases at a time, ``--keep
FILE`` keeps each case as it is done, and does not do it again (FILE is of this code; begin another when that changes). The
last line is JSON: ``regret`` (mean over cases and seeds), ``hardware_share`` (of one round of the grid), and ``vs_random``,
``vs_tpe``, ``vs_auto_tune``: our true goodput over theirs, geometric mean over cases and seeds.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.command import command, exit_code
from benchmarks.sweep.cases import CASES
from benchmarks.sweep.contest import OURS, CaseResult, Result, play

SEEDS = (501, 502, 503)
"""Those reported last. The cases, the profiler and this file were worked on with others."""

QUICK = ("code-experts", "strict-stalls", "tiny-cpu")
ROUNDS = 3
RIVALS = ("random", "tpe", "auto_tune")
ORDER = (OURS, *RIVALS, "auto_tune, no restarts", "auto_tune, to its end", "grid once", "grid twice", "grid thrice")
_LEAST = 1e-3  # of the best: what a choice that serves nothing counts as in a ratio


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


@exit_code()
def main() -> None:
    parser = command("sweep", __doc__)
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
    sys.exit(main())
