"""What a setting is worth, in one place: the simulated search, validation, the choice and the report go by it.

Settings are compared at one rate, under the same arrivals. There goodput is the attainment times what was offered, so the better
setting is the one with the higher attainment; of settings whose attainments do not differ beyond noise, the one with the lower
latency. Where there is no SLO to meet, the better setting is the one with the lower mean E2E. The machine costs the same whatever
its knobs are, so the setting with the highest capacity is also the cheapest per token. docs/how-to/profile.md has the rules in
full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from scipy.stats import binom

from autotune.cost.price import per_million
from autotune.measure.score import Score
from autotune.profile import Point, Profile, Purpose, Setting, Spread
from autotune.profile.callable import CallablePoint
from autotune.profile.parts import Calibration, ObjectiveName
from autotune.profiling.kinds import SettingT
from autotune.profiling.setup import Comparison, Setup
from runtime.knobs import Knobs
from runtime.slo import SLO, Counted, RequestClass, share_met

GIVE_UP = 0.15
"""Goodput the interactive setting may cost, as a share of the best."""

SAME_P99 = 0.05
"""Share by which p99s of settings of a batcher may differ before the lower one is worth anything."""

CLEAR_P99 = 0.1
"""Share by which all p99s of a setting must be above those of the defaults to count as clearly worse."""

SIGNIFICANCE = 0.05


class Performance(Protocol):
    """What became of a setting: a score, a point, or a trial in a report."""

    @property
    def offered_rate(self) -> float: ...

    @property
    def goodput(self) -> float | Spread:
        """Requests/s that met the SLO, by weight."""
        ...

    @property
    def e2e_mean_ms(self) -> float | None:
        """None: not known, or no request was served."""
        ...


class Tails(Protocol):
    """The p99s of a setting, or of a class of its requests, in ms; None: no request has one."""

    @property
    def ttft_p99_ms(self) -> float | None: ...

    @property
    def tpot_p99_ms(self) -> float | None: ...

    @property
    def e2e_p99_ms(self) -> float | None: ...


class Measure(NamedTuple):
    """The figure that an objective is read in, and its words; ``{}`` stands for the figure or a percentage.

    ``unit_in_full``: on an axis with room. ``lowest``: whether the lowest is the best; ``best``: what that is called.
    ``reads``: the figure in a sentence, ``attained``: the attainment behind it, ``of_best``: the best figure of a search.
    ``meets``, ``met``: what a request does that counts. ``costs``, ``gains``: what turning a knob does; ``costs_in_full``: in a
    title. ``ahead``: a setting (the first ``{}``), and how far it is ahead of the choice. ``direction``: of an axis.
    """

    name: str
    unit: str
    unit_in_full: str
    lowest: bool
    best: str
    reads: str
    attained: str
    of_best: str
    meets: str
    met: str
    costs: str
    gains: str
    costs_in_full: str
    ahead: str
    direction: str
    definition: str

    @property
    def title(self) -> str:
        """The name at the beginning of a sentence."""
        return self.name[:1].upper() + self.name[1:]


GOODPUT = Measure(
    name="goodput",
    unit="req/s",
    unit_in_full="requests/s",
    lowest=False,
    best="best goodput",
    reads="{} req/s within the SLO",
    attained="{} of requests",
    of_best="{} requests a second met the SLO",
    meets="meets the SLO",
    met="met the SLO",
    costs="costs {}",
    gains="gains {}",
    costs_in_full="costs {} of goodput",
    ahead="{} {} above the choice",
    direction="Higher is more requests a second within the SLO",
    definition="Goodput: requests a second that met every target of the SLO.",
)
MEAN_E2E = Measure(
    name="mean E2E",
    unit="ms",
    unit_in_full="ms",
    lowest=True,
    best="lowest mean E2E",
    reads="mean E2E {} ms",
    attained="{} of requests within the SLO",
    of_best="{} ms",
    meets="is served",
    met="was served",
    costs="takes {} longer",
    gains="takes {} less time",
    costs_in_full="makes the mean E2E {} longer",
    ahead="the mean E2E with {} {} below that of the choice",
    direction="Lower is a shorter mean E2E",
    definition=(
        "Mean E2E: from arrival to the last token, over all requests but the rejected; those unfinished at the end count with "
        "the time they had been there."
    ),
)


@dataclass(frozen=True)
class Objective:
    """Goodput within ``slo``, and what that costs on a machine of ``price_per_hour`` (None: not known).

    Requests of ``classes`` are judged by their own SLO and count by their weight. ``name`` mean-e2e: the lowest mean E2E instead,
    in units of ``alone_ms``, about that of a request that has the engine to itself. ``same_p99``: share by which the p99s of
    settings may differ that are equal otherwise, and still the first of them is taken; 0: the lowest is.
    """

    slo: SLO
    price_per_hour: float | None = None
    classes: tuple[RequestClass, ...] = ()
    name: ObjectiveName = "goodput"
    alone_ms: float = 1.0
    same_p99: float = 0.0

    @classmethod
    def of(cls, profile: Profile) -> Objective:
        """That of a profile."""
        alone = _alone(profile.calibration, profile.workload.mean_output)
        return cls(profile.slo, profile.price_per_hour, profile.classes, profile.objective, alone)

    @classmethod
    def under(cls, setup: Comparison) -> Objective:
        """That of a profiling run."""
        if not isinstance(setup, Setup):  # of a callable: the simplest come first
            return cls(setup.slo, classes=setup.classes, name=setup.objective, same_p99=SAME_P99)
        alone = _alone(setup.calibration, setup.mean_output)
        return cls(setup.slo, classes=setup.classes, name=setup.objective, alone_ms=alone)

    # -- one setting ------------------------------------------------------------------------------------------------------

    @property
    def measure(self) -> Measure:
        """The figure it is read in, and its words."""
        return GOODPUT if self.name == "goodput" else MEAN_E2E

    def figure(self, found: Performance) -> float | None:
        """Goodput in requests/s, by weight; or the mean E2E in ms, None where that is not known or no request was served."""
        if self.name != "goodput":
            return found.e2e_mean_ms
        return found.goodput.mean if isinstance(found.goodput, Spread) else found.goodput

    def interval(self, point: Point) -> Spread | None:
        """The 95% interval of :meth:`figure`; None where none is taken."""
        return point.goodput if self.name == "goodput" else None

    def value(self, found: Performance) -> float:
        """Higher for the better, of settings at one rate: goodput in requests/s, by weight; or what :meth:`worth` says."""
        figure = self.figure(found)
        return self._against_alone(figure) if self.name != "goodput" else figure or 0.0

    def share(self, found: Performance, best: Performance) -> float:
        """How near to ``best`` it comes, of settings at one rate: 1 if it is as good, more if better; 0 if nothing is known."""
        mine, other = self.figure(found), self.figure(best)
        return (other / mine if self.measure.lowest else mine / other) if mine and other else 0.0

    def loss(self, found: Performance, base: Performance) -> float:
        """The share of goodput lost against ``base``, or by what share the mean E2E is longer; below 0 for a gain, inf for a mean
        E2E that is not known."""
        share = self.share(found, base)
        if not self.measure.lowest:
            return 1 - share
        return 1 / share - 1 if share else inf

    def worth(self, found: Score | Point) -> float:
        """From 0 to 1, higher for the better of two at one rate: attainment, by weight; or alone / (alone + mean) of E2E."""
        if self.name == "goodput":
            return found.weighted_attainment
        return self._against_alone(found.e2e_mean_ms)

    def _against_alone(self, mean_ms: float | None) -> float:
        return 0.0 if mean_ms is None else self.alone_ms / (self.alone_ms + mean_ms)

    def regret(self, share: float, worth: float) -> float:
        """What a ``share`` of ``worth`` is in units that people know: of goodput the same; of E2E how much longer it is."""
        if self.name == "goodput" or not 0 < worth < 1:
            return share
        less = max(worth * (1 - share), 1e-9)
        return (1 / less - 1) / (1 / worth - 1) - 1

    def said(self, found: Performance, unit: str = "req/s", *, offered: bool = True) -> str:
        """What it came to, in words; of a goodput also of how many, if those ``offered`` are to be named and count as much."""
        figure = self.figure(found)
        if self.name == "goodput":
            of = f" of {found.offered_rate:.1f}" if offered and not self.classes else ""
            return f"best {figure or 0.0:.1f}{of} {unit} within the SLO{self.weighed}"
        return "best mean E2E unknown" if figure is None else f"best mean E2E {figure:.4g} ms"

    @property
    def weighed(self) -> str:
        """What to say behind a goodput of requests that count by their class."""
        return ", each counted by the weight of its class" if self.classes else ""

    def order(self, point: Point) -> tuple[float, float]:
        """Higher for the better of two settings at one rate: by attainment, of equals by latency."""
        return self.worth(point), -self.latency(point)

    def latency(self, point: Point) -> float:
        """The worst p99 in units of its target, of all classes that were offered; lower is better, inf when nothing finished."""
        if not point.classes:
            return worst_ratio(point, _targets(self.slo))
        own = {one.name: one.slo for one in self.classes}
        seen = {name: one for name, one in point.classes.items() if one.offered}
        return max((worst_ratio(one, _targets(own.get(name, self.slo))) for name, one in seen.items()), default=inf)

    def cost(self, tokens_per_s: float) -> float | None:
        """Money per million output tokens; None without a price, or where no tokens come out."""
        return None if self.price_per_hour is None else per_million(self.price_per_hour, tokens_per_s)

    def refuted(self, point: Counted) -> bool:
        """Whether this point shows that the SLO's attainment is not met, of any class by its own.

        By the binomial tail: were it met, so many misses would be seen less than once in twenty times. (Of 14 requests one
        may miss an SLO of 99% by bad luck, of 400 hardly 12.)
        """
        return not point.offered or any(_refuted(seen, share) for seen, share in self._judged(point))

    def confirmed(self, point: Counted) -> bool:
        """Whether this point met the SLO's attainment, with requests enough to say so.

        Enough: an attainment that is just met brings one miss among them. If none came, three times as many misses as
        allowed are ruled out (the rule of three: 95% upper bound 3/n); of 100%, 3%.
        """
        return self.attained(point) and all(
            seen.offered * max(1 - share, 0.01) >= 1 - 1e-9 for seen, share in self._judged(point)
        )

    def attained(self, point: Counted) -> bool:
        """Whether this point measured the SLO's attainment, of every class its own."""
        return all(share_met(seen) >= share for seen, share in self._judged(point))

    def _judged(self, point: Counted) -> list[tuple[Counted, float]]:
        """What is judged by itself, and the attainment it must have: every class that was offered, or all there is."""
        targets = {one.name: one.slo.attainment for one in self.classes}
        by_class = point.classes if isinstance(point, Point) else {}
        parts = [(c, targets.get(name, self.slo.attainment)) for name, c in by_class.items() if c.offered]
        return [*parts] or [(point, self.slo.attainment)]

    @property
    def shares(self) -> str:
        """The attainments that the SLOs require, in words: ``99%``, or ``99% of chat and 90% of batch``."""
        if not self.classes:
            return f"{self.slo.attainment * 100:g}%"
        return " and ".join(f"{one.slo.attainment * 100:g}% of {one.name}" for one in self.classes)

    # -- among several ----------------------------------------------------------------------------------------------------

    def choose(
        self,
        found: Sequence[Point],
        expected: Mapping[Knobs, float] | None = None,
        *,
        noise: float = 0.0,
        baseline: Knobs | None = None,
        better: Callable[[Knobs, Knobs], bool] = lambda mine, base: False,
    ) -> dict[Purpose, Setting]:
        """Interactive, balanced and throughput from points of an engine at one and the same rate. They may be one setting.

        The arguments are those of :meth:`balanced`.
        """
        known = expected or {}
        points = {p.knobs: p for p in found}
        worth = {knobs: self._expected(knobs, p, known) for knobs, p in points.items()}
        best, why = self.balanced(points, known, noise=noise, baseline=baseline, better=better)
        balanced = points[best]
        enough = [p for p in found if worth[p.knobs] >= (1 - GIVE_UP) * worth[best] - noise]
        interactive = min(enough, key=lambda p: (self.latency(p), -worth[p.knobs]))
        what = "goodput" if self.name == "goodput" else "mean E2E, beside that of a request alone"
        throughput = max(found, key=lambda p: (p.throughput.mean / max(p.offered_rate, 1e-9), worth[p.knobs]))
        return {
            "interactive": Setting(
                knobs=interactive.knobs,
                why=f"lowest p99 against its targets among those within {GIVE_UP:.0%} of the best {what}",
                point=interactive,
            ),
            "balanced": Setting(knobs=balanced.knobs, why=why, point=balanced),
            "throughput": Setting(knobs=throughput.knobs, why="most output tokens/s, SLO or not", point=throughput),
        }

    def balanced(
        self,
        found: Mapping[SettingT, Point],
        expected: Mapping[SettingT, float],
        *,
        noise: float = 0.0,
        baseline: SettingT | None = None,
        better: Callable[[SettingT, SettingT], bool] = lambda mine, base: False,
    ) -> tuple[SettingT, str]:
        """The setting to recommend, of an engine or a callable, and why. All of ``found`` are at one and the same rate.

        ``expected``: attainment, by weight, that each is expected to have; without it, what it measured. ``noise``: attainments
        that differ by less are taken as equal where all requests met the SLO, elsewhere if they differ by less than one request
        too; the quicker of equals is balanced. ``baseline``: what measures clearly worse than it in every p99, and no better
        in goodput, is not balanced. ``better``: whether one setting measured clearly more goodput than another under the same
        requests. Then the other is not balanced, whatever is expected of it.
        """
        worth = {s: self._expected(s, p, expected) for s, p in found.items()}
        measured = {s: self.worth(p) for s, p in found.items()}

        def merit(s: SettingT) -> tuple[float, float]:
            return worth[s], -self.latency(found[s])

        base = None if baseline is None else found.get(baseline)
        fair = [s for s, p in found.items() if base is None or p is base or not self.dominated(p, base)]
        beaten = {s: q for s in fair for q in found if measured[q] > measured[s] and better(q, s)}
        preferred = max(fair, key=merit)
        fair = [s for s in fair if s not in beaten] or fair
        best = max(fair, key=merit)
        alike = self.equals({s: found[s] for s in fair}, best, expected, noise)
        lowest = min(self.latency(found[s]) for s in alike)
        quick = [s for s in alike if self.latency(found[s]) <= (1 + self.same_p99) * lowest]
        balanced = quick[0] if self.same_p99 else max(quick, key=worth.__getitem__)
        together = ", measured and simulated taken together" if expected else ""
        why = f"highest goodput{together}" if self.name == "goodput" else f"lowest mean E2E{together}"
        if balanced != best:
            why = f"the quickest of those whose goodput{together or ', as measured,'} is not distinguishable from the highest"
        if preferred in beaten and preferred not in fair:
            why += f"; more is expected of {preferred}, which measured clearly less than {beaten[preferred]}"
        most = max(found, key=measured.__getitem__)
        attained, reached = found[most].weighted_attainment, found[balanced].weighted_attainment
        if expected and self.name == "goodput" and attained > reached and not better(most, balanced):
            why += f"; {most} measured {attained:.1%} within the SLO against {reached:.1%}, which is not beyond chance"
        return balanced, why

    def equals(
        self, found: Mapping[SettingT, Point], setting: SettingT, expected: Mapping[SettingT, float], noise: float
    ) -> list[SettingT]:
        """Those of ``found`` not distinguishable from ``setting``, itself among them; see :meth:`balanced`. Means are."""
        if self.name != "goodput":
            return [setting]
        mine = found[setting]
        here = self._expected(setting, mine, expected)
        return [s for s, p in found.items() if abs(here - self._expected(s, p, expected)) <= _tolerance(p, mine, noise)]

    def dominated(self, point: Point, other: Point) -> bool:
        """Whether ``other`` measured no less goodput, and a clearly lower p99 of every latency known of both."""
        pairs = (
            (point.ttft_p99_ms, other.ttft_p99_ms),
            (point.tpot_p99_ms, other.tpot_p99_ms),
            (point.e2e_p99_ms, other.e2e_p99_ms),
        )
        both = [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]
        no_less = self.worth(other) >= self.worth(point)
        return bool(both) and no_less and all(mine > (1 + CLEAR_P99) * theirs for mine, theirs in both)

    def _expected(self, setting: SettingT, point: Point, expected: Mapping[SettingT, float]) -> float:
        """The worth a setting is expected to have; without an expectation, what it measured."""
        return min(1.0, max(0.0, expected.get(setting, self.worth(point))))

    def ranked(self, found: Sequence[CallablePoint]) -> list[CallablePoint]:
        """The best setting of a callable first, of many that stand for themselves: by attainment. Of those that the best does
        not beat by more than chance (one item, or twice the deviation of its count) first those whose p99 is about the lowest, in
        the order given."""
        left = [(p, inf if p.e2e_p99_ms is None else p.e2e_p99_ms) for p in found]
        ranked: list[CallablePoint] = []
        while left:
            top = max(share_met(p) for p, _ in left)
            n = max(1, min(p.offered for p, _ in left))
            least = top - max(1 / n, 2 * (top * (1 - top) / n) ** 0.5) - 1e-12
            lowest = min(p99 for p, p99 in left if share_met(p) >= least)
            first = next(pair for pair in left if share_met(pair[0]) >= least and pair[1] <= (1 + SAME_P99) * lowest)
            ranked.append(first[0])
            left.remove(first)
        return ranked

    def cheapest(self, found: Sequence[Point]) -> Point | None:
        """Of those that do not refute the SLO the one with the most output tokens/s, for the machine costs the same for all."""
        return max((p for p in found if not self.refuted(p)), key=lambda p: p.throughput.mean, default=None)

    def capacity(self, tried: Sequence[Point]) -> Point | None:
        """The point of the highest rate not refuted below every rate that was (None: none).

        Rates are those that came in: with few requests they may be far from, and in another order than, those requested.
        """
        missed = min((p.offered_rate for p in tried if self.refuted(p)), default=inf)
        below = [p for p in tried if not self.refuted(p) and p.offered_rate < missed]
        return max(below, key=lambda p: p.offered_rate, default=None)


def _alone(calibration: Calibration, mean_output: float) -> float:
    """E2E of a request that has the engine to itself, ms, about."""
    return max(1e-6, calibration.alone_ttft_ms + calibration.alone_tpot_ms * max(0.0, mean_output - 1))


def worst_ratio(seen: Tails, targets: Mapping[str, float]) -> float:
    """The p99 that is worst against its target, in units of the target; inf where nothing finished.

    ``targets`` in ms, by the name of the p99. A latency that no request has, as answers of one token have no TPOT, misses none.
    """
    if seen.e2e_p99_ms is None and (seen.ttft_p99_ms is None or "e2e_p99_ms" in targets):
        return inf
    values = ((getattr(seen, name), target) for name, target in targets.items())
    return max((value / target for value, target in values if value is not None), default=0.0)


def _targets(slo: SLO) -> dict[str, float]:
    """Those of ``slo``, as :func:`worst_ratio` has them; one on gaps is held against the TPOT."""
    found = {"ttft_p99_ms": slo.ttft_ms, "tpot_p99_ms": slo.tpot_ms or slo.itl_ms, "e2e_p99_ms": slo.e2e_ms}
    return {name: target for name, target in found.items() if target is not None}


def _refuted(seen: Counted, share: float) -> bool:
    misses = seen.offered - seen.met
    return misses > 0 and float(binom.sf(misses - 1, seen.offered, 1 - share)) < SIGNIFICANCE


def _tolerance(a: Point, b: Point, noise: float) -> float:
    """By how much expected shares may differ and yet be equal: the noise at the ceiling, else one request at most."""
    if all(p.offered and p.met == p.offered for p in (a, b)):
        return noise
    return min(noise, 1 / max(1, min(a.offered, b.offered)))
