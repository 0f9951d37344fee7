"""What a report speaks from: the profile, the sidecar beside it, and what of either is not there."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from autotune.profile import RECOMMENDED, Point, Profile, Setting
from autotune.profile.parts import StepPoint
from autotune.profiling.objective import Tails, worst_ratio
from autotune.profiling.points import Run, Stage
from autotune.profiling.simulator import PAIRED
from runtime.knobs import Knobs
from runtime.slo import SLO, share_met


class Failure(NamedTuple):
    """A trial that could not be measured."""

    stage: str
    trial: int
    cause: str


class MeasuredTrial(NamedTuple):
    """One setting tried once. ``number``: of the trial, -1 where it is not known; latencies in ms, None: nothing finished."""

    stage: Stage
    number: int
    label: str
    knobs: Knobs
    offered_rate: float
    attainment: float
    goodput: float
    throughput: float
    ttft_p99_ms: float | None
    tpot_p99_ms: float | None
    e2e_p99_ms: float | None
    e2e_mean_ms: float | None


class LatencyBound(NamedTuple):
    """A latency the SLO bounds: its name in the glossary, the field of a trial or point that holds its p99, the bound in ms."""

    name: str
    field: str
    bound: float

    def of(self, found: Tails) -> float | None:
        value: float | None = getattr(found, self.field)
        return value


@dataclass(frozen=True)
class Evidence:
    """A profile and the raw figures behind it. ``lacking``: in sentences, what was looked for and not found."""

    profile: Profile
    source: str
    runs: tuple[Run, ...] = ()
    steps: tuple[StepPoint, ...] = ()
    failures: tuple[Failure, ...] = ()
    lacking: tuple[str, ...] = ()

    @property
    def recommended(self) -> Setting:
        """The balanced setting, or the first there is."""
        settings = self.profile.settings
        return settings.get(RECOMMENDED) or next(iter(settings.values()))

    @property
    def simulated(self) -> bool:
        """Whether the choice rests on simulation alone: the run was stopped before anything was measured."""
        return self.recommended.point.stage == "simulation"

    @property
    def compared(self) -> list[Point]:
        """The points the choice was made from: one each of the same stage and rate as the recommended one."""
        chosen = self.recommended.point
        return [p for p in self.profile.points if p.stage == chosen.stage and math.isclose(p.rate, chosen.rate)]

    def trials(self, stage: Stage) -> list[MeasuredTrial]:
        """What the sampler proposed in ``stage``, in order, at the one rate most of it was tried at.

        That may be another rate than settings were compared at in the end. Without a sidecar: the profile's own points, of
        the simulated ones those that no other beats.
        """
        tried = [run for run in self.runs if run.stage == stage and run.trial >= 0]
        if tried:
            rate = Counter(run.score.rate for run in tried).most_common(1)[0][0]
            return sorted((trial_of(run) for run in tried if run.score.rate == rate), key=lambda t: t.number)
        if stage == "simulation":
            return self.candidates
        rate = self.recommended.point.rate
        return [_of_point(p) for p in self.profile.points if p.stage == stage and math.isclose(p.rate, rate)]

    @property
    def candidates(self) -> list[MeasuredTrial]:
        """Simulated settings that nothing beats, at the rate settings were compared at."""
        rate = self.recommended.point.rate
        return [_of_point(p) for p in self.profile.simulated if p.label != PAIRED and math.isclose(p.rate, rate)]

    def runs_of(self, point: Point) -> list[Run]:
        """The runs ``point`` was made from; none without a sidecar."""
        return [
            r
            for r in self.runs
            if r.stage == point.stage and r.knobs == point.knobs and math.isclose(r.score.rate, point.rate)
        ]

    def pairs(self) -> list[tuple[Point, Point]]:
        """(measured, simulated) of every validated setting that was simulated at the same rate, by the same arrivals if so."""
        found = []
        for p in self.profile.points:
            same = [q for q in self.profile.simulated if q.knobs == p.knobs and math.isclose(q.rate, p.rate)]
            if p.stage == "validation" and same:
                found.append((p, max(same, key=lambda q: (set(q.seeds) == set(p.seeds), q.label == PAIRED))))
        return found


def targets(slo: SLO) -> list[LatencyBound]:
    """What the SLO bounds, in the order of a request's life, but ITL, which profiles do not keep."""
    found = [("TTFT", "ttft_p99_ms", slo.ttft_ms), ("TPOT", "tpot_p99_ms", slo.tpot_ms)]
    found.append(("E2E", "e2e_p99_ms", slo.e2e_ms))
    return [LatencyBound(name, field, bound) for name, field, bound in found if bound is not None]


def worst_of(found: Tails, bounds: Sequence[LatencyBound]) -> float | None:
    """The p99 that is worst against its target, in units of the target; None where nothing finished."""
    ratio = worst_ratio(found, {one.field: one.bound for one in bounds})
    return ratio if math.isfinite(ratio) else None


def gather(profile: Profile, path: Path) -> Evidence:
    """``profile`` (read from ``path``) with what its sidecar holds; a sidecar that is not there or not its own is said so."""
    names = dict.fromkeys((Path(profile.points_file).name, f"{path.stem}.points.jsonl"))
    files = [path.parent / name for name in names if name]
    there = next((file for file in files if file.is_file()), None)
    if there is None:
        return Evidence(
            profile, path.name, lacking=(f"The file of raw runs, {files[0].name}, is not beside the profile.",)
        )
    try:
        lines = there.read_bytes().splitlines()
    except OSError as error:
        why = error.strerror or error
        return Evidence(profile, path.name, lacking=(f"The file of raw runs, {there.name}, cannot be read: {why}.",))
    runs, steps, failures, unread = _read(lines)
    mine = {(p.stage, p.knobs, round(p.rate, 6)) for p in profile.points}
    measured = {(r.stage, r.knobs, round(r.score.rate, 6)) for r in runs if r.stage != "simulation"}
    if measured and mine and not measured & mine:
        return Evidence(
            profile, path.name, lacking=(f"{there.name} holds the runs of another profile and was left alone.",)
        )
    lacking = []
    if unread:
        count, were = ("1 line", "was") if unread == 1 else (f"{unread} lines", "were")
        lacking.append(f"{count} of {there.name} could not be read and {were} left out.")
    return Evidence(profile, path.name, tuple(runs), tuple(steps), tuple(failures), tuple(lacking))


def _read(lines: Iterable[bytes]) -> tuple[list[Run], list[StepPoint], list[Failure], int]:
    """Runs, steps, failures, and how many lines are none of these."""
    runs: list[Run] = []
    steps: list[StepPoint] = []
    failures: list[Failure] = []
    unread = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            data: Any = json.loads(line.decode())
            if data.get("kind") == "step":
                steps.append(StepPoint.model_validate({k: v for k, v in data.items() if k != "kind"}))
            elif "failed" in data:
                failures.append(Failure(str(data["stage"]), int(data["trial"]), str(data["failed"])))
            else:
                run = Run.model_validate(data)
                _ = run.knobs  # raises of values that no knob has
                runs.append(run)
        except (ValidationError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            unread += 1
    return runs, steps, failures, unread


def trial_of(run: Run) -> MeasuredTrial:
    """One run as a trial."""
    s = run.score
    return MeasuredTrial(
        stage=run.stage,
        number=run.trial,
        label=run.label,
        knobs=run.knobs,
        offered_rate=s.offered_rate,
        attainment=share_met(s),
        goodput=s.goodput,
        throughput=s.throughput,
        ttft_p99_ms=s.ttft_ms.p99,
        tpot_p99_ms=s.tpot_ms.p99,
        e2e_p99_ms=s.e2e_ms.p99,
        e2e_mean_ms=s.e2e_mean_ms,
    )


class _OfClass(NamedTuple):
    ttft_p99_ms: float | None
    tpot_p99_ms: float | None
    e2e_p99_ms: float | None


def of_run(run: Run, request_class: str) -> Tails | None:
    """The p99s of one run, of the requests of that class if one is named; None if the run kept none of them."""
    if not request_class:
        return trial_of(run)
    seen = run.score.classes.get(request_class)
    if seen is None or seen.ttft_ms is None or seen.tpot_ms is None or seen.e2e_ms is None:
        return None
    return _OfClass(seen.ttft_ms.p99, seen.tpot_ms.p99, seen.e2e_ms.p99)


def _of_point(p: Point) -> MeasuredTrial:
    return MeasuredTrial(
        stage=p.stage,
        number=-1,
        label=p.label,
        knobs=p.knobs,
        offered_rate=p.offered_rate,
        attainment=share_met(p),
        goodput=p.goodput.mean,
        throughput=p.throughput.mean,
        ttft_p99_ms=p.ttft_p99_ms,
        tpot_p99_ms=p.tpot_p99_ms,
        e2e_p99_ms=p.e2e_p99_ms,
        e2e_mean_ms=p.e2e_mean_ms,
    )
