"""Interactive and batch requests on one engine: what chat loses to batch, and what batch gets of the rest.

Chat (lengths and arrivals fitted to Azure's conversation trace) comes at a share of what the machine serves of it at most;
batch (prompts of 2,000 tokens, outputs of 200, lognormal) at 1.3 times what is left. What is left: with chat at a share u of
its own most, 1 - u of the batch tokens that the same engine makes with nothing else to do. Most: output tokens/s with a queue
that never empties, at the best of ten settings, no SLO. Chat's SLO makes steps small, and small steps are less efficient; so
all that is left by this count cannot be had.

Chat is served alone, then beside batch, the very same chat requests at the same times, by each contender:

- ``default``: ``autotune.control(engine, admission=True)``: late chat is rejected, late batch relegated;
- ``reject``: the same, late batch rejected too;
- ``knobs``: the controller without admission, in the order of arrival;
- ``defaults``: vLLM's defaults, in the order of arrival;
- ``fixed-512`` and the like, if asked for: steps of at most so many tokens, with the same admission as ``default``, and no
  controller.

In virtual time on two GPUs and, with shorter requests, on a CPU by the step times of its profile; ``--live`` on the engine
itself, ``tiny`` in the dtype that is fast there, on one CPU thread (``default`` and ``defaults``, unless ``--contender`` says
otherwise). There,

- lengths follow from a calibration on the spot, as in ``benchmarks.controller_live``. The SLOs are those of virtual time, TTFT
  500 ms, TPOT 50 ms and for batch E2E 60 s, or on a machine too slow for these a multiple, as in ``autotune profile``. The
  clock leaves out how the machine's speed drifts (``--wall-clock``: it does not);
- the most is measured the same way, for 6 s behind 3 s in which the engine fills. Of the ten settings (8 to 128 sequences) all
  are simulated on the calibrated step times, and the best two measured twice. Rates follow from that, once. What is left is
  measured again in each round, at the best of these settings, just before the turns that are compared with it. All such requests
  are there from the start, and have the load's average length;
- rounds have requests of their own. Within a round contenders take turns, as do chat alone and chat beside batch. Every turn
  begins at vLLM's defaults with a controller that knows nothing (``fixed-…``: at that setting), and its first 3 s do not count;
- the difference is over all requests of all rounds, and batch's share the sum of its tokens over the sum of what was left; 95%
  intervals are paired bootstraps over rounds, of the difference also over blocks of some 4 s.

The last line is JSON: of each contender the mean and the least over all seeds, machines and loads, and for each machine and load
whether the aims are ``met``: chat loses at most 1% of its attainment, batch gets at least 85% of what is left.

Run ``python -m benchmarks.classes``: some minutes, ``--quick`` a quarter of that; ``--live`` some 27 minutes, ``--quick`` two.
Ctrl-C ends a live run with the rounds that are complete.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from autotune.cli.output import guarded
from benchmarks.classes import virtual
from benchmarks.classes.contenders import CONTENDERS, DEFAULT, DEFAULTS, known
from benchmarks.classes.summary import HEAD, Row, line, summary
from benchmarks.command import INTERRUPTED, command, count, exit_code, say, seconds
from benchmarks.controller.__main__ import seeds_of


@exit_code()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command("classes", __doc__)
    parser.add_argument("--live", action="store_true", help="on the engine itself, on this machine's CPU")
    parser.add_argument("--quick", action="store_true", help="one seed, no A100; live: two short rounds, one load")
    parser.add_argument(
        "--seeds", help="in virtual time: sets of requests; 3: seeds 1 to 3; 7-10; 4,7 (default: 3, quick 1)"
    )
    parser.add_argument("--rounds", type=count, help="live: turns of each contender and load (default: 8, quick 2)")
    parser.add_argument("--seconds", type=seconds(4), help="live: of a turn that count (default: 9, quick 6)")
    parser.add_argument("--seed", type=int, default=0, help="live: of the first round's requests")
    parser.add_argument("--wall-clock", action="store_true", help="live: leave the machine's drift in")
    parser.add_argument("--undisturbed", action="store_true", help="live: leave out time that other processes took")
    parser.add_argument(
        "--contender",
        action="append",
        type=known,
        metavar="NAME",
        help=f"only this one of {', '.join(CONTENDERS)}, fixed-512, fixed-640 …; repeatable",
    )
    args = parser.parse_args(argv)
    of_live = {"--rounds": args.rounds, "--seconds": args.seconds, "--seed": args.seed}
    of_live |= {"--wall-clock": args.wall_clock, "--undisturbed": args.undisturbed}
    for option, given in {"--seeds": args.seeds}.items() if args.live else of_live.items():
        if given:
            parser.error(f"{option} goes {'without' if args.live else 'with'} --live")
    with guarded():
        return _live(args) if args.live else _virtual(args)


def _virtual(args: argparse.Namespace) -> int:
    seeds = seeds_of(args.seeds or ("1" if args.quick else "3"))
    places = (virtual.H200_PLACE, virtual.CPU_PLACE) if args.quick else virtual.PLACES
    print(HEAD)
    found = []
    for row in virtual.rows(places, dict.fromkeys(args.contender or CONTENDERS), seeds):
        found.append(row)
        print(line(row), flush=True)
    print(json.dumps({"live": False, "seeds": len(seeds), **summary(found)}))
    return 0


def _live(args: argparse.Namespace) -> int:
    from autotune.cli.interrupt import stop_on_interrupt
    from autotune.measure.evaluate import EvaluationError, Interrupted
    from benchmarks.classes.live import FULL, QUICK, STARTED_WITH, Rounds, load_of, rows
    from benchmarks.controller_live.machine import live

    plan = QUICK if args.quick else FULL
    plan = plan._replace(rounds=args.rounds or plan.rounds, window=args.seconds or plan.window)
    names = [*dict.fromkeys(args.contender or (DEFAULT, DEFAULTS))]
    begun = time.monotonic()
    with (
        stop_on_interrupt() as stop,
        live(
            wall_clock=args.wall_clock, undisturbed=args.undisturbed, classes=STARTED_WITH, admission=False
        ) as machine,
    ):
        try:
            load = load_of(machine, plan, args.seed, stop.is_set)
        except Interrupted:
            say("stopped before anything was measured")
            return INTERRUPTED
        except EvaluationError as error:
            say(f"error: {error}")
            return 1
        slos = ", ".join(f"{one.name} {one.slo}" for one in load.classes)
        print(f"tiny on one CPU thread: at most {load.most.chat:.1f} chats/s, or {load.most.batch:.0f} batch tokens/s")
        print(f"{load.said}; {slos}", flush=True)
        served = Rounds(machine, load, names, plan, args.seed, stop.is_set).run()
        stopped = stop.is_set()
    found: list[Row] = rows(served, names, plan)
    if not found:
        say("stopped before a round was complete" if stopped else "error: no round could be measured")
        return INTERRUPTED if stopped else 1
    print(f"\n{HEAD}  95% intervals over rounds: of the difference, of batch/left")
    for row in found:
        print(line(row))
    took = time.monotonic() - begun
    print(f"took {took:.0f} s{', stopped early' if stopped else ''}; {served.failures} turns failed")
    done = max(len(row.runs) for row in found)
    said: dict[str, object] = {"live": True, "rounds": done, "seeds": done, "seconds": plan.window, "stopped": stopped}
    said |= {"failed": served.failures, "slos": {one.name: str(one.slo) for one in load.classes}}
    print(json.dumps({**said, **summary(found)}))
    return INTERRUPTED if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
