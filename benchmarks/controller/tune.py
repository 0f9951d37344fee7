"""Constants for rivals: the best of a random search over their published ranges, on the seeds that are there to tune on.

``python -m benchmarks.controller.tune --traces FOLDER`` writes ``benchmarks/data/controller_rivals.json``, from which the
benchmark takes them; ``--rival aimd`` tunes one anew and leaves the others as they are. Each is tuned twice: with knobs alone,
and with all layers. Successive halving: the published constants and ``--samples`` others serve nine scenarios on seed 1; the
best five all that ours was tuned on (M1 to M14, G1 to G8) on seed 2; the best two of these the same on seeds 3 to 10. Whoever has
most goodput over those last two rounds wins, the published constants if nothing beats them, for they go all the way. Goodput is
taken as a share of the oracle's, and scenarios count alike.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autotune.writing import write_whole
from benchmarks.command import command, exit_code
from benchmarks.controller.__main__ import say
from benchmarks.controller.cache import FOLDER, Cache
from benchmarks.controller.constants import FILE, RANGES, Constants
from benchmarks.controller.contenders import RIVALS, Layer, driver_of
from benchmarks.controller.known import TUNED, OracleStore, peaks
from benchmarks.controller.run import Bench, Outcome, run
from benchmarks.controller.scenarios import MATRIX, MEASURED, SCENARIOS
from benchmarks.controller.work import Workers
from runtime.errors import InputError

FEW = ("M3", "M4", "M6", "M9", "M11", "M14", "G2", "G3", "G5")
TUNED_ON = (*MATRIX, *MEASURED)
ALL = tuple(scenario.name for scenario in TUNED_ON)
LAYERS: tuple[Layer, ...] = ("knobs", "full")
SAMPLES = 12
_DICE = 20_261_124


class Round(NamedTuple):
    """Which scenarios and seeds candidates serve, and how many of them go on."""

    scenarios: tuple[str, ...]
    seeds: tuple[int, ...]
    kept: int


ROUNDS = (Round(FEW, (1,), 5), Round(ALL, (2,), 2), Round(ALL, tuple(range(3, 11)), 1))


class Trial(NamedTuple):
    """One run of a candidate, which is named by its place in the list."""

    base: str
    layer: Layer
    candidate: int
    constants: tuple[tuple[str, object], ...]
    scenario: str
    seed: int


def run_trial(trial: Trial, bench: Bench) -> Outcome:
    driver = driver_of(RIVALS[trial.base], trial.layer, dict(trial.constants))
    return run(SCENARIOS[trial.scenario], driver, trial.seed, bench)


class Found(NamedTuple):
    """The best constants, their goodput as a share of the oracle's, that of the published ones on the same runs, and how many
    runs it took."""

    constants: Constants
    share: float
    published: float
    runs: int


class Search:
    """``best``: requests that the oracle met, by scenario and seed."""

    def __init__(self, workers: Workers, best: Mapping[tuple[str, int], int], rounds: Sequence[Round] = ROUNDS) -> None:
        self._workers, self._best, self._rounds = workers, best, rounds

    def of(self, base: str, layer: Layer, samples: int) -> Found:
        candidates = candidates_of(base, layer, samples)
        met: dict[tuple[int, str, int], int] = {}
        left = list(range(len(candidates)))
        for number, stage in enumerate(self._rounds):
            trials = [
                Trial(base, layer, c, tuple(candidates[c].items()), scenario, seed)
                for c in left
                for scenario in stage.scenarios
                for seed in stage.seeds
            ]
            for trial, outcome in self._workers.each(run_trial, trials):
                met[trial.candidate, trial.scenario, trial.seed] = outcome.met
            judged = self._rounds[min(1, number) : number + 1]  # the first round is of too little to count in the end
            left = sorted(left, key=lambda c: (-self._share(met, c, judged), c))
            left = list(dict.fromkeys([*left[: stage.kept], 0]))  # those published go all the way
        return Found(candidates[left[0]], self._share(met, left[0], judged), self._share(met, 0, judged), len(met))

    def _share(self, met: Mapping[tuple[int, str, int], int], candidate: int, stages: Sequence[Round]) -> float:
        """Mean over scenarios of goodput over the oracle's, on the runs of ``stages``."""
        seeds: dict[str, list[int]] = {}
        for stage in stages:
            for scenario in stage.scenarios:
                seeds.setdefault(scenario, []).extend(stage.seeds)
        return statistics.fmean(
            sum(met[candidate, name, seed] for seed in of) / sum(self._best[name, seed] for seed in of)
            for name, of in seeds.items()
        )


def candidates_of(base: str, layer: Layer, samples: int) -> list[Constants]:
    """The published constants (none named) and up to ``samples`` others, each once; equal for equal arguments."""
    dice = random.Random(f"{_DICE} {base} {layer}")
    found: list[Constants] = [{}]
    for _ in range(4 * samples):
        drawn = {name: draw(dice) for name, draw in RANGES[base].items()}
        if drawn not in found and len(found) <= samples:
            found.append(drawn)
    return found


def tune(args: argparse.Namespace) -> None:
    """Tune what was requested, and write it beside what the file has of others."""
    begun = time.monotonic()
    cache = Cache(FOLDER / f"controller_{'traces' if args.traces else 'presets'}.json")
    loads = list(dict.fromkeys(scenario.load(phase) for scenario in TUNED_ON for phase in scenario.phases))
    bench = Bench(peaks(loads, cache, args.traces, args.jobs, say), args.traces)
    document = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    constants, reported = document.get("constants", {}), document.get("reported", {})
    seeds = sorted({seed for stage in ROUNDS for seed in stage.seeds})
    runs = 0
    with Workers(args.jobs, bench) as workers:
        oracles = OracleStore(cache, workers, TUNED, say, reject=False, layers=False).of(TUNED_ON)
        best = {(name, seed): o.met for name, known in oracles.items() for seed, o in known.plain.by_seed.items()}
        search = Search(workers, best)
        for base in args.rival or RANGES:
            for layer in (layer for layer in LAYERS if layer in RIVALS[base].layers):
                cpu = time.process_time()
                found = search.of(base, layer, args.samples)
                runs += found.runs
                constants.setdefault(base, {})[layer] = found.constants
                reported.setdefault(base, {})[layer] = {
                    "share_of_the_oracle": round(found.share, 4),
                    "as_published": round(found.published, 4),
                    "samples": args.samples,
                    "runs": found.runs,
                    "cpu_s": round(time.process_time() - cpu) if args.jobs == 1 else None,
                    "seeds": seeds,
                    "scenarios": " ".join(ALL),
                }
                said = ", ".join(f"{name} {value}" for name, value in found.constants.items()) or "as published"
                say(
                    f"{base:<12}{layer:<8}{found.share:.3f} (published {found.published:.3f}): {said}; {found.runs} runs"
                )
    document = {
        "command": "python -m benchmarks.controller.tune --traces FOLDER",
        "reported": reported,
        "constants": constants,
    }
    write_whole(FILE, json.dumps(document, indent=1) + "\n")
    say(f"{runs} runs, {time.monotonic() - begun:.0f} s; seeds {', '.join(map(str, seeds))}; written: {FILE.name}")


@exit_code("interrupted; nothing was written")
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("controller.tune", __doc__)
    parser.add_argument("--rival", action="append", metavar="NAME", help=f"only this one of {', '.join(RANGES)}")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"constants tried of each rival ({SAMPLES})")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--traces", metavar="FOLDER", help="where the CSV files of the Azure 2023 traces are")
    args = parser.parse_args(arguments)
    for option in ("samples", "jobs"):
        if getattr(args, option) < 1:
            raise InputError(f"--{option} is {getattr(args, option)}; it must be at least 1")
    for name in args.rival or ():
        if name not in RANGES:
            raise InputError(f"--rival is {name}; it must be one of {', '.join(RANGES)}")
    tune(args)


if __name__ == "__main__":
    sys.exit(main())
