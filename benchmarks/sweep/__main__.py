"""How good a setting ``autotune profile`` finds, and for how much of the machine's time, against other ways to look for one.

Twelve cases (:mod:`benchmarks.sweep.cases`): a machine whose step times follow formulas that no fitted cost model has (eight),
or are composed of kernels measured on real GPUs (four), with 3% noise, its load, and the SLO. The machines exist in virtual time
only; every second they would be busy is counted, calibration and restarts included. In each case:

- **grid**: all 98 cells, three rounds. What one round takes is the unit of hardware time.
- **ours**: a whole :class:`autotune.profiling.session.Session`: calibrate, simulate, validate, choose. Its time is what passes
  on the machine's clock from the first probe to the choice.
- **random**, **tpe** (five random trials first, or Optuna's default of ten), **halving** (successive halving, from short windows
  to whole ones), **auto_tune** (:mod:`benchmarks.sweep.rivals`): as much time as ours took under the same seed. auto_tune also
  without the time that restarts take, and run to its end whatever that takes.
- **expert**: what vLLM's guide says, two settings, the better of them. **vLLM defaults**: nothing is measured.

The *truth* about a setting is its goodput over long runs without noise (:mod:`benchmarks.sweep.truth`). **Regret** is what the
choice falls short of the best setting that anybody found, as a share of it. Who finds nothing keeps vLLM's defaults.

Run ``python -m benchmarks.sweep``; ``--quick`` takes three cases and one seed, ``--jobs N`` works on N cases at a time, ``--keep
FILE`` keeps each case as it is done, and does not do it again (what other code left in FILE is not counted).
``--drift 0.15`` has every machine change its speed, as one that others share does; the truth is of such a machine, too. The
last line is JSON: ``regret`` (mean over cases and seeds), ``regret_max`` (of a single run), ``hardware_share`` (mean, of one
round of the grid), and ``vs_random``, ``vs_tpe``, ``vs_auto_tune`` and the like: the mean over cases and seeds of our true
goodput, as a share of each case's best, over the mean of theirs (null: they serve nothing anywhere).
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.command import at_least, command, deviation, exit_code
from benchmarks.kept import Kept
from benchmarks.sweep.cases import CASES
from benchmarks.sweep.contest import OURS, CaseResult, Result, play
from benchmarks.workers import end_with_parent

SEEDS = (601, 602, 603)
"""Of whole reports. Cases, profiler and this file were made with others; what was changed after the first report on these was
changed with their figures in sight."""

QUICK_SEEDS = (501,)
QUICK = ("code-experts", "strict-stalls", "tiny-cpu")
ROUNDS = 3
RIVALS = {
    "vs_random": "random",
    "vs_tpe": "tpe",
    "vs_tpe_10_startup": "tpe, 10 start-up",
    "vs_halving": "halving",
    "vs_expert": "expert",
    "vs_auto_tune": "auto_tune",
    "vs_auto_tune_no_restarts": "auto_tune, no restarts",
}
"""Contenders that ours is compared with under each seed, by their names in the JSON line."""

ORDER = (OURS, *RIVALS.values(), "auto_tune, to its end", "vLLM defaults", "grid once", "grid twice", "grid thrice")


def mean(results: Iterable[Result], what: Callable[[Result], float]) -> float:
    return statistics.fmean(map(what, results))


def ratio(cases: Sequence[CaseResult], rival: str) -> float | None:
    """Our mean true goodput over the rival's, each as a share of the case's best, over cases and seeds.

    A ratio of means: a case in which a rival serves nothing counts as that, and not as a quotient by nothing. None: it serves
    nothing anywhere.
    """
    ours, theirs = (mean((r for case in cases for r in case.of(who)), lambda r: r.share) for who in (OURS, rival))
    return ours / theirs if theirs else None


def report(cases: Sequence[CaseResult]) -> None:
    """What ours falls short of the best, and in what time; then tables, over all and by case."""
    mine = [(r, case.case) for case in cases for r in case.of(OURS)]
    worst, where = max(mine, key=lambda one: one[0].regret)
    runs = [r for r, _ in mine]
    print(
        f"\nregret {mean(runs, lambda r: r.regret):.1%} on average, at most {worst.regret:.1%} ({where}, seed {worst.seed}); "
        f"time {mean(runs, lambda r: r.time):.3f} of one round of the grid, at most {max(r.time for r in runs):.3f}"
    )
    print(f"\nall {len(cases)} cases")
    for contender in ORDER:
        found = [r for case in cases for r in case.of(contender)]
        if found:
            print(_row(contender, found))
    for case in cases:
        print(f"\n{case.case}: best {case.best}")
        print(f"  attainment {case.attainment:.1%} in the long run; one round of the grid takes {case.round_s / 3600:.2f} h "
              f"of the machine ({case.cpu_s:.0f} s of CPU here)")  # fmt: skip
        for contender in ORDER:
            found = case.of(contender)
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
    ratios = {name: ratio(cases, rival) for name, rival in RIVALS.items()}
    return {
        "regret": round(mean(mine, lambda r: r.regret), 4),
        "regret_max": round(max(r.regret for r in mine), 4),
        "hardware_share": round(mean(mine, lambda r: r.time), 4),
        "hardware_share_max": round(max(r.time for r in mine), 4),
        "worst_case": max(by_case, key=lambda name: by_case[name]),
        "regret_by_case": by_case,
        **{name: None if found is None else round(found, 3) for name, found in ratios.items()},
    }


def _begin() -> None:
    """Ctrl-C reaches the workers as well, where a pool would take it for the result of a case and go on with the next."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()


@exit_code("interrupted; cases that are done are in --keep FILE")
def main(argv: Sequence[str] | None = None) -> None:
    parser = command("sweep", __doc__)
    parser.add_argument("--quick", action="store_true", help="three cases, one seed, two rounds of the grid")
    parser.add_argument(
        "--jobs", type=at_least(1), default=1, help="cases at a time, each a process of its own (default 1)"
    )
    parser.add_argument("--cases", nargs="*", choices=[c.name for c in CASES], help="only these")
    parser.add_argument(
        "--drift",
        type=deviation,
        default=0.0,
        help="deviation of the machine's speed, which changes every one and a half windows (default: it does not)",
    )
    parser.add_argument("--seeds", nargs="*", type=int, help=f"other than {SEEDS}, quick {QUICK_SEEDS}")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep each case that is done, and go on from those kept"
    )
    given = parser.parse_args(argv)
    names = given.cases or (list(QUICK) if given.quick else [c.name for c in CASES])
    seeds = tuple(given.seeds or (QUICK_SEEDS if given.quick else SEEDS))
    rounds, truth_seeds = (2, 3) if given.quick else (ROUNDS, 6)
    work = partial(play, seeds=seeds, rounds=rounds, truth_seeds=truth_seeds, drift=given.drift)
    drift = {"drift": given.drift} if given.drift else {}
    kept = Kept(given.keep, {"seeds": seeds, "rounds": rounds, "truth_seeds": truth_seeds, **drift})
    done = {case.case: case for case in map(CaseResult.of_json, kept.known())}
    left = [name for name in names if name not in done]
    pool = ProcessPoolExecutor(given.jobs, initializer=_begin)
    try:
        for future in as_completed([pool.submit(work, name) for name in left]):
            case = future.result()
            kept.add(asdict(case))
            done[case.case] = case
            print(
                f"{case.case} is done, {len(done)} of {len(names)} ({case.cpu_s:.0f} s of CPU)",
                file=sys.stderr,
                flush=True,
            )
    except BaseException:
        for process in [*pool._processes.values()]:  # what they would find, nobody takes
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    cases = [done[name] for name in names]
    report(cases)
    print(json.dumps(summary(cases) | drift))


if __name__ == "__main__":
    sys.exit(main())
