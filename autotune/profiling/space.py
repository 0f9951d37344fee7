"""The search space: one range or one pinned value for each knob, and the settings worth trying first.

Made from ``KNOBS`` and the engine's limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal

from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from autotune.engines.defaults import OTHER_DEFAULTS, VLLM_DEFAULTS, VLLM_LABEL
from runtime.errors import InputError
from runtime.knobs import KNOBS, KnobLimits, Knobs, KnobSpec

SEARCHED: Mapping[str, tuple[float, float]] = {spec.name: spec.usual for spec in KNOBS}
"""Where each knob is searched unless ``--range`` says otherwise; the engine's limits cut it."""

WIDEST = KnobLimits(**{spec.name: spec.high for spec in KNOBS})  # type: ignore[arg-type]  # integers where it takes those
"""Of an engine whose ceilings are not known yet."""

NEAR_BEST = "near the best"

_AROUND_GUESS = (  # slots, budget and chunk over the calibration's guess; the chunk is cut to the budget
    (1, 1, 1), (2, 1, 1), (0.5, 1, 1), (1, 2, 1), (1, 0.5, 0.5), (2, 2, 2), (4, 2, 0.5), (2, 4, 4), (4, 4, 1), (4, 1, 0.5),
    (0.5, 0.5, 0.5), (1, 4, 1), (8, 8, 8), (4, 8, 2),
)  # fmt: skip
_SMALL_STEPS = (
    (1, 0.84, 0.84), (1, 1.19, 1.19), (1, 0.7, 0.7), (1, 1.41, 1.41), (1.5, 1, 1), (0.67, 1, 1), (1, 1, 0.6), (1, 1, 0.3),
    (1, 1, 1.6),
)  # fmt: skip

_COARSE = 1.0
"""Width of a range from which on its values are tenths."""

_RANGE = re.compile(r"^(?P<low>[^:]*):(?P<high>[^:]*)$")


@dataclass(frozen=True)
class SearchSpace:
    """``pinned``: name → value; ``ranges``: name → (low, high). Together they name every knob once.

    ``stock``: vLLM's defaults, the baseline; of vLLM's own engine those that it would start with here.
    """

    pinned: Mapping[str, float]
    ranges: Mapping[str, tuple[float, float]]
    limits: KnobLimits
    ours: frozenset[str] = frozenset()  # ranges nobody requested, free to be narrowed
    stock: Knobs = VLLM_DEFAULTS

    def narrowed(self, fitted: Knobs) -> SearchSpace:
        """Our own logarithmic ranges cut to an eighth … sixteen times of the calibration's guess: the rest is surely worse."""
        cut = dict(self.ranges)
        for spec in KNOBS:
            if spec.name in self.ours and spec.log:
                low, high = self.ranges[spec.name]
                guess = min(max(getattr(fitted, spec.name), low), high)
                cut[spec.name] = (max(low, _as(spec.name, guess / 8)), min(high, _as(spec.name, guess * 16)))
        return replace(self, ranges=cut)

    def distributions(self) -> dict[str, BaseDistribution]:
        made: dict[str, BaseDistribution] = {}
        for spec in KNOBS:
            if spec.name not in self.ranges:
                continue
            low, high = self.ranges[spec.name]
            if spec.integer:
                made[spec.name] = IntDistribution(int(low), int(high), log=spec.log)
            else:
                step = (
                    None if spec.log else float((Decimal(str(high)) - Decimal(str(low))) / 10)
                )  # 0 ms must be a likely draw
                made[spec.name] = FloatDistribution(low, high, log=spec.log, step=step)
        return made

    def knobs(self, params: Mapping[str, float]) -> Knobs:
        """Knobs of a trial: round numbers, as far as pins and ranges have them. A chunk longer than the budget acts like the
        budget, so it is written as that, where it was not asked for.

        A knob that the trial is older than is at its default.
        """
        values = {**self.pinned, **params}
        for spec in KNOBS:
            if spec.name not in values and not spec.required:
                continue
            if spec.name not in self.ranges:
                continue
            low, high = self.ranges[spec.name]
            if not spec.integer:
                fine = high - low < _COARSE  # or tenths would be most of the range
                values[spec.name] = min(max(round(values[spec.name], 4 if fine else 1), low), high)
            elif spec.log:
                values[spec.name] = int(min(max(round_number(values[spec.name]), low), high))
        if "chunk_size" not in self.pinned:
            shortest = 0 if "chunk_size" in self.ours else int(self.ranges["chunk_size"][0])
            values["chunk_size"] = max(min(values["chunk_size"], values["token_budget"]), shortest)
        return Knobs(**values)  # type: ignore[arg-type]  # integers for integer knobs, checked by Knobs

    def params(self, knobs: Knobs) -> dict[str, float]:
        """The nearest point of the space: pinned knobs dropped, the others moved into their range."""
        values = knobs.as_dict()
        return {name: _as(name, min(max(values[name], low), high)) for name, (low, high) in self.ranges.items()}

    def allows(self, knobs: Knobs) -> bool:
        """Whether ``knobs`` keep to what was requested: pins, and ranges that are not our own."""
        values = knobs.as_dict()
        return all(values[name] == value for name, value in self.pinned.items() if name not in self.ours) and all(
            low <= values[name] <= high for name, (low, high) in self.ranges.items() if name not in self.ours
        )

    @property
    def baseline(self) -> Knobs:
        """What settings are compared with: :attr:`stock` as the engine's ceilings allow."""
        return self.limits.clamp(self.stock)

    def as_dict(self) -> dict[str, object]:
        """For the study's identity."""
        return {
            "pinned": dict(self.pinned),
            "ranges": {name: list(bounds) for name, bounds in self.ranges.items()},
            "limits": self.limits.as_dict(),
        }


def whole_space(limits: KnobLimits) -> SearchSpace:
    """Everything that ``limits`` allow, also where we would not search unasked."""
    ranges = {name: (low, float(getattr(limits, name))) for name, (low, _) in SEARCHED.items()}
    free = {name: bounds for name, bounds in ranges.items() if bounds[0] < bounds[1]}
    return SearchSpace({name: high for name, (_, high) in ranges.items() if name not in free}, free, limits)


def round_number(value: float) -> int:
    """The nearest of 4, 5, 6 and 7 times a power of two; below 8 the nearest whole number.

    Hardware computes whole tiles of rows and pads batches to a ladder of sizes: of numbers a few percent apart the round one
    is no slower, and often quicker by a tile.
    """
    unit = 1 << max(0, math.floor(math.log2(max(1.0, value))) - 2)
    return round(value / unit) * unit


def make_space(limits: KnobLimits, pins: Iterable[str] = (), ranges: Iterable[str] = ()) -> SearchSpace:
    """The space from ``--pin name=value`` and ``--range name=low:high``. Raises :class:`InputError`, one line."""
    pinned: dict[str, float] = {}
    chosen: dict[str, tuple[float, float]] = {}
    ours: set[str] = set()
    for text in pins:
        spec, value = _assignment("--pin", text, "token_budget=512")
        _once(spec, "--pin", pinned, chosen)
        pinned[spec.name] = _number("--pin", spec, value, limits)
    for text in ranges:
        spec, value = _assignment("--range", text, "token_budget=64:2048")
        match = _RANGE.match(value)
        if match is None:
            raise InputError(
                f'--range: "{text}" is not a range; write {spec.name}=LOW:HIGH, such as token_budget=64:2048'
            )
        _once(spec, "--range", pinned, chosen)
        low, high = (_number("--range", spec, match[end], limits) for end in ("low", "high"))
        if low >= high:
            raise InputError(f"--range: {spec.name}={value}: {low:g} is not below {high:g}; use --pin for one value")
        if spec.log and low <= 0:
            raise InputError(f"--range: {spec.name}={value}: it must start above 0")
        chosen[spec.name] = (low, high)
    for spec in KNOBS:
        if spec.name in pinned or spec.name in chosen:
            continue
        low, high = SEARCHED[spec.name]
        top = min(high, getattr(limits, spec.name))
        if not spec.searched:
            pinned[spec.name] = getattr(limits.clamp(Knobs()), spec.name)
        elif top > low:
            chosen[spec.name] = (low, top)
            ours.add(spec.name)
        else:
            pinned[spec.name] = _as(spec.name, top)
    if not chosen:
        raise InputError("--pin: every knob is pinned, so there is nothing to search; leave one free")
    ordered = {spec.name: chosen[spec.name] for spec in KNOBS if spec.name in chosen}
    return SearchSpace(pinned, ordered, limits, frozenset(ours))


def starting_points(space: SearchSpace, fitted: Knobs) -> list[tuple[str, Knobs]]:
    """What to try before the sampler proposes anything: the defaults of other engines, then ``fitted``, half and double.

    Defaults are clamped to the engine's limits and otherwise tried as they are, outside pins and ranges too: they are
    baselines, not candidates (:func:`is_baseline`).
    """
    points: list[tuple[str, Knobs]] = []
    for label, knobs in {VLLM_LABEL: space.stock, **OTHER_DEFAULTS}.items():
        clamped = space.limits.clamp(knobs)
        if all(clamped != known for _, known in points):
            points.append((label, clamped))
    for label, factor in (("fitted", 1.0), ("fitted × 2", 2.0), ("fitted / 2", 0.5)):
        scaled = {
            spec.name: _as(spec.name, value * factor) if spec.log else value
            for spec in KNOBS
            for value in [getattr(fitted, spec.name)]
        }
        knobs = space.knobs(space.params(Knobs(**{n: _bounded(n, v) for n, v in scaled.items()})))  # type: ignore[arg-type]  # bounded
        if all(knobs != known for _, known in points):
            points.append((label, knobs))
    return points


def around_guess(space: SearchSpace, fitted: Knobs) -> list[Knobs]:
    """A few settings spread around the calibration's guess, all inside the space."""
    return _scaled(space, fitted, _AROUND_GUESS)


def neighbours(space: SearchSpace, knobs: Knobs) -> list[Knobs]:
    """Settings a small step away from ``knobs``, inside the space."""
    return _scaled(space, knobs, _SMALL_STEPS)


def _scaled(space: SearchSpace, knobs: Knobs, factors: Iterable[tuple[float, float, float]]) -> list[Knobs]:
    found = []
    for slots, budget, chunk in factors:
        by = {"max_batch_size": slots, "token_budget": budget, "chunk_size": chunk}
        values = {s.name: min(max(getattr(knobs, s.name) * by.get(s.name, 1.0), s.low), s.high) for s in KNOBS}
        whole = {s.name: int(values[s.name]) if s.integer else values[s.name] for s in KNOBS}
        found.append(space.knobs(space.params(Knobs(**whole))))
    return list(dict.fromkeys(found))


ALIKE = 1.2
"""Two settings whose logarithmic knobs all lie within this ratio are not worth two validations."""


def alike(a: Knobs, b: Knobs) -> bool:
    """Whether two settings are all but the same: see :data:`ALIKE`."""
    for spec in KNOBS:
        x, y = getattr(a, spec.name), getattr(b, spec.name)
        if spec.log and not 1 / ALIKE <= x / y <= ALIKE:
            return False
        if not spec.log and abs(x - y) > 1:
            return False
    return True


def is_baseline(label: str) -> bool:
    """Whether a starting point of this label is another engine's default."""
    return label == VLLM_LABEL or label in OTHER_DEFAULTS


def _spec(name: str, option: str) -> KnobSpec:
    for spec in KNOBS:
        if spec.name == name:
            return spec
    raise InputError(f"{option}: {name} is not a knob; the knobs are {', '.join(s.name for s in KNOBS)}")


def _assignment(option: str, text: str, example: str) -> tuple[KnobSpec, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f'{option}: "{text}" has no value; write {example}')
    return _spec(name.strip(), option), value.strip()


def _once(spec: KnobSpec, option: str, *given: Mapping[str, object]) -> None:
    if any(spec.name in values for values in given):
        raise InputError(f"{option}: {spec.name} is given twice")


def _number(option: str, spec: KnobSpec, text: str, limits: KnobLimits) -> float:
    try:
        return spec.read(text, getattr(limits, spec.name), where=f"{option}: ")
    except ValueError as error:
        raise InputError(str(error)) from None


def _as(name: str, value: float) -> float:
    return int(value) if _spec(name, "").integer else float(value)


def _bounded(name: str, value: float) -> float:
    spec = _spec(name, "")
    return min(max(value, spec.low), spec.high)
