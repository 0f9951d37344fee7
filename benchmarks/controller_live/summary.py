"""What came of a contest: the table for people, and the JSON line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from autotune.bench import Contender, PairedComparison
from autotune.bench.table import show
from benchmarks.controller_live.figures import Panel
from benchmarks.live.loads import Case
from benchmarks.live.ratios import Ratio, geometric_mean, interval, number, ratio, words
from benchmarks.live.serving import Contest


class Compared(NamedTuple):
    """One case: who was the best fixed setting, and ours over it and over the defaults. ``admitted``: the best fixed setting with
    order and early rejection, if any took part; ``layers``: everybody's goodput over that one's, by name. ``others``: goodput
    over that of the defaults, of who took part beside ours, by name."""

    case: Case
    comparison: PairedComparison
    best: Contender
    against_best: Ratio
    against_defaults: Ratio
    admitted: Contender | None = None
    layers: Mapping[str, Ratio] = MappingProxyType({})
    others: Mapping[str, Ratio] = MappingProxyType({})


def compared(
    contest: Contest,
    cases: Sequence[Case],
    ours: Contender,
    vllm: Contender,
    duration: float,
    others: Sequence[Contender] = (),
) -> list[Compared]:
    """Of each case that has a whole round in which a fixed setting was served. ``others``: who took part with fewer layers."""
    found = []
    for index, case in enumerate(cases):
        results, leading = contest.results(case), contest.leading(case)
        plain, with_admission = ([c for c in leading if c.control is kind] for kind in (False, True))
        if not results or not plain:
            continue
        best = plain[0]
        against_best, against_vllm = (
            ratio(results, ours, other, duration, seed=2 * index + at) for at, other in enumerate((best, vllm))
        )
        beside = {c.name: ratio(results, c, vllm, duration, seed=2000 + 50 * index + at) for at, c in enumerate(others)}
        made = Compared(case, PairedComparison(results, duration), best, against_best, against_vllm, others=beside)
        if with_admission:
            baseline = with_admission[0]
            layers = {
                c.name: ratio(results, c, baseline, duration, seed=1000 + 50 * index + at)
                for at, c in enumerate((ours, vllm, *others))
            }
            layers["best fixed"] = ratio(results, best, baseline, duration, seed=1049 + 50 * index)
            made = made._replace(admitted=baseline, layers=layers)
        found.append(made)
    return found


def panels(found: Sequence[Compared], ours: Contender, vllm: Contender) -> list[Panel]:
    return [Panel(c.case, c.comparison.results, (ours, vllm, c.best)) for c in found]


def layer_ratios(found: Sequence[Compared]) -> dict[str, dict[str, float]]:
    """Of each case, and of all together, everybody's goodput over that of the best fixed setting with order and early rejection,
    by name."""
    layered = [c for c in found if c.layers]
    names = dict.fromkeys(name for c in layered for name in c.layers)
    means = {name: geometric_mean([c.layers[name] for c in layered if name in c.layers]).value for name in names}
    return {c.case.name: {name: r.value for name, r in c.layers.items()} for c in layered} | {"geometric mean": means}


def summary(found: Sequence[Compared], ours: Contender, vllm: Contender) -> dict[str, Any]:
    """The three figures with their 95% intervals, and what they are made of. None: nothing was measured.

    ``steady_vs_best_static``, ``shift_vs_best_static``: geometric means over the steady loads, and over those that shift, of our
    goodput ÷ that of the best fixed setting of each. ``vs_defaults``: of our goodput ÷ that of vLLM's defaults, over all.
    ``others_vs_defaults``: of everybody else's, its mean and the least of any load.
    """
    figures = {
        "steady_vs_best_static": geometric_mean([c.against_best for c in found if not c.case.shifts]),
        "vs_defaults": geometric_mean([c.against_defaults for c in found]),
        "shift_vs_best_static": geometric_mean([c.against_best for c in found if c.case.shifts]),
    }
    shape: dict[str, Any] = {name: number(estimate.value) for name, estimate in figures.items()}
    shape |= {f"{name}_interval": interval(estimate) for name, estimate in figures.items()}
    if any(c.layers for c in found):
        shape |= attribution(found, ours)
    shape["others_vs_defaults"] = {
        name: {"mean": number(geometric_mean([c.others[name] for c in found]).value)}
        | {"min": number(min(c.others[name].value for c in found))}
        for name in (found[0].others if found else ())
    }
    shape["cases"] = {c.case.name: _of_case(c, ours, vllm) for c in found}
    return shape


def attribution(found: Sequence[Compared], ours: Contender) -> dict[str, Any]:
    """Goodput over that of the best fixed setting with order and early rejection: of everybody, by name, and of ours the
    geometric mean over cases, its interval, and the least."""
    names = list(dict.fromkeys(name for c in found for name in c.layers))
    each = {name: [c.layers[name] for c in found if name in c.layers] for name in names}
    mean, mine = geometric_mean(each[ours.name]), [r.value for r in each[ours.name] if not math.isnan(r.value)]
    return {
        "full_vs_best_static_with_admission_mean": number(mean.value),
        "full_vs_best_static_with_admission_mean_interval": interval(mean),
        "full_vs_best_static_with_admission_min": number(min(mine, default=math.nan)),
        "layers": {name: number(geometric_mean(ratios).value) for name, ratios in each.items()},
    }


def _of_case(c: Compared, ours: Contender, vllm: Contender) -> dict[str, Any]:
    against_best, against_defaults = c.against_best.estimate(), c.against_defaults.estimate()
    shape: dict[str, Any] = {
        "vs_best_static": number(against_best.value),
        "vs_best_static_interval": interval(against_best),
        "vs_defaults": number(against_defaults.value),
        "vs_defaults_interval": interval(against_defaults),
        "slo": str(c.case.slo),
        "rate": round(c.case.workload.rate, 2),
        "best_static": c.best.name,
    }
    ratios = {**c.layers} | {f"{name} ÷ defaults": found for name, found in c.others.items()}
    shape["ratios"] = {name: [number(e.value), *interval(e)] for name, r in ratios.items() for e in [r.estimate()]}
    shape["best_static_with_admission"] = c.admitted.name if c.admitted is not None else None
    for name, contender in (("control", ours), ("defaults", vllm), ("best", c.best)):
        found = c.comparison.summary(contender)
        shape[name] = {
            "attainment": number(found.attainment.value),
            "goodput": number(found.goodput.value),
            "goodput_interval": interval(found.goodput),
            "offered": found.offered,
            "rounds": found.rounds,
        }
    return shape


def report(found: Sequence[Compared], vllm: Contender, say: Callable[[str], None]) -> None:
    """A table of every case, and ours against the two."""
    from autotune.cli.display import make_console

    console = make_console()
    console.width = max(console.width, 200)
    for c in found:
        say(f"\n{c.case.name}: {c.case.said}")
        show(c.comparison, c.case.slo, console, baseline=vllm)
        say(
            f"goodput ÷ that of {c.best.name}, the best fixed setting: {words(c.against_best.estimate())}; "
            f"÷ that of the defaults: {words(c.against_defaults.estimate())}"
            + "".join(f"; {name} ÷ that of the defaults: {words(r.estimate())}" for name, r in c.others.items())
        )
    compared = [c for c in found if c.layers]
    if compared:
        say("\ngoodput ÷ that of the best fixed setting with deadline order and early rejection")
        say(f"{'':<34}" + "".join(f"{c.case.name:>22}" for c in compared) + f"{'mean':>22}")
        for name in compared[0].layers:
            ratios = [c.layers[name] for c in compared]
            cells = [words(r.estimate()) for r in ratios] + [words(geometric_mean(ratios))]
            say(f"{name:<34}" + "".join(f"{cell:>22}" for cell in cells))
