"""Our controller on live vLLM, against its defaults and the best fixed settings.

vLLM's CPU build serves a model of random weights (57M parameters). Four loads (:mod:`.cases`): a conversation at 0.8, 1.0 and
1.2 of what vLLM completes when it is kept full, and one in which code completions with their long prompts join in mid-run.

- *ours* starts cold from the defaults in every turn and has all it can do: knobs, budgets of single steps, early rejection,
  deadline order. *knobs only* turns knobs and nothing else.
- *defaults* are those of ``vllm serve`` on a CPU, 128 sequences and 2048 tokens, with our scheduler around vLLM's.
- *stock* is vLLM at the same defaults, scheduled by its own code alone (:mod:`.stock`).
- *the best static*: a grid of 51 fixed settings is simulated on calibrated step times. The best few of a load and of the loads
  beside it are measured there, and so is what was the best of another load in ``--keep``. The best of these by what was measured,
  known only afterwards, is what ours is compared with: of each load its own. Once as it is, and once *with admission*: the same
  early rejection and deadline order as ours. From round to round the weaker ones are left out.

Turns alternate in rounds that share their arrivals. The load at 1.0 is also sent by ``vllm bench serve`` to two servers of ``vllm
serve``, with and without our scheduler (:mod:`.client`).

Before the contest: whether the steered engine's greedy outputs are those of stock vLLM, whatever its knobs, and that it loses
no request (:mod:`.agreement`); and what steering costs the host in a step (:mod:`benchmarks.vllm.overhead`).

The last line is JSON: goodput ratios, geometric means over the loads that do not shift (``vs_defaults``, ``vs_stock``: over
all), with their 95% intervals, and ``host_overhead``: CPU time of adapter and controller ÷ stock's own, at 16 and 64 decodes, the
larger.

A part that fails is named in ``failures``, and costs the others nothing; ``stopped`` is true after Ctrl-C, which ends it with
what there is.

Run it by a Python that has vLLM: ``python -m benchmarks.vllm_live`` (about 90 minutes; ``--quick``: fifteen). ``--keep FILE``
makes it in pieces, of one version of the code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from autotune.bench import Contender
from autotune.cost.model import CostModel
from autotune.writing import write_whole
from benchmarks.command import INTERRUPTED, command, count, exit_code, say, seconds
from benchmarks.kept import Kept
from benchmarks.live.contenders import admitted
from benchmarks.live.learning import calibrate, served
from benchmarks.live.loads import Case
from benchmarks.live.machine import Machine
from benchmarks.live.ratios import interval, number, words
from benchmarks.live.screening import expected, screen
from benchmarks.live.serving import Contest, say_failed, say_turn
from benchmarks.vllm import overhead
from benchmarks.vllm.machine import live, simulated
from benchmarks.vllm.model import model_folder
from benchmarks.vllm.starting import prepared, vllm_options
from benchmarks.vllm_live import agreement, client
from benchmarks.vllm_live.cases import AT_DEFAULTS, GRID, KNOBS_ONLY, NAMES, NEIGHBOURS, OURS, STOCK, cases, rivals
from benchmarks.vllm_live.summary import Figures, compared, report, summary
from runtime.errors import AutotuneError

FAILED = 1
PARTS = ("agreement", "overhead", "contest", "client")


class Plan(NamedTuple):
    """``keep``: fixed settings of either kind that a load is screened for, and then how many are left after each round but the
    last. Seconds of arrivals in a turn, and of calibration."""

    keep: tuple[int, ...]
    duration: float
    calibration: float
    rounds: int


FULL = Plan((4, 3, 2, 2, 1, 1), 15.0, 75.0, 6)
QUICK = Plan((2, 1), 8.0, 30.0, 2)


@exit_code()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command("vllm_live", __doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds, shorter turns, two fixed settings of a kind")
    parser.add_argument("--rounds", type=count, help="rounds of each load (default: 6, quick 2)")
    parser.add_argument("--duration", type=seconds(), help="seconds of arrivals in a turn (default: 15, quick 8)")
    parser.add_argument("--calibrate", type=seconds(), help="seconds of calibration (default: 75, quick 30)")
    parser.add_argument(
        "--case", action="append", choices=NAMES, help="one of the loads alone; may be given several times"
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="one of the parts alone; may be given several times"
    )
    vllm_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the first round's arrivals")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="one load after the other; keep each that is done, and go on from those kept",
    )
    parser.add_argument("--log", type=Path, help="a file for our decisions, one JSON object a line")
    args = parser.parse_args(argv)
    preset = prepared(args)
    given = QUICK if args.quick else FULL
    rounds = args.rounds or given.rounds
    keep = (*given.keep, *[given.keep[-1]] * rounds)[:rounds]
    plan = Plan(keep, args.duration or given.duration, args.calibrate or given.calibration, rounds)
    parts = tuple(args.part or PARTS)

    from autotune.cli.interrupt import stop_on_interrupt

    begun, shape, failures = time.monotonic(), dict[str, Any](), list[str]()
    with tempfile.TemporaryDirectory(prefix="vllm-live-") as scratch, stop_on_interrupt() as stop:
        kept = Kept(args.keep, _requested(args, plan, preset))
        folder = model_folder(Path(scratch) / preset, preset)
        part = partial(_part, shape, failures, stop.is_set)
        if "overhead" in parts:
            part("overhead", lambda: _overhead(folder, args.quick))
        if "agreement" in parts:
            part("agreement", lambda: _agreement(folder, rounds, args.threads, failures))
        lengths = list[client.Lengths]()
        done = {figures.name: figures for figures in map(Figures.of_json, kept.known())}
        wanted = [name for name in NAMES if not args.case or name in args.case]
        left = [name for name in wanted if name not in done] if "contest" in parts else []

        def contest() -> dict[str, Any]:
            with live(folder, preset) as machine:
                return _contest(machine, plan, args, left, kept, done, lengths, stop.is_set)

        if left or "client" in parts:
            part("contest", contest)
        if "contest" in parts:
            shape |= summary([done[name] for name in wanted if name in done])
        if "client" in parts and lengths:
            part("client", lambda: _client(folder, lengths[0], plan, stop.is_set, failures))
        stopped = stop.is_set()
    print(f"took {time.monotonic() - begun:.0f} s{', stopped early' if stopped else ''}")
    for failure in failures:
        print(f"FAILED: {failure}")
    shape |= {"stopped": stopped, "failures": [failure.splitlines()[0] for failure in failures]}
    print(json.dumps(shape))
    return INTERRUPTED if stopped else FAILED if failures else 0


def _part(
    shape: dict[str, Any], failures: list[str], stop: Callable[[], bool], name: str, make: Callable[[], dict[str, Any]]
) -> None:
    """Have ``make`` find its figures, into ``shape``, unless it is to ``stop``. If it fails, that is one of the ``failures``."""
    if stop():
        return
    try:
        shape |= make()
    except (AutotuneError, RuntimeError) as error:
        if stop():  # Ctrl-C ends the processes that it started, too
            say(f"{name}: stopped before it was done")
        else:
            failures.append(f"{name}: {error}")


def _overhead(folder: Path, quick: bool) -> dict[str, Any]:
    say("what steering costs the host in a step")
    found = overhead.measured_apart(folder, rounds=3 if quick else 7, steps=80 if quick else 150)
    for one in found:
        say(f"  {one.said()}")
    return overhead.shape(found)


def _agreement(folder: Path, rounds: int, threads: int, failures: list[str]) -> dict[str, Any]:
    found = agreement.compared_apart(folder, rounds=rounds, threads=threads)
    say(
        f"beside stock vLLM: {found.served} requests, {found.differing} answered otherwise, {found.lost} lost; at the same knobs "
        f"{found.speed:.3f} of its speed; {found.decisions} decisions by the controller at the end"
    )
    if found.differing or found.lost:
        failures.append(
            f"{found.differing} greedy outputs are not those of stock vLLM, {found.lost} requests were lost"
        )
    return {"agreement": found._asdict()}


def _requested(args: argparse.Namespace, plan: Plan, preset: str) -> dict[str, object]:
    """What figures that may stand beside each other have in common, beside the code that made them."""
    from autotune.profile.fingerprint import cpu_model, package_version

    return {
        "cpu": cpu_model(), "vllm": package_version("vllm"), "model": preset, "threads": args.threads, "seed": args.seed,
        **plan._asdict(), "keep": list(plan.keep),
    }  # fmt: skip


def _contest(
    machine: Machine,
    plan: Plan,
    args: argparse.Namespace,
    left: Sequence[str],
    kept: Kept,
    done: dict[str, Figures],
    lengths: list[client.Lengths],
    stop: Callable[[], bool],
) -> dict[str, Any]:
    """The loads that are ``left``, into ``done``: their rounds in turn, or one load after the other if they are kept. The mean
    lengths of the conversation, into ``lengths``."""
    say(f"calibration, {plan.calibration:g} s")
    cost = calibrate(machine, plan.calibration, args.seed, stop)
    cost = served(
        machine, cost, [c for c in cases(machine, cost, plan.duration) if not c.shifts][:1], plan.duration, stop
    )
    every = cases(machine, cost, plan.duration)
    drawn = list(every[0].workload.arrivals(1, limit=2000))
    means = (statistics.fmean(a.prompt_tokens for a in drawn), statistics.fmean(a.output_tokens for a in drawn))
    lengths.append(client.Lengths(*map(round, means)))
    chosen = [case for case in every if case.name in left]
    if not chosen:
        return {}
    decisions, failed, screened = list[str](), 0, dict[str, _Best]()
    for together in [chosen] if args.keep is None else [[case] for case in chosen]:
        if stop():
            break
        counting = {name for case in together for name in (case.name, *NEIGHBOURS[case.name])} - screened.keys()
        screened |= {case.name: _screened(machine, cost, case, plan) for case in every if case.name in counting}
        winners = [name for figures in done.values() for name in figures.winners]
        statics = {case.name: _statics(screened, case.name, winners) for case in together}
        first = max(sum(c.control is kind for c in found) for found in statics.values() for kind in (False, True))
        contest = Contest(
            machine, together, [AT_DEFAULTS, STOCK, OURS, KNOBS_ONLY], statics, (first, *plan.keep[:-1]), seed=args.seed,
            duration=plan.duration, stop=stop, tell=say_turn, fail=say_failed,
        )  # fmt: skip
        contest.run()
        failed += contest.failures
        found = compared(contest, together, plan.duration)
        report(found, print)
        for figures in map(Figures.of, found):
            done[figures.name] = figures
            if not stop():  # else it lacks rounds
                kept.add(figures.as_json())
        mine = [r for case in together for r in contest.results(case) if r.turn.contender == OURS]
        decisions += [d.as_json() + "\n" for r in mine for d in r.decisions]
    if args.log is not None:
        write_whole(args.log, "".join(decisions))
    return {"failed_turns": failed, "threads": args.threads}


class _Best(NamedTuple):
    """The best fixed settings of a load in simulation, best first: as they are, and with admission."""

    plain: list[Contender]
    admitted: list[Contender]


def _screened(machine: Machine, cost: CostModel, case: Case, plan: Plan) -> _Best:
    say(f"{case.name}: {case.said}; SLO {case.slo}")
    simulation = partial(simulated, cost, machine)
    plain = screen(simulation, case, plan.duration, GRID)[: max(plan.keep)]
    late = screen(simulation, case, plan.duration, GRID, admitted)[: max(plan.keep)]
    predicted = [(c.name, expected(simulation, case, c, plan.duration)) for c in (AT_DEFAULTS, OURS, KNOBS_ONLY)]
    predicted += [(s.contender.name, s.share) for s in (*plain, *late)]
    say("  in simulation: " + ", ".join(f"{name} {share:.1%}" for name, share in predicted))
    return _Best([s.contender for s in plain], [s.contender for s in late])


def _statics(screened: Mapping[str, _Best], name: str, winners: Sequence[str]) -> list[Contender]:
    """The fixed settings that take part at the load ``name``. ``winners``: names of those that were the best at loads done."""
    plain = rivals(name, {one: best.plain for one, best in screened.items()}, winners)
    late = rivals(name, {one: best.admitted for one, best in screened.items()}, winners)
    say(f"{name} is served at {', '.join(c.name for c in (*plain, *late))}")
    return [*plain, *late]


def _client(
    folder: Path, lengths: client.Lengths, plan: Plan, stop: Callable[[], bool], failures: list[str]
) -> dict[str, Any]:
    say(f"vllm bench serve, prompts of about {lengths.prompt} tokens and outputs of about {lengths.output}")
    found = client.contest(
        folder, lengths, share=1.0, rounds=plan.rounds, seconds=2 * plan.duration, say=say, stop=stop
    )
    stock, ours = (sum(run.lost for run in runs) for runs in (found.stock, found.ours))
    if stock or ours:
        failures.append(
            f"client: neither completed nor refused were {ours} requests to the self-tuning server, {stock} to stock"
        )
    if not found.attached:
        print(
            "vllm bench serve: NO CONTROLLER was attached to the server with our scheduler (it wrote no decision): its "
            "figures are those of the steered scheduler alone"
        )
    print(f"vllm bench serve: requests within {found.slo}, self-tuning ÷ stock: {words(found.ratio)}")
    return {
        "client": {
            "vs_defaults": number(found.ratio.value),
            "interval": interval(found.ratio),
            "controller_attached": found.attached,
            "rate": round(found.rate, 2),
            "slo": str(found.slo),
            "sent": [r.sent for r in found.stock],
            **{
                name: {"stock": [getattr(r, name) for r in found.stock], "ours": [getattr(r, name) for r in found.ours]}
                for name in ("good", "completed", "refused", "lost")
            },
        }
    }


if __name__ == "__main__":
    sys.exit(main())
