"""Every ordering under the same two classes of requests, at loads below, at and past capacity, without and with early rejection.

In virtual time (8B on an H200); --live: on the engine itself, a small model on one CPU thread, some ten minutes on a quiet
machine. Loads are shares of what the engine completes at most; how that and the SLOs follow from the machine is said in
worlds.py. Orderings see a max_tokens of 1,024 for all; "shortest, known" alone sees how long each answer will be, and
stands for what learning could get at most.

Printed for each load: goodput (requests/s that met their SLO), the share that met it, percentiles and means of TTFT and E2E
of those not rejected, and the longest wait for a first step, averaged over seeds (waits: the longest). The last line is
JSON. Ctrl-C ends it with what there is.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from autotune.measure.evaluate import EvaluationError, Interrupted, evaluate
from benchmarks.command import INTERRUPTED, command, count, exit_code, say, seconds
from benchmarks.orderings.contenders import CONTENDERS
from benchmarks.orderings.figures import Figures, by_class, merged, numbers, row, table
from benchmarks.orderings.worlds import Load, World, live, load_of, simulated
from runtime.records import RequestRecord

LOADS = (0.7, 1.0, 1.3)
_WARM_UP = 0.2  # of a window, before it


@exit_code()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command("orderings", __doc__)
    parser.add_argument("--live", action="store_true", help="on the engine itself, on this machine's CPU")
    parser.add_argument("--quick", action="store_true", help="one seed and short windows")
    parser.add_argument("--model", default="nano", help="of --live: a preset (default: nano)")
    parser.add_argument("--seeds", type=count, help="sets of requests, from 1 on (default: 5, live 1, quick 1)")
    parser.add_argument(
        "--seconds", type=seconds(), help="of arrivals in a run (default: 240, quick 60, live 6, both 3)"
    )
    parser.add_argument("--load", type=_load, action="append", help="of capacity; repeatable (default: 0.7, 1.0, 1.3)")
    parser.add_argument("--ordering", action="append", choices=[*CONTENDERS], help="only this; repeatable")
    args = parser.parse_args(argv)
    window = args.seconds or {(0, 0): 240.0, (0, 1): 60.0, (1, 0): 6.0, (1, 1): 3.0}[args.live, args.quick]
    seeds = range(1, 1 + (args.seeds or (1 if args.live or args.quick else 5)))
    if args.live:
        from runtime.torch_backend.presets import PRESETS

        if args.model not in PRESETS:
            parser.error(f"--model is {args.model!r}; it must be one of {', '.join(PRESETS)}")

    from autotune.cli.interrupt import stop_on_interrupt

    with stop_on_interrupt() as stop, live(args.model) if args.live else nullcontext(simulated()) as world:
        try:
            load = load_of(world, stop.is_set)
        except Interrupted:
            say("stopped before anything was measured")
            return INTERRUPTED
        except EvaluationError as error:
            say(f"error: {error}")
            return 1
        slos = ", ".join(f"{name} {load.slos[name]}" for name in ("chat", "batch"))
        print(f"{world.name}\ncapacity {load.capacity:.2f} requests/s; {slos}")
        print(f"seeds {seeds[0]} to {seeds[-1]}, {window:g} s of arrivals behind {_WARM_UP * window:g} s", flush=True)
        rows = []
        for share in args.load or LOADS:
            for reject in (False, True):
                found = measure(world, load, share, reject, args.ordering or [*CONTENDERS], seeds, window, stop.is_set)
                if found:
                    print(f"\nload {share:g}, {'with' if reject else 'without'} early rejection\n")
                    print(table([row(name, one) for name, one in found.items()]), flush=True)
                rows += [
                    {"load": share, "rejection": reject, "ordering": name, **numbers(one)}
                    for name, one in found.items()
                ]
        stopped = stop.is_set()
    said = {"live": args.live, "seeds": [*seeds], "seconds": window, "capacity": round(load.capacity, 3)}
    print(
        json.dumps(
            {**said, "slos": {name: str(slo) for name, slo in load.slos.items()}, "stopped": stopped, "runs": rows}
        )
    )
    return INTERRUPTED if stopped else 0


def measure(
    world: World,
    load: Load,
    share: float,
    reject: bool,
    names: Sequence[str],
    seeds: Sequence[int],
    window: float,
    stop: Callable[[], bool],
) -> dict[str, dict[str, Figures]]:
    """The figures of each of ``names`` at ``share`` of capacity, over ``seeds``; those that were measured with all before
    ``stop``."""
    runs: dict[str, list[dict[str, Figures]]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            try:
                runs[name].append(_run(world, load, share, reject, name, seed, window, stop))
            except Interrupted:
                return {name: merged(found) for name, found in runs.items() if len(found) == len(seeds)}
            except EvaluationError as error:  # left out, and named; it never becomes a bad score
                say(f"  load {share:g} seed {seed} {name}: left out: {error}")
                continue
            every = runs[name][-1]["all"]
            say(
                f"  load {share:g} {'rejecting ' if reject else ''}seed {seed} {name:<18} {every.attainment:6.1%} met, "
                f"E2E {every.e2e_mean:.2f} s on average, longest wait {every.wait:.1f} s"
            )
    return {name: merged(found) for name, found in runs.items() if found}


def _run(
    world: World, load: Load, share: float, reject: bool, name: str, seed: int, window: float, stop: Callable[[], bool]
) -> dict[str, Figures]:
    kept: list[RequestRecord] = []
    with world.start(CONTENDERS[name](load.slos), reject, load.slos, seed) as engine:
        evaluate(
            engine, None, world.workload.at_rate(share * load.capacity), load.slos, vocab_size=world.vocab_size, seed=seed,
            duration=window, warmup=_WARM_UP * window, stop=stop, keep=kept.extend,
        )  # fmt: skip
    return by_class(kept, load.slos, window)


def _load(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 3:
        raise argparse.ArgumentTypeError(f"{text}; it must be 0.1 to 3, such as 1.3")
    return value


if __name__ == "__main__":
    sys.exit(main())
