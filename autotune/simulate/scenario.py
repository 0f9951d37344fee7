"""What is simulated: a machine, a load and an SLO; and the one way to measure a setting under them.

``autotune simulate``, ``capacity`` and the report have theirs from a profile; a profiling run
(:mod:`autotune.profiling.simulator`) from what it has found so far.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from autotune.control.attach import attach
from autotune.control.controllers.protocol import failure
from autotune.control.loop import Control
from autotune.cost.model import CostModel
from autotune.measure.evaluate import evaluate
from autotune.measure.score import Score
from autotune.profile import Profile
from autotune.profile.serving import serving_cost
from autotune.simulate.engine import SimulatedEngine
from autotune.workload import Workload, at_length_scale, parse_workload
from autotune.workload.options import plain_float
from runtime.errors import InputError
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.slo import SLO, RequestClass
from runtime.tunable import TILE, KvAllocation, tile_on

SPEEDS = ("compute", "bandwidth", "overhead")
_FASTEST = 1000  # times as fast, or as slow
WARM_UP = 0.1  # of the requests, before the window begins
_CLOSEST = 1e12  # requests/s: what is closer together comes at once


def with_warm_up(requests: int) -> int:
    """Requests that a simulation of so many draws at least: those of its warm-up, and the one that ends the window."""
    return math.ceil(WARM_UP * requests) + requests + 1


@dataclass(frozen=True)
class Scenario:
    """Everything a simulation needs but the setting, the rate and the seed. Plain data.

    ``classes`` have an SLO of their own. ``workload`` has its lengths scaled and capped; its own rate is not looked at.
    ``block_size``, ``prefix_cache``, ``growth_reserve``, ``kv_allocation`` and ``tile`` are those of the engine. Steps are slow
    at the same times under every setting (common random numbers).
    """

    cost: CostModel
    limits: KnobLimits
    kv_tokens: int
    block_size: int
    prefix_cache: bool
    workload: Workload
    slo: SLO
    growth_reserve: int = 1
    kv_allocation: KvAllocation = "whole"
    classes: tuple[RequestClass, ...] = ()
    tile: int = TILE

    @classmethod
    def of(
        cls,
        profile: Profile,
        name: str = "the profile",
        *,
        workload: str | Workload | None = None,
        slo: SLO | None = None,
        classes: Sequence[RequestClass] | None = None,
        speeds: dict[str, float] | None = None,
        kv_tokens: int | None = None,
    ) -> Self:
        """The machine, the load and the SLO of ``profile``, but for what is given.

        The profile's length scale and caps apply to any workload that brings no length scale of its own. ``speeds``: how many
        times as fast the machine is in :data:`SPEEDS`; ``kv_tokens``: rounded down to whole blocks. Raises
        :class:`InputError`, which calls the profile ``name``.
        """
        if profile.cost_model is None:
            raise InputError(
                f"{name} holds no cost model, so nothing can be simulated from it; make it anew with autotune profile"
            )
        cost = serving_cost(profile)
        if speeds:
            cost = cost.scaled(**speeds)
        facts, engine = profile.workload, profile.engine
        if isinstance(workload, str):
            workload = parse_workload(workload)
        load = load_of(profile, name) if workload is None else workload
        block = engine.kv_pool.block_size
        requested = engine.kv_pool.tokens if kv_tokens is None else kv_tokens
        pool = requested // block * block  # a pool is whole blocks
        longest = min(pool, profile.model.max_model_len)
        cap_output = min(facts.cap_output or longest, max(1, longest // 4))
        cap_prompt = min(facts.cap_prompt or longest, longest - cap_output)
        if cap_prompt < 1:
            least = block * math.ceil(2 / block)
            raise InputError(
                f"--kv-tokens is {requested}; it must be a whole number of at least {least}: blocks of {block} tokens that "
                "hold a prompt and its answer"
            )
        return cls(
            cost=cost,
            limits=engine.limits,
            kv_tokens=pool,
            block_size=block,
            prefix_cache=engine.prefix_cache,
            workload=at_length_scale(load, facts.length_scale).scaled(cap_prompt=cap_prompt, cap_output=cap_output),
            slo=slo or profile.slo,
            growth_reserve=engine.growth_reserve,
            kv_allocation=engine.kv_allocation,
            classes=profile.classes if classes is None else tuple(classes),
            tile=tile_on(profile.machine.kind),
        )

    def even(self) -> Self:
        """The same with steps that all take their mean, for comparing settings that differ little."""
        return replace(self, cost=self.cost.even())

    def with_ceilings_for(self, knobs: Knobs) -> Self:
        """The same with ceilings that ``knobs`` fit under: nothing has to be built for them here."""
        top = {spec.name: max(getattr(self.limits, spec.name), getattr(knobs, spec.name)) for spec in KNOBS}
        return replace(self, limits=KnobLimits(**top))

    @property
    def model(self) -> None:
        """It does not know which."""
        return None

    def start(self, knobs: Knobs | None = None, limits: KnobLimits | None = None, seed: int = 0) -> SimulatedEngine:
        """One at rest, under the scenario's limits unless others are given; its steps scatter as served ones did."""
        return SimulatedEngine(
            self.cost,
            kv_tokens=self.kv_tokens,
            limits=limits or self.limits,
            block_size=self.block_size,
            knobs=knobs,
            slo=self.slo,
            classes=self.classes,
            prefix_cache=self.prefix_cache,
            growth_reserve=self.growth_reserve,
            kv_allocation=self.kv_allocation,
            jitter=self.cost.facts.jitter,
            jitter_by_time=True,
            seed=seed,
            acceptance=self.workload.acceptances if self.workload.may_draft else 0.0,
            graphs=self.cost.facts.graphs,
            tile=self.tile,
        )

    def window(self, rate: float, seed: int, requests: int) -> tuple[float, float]:
        """(warm-up, window), s: as long as it takes ``requests`` to come, or as many as a finite workload has.

        It begins and ends between different times: requests of one time are in it together, so that it may hold more.
        """
        first = math.ceil(WARM_UP * requests)
        times: list[float] = []
        for arrival in self.workload.at_rate(rate).arrivals(seed, limit=sys.maxsize):
            enough = len(times) >= first + requests and arrival.time > times[-1]
            times.append(arrival.time)
            if enough:
                break
        else:  # all there are, and the time until another would have come
            if len(times) < 2:
                raise InputError(f"{self.workload.name} holds {len(times)} requests; a simulation needs at least 2")
            times.append(times[-1] + 1 / rate)
            first = int(len(times) * WARM_UP)
        while first and times[first - 1] == times[first]:
            first -= 1
        begin = 0.0 if first == 0 else (times[first - 1] + times[first]) / 2
        length = (times[-2] + times[-1]) / 2 - begin
        if length * _CLOSEST < len(times):
            raise InputError(
                f"{self.workload.name}: {len(times) - 1 - first} requests come within {length:.3g} s; give it more --requests"
            )
        return begin, length

    def mean_answer(self, rate: float, seed: int, requests: int) -> float:
        """Mean output tokens of the requests that :meth:`measure` counts."""
        begin, length = self.window(rate, seed, requests)
        arrivals = self.workload.at_rate(rate).arrivals(seed, duration=begin + length)
        return statistics.fmean(a.output_tokens for a in arrivals if a.time >= begin)

    def distinct(self, seeds: Sequence[int], requests: int) -> tuple[int, ...]:
        """Those of ``seeds`` that make a difference: the first alone where neither requests nor step times depend on a seed."""
        noisy = self.cost.facts.jitter is not None or self.workload.may_draft
        alike = not noisy and self.workload.alike_under(0, 1, limit=with_warm_up(requests))
        return tuple(seeds[:1] if alike else seeds)

    def repeated(self, requests: int) -> float:
        """Share of ``requests`` requests, and of those of their warm-up, that are the same under every seed."""
        return self.workload.repeated(limit=with_warm_up(requests))

    def measure(
        self,
        knobs: Knobs,
        rate: float,
        seed: int,
        *,
        requests: int,
        controller: str | None = None,
        log: Path | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Score:
        """``requests`` requests at a mean of ``rate`` under ``knobs``, or under ``controller``, which starts from them and whose
        decisions are appended to ``log``. Raises :class:`InputError` for a log that cannot be written; one that is a pipe whose
        reader has gone is no loss.

        One seed offers the same requests at every rate, only closer together or further apart; those of a bursty workload may
        come faster or slower than ``rate`` (``Score.offered_rate``). Where some are the same under every seed (:meth:`repeated`),
        ``seed`` draws the step-time noise, places inside the bins of a trace, and what else is in a mix: scores put together
        count ``once``. Raises :class:`~autotune.measure.evaluate.Interrupted` when ``stop`` says so.
        """
        warmup, window = self.window(rate, seed, requests)
        return self.measure_over(knobs, rate, seed, warmup, window, controller=controller, log=log, stop=stop)

    def measure_over(
        self,
        knobs: Knobs,
        rate: float,
        seed: int,
        warmup: float,
        window: float,
        *,
        scatter: int | None = None,
        controller: str | None = None,
        log: Path | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Score:
        """The same over a ``window`` of so many seconds behind a ``warmup``: the very arrivals that a live engine meets then.

        ``scatter``: the seed of the step-time noise, if it is not that of the arrivals.
        """
        engine = self.start(self.limits.clamp(knobs), seed=seed if scatter is None else scatter)
        with self._controlled(engine, controller, log) if controller else nullcontext() as attached:
            found = evaluate(
                engine, None, self.workload.at_rate(rate), self.slo,
                vocab_size=2, seed=seed, duration=window, warmup=warmup, stop=stop, classes=self.classes,
            )  # fmt: skip
        if attached is not None and (error := attached.failed) is not None:
            raise InputError(f"controller {controller} failed: {failure(attached.controller, error)}") from error
        lost = None if attached is None else attached.log_failure
        if lost is not None and not isinstance(lost, BrokenPipeError):
            raise InputError(f"log: {log} could not be written ({lost.strerror or lost})") from None
        return found.model_copy(update={"rate": rate})  # as it was requested, not as the scaled workload rounds it

    def _controlled(self, engine: SimulatedEngine, controller: str, log: Path | None) -> Control:
        try:
            return attach(engine, slo=self.slo, controller=controller, log=log)
        except ValueError as error:
            raise InputError(str(error)) from error


def load_of(profile: Profile, name: str = "the profile") -> Workload:
    """The workload of ``profile``, before it is scaled. Raises :class:`InputError`, which calls the profile ``name``."""
    try:
        return parse_workload(profile.workload.spec)
    except InputError as error:
        raise InputError(f"{name}: workload.spec: {error}; --workload names another") from None


def parse_speeds(text: str) -> dict[str, float]:
    """``compute=0.5,bandwidth=0.4`` as numbers. Raises :class:`InputError` that quotes what it could not read."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in SPEEDS:
            raise InputError(
                f'--scale: "{part.strip()}" is no speed; write compute=0.5,bandwidth=0.4, with names of {", ".join(SPEEDS)}'
            )
        if name in found:
            raise InputError(f"--scale: {name} is given twice")
        try:
            found[name] = plain_float(value)
        except ValueError:
            found[name] = math.nan
        if not 1 / _FASTEST <= found[name] <= _FASTEST:
            raise InputError(
                f'--scale: "{part.strip()}" must be a number from {1 / _FASTEST:g} to {_FASTEST:g} (0.5: half as fast)'
            )
    return found
