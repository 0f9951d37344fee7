"""What a comparison found, as tables and as figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from benchmarks.controller.attribution import (
    Attribution,
    Found,
    least_of,
    mean_of,
    share_of,
)
from benchmarks.controller.contenders import COLUMNS, CONTENDERS
from benchmarks.controller.known import Oracles
from benchmarks.controller.oracle import Best
from benchmarks.controller.run import BIN_S
from benchmarks.controller.scenarios import FAMILIES, MATRIX, SCENARIOS, UNSEEN, VARIANTS, Scenario

COLD_S = 30.0
_BACK = 0.95  # of the oracle's goodput over _WINDOW bins: a contender has recovered
_WINDOW = 2


class Comparison:
    """Outcomes beside oracles, on the seeds that are in both."""

    def __init__(self, found: Found, oracles: Mapping[str, Oracles]) -> None:
        self._found, self._oracles = found, oracles
        self.attribution = Attribution(found, oracles)
        self.contenders = [name for name in COLUMNS if any(name == contender for _, contender in found)]
        self.scenarios = [scenario for scenario in SCENARIOS.values() if any(scenario.name == s for s, _ in found)]

    def has(self, scenario: str, contender: str) -> bool:
        return (scenario, contender) in self._found

    def ratio(self, scenario: str, contender: str, *, reject: bool = False) -> float:
        """Goodput as a share of the oracle's; nan where there is none."""
        best = self._best(scenario, reject)
        if best is None or not self.has(scenario, contender):
            return math.nan
        by_seed = self._found[scenario, contender]
        return share_of(sum(o.met for o in by_seed.values()), sum(best.by_seed[seed].met for seed in by_seed))

    def hindsight(self, scenario: str) -> float:
        """The best single setting's goodput as a share of the oracle's."""
        best = self._oracles[scenario].plain
        return share_of(sum(best.single_met.values()), sum(o.met for o in best.by_seed.values()))

    def error(self, scenarios: Sequence[str], contender: str, *, reject: bool = False) -> float:
        """Standard error of the mean ratio over ``scenarios``, from how it differs between seeds; nan with one seed."""
        known = [(self._best(name, reject), self._found.get((name, contender), {})) for name in scenarios]
        seeds = set.intersection(*(set(by_seed) for _, by_seed in known)) if known else set()
        means = [
            mean_of(share_of(by_seed[seed].met, best.by_seed[seed].met) for best, by_seed in known if best is not None)
            for seed in sorted(seeds)
        ]
        means = [mean for mean in means if not math.isnan(mean)]
        return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan

    def cold(self, scenario: str, contender: str) -> float:
        """The same as :meth:`ratio`, of requests of the first :data:`COLD_S`."""
        by_seed, best = self._found[scenario, contender], self._oracles[scenario].plain
        met = sum(outcome.first(COLD_S)[1] for outcome in by_seed.values())
        return share_of(met, sum(best.by_seed[seed].first(COLD_S)[1] for seed in by_seed))

    def recovery(self, scenario: Scenario, contender: str) -> float:
        """Seconds after a phase began until a window's goodput is back at the oracle's, the longest of all phases but the
        first; inf if it never is, nan without a second phase."""
        by_seed, best = self._found[scenario.name, contender], self._oracles[scenario.name].plain
        ours, theirs = (_pooled(o.bins for o in outcomes) for outcomes in (
            by_seed.values(), [best.by_seed[seed] for seed in by_seed]))  # fmt: skip
        edges = [int(start / BIN_S) for start in (*scenario.starts, scenario.seconds)]
        return max((_back(ours[a:b], theirs[a:b]) for a, b in pairwise(edges[1:])), default=math.nan)

    def _best(self, scenario: str, reject: bool) -> Best | None:
        oracles = self._oracles[scenario]
        return oracles.reject if reject else oracles.plain

    def figures(self) -> dict[str, float]:
        """The line of JSON: of the matrix, as far as it was run."""
        names = [scenario.name for scenario in self.scenarios if scenario in MATRIX]
        knobs, full = "predictive-knobs", "predictive"
        rivals = [name for name in self.contenders if CONTENDERS[name].group == "rivals"]
        means = [mean_of(self.ratio(name, rival) for name in names) for rival in rivals]
        unseen = [scenario.name for scenario in self.scenarios if scenario in UNSEEN]
        steady = [name for name in names if name != "M14"]
        figures = {
            "knobs_mean": mean_of(self.ratio(n, knobs) for n in names),
            "knobs_min": least_of(self.ratio(n, knobs) for n in names),
            "m1": self.ratio("M1", knobs) if "M1" in names else math.nan,
            "full_mean": mean_of(self.ratio(n, full) for n in names),
            "full_min": least_of(self.ratio(n, full) for n in names),
            "full_vs_reject_oracle_mean": mean_of(self.ratio(n, full, reject=True) for n in names),
            "best_rival_mean": max((m for m in means if not math.isnan(m)), default=math.nan),
            "knobs_mean_without_m14": mean_of(self.ratio(n, knobs) for n in steady),
            "full_mean_without_m14": mean_of(self.ratio(n, full) for n in steady),
            "full_vs_reject_oracle_mean_without_m14": mean_of(self.ratio(n, full, reject=True) for n in steady),
            "unseen_knobs_mean": mean_of(self.ratio(n, knobs) for n in unseen),
            "unseen_full_mean": mean_of(self.ratio(n, full) for n in unseen),
        }
        figures |= self.attribution.figures()
        return {name: round(value, 4) for name, value in figures.items() if not math.isnan(value)}

    def tables(self) -> str:
        """All tables, for a person."""
        parts = [self._ratios(reject=False)] if self.contenders else []
        if self.contenders and any(oracles.reject is not None for oracles in self._oracles.values()):
            parts.append(self._ratios(reject=True))
        if self.contenders:
            parts.append(self._shifts())
        if self.attribution.scenarios:
            parts.append(self.attribution.tables())
        return "\n\n".join(parts)

    def _ratios(self, *, reject: bool) -> str:
        what = "best fixed knobs of each phase" + (" with early rejection" if reject else "")
        lines = [f"Goodput as a share of that of the {what}", self._header("hindsight")]
        groups = {family.about: family.scenarios for family in FAMILIES} | {"variants": VARIANTS}
        for title, group in groups.items():
            rows = [s.name for s in self.scenarios if s in group]
            if rows and title:
                lines.append(title)
            for name in rows:
                first = math.nan if reject else self.hindsight(name)
                lines.append(_row(name, first, [self.ratio(name, c, reject=reject) for c in self.contenders]))
            if len(rows) > 1:
                kept = [name for name in rows if name != "M14"]
                lines += self._summary(rows, reject) + (self._without(kept, reject) if len(kept) < len(rows) else [])
        return "\n".join(lines)

    def _summary(self, rows: Sequence[str], reject: bool) -> list[str]:
        by_contender = [[self.ratio(name, c, reject=reject) for name in rows] for c in self.contenders]
        first = [math.nan] if reject else [self.hindsight(name) for name in rows]
        return [
            _row("mean", mean_of(first), [mean_of(ratios) for ratios in by_contender]),
            _row("± s.e.", math.nan, [self.error(rows, c, reject=reject) for c in self.contenders]),
            _row("min", least_of(first), [least_of(ratios) for ratios in by_contender]),
        ]

    def _without(self, rows: Sequence[str], reject: bool) -> list[str]:
        means = [mean_of(self.ratio(name, c, reject=reject) for name in rows) for c in self.contenders]
        first = math.nan if reject else mean_of(self.hindsight(name) for name in rows)
        return [_row("mean w/o M14", first, means)]

    def _shifts(self) -> str:
        lines = [
            f"First {COLD_S:.0f} s (share of the oracle's goodput) / s until back after a shift (the slowest; - : never)"
        ]
        lines.append(self._header(""))
        for scenario in self.scenarios:
            cells = []
            for contender in self.contenders:
                if not self.has(scenario.name, contender):
                    cells.append("")
                    continue
                back = self.recovery(scenario, contender)
                shown = "" if math.isnan(back) else " / -" if math.isinf(back) else f" / {back:.0f}"
                cells.append(f"{self.cold(scenario.name, contender):.2f}{shown}")
            lines.append(f"{scenario.name:<14}{'':>10}" + "".join(f"{cell:>17}" for cell in cells))
        return "\n".join(lines)

    def _header(self, first: str) -> str:
        groups = "".join(f"{CONTENDERS[name].group:>17}" for name in self.contenders)
        return f"{'':<24}{groups}\n{'':<14}{first:>10}" + "".join(f"{name:>17}" for name in self.contenders)


def _back(ours: Sequence[int], theirs: Sequence[int]) -> float:
    for start in range(len(ours) - _WINDOW + 1):
        if sum(ours[start : start + _WINDOW]) >= _BACK * sum(theirs[start : start + _WINDOW]):
            return start * BIN_S
    return math.inf


def _pooled(bins: Iterable[Sequence[tuple[int, int]]]) -> list[int]:
    return [sum(met for _, met in column) for column in zip(*bins, strict=True)]


def _row(name: str, first: float, values: Sequence[float]) -> str:
    shown = ["" if math.isnan(value) else f"{value:.3f}" for value in (first, *values)]
    return f"{name:<14}{shown[0]:>10}" + "".join(f"{cell:>17}" for cell in shown[1:])
