"""Our controller on the live CPU engine, against vLLM's defaults and the best fixed setting.

Five loads (:mod:`.cases`): three steady ones, one in which long prompts arrive in mid-run, and one in which a second process
wants the core that the engine computes on. Rate and SLO of each follow from a calibration on the spot, by one rule for all.

- *ours* starts cold from vLLM's defaults in every turn, knows neither machine nor traffic, and has all it can do: knobs,
  budgets of single steps, early rejection, deadline order. All its requests count, those it learns from too. ``--knobs-only``
  adds the same turning knobs and nothing else; ``--admission`` the best fixed settings with the same order and rejection;
  ``--layers`` ours with one layer more at a time, the defaults and the rivals with all, AIMD and bisection with knobs alone, too
  (their constants are those of the simulated benchmark, those that are tokens made smaller as lengths are), and the best fixed
  settings with the same order and rejection.
- *defaults* are vLLM's, 1024 sequences and 8192 tokens, on our engine.
- *the best fixed setting*: a grid of 42 is simulated on the step times of this very machine; the best eight are measured, and
  the best of these by what was measured, known only afterwards, is what ours is compared with: of each load its own, for a
  shift one for the whole run. From round to round the weaker half of them is left out.

Turns alternate in rounds that share their arrivals. Whoever serves, a request that has not been begun when its TTFT target has
passed leaves the queue and is a miss. The engine is on a clock that leaves out how the machine's speed drifts (:mod:`.machine`);
``--wall-clock`` leaves it in.

The last line is JSON: geometric means of goodput ratios, each with its 95% interval (see :func:`.summary.summary`).
``steady_vs_best_static`` is over the three steady loads, ``shift_vs_best_static`` over the two that shift, ``vs_defaults``
over all five.

Run ``python -m benchmarks.controller_live`` (70 minutes; ``--quick``: ten). Ctrl-C ends it with what there is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from autotune.bench import Contender, Result, defaults, fixed
from autotune.bench.plotting import check
from autotune.cost.model import CostModel
from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profiling.setup import LOAD, typical_step
from autotune.writing import write_whole
from benchmarks.command import INTERRUPTED, command, exit_code, say, seconds, share
from benchmarks.controller_live import figures
from benchmarks.controller_live.cases import SHIFTS, STEADY, cases, steady_cases
from benchmarks.controller_live.machine import live, simulated, slowdown
from benchmarks.controller_live.summary import Compared, compared, layer_ratios, panels, report, summary
from benchmarks.live.contenders import admitted, layers, ours, ours_knobs_only
from benchmarks.live.learning import calibrate, served
from benchmarks.live.loads import Case
from benchmarks.live.machine import Machine
from benchmarks.live.ratios import geometric_mean, ratio, words
from benchmarks.live.screening import GRID, Screened, Simulation, expected, screen
from benchmarks.live.serving import Contest, say_failed, say_turn
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs


class Plan(NamedTuple):
    """``keep``: how many fixed settings take part in each round. Seconds of arrivals in a turn, and of calibration."""

    keep: tuple[int, ...]
    duration: float
    calibration: float


FULL = Plan((8, 4, 4, 2, 2, 2, 2, 2), 13.0, 40.0)
QUICK = Plan((2, 2), 8.0, 15.0)


class Loads(NamedTuple):
    """What is served, and the fixed settings of each that are worth it, best first."""

    cases: list[Case]
    screened: dict[str, list[Screened]]


@exit_code()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command("controller_live", __doc__)
    parser.add_argument("--quick", action="store_true", help="two fixed settings, shorter turns: within ten minutes")
    parser.add_argument("--duration", type=seconds(), help="seconds of arrivals in a turn (default: 13, quick 8)")
    parser.add_argument("--calibrate", type=seconds(), help="seconds of calibration (default: 40, quick 15)")
    parser.add_argument(
        "--load", type=share, default=LOAD, help=f"of what the engine completes when kept full ({LOAD})"
    )
    parser.add_argument(
        "--keep", type=_counts, help="fixed settings in each round (default: 8,4,4,2,2,2,2,2, quick 2,2)"
    )
    parser.add_argument(
        "--case", action="append", choices=[*STEADY, *SHIFTS], help="one of the loads alone; may be given several times"
    )
    parser.add_argument("--knobs-only", action="store_true", help="also ours without step budgets and early rejection")
    parser.add_argument(
        "--layers",
        action="store_true",
        help="also ours with one layer more at a time, the rivals with all (some with knobs alone, too), and fixed settings with "
        "admission",
    )
    parser.add_argument(
        "--contender",
        action="append",
        metavar="NAME",
        help='of those that --layers adds only this one, such as "bisection knobs"; may be given several times',
    )
    parser.add_argument(
        "--simulated", action="store_true", help="after calibration, serve all of it in simulation instead"
    )
    parser.add_argument(
        "--admission", action="store_true", help="also fixed settings with the same order and rejection"
    )
    parser.add_argument("--wall-clock", action="store_true", help="leave the machine's drift in")
    parser.add_argument("--undisturbed", action="store_true", help="leave out time that other processes took")
    parser.add_argument("--seed", type=int, default=0, help="of the first round's arrivals")
    parser.add_argument("--plot", type=Path, help="a page to write, .html; with --layers also a picture of them, .svg")
    parser.add_argument("--log", type=Path, help="a file for our decisions, one JSON object a line")
    parser.add_argument("--save", type=Path, help="a file for every request of every turn, JSON")
    args = parser.parse_args(argv)
    given = QUICK if args.quick else FULL
    plan = Plan(args.keep or given.keep, args.duration or given.duration, args.calibrate or given.calibration)
    if args.plot is not None:
        check(args.plot, "--plot", (".html", ".svg") if args.layers else (".html",))
    if args.contender and not args.layers:
        raise InputError("--contender is given without --layers; it chooses among those that --layers adds")
    _chosen(layers(KnobLimits()), args.contender)

    from autotune.cli.interrupt import stop_on_interrupt

    begun = time.monotonic()
    with stop_on_interrupt() as stop, live(wall_clock=args.wall_clock, undisturbed=args.undisturbed) as machine:
        vllm, control = defaults(machine.engine.limits), ours(machine.engine.limits)
        everywhere = [vllm, control]
        if args.layers:
            everywhere += _chosen(layers(machine.engine.limits), args.contender)
        elif args.knobs_only:
            everywhere.append(ours_knobs_only(machine.engine.limits))
        try:
            cost, slower = _learn(machine, plan, args.seed, stop.is_set)
            simulation = partial(simulated, cost, machine.facts, slower)
            held = (fixed, admitted) if args.layers or args.admission else (fixed,)
            loads = prepare(machine, simulation, cost, slower, plan, everywhere, args.case, args.load, held=held)
        except Interrupted:
            say("stopped before anything was measured")
            return INTERRUPTED
        except EvaluationError as error:
            say(f"error: nothing could be measured: {error}")
            return 1
        statics = {name: [s.contender for s in found] for name, found in loads.screened.items()}
        contest = Contest(
            simulation(args.seed) if args.simulated else machine, loads.cases, everywhere, statics, plan.keep, seed=args.seed,
            duration=plan.duration, stop=stop.is_set, tell=_teller(machine), fail=say_failed,
        )  # fmt: skip
        contest.run()
        stopped = stop.is_set()
    found = compared(contest, loads.cases, control, vllm, plan.duration, everywhere[2:])
    report(found, vllm, print)
    for other in everywhere[2:]:
        _others(found, other, plan.duration)
    if args.log is not None:
        lines = [
            d.as_json()
            for c in loads.cases
            for r in contest.results(c)
            if r.turn.contender == control
            for d in r.decisions
        ]
        write_whole(args.log, "".join(line + "\n" for line in lines))
    if args.save is not None:
        write_whole(args.save, json.dumps([_saved(c, r) for c in loads.cases for r in contest.results(c)]) + "\n")
    if args.plot is not None and found:
        if args.plot.suffix == ".svg":
            write_whole(
                args.plot, figures.layers_picture(layer_ratios(found), "Goodput ÷ the best fixed setting's with all")
            )
        else:
            title = "tiny on one CPU thread: control from a cold start, vLLM's defaults, the best fixed setting"
            write_whole(args.plot, figures.render(panels(found, control, vllm), plan.duration, title))
    print(
        f"took {time.monotonic() - begun:.0f} s{', stopped early' if stopped else ''}; {contest.failures} turns failed"
    )
    print(json.dumps(summary(found, control, vllm)))
    return INTERRUPTED if stopped else 0


def _chosen(contenders: Sequence[Contender], names: Sequence[str] | None) -> list[Contender]:
    """Those of ``names``, or all. Raises InputError for a name that none of them has."""
    known = [c.name for c in contenders]
    if unknown := [name for name in names or () if name not in known]:
        raise InputError(f"--contender is {unknown[0]!r}; it must be one of {', '.join(known)}")
    return [c for c in contenders if names is None or c.name in names]


def _learn(machine: Machine, plan: Plan, seed: int, stop: Callable[[], bool]) -> tuple[CostModel, float]:
    say(f"calibration, {plan.calibration:g} s")
    cost = calibrate(machine, plan.calibration, seed, stop)
    found = served(machine, cost, steady_cases(machine, cost), plan.duration / 2, stop)
    step = typical_step(8, 64, 128)
    say(f"served at {cost.predict(step) / found.predict(step):.2f} × the speed of the calibration")
    slower = slowdown(machine)
    say(f"beside a process that wants the core, steps take {slower:.2f} times as long")
    return found, slower


def prepare(
    machine: Machine,
    simulation: Simulation,
    cost: CostModel,
    slower: float,
    plan: Plan,
    everywhere: Sequence[Contender],
    only: Sequence[str] | None,
    load: float = LOAD,
    grid: Sequence[Knobs] = GRID,
    held: Sequence[Callable[[Knobs], Contender]] = (fixed,),
) -> Loads:
    """The loads for this machine, and which fixed settings will take part, of each way to hold one."""
    chosen = [case for case in cases(machine, cost, slower, plan.duration, load) if not only or case.name in only]
    screened = {}
    for case in chosen:
        say(f"{case.name}: {case.said}; SLO {case.slo}")
        screened[case.name] = [
            found for how in held for found in screen(simulation, case, plan.duration, grid, how)[: max(plan.keep)]
        ]
        predicted = [(c.name, expected(simulation, case, c, plan.duration)) for c in everywhere]
        predicted += [(s.contender.name, s.share) for s in screened[case.name]]
        say("  in simulation: " + ", ".join(f"{name} {share:.1%}" for name, share in predicted))
    return Loads(chosen, screened)


def _teller(machine: Machine) -> Callable[[Case, Result], None]:
    def tell(case: Case, result: Result) -> None:
        say_turn(case, result, f", {machine.drift():.2f} times its fastest step")

    return tell


def _others(found: Sequence[Compared], other: Contender, duration: float) -> None:
    ratios = [ratio(c.comparison.results, other, c.best, duration, seed=91) for c in found]
    each = ", ".join(f"{c.case.name} {words(r.estimate())}" for c, r in zip(found, ratios, strict=True))
    print(f"\n{other.name}, goodput ÷ that of the best fixed setting: {words(geometric_mean(ratios))} ({each})")


def _saved(case: Case, result: Result) -> dict[str, object]:
    return {
        "case": case.name,
        "contender": result.turn.contender.name,
        "round": result.turn.round,
        "score": result.score.model_dump(mode="json"),
        "outcomes": [list(outcome) for outcome in result.outcomes],
    }


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (0,)
    if not all(1 <= count <= len(GRID) for count in counts):
        raise argparse.ArgumentTypeError(f"{text}; each round must have 1 to {len(GRID)} fixed settings, as in 8,4,4,2")
    return counts


if __name__ == "__main__":
    sys.exit(main())
