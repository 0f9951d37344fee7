"""Controllers against fixed settings, against each other and against the best that could have been known, in simulation.

Fourteen scenarios (M1 to M14) of machines, requests and SLOs that change while they are served, three that were invented later
(U1 to U3), eight on step times of real GPUs (G1 to G8), four invented when most of ours stood (F1 to F4), four when all
contenders did (H1 to H4), four with E2E targets (E1 to E4), and variants with noise in step times and with a bound on gaps
between tokens. Ours was tuned on M1 to M14, and constants of it were chosen with others in sight, as
:mod:`autotune.control.controllers.predictive.constants` says of each: on E1 to E4 none. Rivals are tuned on M1 to M14 and on G1
to G8.

Every contender starts cold at vLLM's defaults, knows neither machine nor traffic, and serves the same requests. What is compared
is goodput, as a share of that of an oracle: the best fixed knobs of each phase, chosen in hindsight. To tell which part earns
what, every contender also serves with one layer more at a time (knobs; a budget for each step; deadline order; early rejection),
beside the best fixed setting that has the same order and rejection.

Run ``python -m benchmarks.controller --traces FOLDER`` with the Azure 2023 traces; without them the presets fitted to those take
their place. ``--scenario M5 --contender predictive --seeds 3`` takes seconds, as the cache knows what that is compared with. Of a
scenario and seeds that it lacks, the best fixed settings are searched for first, a minute or more, and kept there. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from autotune.bench.plotting import check
from autotune.writing import write_whole
from benchmarks.command import command, exit_code
from benchmarks.controller import adversaries
from benchmarks.controller.cache import FOLDER, Cache, outcome_of
from benchmarks.controller.contenders import COLUMNS, REPORTED
from benchmarks.controller.known import REPORTED as REPORTED_SEEDS
from benchmarks.controller.known import OracleStore, peaks
from benchmarks.controller.loads import TRACES
from benchmarks.controller.run import Bench, Outcome, rates_of
from benchmarks.controller.scenarios import SCENARIOS, VARIANTS
from benchmarks.controller.table import Comparison
from benchmarks.controller.work import Task, Workers
from benchmarks.kept import Kept, code_digest
from runtime.errors import InputError

_QUICK = 3
_MOST_SEEDS = 50  # by number: who writes 201 means that seed


def seeds_of(text: str) -> tuple[int, ...]:
    """``3``: seeds 1 to 3; ``101-110``; ``4,7``. Raises :class:`InputError`, also of a number above 50: it is one seed's name."""
    count = 0
    try:
        if "-" in text:
            first, last = map(int, text.split("-"))
            found = tuple(range(first, last + 1))
        elif "," in text:
            found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
        else:
            count = int(text)
            found = tuple(range(1, min(count, _MOST_SEEDS) + 1))
    except ValueError:
        found = ()
    if count > _MOST_SEEDS:
        raise InputError(
            f"--seeds is {count}, which is a number of seeds (1 to {count}), and at most {_MOST_SEEDS}; a range names others: "
            f"{count}-{count} is seed {count} alone"
        )
    if not found or min(found) < 1:
        raise InputError(
            f"--seeds is {text!r}; it must be a number of seeds (3), a range (201-210) or a list (4,7) from 1 on"
        )
    return found


def say(text: str) -> None:
    print(text, flush=True)


def compare(args: argparse.Namespace, seeds: Sequence[int]) -> None:
    """Everything requested, as it comes, then tables and the line of JSON."""
    begun = time.monotonic()
    cache = Cache(FOLDER / f"controller_{'traces' if args.traces else 'presets'}.json", use=not args.recompute)
    files = [] if args.traces is None else [Path(args.traces) / name for name in TRACES.values()]
    kept = Kept(
        args.keep, {"traces": args.traces is not None}, code_digest(*(path for path in files if path.is_file()))
    )
    if args.traces is None:
        say("without --traces: lengths and arrivals are those of the presets fitted to the Azure 2023 traces")
    scenarios = [SCENARIOS[name] for name in args.scenario or SCENARIOS]
    loads = list(dict.fromkeys(scenario.load(phase) for scenario in scenarios for phase in scenario.phases))
    bench = Bench(peaks(loads, cache, args.traces, args.jobs, say), args.traces)
    if args.peaks:
        for load in loads:
            say(f"{load!s:<48}{bench.peaks[str(load)]:>8.2f} requests/s")
        return
    with Workers(args.jobs, bench) as workers:
        oracles = {
            scenario.name: OracleStore(
                cache,
                workers,
                seeds,
                say,
                reject=args.reject_oracle,
                layers=scenario not in VARIANTS,
            ).one(scenario)
            for scenario in scenarios
        }
        if args.oracle_only:
            return
        tasks = [
            Task(scenario.name, contender, seed)
            for scenario in scenarios
            for contender in args.contender or (COLUMNS if scenario in VARIANTS else REPORTED)
            for seed in seeds
        ]
        rates = {scenario.name: list(rates_of(scenario, bench.peaks)) for scenario in scenarios}
        known = [(Task(*run["run"]), run) for run in kept.known()]
        done = {task: outcome_of(run["outcome"]) for task, run in known if run["rates"] == rates.get(task.scenario)}
        if others := sum(task.scenario in rates and task not in done for task, _ in known):
            say(f"{others} of the runs kept are of other peak goodputs, so of other loads, and are not counted")
        found: dict[tuple[str, str], dict[int, Outcome]] = {}
        left = len(tasks)
        for task, outcome in chain(
            ((task, done[task]) for task in tasks if task in done),
            workers.runs(task for task in tasks if task not in done),
        ):
            if task not in done:
                kept.add({"run": task[:3], "rates": rates[task.scenario], "outcome": outcome})
            found.setdefault((task.scenario, task.contender), {})[task.seed] = outcome
            best = oracles[task.scenario].plain.by_seed[task.seed].met
            left -= 1
            say(
                f"{task.scenario:<10}{task.contender:<18}seed {task.seed:<4}{outcome.met / outcome.offered:>7.1%} within the SLO,"
                f" {outcome.met / best:.3f} of the oracle's goodput, phases "
                + " ".join(f"{met / max(1, offered):.2f}" for offered, met in outcome.phases)
                + f"  ({left} left)"
            )
    comparison = Comparison(found, oracles)
    say(f"\n{comparison.tables()}\n\nseeds {', '.join(map(str, seeds))}; {time.monotonic() - begun:.0f} s")
    if args.plot is not None:
        write_whole(args.plot, comparison.attribution.picture(seeds))
    say(json.dumps(comparison.figures() | adversaries.harm_min(found, say, everything=not args.scenario)))


@exit_code("interrupted; oracles and peaks found so far are in the cache, runs that are done in --keep FILE")
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("controller", __doc__)
    names = ", ".join(SCENARIOS).replace("%", "%%")  # argparse formats what it prints
    parser.add_argument("--scenario", action="append", metavar="NAME", help=f"only this one of {names}")
    parser.add_argument("--contender", action="append", metavar="NAME", help=f"only this one of {', '.join(REPORTED)}")
    parser.add_argument(
        "--seeds",
        help=f"3: seeds 1 to 3, for tuning ({_MOST_SEEDS} at most); a range, 201-201 for one seed; or a list, 4,7 "
        "(default: 201-210, which are reported)",
    )
    parser.add_argument("--quick", action="store_true", help=f"the first {_QUICK} of the seeds that are reported")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--traces", metavar="FOLDER", help="where the CSV files of the Azure 2023 traces are")
    parser.add_argument("--recompute", action="store_true", help="search for peak goodputs and oracles anew")
    parser.add_argument("--oracle-only", action="store_true", help="search for oracles that are not known, and end")
    parser.add_argument(
        "--reject-oracle", action="store_true", help="compare with the best settings of each phase with rejection, too"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep each run that is done, and go on from those kept"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture to write, .svg: what each layer earns")
    parser.add_argument(
        "--peaks", action="store_true", help="print the peak goodputs that loads are relative to, and end"
    )
    args = parser.parse_args(arguments)
    for option, known in (("scenario", list(SCENARIOS)), ("contender", list(REPORTED))):
        for name in getattr(args, option) or ():
            if name not in known:
                raise InputError(f"--{option} is {name}; it must be one of {', '.join(known)}")
    if args.plot is not None:
        check(args.plot, "--plot", (".svg",))
    if args.jobs < 1:
        raise InputError(f"--jobs is {args.jobs}; it must be at least 1")
    seeds = seeds_of(args.seeds) if args.seeds else REPORTED_SEEDS[: _QUICK if args.quick else None]
    if args.keep is not None and not args.keep.parent.is_dir():
        raise InputError(f"--keep: {args.keep} cannot be written: there is no directory {args.keep.parent}")
    compare(args, seeds)


if __name__ == "__main__":
    sys.exit(main())
