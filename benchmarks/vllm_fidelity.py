"""A profile of vLLM, made by the command, and what is simulated from it, against what vLLM then does.

vLLM's CPU build serves a model of random weights (57M parameters). What a user would type, in processes of their own:

1. ``autotune profile --engine vllm --model DIR --budget 5m``;
2. ``autotune check`` of what that wrote, right after;
3. vLLM is started as the profile says, under the setting it recommends, and serves the profile's workload at shares of capacity:
   what it completes of that workload, simulated, when it is flooded. Each round is compared with the mean of eight simulations of
   the very same requests by the profile, each under another draw of the step-time noise.

Nothing that was measured after the profile was made is used to predict. An error of a load is the median over its rounds of
simulated ÷ real − 1; JSON has the largest, by size, over the loads: ``tpot_p50``, ``throughput``, ``ttft_p50``, null where no
round counted or an error is infinite; ``shares``: of each share the median, the least and the greatest of its rounds;
``rounds``: how many of these counted; ``stopped``: whether Ctrl-C ended it
early, with exit code 130; and ``check``: what its exit code says of the profile.

Two more figures tell where an error comes from, and are not held to anything. ``steps``: the seconds that the profile says for
the very steps that vLLM made, all together, over what they took. ``tpot_p50_as_fast``: the error of TPOT where the simulated
machine is as much faster as that says. If this is near 0, the profile's step times are off, or the machine's speed has changed
since; if not, the simulator is.

Run it by a Python that has vLLM: ``python -m benchmarks.vllm_fidelity`` (a quarter of an hour; ``--quick``: four minutes).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from autotune.engines import Engine
from autotune.measure.evaluate import Interrupted, Recorder, evaluate
from autotune.profile import RECOMMENDED, Profile, load_profile
from autotune.profile.serving import serving_speed
from autotune.simulate.scenario import Scenario
from benchmarks.command import INTERRUPTED, command, count, exit_code, say, seconds, share
from benchmarks.fidelity.table import Costs, bias, mean_metrics, metrics, relative_error, step_pairs
from benchmarks.live.ratios import number
from benchmarks.vllm.model import model_folder
from benchmarks.vllm.starting import OPTIONS, prepared, vllm_options
from runtime.errors import InputError
from runtime.knobs import Knobs

SHARES: Final = (0.5, 0.7, 0.9)
"""Of capacity."""
DRAWS: Final = 8
"""Of the step-time noise, as many as ``autotune simulate`` holds against a measurement."""
METRICS: Final = ("TPOT p50", "throughput", "TTFT p50")
STEPS, AS_FAST = "steps", "TPOT p50 as fast"
"""They tell where an error comes from."""
FITS, CANNOT_MEET_SLO = 0, 1
_APART = 1_000_003  # seeds of two draws; of prompts and arrivals
_FLOOD = 600  # requests at once


@exit_code()
def main(argv: Sequence[str] | None = None) -> int:
    parser = command("vllm_fidelity", __doc__)
    parser.add_argument("--quick", action="store_true", help="a budget of a minute, two rounds of ten seconds")
    parser.add_argument("--budget", type=seconds(30), help="of the profile, s (default: 300, quick 60)")
    parser.add_argument("--rounds", type=count, help="of each load (default: 6, quick 2)")
    parser.add_argument("--duration", type=seconds(), help="seconds of arrivals in a round (default: 20, quick 10)")
    parser.add_argument("--share", type=share, action="append", help="of capacity; may be given several times")
    parser.add_argument("--profile", type=Path, help="one that was made before, of the same model: leave out 1 and 2")
    vllm_options(parser)
    args = parser.parse_args(argv)
    preset = prepared(args)
    budget = args.budget or (60.0 if args.quick else 300.0)
    rounds = args.rounds or (2 if args.quick else 6)
    duration = args.duration or (10.0 if args.quick else 20.0)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vllm-fidelity-") as kept:
        folder = model_folder(Path(kept) / preset, preset)
        shape: dict[str, Any] = {}
        path = args.profile
        if path is None:
            path = Path(kept) / "vllm.yaml"
            shape["check"] = _profiled(folder, path, budget, args.threads)
        profile = load_profile(path)
        shape |= _compared(folder, profile, args.share or SHARES, rounds, duration)
    print(f"took {time.monotonic() - begun:.0f} s")
    print(json.dumps(shape))
    return INTERRUPTED if shape["stopped"] else 0


def _profiled(folder: Path, path: Path, budget: float, threads: int) -> str:
    """Make the profile and check it; what the check says."""
    options = [word for name, value in _arguments().items() for word in ("--engine-arg", f"{name}={value}")]
    code = _autotune(
        threads, "profile", "--engine", "vllm", "--model", str(folder), *options,
        "--dtype", "float32", "--budget", f"{budget:g}s", "--out", str(path),
    )  # fmt: skip
    if code not in (FITS, CANNOT_MEET_SLO):
        raise InputError(f"autotune profile ended with exit code {code}")
    return "fits" if _autotune(threads, "check", str(path), "--model", str(folder)) == FITS else "does not fit"


def _arguments() -> dict[str, str]:
    """What vLLM is started with, as ``--engine-arg`` has it. The prefix cache is left as it is: a user would."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in OPTIONS.items()
        if name not in ("dtype", "enable_prefix_caching")
    }


def _autotune(threads: int, *words: str) -> int:
    say("autotune " + " ".join(words))
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    return subprocess.run([sys.executable, "-m", "autotune.cli.main", *words], env=environment).returncode


def _compared(folder: Path, profile: Profile, shares: Sequence[float], rounds: int, duration: float) -> dict[str, Any]:
    from autotune.cli.interrupt import stop_on_interrupt
    from autotune.cli.target import running
    from autotune.engines import named

    facts, pool = profile.engine, profile.engine.kv_pool
    setting = profile.settings[RECOMMENDED].knobs
    scenario = Scenario.of(profile)
    capacity = _flooded(scenario, profile)
    load = scenario.workload
    print(
        f"{setting}: {capacity:.3g} requests/s when flooded, simulated; {load.name}, lengths × {load.length_scale:.3g}; "
        f"in the profiler's own measurements the machine had {serving_speed(profile):.1%} of the speed that it was calibrated at"
    )
    source = named.load(
        named.named(facts.name), str(folder), dtype=profile.model.dtype, max_model_len=profile.model.max_model_len,
        seed=profile.model.seed or 0, arguments=dict(facts.options),
    ).as_profiled(pool.tokens, facts.block_size_given, facts.prefix_cache, profile.machine.threads)  # fmt: skip
    with running(source.start(setting, facts.limits, profile.seed)) as engine, stop_on_interrupt() as stop:
        shape = report(compared(engine, profile, scenario, capacity, shares, rounds, duration, stop.is_set))
        return shape | {"stopped": stop.is_set()}


def compared(
    engine: Engine,
    profile: Profile,
    scenario: Scenario,
    capacity: float,
    shares: Sequence[float],
    rounds: int,
    duration: float,
    stop: Callable[[], bool],
) -> dict[float, dict[str, list[float]]]:
    """Serve the load of ``scenario`` on ``engine`` at ``shares`` of ``capacity`` (requests/s), ``duration`` seconds each, and
    simulate the same requests: for each share the errors of its rounds, by name. Fewer on ``stop``, and where nothing came."""
    setting, load = profile.settings[RECOMMENDED].knobs, scenario.workload
    errors: dict[float, dict[str, list[float]]] = {
        one: {name: [] for name in (*METRICS, STEPS, AS_FAST)} for one in shares
    }
    try:
        for number in range(rounds + 1):  # the first does not count: a process gets faster in its first minute
            for one in shares:
                rate, seed = one * capacity, profile.seed + _APART * (number + 1)
                served = Recorder()
                forget = engine.subscribe(served)
                real = evaluate(
                    engine, setting, load.at_rate(rate), scenario.slo, vocab_size=profile.model.vocab_size,
                    seed=seed, prompt_seed=seed + round(100 * one), duration=duration, stop=stop,
                )  # fmt: skip
                forget()
                if not number:
                    continue
                if not served.steps:
                    say(f"  round {number}, {one:.0%} of capacity: no step was made; the round does not count")
                    continue
                off = bias(step_pairs(served.steps, Costs(scenario.cost, scenario.cost)))
                predicted = _simulated(scenario, setting, rate, seed, duration)
                as_fast = _simulated(faster(scenario, 1 + off), setting, rate, seed, duration)
                found = metrics(real)
                for name in METRICS:
                    errors[one][name].append(relative_error(predicted[name], found[name]))
                errors[one][STEPS].append(off)
                errors[one][AS_FAST].append(relative_error(as_fast["TPOT p50"], found["TPOT p50"]))
                said = ", ".join(f"{name} {found[name]:.4g} ({errors[one][name][-1]:+.1%})" for name in METRICS)
                say(
                    f"  round {number}, {one:.0%} of capacity, {real.offered} requests: {said}; "
                    f"steps {off:+.1%}, TPOT p50 on a machine as fast {errors[one][AS_FAST][-1]:+.1%}"
                )
    except Interrupted:
        say("stopped early")
    return errors


def _simulated(scenario: Scenario, setting: Knobs, rate: float, seed: int, duration: float) -> dict[str, float]:
    """Means over draws of the step-time noise, where there is any."""
    draws = range(DRAWS if scenario.cost.facts.jitter is not None else 1)
    return mean_metrics(
        [scenario.measure_over(setting, rate, seed, 0.0, duration, scatter=seed + draw * _APART) for draw in draws]
    )


def faster(scenario: Scenario, speed: float) -> Scenario:
    """``scenario`` on a machine that is so many times as fast in all."""
    return replace(scenario, cost=scenario.cost.scaled(compute=speed, bandwidth=speed, overhead=speed))


def _flooded(scenario: Scenario, profile: Profile) -> float:
    """Requests/s that the simulated engine completes under the recommended setting when all come at once."""
    engine = scenario.start(profile.settings[RECOMMENDED].knobs)
    arrivals = [a._replace(time=0.0) for a in scenario.workload.arrivals(profile.seed, limit=_FLOOD)]
    engine.serve(arrivals)
    engine.run()
    return len(arrivals) / engine.clock.now()


def report(errors: dict[float, dict[str, list[float]]]) -> dict[str, Any]:
    """The table of medians and ranges; the worst of each metric, None where no share has any, and the rounds of each share."""
    names = (*METRICS, STEPS, AS_FAST)
    print(f"\n{'of capacity':>12}" + "".join(f"{name:>26}" for name in names))
    worst = dict.fromkeys(names, math.nan)
    shares: dict[str, dict[str, list[float | None]]] = {}
    for one, by_metric in errors.items():
        cells = []
        spread = shares.setdefault(f"{one:g}", {})
        for name, values in by_metric.items():
            if not values:
                cells.append("–")
                continue
            middle = statistics.median(values)
            worst[name] = middle if math.isnan(worst[name]) else max(worst[name], middle, key=abs)
            spread[_key(name)] = [number(value) for value in (middle, min(values), max(values))]
            cells.append(f"{middle:+.1%} [{min(values):+.1%} {max(values):+.1%}]")
        print(f"{one:>12.0%}" + "".join(f"{cell:>26}" for cell in cells))
    rounds = {f"{one:g}": len(by_metric[STEPS]) for one, by_metric in errors.items()}
    if unserved := [share for share, count in rounds.items() if not count]:
        print(f"no round counted at {', '.join(unserved)} of capacity")
    return {_key(name): number(value) for name, value in worst.items()} | {"shares": shares, "rounds": rounds}


def _key(name: str) -> str:
    """For JSON."""
    return name.lower().replace(" ", "_")


if __name__ == "__main__":
    sys.exit(main())
