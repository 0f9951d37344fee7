"""When tuning pays: what a setting, admission, order and the controller gain over vLLM's defaults, by GPU, requests and SLO.

Eight pairs of GPU and model (:mod:`benchmarks.gpu_truth`) × chat and code × a strict and a loose SLO, in virtual time, at 0.5,
0.8 and 1.2 of what the best of sixteen fixed settings carries; four of the pairs again where steps that hold prompts cost more.
What is compared, and how settings are chosen, is in :mod:`benchmarks.when_tuning_pays.play`. The results make
``docs/when-tuning-pays.md``.

Finished cells are kept in ``benchmarks/data/when_tuning_pays.json``, with a digest of what the simulator, admission and the
controller do with a fixed probe, and of the search: the command goes on where it stopped, and plays again what would come out
otherwise now. With
``--quick`` or seeds of your own only ``--keep FILE`` keeps them. The last line is JSON: mean gains in points of 100 by load.

    python -m benchmarks.when_tuning_pays --truth h100-llama3-8b --workload chat --slo strict
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import command, exit_code, say
from benchmarks.controller.cache import FOLDER, Cache
from benchmarks.controller.run import Bench
from benchmarks.controller.work import Workers
from benchmarks.gpu_truth import names
from benchmarks.when_tuning_pays.cells import SLOS, VARIANTS, WORKLOADS, Cell, cells
from benchmarks.when_tuning_pays.page import figures, line_of, summary, written
from benchmarks.when_tuning_pays.play import Found, Plan, Task, digest, from_entry, play
from runtime.errors import InputError

ROOT = FOLDER.parents[1]
MEASURED = ("runtime", "autotune/control", "autotune/simulate")
"""Folders with what is measured: the engine's scheduler and admission, the controller, the simulator."""

FILE = FOLDER / "when_tuning_pays.json"
CHOICES = {"variant": list(VARIANTS), "truth": names(), "workload": list(WORKLOADS), "slo": list(SLOS)}
PUBLISHED = Plan()
QUICK = Plan(reported=PUBLISHED.reported[:1], chosen_on=PUBLISHED.chosen_on[:1], requests=60, least_s=6.0)


def commit() -> str:
    """The last commit of :data:`MEASURED`, with + where these have changed since; ``unknown`` outside a clone."""
    last, changed = ("log", "-1", "--format=%h", "--", *MEASURED), ("status", "--porcelain", "--", *MEASURED)
    try:
        said = [
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (last, changed)
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said[0] + ("+" if said[1] else "")


def kept(path: Path) -> tuple[list[Found], list[str]]:
    """All cells of a file, in their order, and the commits they were made at. Raises :class:`InputError` if some are missing."""
    cache = Cache(path)
    entries = [cache.entry(str(cell)) for cell in cells()]
    if missing := [str(cell) for cell, entry in zip(cells(), entries, strict=True) if entry is None]:
        raise InputError(
            f"--page: {path} lacks {len(missing)} cells, the first is {missing[0]}; run without --page first"
        )
    known = [entry for entry in entries if entry is not None]
    return [from_entry(entry) for entry in known], [entry["commit"] for entry in known]


def compare(requested: Sequence[Cell], plan: Plan, keep: Path | None, jobs: int) -> list[Found]:
    """Play what is not kept, a line for each cell; all of ``requested``, in that order."""
    cache = None if keep is None else Cache(keep)
    found: dict[Cell, Found] = {}
    digests = {} if cache is None else {cell: digest(cell, plan) for cell in requested}
    for cell, text in digests.items():
        if cache is not None and (entry := cache.get(str(cell), text)) is not None:
            found[cell] = from_entry(entry)
    if found:
        say(f"{len(found)} of {len(requested)} cells were kept in {keep}")
    at, left = commit(), [cell for cell in requested if cell not in found]
    with Workers(jobs, Bench({})) as workers:
        for task, one in workers.each(play, [Task(cell, plan) for cell in left]):
            found[task.cell] = one
            if cache is not None:
                cache.put(str(task.cell), digests[task.cell], {"commit": at, **one.entry()})
            say(f"{line_of(one)}  ({len(requested) - len(found)} left)")
    return [found[cell] for cell in requested]


def checked(args: argparse.Namespace) -> tuple[list[Cell], Plan]:
    """What is asked. Raises :class:`InputError`."""
    for option, values in CHOICES.items():
        for name in getattr(args, option) or ():
            if name not in values:
                raise InputError(f"--{option} is {name}; it must be one of {', '.join(values)}")
    if args.jobs < 1:
        raise InputError(f"--jobs is {args.jobs}; it must be at least 1")
    plan = QUICK if args.quick else PUBLISHED
    if args.seed:
        plan = plan._replace(reported=tuple(args.seed))
    for seed in plan.reported:
        if seed < 1 or seed in PUBLISHED.chosen_on:
            chosen = " and ".join(map(str, PUBLISHED.chosen_on))
            raise InputError(
                f"--seed is {seed}; it must be above {max(PUBLISHED.chosen_on)}: settings are chosen on {chosen}"
            )
    if args.keep is not None and not args.keep.parent.is_dir():
        raise InputError(f"--keep: {args.keep} cannot be written: there is no directory {args.keep.parent}")
    return list(cells(args.variant or (), args.truth or (), args.workload or (), args.slo or ())), plan


@exit_code("interrupted; cells that are done are in the file")
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("when_tuning_pays", __doc__)
    for option, values in CHOICES.items():
        about = f"only this one of {', '.join(values)}; repeatable"
        parser.add_argument(f"--{option}", action="append", metavar="NAME", help=about)
    usual = ", ".join(map(str, PUBLISHED.reported))
    parser.add_argument(
        "--seed", action="append", type=int, metavar="N", help=f"report on this; repeatable (default: {usual})"
    )
    parser.add_argument("--quick", action="store_true", help="one seed of some sixty requests: to try the command")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, each in a process (default: 1)")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help=f"where cells are kept (default: {FILE.parent.name}/{FILE.name})"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE",
        help="write what is kept of all cells into this page, between its marks, and the picture beside it; play nothing",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    requested, plan = checked(args)
    keep = args.keep or (FILE if plan == PUBLISHED else None)
    if args.page is not None:
        everything, commits = kept(keep or FILE)
        written(args.page, everything, commits)
        print(json.dumps(summary(everything)))
        return
    found = compare(requested, plan, keep, args.jobs)
    spent = f"seeds {', '.join(map(str, plan.reported))}; {sum(one.cpu_s for one in found):.0f} s of CPU"
    print(f"{figures(found, [commit()])}\n\n{spent}")
    print(json.dumps(summary(found)))


if __name__ == "__main__":
    sys.exit(main())
