"""Controllers on scenarios that nobody chose: machines, requests, SLOs, loads, shifts and starting knobs drawn at random.

Whoever invents a scenario may invent what suits a controller. Here a seed draws all of it (:func:`drawn`): one of the 26 machines
of the other scenarios; one to three phases of one or two classes, with lengths and SLOs of the other scenarios, steady or in
bursts, each at 0.3 to 1.4 times what the machine completes when it is flooded (:func:`flooded`); perhaps a slower machine in a
later phase; noise, stalls or neither; and one of six starting knobs. SLOs are drawn whether the machine can meet them or not.

Every contender begins with the starting knobs. With all layers each is compared with the best of twelve fixed settings and the
start, in hindsight, all with deadline order and early rejection; with knobs alone, with the starting knobs. A scenario counts
if the best fixed setting serves :data:`WORTH` of its requests in time, and if there are :data:`FEWEST` of them: below that no
setting matters, or chance decides.

Those of :data:`REPORTED` are reported; nothing was tuned on them. Run ``python -m benchmarks.controller.drawn --traces FOLDER``
(a quarter of an hour on two quiet cores; ``--seeds 3``: half a minute); ``--keep FILE`` goes on from what is done. The last line
is JSON.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival
from benchmarks.command import at_least, command, exit_code
from benchmarks.controller.constants import constants_of
from benchmarks.controller.contenders import ALGORITHMS, OURS, POLICIES, Layer, driver_of
from benchmarks.controller.hardware import Hardware, measured
from benchmarks.controller.loads import POISSON, TRACES, Part, Pattern, arrivals, trace_rows
from benchmarks.controller.run import Bench, Driver, serve
from benchmarks.controller.scenarios import COLD, HARDWARE, Phase, Scenario
from benchmarks.controller.work import Workers
from benchmarks.gpu_truth import ALL, BASE, names
from benchmarks.kept import Kept, code_digest
from runtime.knobs import Knobs
from runtime.records import RequestRecord, StepRecord

REPORTED: Final = range(1001, 1201)
WORTH, FEWEST = 0.4, 150
MOST: Final = 6000
"""Requests of a scenario, about: a faster machine serves for a shorter time."""
BOUND: Final = 0.97


_GPUS: Final = tuple(measured(name, flags) for name in names() for flags in (BASE, ALL))
MACHINES: Final = (*(machine for machine in HARDWARE.values() if "measured" not in machine.about), *_GPUS)
LENGTHS: Final = ("conv", "code", "moon", "reason", "brief", "digest", "agent", "story")
SLO_NAMES: Final = (
    "mlperf", "inter", "strict", "gap", "whole", "answer", "page", "inter*2,2", "mlperf*5,1", "inter*1,2", "inter*4,1",
)  # fmt: skip
LOADS: Final = (0.3, 0.5, 0.7, 0.85, 0.95, 1.1, 1.4)
SLOWER: Final = (1.0, 1.0, 1.0, 1.3, 1.8, 2.5)
PATTERNS: Final = (POISSON, POISSON, Pattern("gamma", 2.0), Pattern("gamma", 3.0))
STARTS: Final = (
    COLD, COLD, Knobs(512, 0, 2048, 2048), Knobs(256, 0, 2048, 512), Knobs(64, 0, 512, 512), Knobs(32, 0, 8192, 8192),
    Knobs(128, 0, 256, 256),
)  # fmt: skip
FIXED: Final = tuple(
    Knobs(slots, 0, budget, chunk)
    for slots in (32, 128, 512)
    for budget, chunk in ((256, 256), (1024, 256), (1024, 1024), (4096, 1024))
)
FULL: Final[tuple[str, ...]] = (OURS, "niyama", "aimd", "bisection", "gradient", "p-pas")
KNOBS: Final[tuple[str, ...]] = (OURS, "aimd", "bisection", "gradient")


class Draw(NamedTuple):
    """A scenario, and the knobs that everybody starts with."""

    scenario: Scenario
    start: Knobs


def drawn(seed: int) -> Draw:
    """What ``seed`` draws; its loads are relative to :func:`flooded`."""
    dice = random.Random(f"drawn {seed}")
    machine = dice.choice(MACHINES)
    phases = [Phase(dice.choice((30, 60, 90)), _parts(dice), dice.choice(LOADS))]
    for _ in range(dice.choice((0, 1, 1, 2))):
        parts, how = phases[-1].parts, dice.random()
        if how < 0.3:  # other lengths, the same SLOs
            parts = tuple(part._replace(lengths=dice.choice(LENGTHS)) for part in parts)
        elif how < 0.6 and len(parts) == 1:  # another SLO; those of named classes do not change
            parts = (parts[0]._replace(slo_name=dice.choice(SLO_NAMES)),)
        phases.append(Phase(dice.choice((30, 60, 90)), parts, dice.choice(LOADS), dice.choice(SLOWER)))
    scenario = Scenario(
        f"seed {seed}", "drawn", machine, tuple(phases), dice.choice(PATTERNS),
        noise=dice.choice((0.0, 0.0, 0.02, 0.05, 0.15)), stalls=dice.choice((0.0, 0.0, 0.0, 0.005)),
    )  # fmt: skip
    return Draw(scenario, dice.choice(STARTS))


def _parts(dice: random.Random) -> tuple[Part, ...]:
    share = dice.choice((0.2, 0.5, 0.8)) if dice.random() < 0.3 else 1.0
    first = Part(dice.choice(LENGTHS), dice.choice(SLO_NAMES), share)
    if share == 1:
        return (first,)
    return first, Part(dice.choice(LENGTHS), dice.choice(SLO_NAMES), 1 - share, "other")


@cache
def flooded(machine: Hardware, parts: tuple[Part, ...], traces: str | None) -> float:
    """Requests/s that ``machine`` completes of some 200 that are all there at once, under the best of three settings."""
    kinds = tuple(part._replace(request_class="default") for part in parts)
    bunch = [
        arrival._replace(time=0.0)
        for arrival in arrivals(kinds, POISSON, 100.0, 2.0, (1,), kv_tokens=machine.kv_tokens, traces=traces)
    ]
    return max(
        len(bunch) / _completed(machine, bunch, knobs)
        for knobs in (Knobs(64, 0, 512, 512), Knobs(256, 0, 2048, 512), Knobs(512, 0, 8192, 2048))
    )


def _completed(machine: Hardware, bunch: Sequence[Arrival], knobs: Knobs) -> float:
    """Seconds until the last of ``bunch`` has ended."""
    engine = SimulatedEngine(
        machine.cost(), kv_tokens=machine.kv_tokens, knobs=knobs, prefix_cache=False, max_queue=1_000_000, ordering="fcfs",
        admission=False,
    )  # fmt: skip
    last = _LastStep()
    engine.subscribe(last)
    engine.serve(bunch, start=0.0, label="0", shared=False)
    engine.run()
    return last.end


class _LastStep:
    end = 0.0

    def on_step(self, record: StepRecord) -> None:
        self.end = record.end

    def on_run(self, record: StepRecord, ends: Sequence[float]) -> None:
        self.end = ends[-1]

    def on_request(self, record: RequestRecord) -> None:
        pass


def play(seed: int, bench: Bench) -> dict[str, Any]:
    """How many requests of the scenario of ``seed`` there are, and how many each contender serves in time."""
    scenario, start = drawn(seed)
    rates = [phase.load * flooded(scenario.hardware, phase.parts, bench.traces) for phase in scenario.phases]
    whole = sum(rate * phase.seconds for rate, phase in zip(rates, scenario.phases, strict=True))
    phases = tuple(replace(phase, seconds=_shorter(phase.seconds, whole)) for phase in scenario.phases)
    scenario = replace(scenario, phases=phases)
    offered = tuple(
        tuple(
            arrivals(
                phase.parts, scenario.pattern, rate, phase.seconds, (seed, number),
                kv_tokens=scenario.hardware.kv_tokens, traces=bench.traces,
            )
        )
        for number, (phase, rate) in enumerate(zip(phases, rates, strict=True))
    )  # fmt: skip
    met = {name: serve(scenario, offered, driver, seed).met for name, driver in contenders(start).items()}
    return {"seed": seed, "offered": sum(map(len, offered)), "met": met}


def _shorter(seconds: float, requests: float) -> float:
    """Of a phase, in whole bins, so that a scenario has some :data:`MOST` ``requests``."""
    return seconds if requests <= MOST else max(15.0, 5.0 * round(seconds * MOST / requests / 5.0))


def contenders(start: Knobs) -> dict[str, Driver]:
    """Everybody who takes part, by name: fixed settings with all layers, the start, and controllers that begin with it."""
    found = {f"fixed {k.max_batch_size}/{k.token_budget}/{k.chunk_size}": k for k in (*FIXED, start)}
    drivers = {name: Driver((knobs,), policy=POLICIES["full"]) for name, knobs in found.items()}
    drivers["start, full"] = Driver((start,), policy=POLICIES["full"])
    drivers["start, knobs"] = Driver((start,))
    layers: Mapping[Layer, tuple[str, ...]] = {"full": FULL, "knobs": KNOBS}
    for layer, bases in layers.items():
        for name in bases:
            constants = {} if name == OURS else constants_of(name, layer)
            drivers[f"{name}, {layer}"] = driver_of(ALGORITHMS[name], layer, constants)._replace(schedule=(start,))
    return drivers


class Played(NamedTuple):
    """A scenario that counts."""

    seed: int
    met: Mapping[str, int]

    @property
    def best_fixed(self) -> int:
        return max(met for name, met in self.met.items() if name.startswith("fixed "))

    def ratio(self, name: str, base: int) -> float:
        """Goodput over ``base`` requests in time; one more on either side, for there may be none."""
        return (self.met[name] + 1) / (base + 1)


def counting(results: Sequence[Mapping[str, Any]]) -> list[Played]:
    """Those of ``results`` that count."""
    played = [(Played(one["seed"], one["met"]), one["offered"]) for one in results]
    return [one for one, offered in played if offered >= FEWEST and one.best_fixed >= WORTH * offered]


class Spread(NamedTuple):
    """Of ratios over scenarios: geometric mean, tenth percentile, least, and the share below :data:`BOUND`."""

    mean: float
    tenth: float
    least: float
    below: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Spread:
        return cls(
            math.exp(float(np.mean(np.log(ratios)))),
            float(np.quantile(ratios, 0.1)),
            min(ratios),
            sum(ratio < BOUND for ratio in ratios) / len(ratios),
        )


def summary(played: Sequence[Played], say: Callable[[str], None]) -> dict[str, float]:
    """Print both tables; the figures of the line of JSON."""
    full = {name: [one.ratio(f"{name}, full", one.best_fixed) for one in played] for name in ("start", *FULL)}
    knobs = {name: [one.ratio(f"{name}, knobs", one.met["start, knobs"]) for one in played] for name in KNOBS}
    for title, table in (("all layers ÷ best fixed", full), ("knobs alone ÷ start", knobs)):
        say(f"\n{title:<26}{'mean':>8}{'10th':>8}{'least':>8}{f'below {BOUND}':>12}")
        for name, ratios in table.items():
            mean, tenth, least, below = Spread.of(ratios)
            say(f"{name:<26}{mean:>8.3f}{tenth:>8.3f}{least:>8.3f}{below:>12.0%}")
    ours, alone = Spread.of(full[OURS]), Spread.of(knobs[OURS])
    rivals = [
        Spread.of([a / b for a, b in zip(full[OURS], full[name], strict=True)]).mean for name in FULL if name != OURS
    ]
    rounded = {
        "scenarios": len(played),
        "full_vs_best_static_with_admission_mean": ours.mean,
        "full_vs_best_static_with_admission_tenth": ours.tenth,
        "full_vs_best_static_with_admission_min": ours.least,
        "full_vs_best_rival_with_admission_mean": min(rivals),
        "knobs_vs_start_mean": alone.mean,
        "knobs_vs_start_tenth": alone.tenth,
        "knobs_vs_start_min": alone.least,
    }
    return {name: round(value, 4) for name, value in rounded.items()}


@exit_code("interrupted; --keep FILE goes on from what was kept")
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command("controller.drawn", __doc__)
    parser.add_argument(
        "--seeds", help=f"3: seeds 1 to 3, for tuning; 1001-1010; 4,7 (default: {REPORTED[0]}-{REPORTED[-1]})"
    )
    parser.add_argument("--traces", metavar="FOLDER", help="where the CSV files of the Azure 2023 traces are")
    parser.add_argument("--jobs", type=at_least(1), default=2, help="processes (2)")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep each scenario that is done, and go on from those kept"
    )
    args = parser.parse_args(arguments)
    from benchmarks.controller.__main__ import say, seeds_of  # which imports what this does

    seeds = seeds_of(args.seeds) if args.seeds else tuple(REPORTED)
    files = [] if args.traces is None else [Path(args.traces) / name for name in TRACES.values()]
    for lengths in TRACES if files else ():
        trace_rows(args.traces, lengths)  # says so at once if it is not there
    kept = Kept(args.keep, {"traces": bool(files)}, code_digest(*files))
    done = {one["seed"]: one for one in kept.known()}
    with Workers(args.jobs, Bench({}, args.traces)) as workers:
        left = [seed for seed in seeds if seed not in done]
        for number, (seed, result) in enumerate(workers.each(play, left), 1):
            kept.add(result)
            done[seed] = result
            best = Played(seed, result["met"]).best_fixed
            say(
                f"seed {seed:<6}{drawn(seed).scenario.hardware.name:<28}{result['offered']:>6} requests, best fixed {best:>5}, "
                f"ours {result['met'][f'{OURS}, full']:>5} in time  ({len(left) - number} left)"
            )
    played = counting([done[seed] for seed in seeds])
    say(f"\n{len(played)} of {len(seeds)} scenarios count")
    print(json.dumps(summary(played, say) if played else {"scenarios": 0}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
