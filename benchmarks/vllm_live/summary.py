"""What came of a contest: a table for people, and the figures of the JSON line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from autotune.bench import Contender, Estimate, PairedComparison
from autotune.bench.table import show
from benchmarks.live.loads import Case
from benchmarks.live.ratios import Ratio, geometric_mean, interval, number, ratio, words
from benchmarks.live.serving import Contest
from benchmarks.vllm_live.cases import AT_DEFAULTS, KNOBS_ONLY, NAMES, OURS, STOCK

BEST, ADMITTED = "best static", "best static with admission"
"""In hindsight, of each load its own."""


class Compared(NamedTuple):
    """One load: the rivals it had, by what they are called, and what ours and ours with knobs alone are to each."""

    case: Case
    comparison: PairedComparison
    rivals: dict[str, Contender]
    ours: dict[str, Ratio]
    knobs_only: dict[str, Ratio]


def compared(contest: Contest, cases: Sequence[Case], duration: float) -> list[Compared]:
    """Of each load that has a whole round."""
    found = []
    for case in cases:
        results, leading = contest.results(case), contest.leading(case)
        best = {
            name: next((c for c in leading if c.control is kind), None)
            for name, kind in ((BEST, False), (ADMITTED, True))
        }
        if not results:
            continue
        rivals = {AT_DEFAULTS.name: AT_DEFAULTS} | {name: c for name, c in best.items() if c is not None}
        rivals[STOCK.name] = STOCK
        mine, knobs = (
            {
                name: ratio(results, who, c, duration, seed=4 * NAMES.index(case.name) + at)
                for at, (name, c) in enumerate(rivals.items())
            }
            for who in (OURS, KNOBS_ONLY)
        )
        found.append(Compared(case, PairedComparison(results, duration), rivals, mine, knobs))
    return found


class Figures(NamedTuple):
    """What the JSON line needs of one load: what it says of it by itself, and the ratios that means are taken of."""

    name: str
    shifts: bool
    shape: dict[str, Any]
    ours: dict[str, Ratio]
    knobs_only: dict[str, Ratio]

    @classmethod
    def of(cls, c: Compared) -> Self:
        return cls(c.case.name, c.case.shifts, _of_case(c), c.ours, c.knobs_only)

    @property
    def winners(self) -> list[str]:
        """The names of the fixed settings that were the best here, of each kind."""
        return [self.shape[name]["name"] for name in (BEST, ADMITTED) if name in self.shape]

    def as_json(self) -> dict[str, Any]:
        """For a file; the draws are rounded to a ten thousandth, which their count blurs more."""
        ratios = {
            who: {name: [r.value, [round(float(draw), 4) for draw in r.draws]] for name, r in found.items()}
            for who, found in (("ours", self.ours), ("knobs_only", self.knobs_only))
        }
        return {"name": self.name, "shifts": self.shifts, "shape": self.shape, **ratios}

    @classmethod
    def of_json(cls, part: dict[str, Any]) -> Self:
        ours, knobs_only = (
            {name: Ratio(value, np.array(draws)) for name, (value, draws) in part[who].items()}
            for who in ("ours", "knobs_only")
        )
        return cls(part["name"], part["shifts"], part["shape"], ours, knobs_only)


def figures(found: Sequence[Figures]) -> dict[str, Estimate]:
    """Geometric means of goodput ratios: over the loads that do not shift, and of the one that does."""

    def mean(rival: str, *, shifts: bool | None = False, knobs: bool = False) -> Estimate:
        chosen = [c for c in found if shifts is None or c.shifts is shifts]
        return geometric_mean([r for c in chosen if (r := (c.knobs_only if knobs else c.ours).get(rival)) is not None])

    return {
        "vs_defaults": mean(AT_DEFAULTS.name, shifts=None),
        "vs_stock": mean(STOCK.name, shifts=None),
        "vs_best_static": mean(BEST),
        "vs_best_static_with_admission": mean(ADMITTED),
        "shift_vs_best_static": mean(BEST, shifts=True),
        "shift_vs_best_static_with_admission": mean(ADMITTED, shifts=True),
        "knobs_only_vs_defaults": mean(AT_DEFAULTS.name, shifts=None, knobs=True),
        "knobs_only_vs_best_static": mean(BEST, knobs=True),
    }


def summary(found: Sequence[Figures]) -> dict[str, Any]:
    """For the JSON line: each figure, its 95% interval, and each load."""
    made = figures(found)
    shape: dict[str, Any] = {name: number(estimate.value) for name, estimate in made.items()}
    shape["intervals"] = {name: interval(estimate) for name, estimate in made.items()}
    shape["cases"] = {c.name: c.shape for c in found}
    return shape


def _of_case(c: Compared) -> dict[str, Any]:
    shape: dict[str, Any] = {"slo": str(c.case.slo), "rate": round(c.case.workload.rate, 2)}
    for name, contender in {"ours": OURS, "ours, knobs only": KNOBS_ONLY, **c.rivals}.items():
        found = c.comparison.summary(contender)
        shape[name] = {
            "name": contender.name,
            "attainment": number(found.attainment.value),
            "goodput": number(found.goodput.value),
            "goodput_interval": interval(found.goodput),
            "offered": found.offered,
            "rounds": found.rounds,
        }
    everywhere = (AT_DEFAULTS, STOCK, OURS, KNOBS_ONLY)
    shape["fixed settings"] = [one.name for one in c.comparison.contenders if one not in everywhere]
    shape["ratios"] = {name: [number(e.value), *interval(e)] for name, r in c.ours.items() for e in [r.estimate()]}
    return shape


def report(found: Sequence[Compared], say: Callable[[str], None]) -> None:
    from autotune.cli.display import make_console

    console = make_console()
    console.width = max(console.width, 200)
    for c in found:
        say(f"\n{c.case.name}: {c.case.said}")
        show(c.comparison, c.case.slo, console, baseline=AT_DEFAULTS)
        for who, ratios in ((OURS, c.ours), (KNOBS_ONLY, c.knobs_only)):
            each = "; ".join(f"{name} ({c.rivals[name].name}) {words(r.estimate())}" for name, r in ratios.items())
            say(f"{who.name}, goodput ÷ that of: {each}")
