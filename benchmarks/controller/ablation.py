"""What each part of the predictive controller is worth: the same scenarios without it.

Run ``python -m benchmarks.controller.ablation --traces FOLDER`` (``--scenario U1 --seeds 2 --part gain`` is a question of
a minute). Every part is taken out alone, once with all layers and once with knobs alone; what is printed is goodput without it
over goodput with it: mean, and the scenarios that lose and gain most. Below 1 the part earns its place. The last line is JSON.

Peaks and traces are those of :mod:`benchmarks.controller`; nothing is searched for here.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from autotune.control.controllers.predictive import PredictiveController, constants
from autotune.control.controllers.predictive.step_size import Chunks
from autotune.control.controllers.predictive.trusted_model import SlowRegion
from benchmarks.command import command, exit_code
from benchmarks.controller.__main__ import say, seeds_of
from benchmarks.controller.cache import FOLDER, Cache
from benchmarks.controller.contenders import Algorithm, Layer, driver_of
from benchmarks.controller.known import peaks
from benchmarks.controller.run import Bench, run
from benchmarks.controller.scenarios import SCENARIOS
from runtime.errors import InputError
from runtime.tunable import TILE

LAYERS: tuple[Layer, ...] = ("full", "knobs")


class NoDemand:
    """In the place of :class:`~autotune.control.controllers.predictive.traffic.Demand`."""

    per_second = 0.0

    def step(self, record: Any) -> None:
        pass

    def lost(self, record: Any) -> None:
        pass


class NoGain:
    """In the place of :class:`~autotune.control.controllers.predictive.feedback.FeedbackGain`."""

    value, sheds, keeps = 1.0, False, False

    def clear(self) -> None:
        pass

    def shed(self) -> None:
        pass

    def served_late(self) -> None:
        pass

    def rest(self, seconds: float) -> None:
        pass

    def budgeted(self, **_: Any) -> None:
        pass

    def unbudgeted(self, **_: Any) -> None:
        pass


class NoComparison:
    """In the place of :class:`~autotune.control.controllers.predictive.start_comparison.StartComparison`."""

    said, at_start, attained, lately = "", False, 0.0, 0.0

    def saw(self, *_: Any) -> None:
        pass

    def holds(self, *_: Any) -> bool:
        return False

    def decided(self, *_: Any) -> None:
        pass

    def forget(self) -> None:
        pass


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _no_region(it: Any) -> None:
    class NoRegion(SlowRegion):
        def saw(self, decodes: int, off: float, noise: float) -> bool:
            return False

    it._learned.slow = NoRegion()


def _all_feasible(it: Any) -> None:
    it._targets.no_step_below = _always(False)


def _no_demand(it: Any) -> None:
    it._demand = NoDemand()


def _whole_prompts(it: Any) -> None:
    class Whole(Chunks):
        def size(self, *args: Any) -> int:
            return int(args[-1])

    it._chunks = Whole()


def _no_gain(it: Any) -> None:
    it._gain = it._steps._gain = NoGain()


def _no_watch(it: Any) -> None:
    it._learned._watch = _always(None)


def _always_trusted(it: Any) -> None:
    class Trusting(type(it._learned)):  # type: ignore[misc]  # whose class only the run knows
        trusted = property(lambda self: True, lambda self, value: None)

    it._learned.__class__ = Trusting


def _no_queue(it: Any) -> None:
    it._steps._queue_suffers = _always(False)


def _no_comparison(it: Any) -> None:
    it._comparison = NoComparison()


def _no_start(it: Any) -> None:
    it.__class__ = type(it.__class__.__name__, (it.__class__,), {"_unsteady": property(lambda self: False)})
    it._least = _always(1)


def _no_tiles(it: Any) -> None:
    it._steps.tile = 1


def _no_first_steps(it: Any) -> None:
    it._steps._first._said = deque([1 << 30])  # whatever is seen, until prompts are known
    it._steps._first.saw = _always(None)


def _no_trial(it: Any) -> None:
    it._tried_below = _always(constants.HOPELESS)


def _no_attainment_model(it: Any) -> None:
    it._attains = _always(_always(math.nan))  # which is neither more nor less than anything


def _no_short_steps(it: Any) -> None:
    it._steps._short = lambda view, target, allowed: allowed


@contextmanager
def _changed(name: str, value: float) -> Iterator[None]:
    """A constant of the controller at ``value``."""
    before = getattr(constants, name)
    setattr(constants, name, value)
    try:
        yield
    finally:
        setattr(constants, name, before)


def _with_constant(name: str, value: float) -> Callable[[Any], None]:
    """Decisions with a constant at ``value``. It must be one that is looked up in them."""

    def take_out(it: Any) -> None:
        decide = it.decide

        def decided(*args: Any, **options: Any) -> Any:
            with _changed(name, value):
                return decide(*args, **options)

        it.decide = decided

    return take_out


PARTS: Mapping[str, Callable[[Any], None]] = {
    "slow region": _no_region,
    "targets that no step meets": _all_feasible,
    "demand and prefill quantum": _no_demand,
    "cuts of long prompts": _whole_prompts,
    "gain": _no_gain,
    "changes of speed": _no_watch,
    "distrust and fallback": _always_trusted,
    "the queue's say against slack": _no_queue,
    "comparison with the start": _no_comparison,
    "trials of the start": _no_trial,
    "whole tiles": _no_tiles,
    "first steps": _no_first_steps,
    "no cut while the speed changes": _no_start,
    "attainment model": _no_attainment_model,
    "ceiling above step budgets": _with_constant("CEILING", math.inf),
    "room below that ceiling": _with_constant("CEILING", 1.0),
    "discount on long steps": _with_constant("LONG_BUDGETED", constants.LONG),
    "good starts are kept": _with_constant("KEPT", math.inf),
    "short steps of prompts that have long": _no_short_steps,
    "no larger steps than compute as fast": _with_constant("WORTHWHILE", 1 << 30),
}
"""By name, what takes each out of a controller that has just been made."""


def _without(take_out: Callable[[Any], None] | None, *args: Any, **options: Any) -> PredictiveController:
    made = PredictiveController(*args, **options)
    if take_out is not None:
        take_out(made)
    return made


def algorithm(part: str | None) -> Algorithm:
    """The predictive controller without ``part``; None: all of it."""

    def made(slo: Any, start: Any, *, model: Any = None, tile: int = TILE) -> PredictiveController:
        take_out = None if part is None else PARTS[part]
        return _without(take_out, slo, start, model=model, tile=tile)

    return Algorithm(made, f"without {part}" if part else "all of it", LAYERS, "full")


def attained(scenario: str, layer: Layer, part: str | None, seeds: Sequence[int], bench: Bench) -> float:
    """Requests within the SLO, over all seeds."""
    driver = driver_of(algorithm(part), layer, {})
    return float(sum(run(SCENARIOS[scenario], driver, seed, bench).met for seed in seeds))


def compare(args: argparse.Namespace, seeds: Sequence[int]) -> dict[str, float]:
    """Print a line for each part; goodput without it over goodput with it, by layer and part."""
    names = args.scenario or list(SCENARIOS)
    loads = list(dict.fromkeys(s.load(phase) for s in map(SCENARIOS.__getitem__, names) for phase in s.phases))
    cache = Cache(FOLDER / f"controller_{'traces' if args.traces else 'presets'}.json")
    bench = Bench(peaks(loads, cache, args.traces, 1, say), args.traces)
    found: dict[str, float] = {}
    for layer in args.layer or LAYERS:
        met = partial(attained, layer=layer, seeds=seeds, bench=bench)
        whole = {name: met(name, part=None) for name in names}
        for part in args.part or PARTS:
            ratio = {name: met(name, part=part) / max(1.0, whole[name]) for name in names}
            order = sorted(names, key=ratio.__getitem__)
            found[f"{layer}: {part}"] = mean = round(statistics.fmean(ratio.values()), 4)
            least, most = ([f"{name} {ratio[name]:.3f}" for name in part] for part in (order[:3], order[-2:]))
            say(f"{layer:<6}without {part:<32}{mean:.4f}   least {', '.join(least)}; most {', '.join(most)}")
    return found


@exit_code()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command("controller.ablation", __doc__)
    parser.add_argument("--traces", metavar="FOLDER", help="where the CSV files of the Azure 2023 traces are")
    parser.add_argument("--scenario", action="append", metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this one; repeatable")
    parser.add_argument("--layer", action="append", choices=LAYERS, help="only this one; repeatable")
    parser.add_argument("--seeds", default="2", help="3: seeds 1 to 3; 201-210; 201-201; 4,7 (default: 2)")
    args = parser.parse_args(arguments)
    if wrong := [name for name in args.scenario or () if name not in SCENARIOS]:
        raise InputError(f"--scenario is {wrong[0]}; it must be one of {', '.join(SCENARIOS)}")
    say(json.dumps(compare(args, seeds_of(args.seeds))))


if __name__ == "__main__":
    sys.exit(main())
