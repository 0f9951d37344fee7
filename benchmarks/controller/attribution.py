"""Which part earns what: every contender with knobs alone, and with one layer more at a time, beside the best fixed setting that
has the same early rejection and order.

The baseline of a scenario is the fixed setting that met most requests with deadline order and early rejection, over all seeds,
known only afterwards. A ratio is goodput over the baseline's on the same requests; a mean is over scenarios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.controller.contenders import CONTENDERS, LAYERS, OURS, RIVALS, STATIC, Layer
from benchmarks.controller.known import Oracles
from benchmarks.controller.run import Outcome
from benchmarks.controller.scenarios import FAMILIES, SCENARIOS
from benchmarks.dots import Row, drawing, panels_of

HINDSIGHT = "best static"
EVERYTHING = "all in time"
"""Whoever serves every request in time: no ratio can be higher where all ran the same seeds."""

Found = Mapping[tuple[str, str], Mapping[int, Outcome]]
"""Outcomes by seed of each (scenario, contender)."""

_NAMED = {(contender.base, contender.layer): name for name, contender in CONTENDERS.items() if contender.base != STATIC}


class Rival(NamedTuple):
    """One of other tools' algorithms, by name, and ours over it: the mean over scenarios, and the least."""

    name: str
    mean: float
    least: float


class Attribution:
    """What was found of bases and their layers, on scenarios whose best fixed setting with all layers is known."""

    def __init__(self, found: Found, oracles: Mapping[str, Oracles]) -> None:
        self._found, self._oracles = found, oracles
        ran = {name for name, _ in found}
        self.scenarios = [
            name for name in SCENARIOS if name in ran and name in oracles and oracles[name].full is not None
        ]
        self.bases = list(
            dict.fromkeys(CONTENDERS[c].base for c in CONTENDERS if any(c == other for _, other in found))
        )
        self.families = {
            family: names
            for family in FAMILIES
            if (names := [scenario.name for scenario in family.scenarios if scenario.name in self.scenarios])
        }
        self.matrix = self.families.get(FAMILIES[0], [])
        self.shifting = [name for name in self.matrix if SCENARIOS[name].shifts]

    def ratio(self, scenario: str, base: str, layer: Layer) -> float:
        """Goodput over that of the best fixed setting with order and rejection; nan where it was not run."""
        full = self._oracles[scenario].full
        if full is None:
            return math.nan
        if base == HINDSIGHT:
            met = self._static(scenario, layer)
            return math.nan if met is None else share_of(sum(met.values()), sum(full.single_met.values()))
        if base == EVERYTHING:
            return self._most(scenario, full.single_met) if layer == "full" else math.nan
        by_seed = self._found.get((scenario, _NAMED.get((base, layer), "")), {})
        return share_of(sum(o.met for o in by_seed.values()), sum(full.single_met[seed] for seed in by_seed))

    def _most(self, scenario: str, baseline: Mapping[int, int]) -> float:
        """Requests that came over those that ``baseline`` has in time, of the seeds that anybody ran."""
        offered = {
            seed: o.offered
            for (name, _), by_seed in self._found.items()
            if name == scenario
            for seed, o in by_seed.items()
        }
        return share_of(sum(offered.values()), sum(baseline[seed] for seed in offered))

    def _static(self, scenario: str, layer: Layer) -> dict[int, int] | None:
        oracles = self._oracles[scenario]
        best = {"knobs": oracles.plain, "order": oracles.order, "full": oracles.full}.get(layer)
        return None if best is None else best.single_met

    def mean(self, scenarios: Iterable[str], base: str, layer: Layer) -> float:
        return mean_of(self.ratio(name, base, layer) for name in scenarios)

    def rival(self, layer: Layer, scenarios: Sequence[str] | None = None) -> Rival | None:
        """The strongest with this layer on ``scenarios``, the matrix unless given: the one that ours, with the same, is least
        ahead of on average; None if none was run."""
        found = []
        for base in RIVALS:
            for name, theirs in self._with(base, layer):
                ahead = [
                    self.ratio(scenario, OURS, layer) / ratio
                    for scenario in (self.matrix if scenarios is None else scenarios)
                    if (ratio := self.ratio(scenario, base, theirs)) > 0
                ]
                ahead = [value for value in ahead if not math.isnan(value)]
                if ahead:
                    found.append(Rival(name, statistics.fmean(ahead), min(ahead)))
        return min(found, key=lambda rival: rival.mean, default=None)

    @staticmethod
    def _with(base: str, layer: Layer) -> Iterable[tuple[str, Layer]]:
        """What takes part of ``base``: with this layer, and with relegation where that stands in the place of rejection."""
        yield base, layer
        if layer == "full":
            yield f"{base} relegating", "relegate"

    def figures(self) -> dict[str, float]:
        """For the line of JSON; nan where there is nothing to say."""
        full = [self.ratio(name, OURS, "full") for name in self.matrix]
        figures = {
            "full_vs_best_static_with_admission_mean": mean_of(full),
            "full_vs_best_static_with_admission_min": least_of(full),
            "full_vs_best_static_with_admission_shift": self.mean(self.shifting, OURS, "full"),
            "all_in_time_vs_best_static_with_admission_mean": self.mean(self.matrix, EVERYTHING, "full"),
            "all_in_time_vs_best_static_with_admission_shift": self.mean(self.shifting, EVERYTHING, "full"),
        }
        others = {family.key: self.families.get(family, []) for family in FAMILIES if family.key}
        for key, names in others.items():
            name = "gpu_truth_full" if key == "gpu_truth" else f"{key}_full_vs_best_static_with_admission"
            full = [self.ratio(scenario, OURS, "full") for scenario in names]
            figures |= {f"{name}_mean": mean_of(full), f"{name}_min": least_of(full)}
        compared: dict[str, Layer] = {"full_vs_best_rival_with_admission": "full", "knobs_vs_best_tuned_rival": "knobs"}
        for key, layer in compared.items():
            rival = self.rival(layer)
            if rival is not None:
                figures[f"{key}_mean"], figures[f"{key}_min"] = rival.mean, rival.least
            for family, names in others.items():
                if (rival := self.rival(layer, names)) is not None:
                    figures[f"{family}_{key}_mean"] = rival.mean
        return figures

    def tables(self) -> str:
        """For a person: what layers earn, and everybody with all of them, scenario by scenario."""
        return "\n\n".join(filter(None, (self._layers(), self._scenarios())))

    def _layers(self) -> str:
        lines = [
            "Goodput over that of the best fixed setting in hindsight, which has deadline order and early rejection: mean (min)",
            f"{'':<24}" + "".join(f"{text:>20}" for text in LAYERS.values()),
        ]
        groups = {family.about: names for family, names in self.families.items()}
        if self.shifting:
            groups = {"": self.matrix, "those that shift": self.shifting} | groups
        for title, names in groups.items():
            if not names:
                continue
            lines += [title] if title else []
            for base in (HINDSIGHT, *self.bases, EVERYTHING):
                cells = [_cell([self.ratio(name, base, layer) for name in names]) for layer in LAYERS]
                lines.append(f"{base:<24}" + "".join(f"{cell:>20}" for cell in cells))
        compared: dict[Layer, str] = {"knobs": "knobs alone", "full": "all layers"}
        for layer, what in compared.items():
            rival = self.rival(layer)
            if rival is not None:
                lines.append(
                    f"{OURS} with {what}: {rival.mean:.3f} × the best rival, {rival.name} (least {rival.least:.3f})"
                )
        return "\n".join(lines)

    def _scenarios(self) -> str:
        lines = [
            "The same by scenario, with all layers; * : lengths, SLO or machine shift",
            f"{'':<14}" + "".join(f"{base:>14}" for base in (*self.bases, EVERYTHING)),
        ]
        for name in self.scenarios:
            cells = [_number(self.ratio(name, base, "full")) for base in (*self.bases, EVERYTHING)]
            if any(cells[:-1]):
                mark = "*" if SCENARIOS[name].shifts else ""
                lines.append(f"{name + mark:<14}" + "".join(f"{cell:>14}" for cell in cells))
        return "\n".join(lines) if len(lines) > 2 else ""

    def picture(self, seeds: Sequence[int]) -> str:
        """An SVG: a row for each contender, a panel for each group of scenarios, and a dot for each layer at its mean ratio."""
        groups = {family.label: names for family, names in self.families.items()}
        if self.shifting:
            groups = {FAMILIES[0].label: self.matrix, "those that shift": self.shifting} | groups
        rows = [
            Row(base, [{layer: self.mean(names, base, layer) for layer in LAYERS} for names in groups.values()])
            for base in (HINDSIGHT, *self.bases, EVERYTHING)
        ]
        every = [value for row in rows for values in row.values for value in values.values()]
        title = "Goodput by layer, over the best fixed setting with order and rejection"
        said = "; ".join(
            f"{row.label} " + ", ".join(_number(v.get("full", math.nan)) for v in row.values) for row in rows
        )
        return drawing(
            rows,
            panels_of(every, groups, mark=1.0),
            {layer: text for layer, text in LAYERS.items()},
            title=title,
            description=f"{title}: means over {', '.join(groups)}; seeds {', '.join(map(str, seeds))}. With all layers: {said}.",
            left=130,
            across=3,
        )


def share_of(met: float, of: float) -> float:
    return met / of if of else math.nan


def mean_of(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def least_of(values: Iterable[float]) -> float:
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _cell(values: Sequence[float]) -> str:
    mean = mean_of(values)
    return "" if math.isnan(mean) else f"{mean:.3f} ({least_of(values):.3f})"
