"""What load a bench replays, and under which SLO: those of a profile, or found by a calibration on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune.engines import Engine
from autotune.profile import ModelFacts, Profile
from autotune.profiling.calibrate import draw_setup, request_alone
from autotune.profiling.setup import rounded
from autotune.profiling.steps import measure_steps
from autotune.workload import Workload, at_length_scale, cuts_in_words, named_rate, parse_workload
from runtime.errors import InputError
from runtime.slo import SLO, RequestClass

SHARE = 0.8
"""Offered load, in units of what a full engine serves, when no rate is given: high, and yet it can be served."""

CALIBRATE_S = 8.0
_OFF = 0.1  # relative difference of two rates that is said
_LOOKED_AT = 50  # requests, for whether a seed changes any


@dataclass(frozen=True)
class BenchLoad:
    """``workload`` is scaled to the machine and at its rate. ``slo_from`` and ``rate_from`` say who chose them.

    ``cuts``: how many requests are shorter than they were to be, in words; ``offered_rate``: requests/s in the turns planned,
    None before :meth:`planned`.
    """

    spec: str
    workload: Workload
    slo: SLO
    slo_from: str
    rate_from: str
    classes: tuple[RequestClass, ...] = ()
    cuts: str = ""
    offered_rate: float | None = None

    @property
    def repeated(self) -> bool:
        """Whether rounds hold the same requests, all of them or those of a trace in a mix."""
        return self.workload.repeated(limit=_LOOKED_AT) > 0

    def at(self, why: str = "") -> str:
        """``3 req/s``; where the turns offer another rate, ``3 req/s in the long run, 12 in these turns``. ``why``: the mean."""
        return f"{self.workload.rate:.3g} req/s{why}{self._in_these_turns}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What figures of these turns are read with, a clause each."""
        rates = f"requests come at {self.at()}" if self._in_these_turns else ""
        return tuple(clause for clause in (rates, self.cuts) if clause)

    @property
    def _in_these_turns(self) -> str:
        if self.offered_rate is None or abs(self.offered_rate / self.workload.rate - 1) <= _OFF:
            return ""
        return f" in the long run, {self.offered_rate:.3g} in these turns"

    def planned(self, seed: int, rounds: int, duration: float) -> BenchLoad:
        """The same that knows the rate of these turns: one that begins in a burst offers more than the workload's mean."""
        sent = sum(1 for number in range(rounds) for _ in self.workload.arrivals(seed + number, duration=duration))
        return replace(self, offered_rate=sent / (rounds * duration))


def of_profile(
    engine: Engine,
    model: ModelFacts,
    profile: Profile,
    spec: str | None,
    slo: SLO | None,
    rate: float | None,
    classes: Sequence[RequestClass] = (),
) -> BenchLoad:
    """The load that ``profile`` was made under, as far as it is not overridden, cut to what ``engine`` holds of a request."""
    facts = profile.workload
    longest = min(model.max_model_len, engine.facts.kv_tokens)
    cap_output = min(facts.cap_output or longest, max(1, longest // 4))
    whole = at_length_scale(parse_workload(spec or facts.spec), facts.length_scale)
    scaled = whole.scaled(cap_prompt=min(facts.cap_prompt or longest, longest - cap_output), cap_output=cap_output)
    if spec is None or spec.strip() == facts.spec:
        whole = whole.scaled(cap_prompt=facts.cap_prompt, cap_output=facts.cap_output)
    cuts = cuts_in_words(scaled, whole)
    chosen = rate or _own_rate(spec)
    return BenchLoad(
        spec=spec or facts.spec,
        workload=scaled.at_rate(chosen or facts.rate),
        slo=slo or profile.slo,
        slo_from="given" if slo else "the profile's",
        rate_from="given" if chosen else "the profile's",
        classes=tuple(classes) or profile.classes,
        cuts=f"{cuts}, the most that the profile and this engine leave room for" if cuts else "",
    )


def check_lasts(workload: Workload, seed: int, rounds: int, duration: float) -> None:
    """Raise :class:`InputError` where a trace has too few requests for a turn of ``duration`` seconds in one of the rounds, for
    the rest of the turn would count as time in which nothing was served."""
    if not workload.finite:
        return
    lasts = _shortest(workload, seed, rounds)
    if lasts < duration:
        lasts *= 1 - 1e-3  # of which four digits are printed
        slower = workload.rate * lasts / duration
        raise InputError(
            f"--duration is {duration:g} s, but {workload.name} lasts for {lasts:.4g} s at {workload.rate:.4g} requests/s; "
            f"take at most that, or a --rate of at most {slower:.4g}"
        )


def _shortest(workload: Workload, seed: int, rounds: int) -> float:
    """Seconds that a finite workload lasts for in the round in which it is over first."""
    return min(_lasts(workload, seed + number) for number in range(rounds))


def _lasts(workload: Workload, seed: int) -> float:
    """Seconds until the request after its last would come."""
    last = max((arrival.time for arrival in workload.arrivals(seed)), default=0.0)
    return last + 1 / workload.rate


def _own_rate(spec: str | None) -> float | None:
    return None if spec is None else named_rate(parse_workload(spec))


def calibrated(
    engine: Engine,
    model: ModelFacts,
    spec: str,
    slo: SLO | None,
    rate: float | None,
    seed: int,
    *,
    duration: float,
    rounds: int,
    stop: Callable[[], bool] | None = None,
    advance: Callable[[float, str], None] = lambda share, note: None,
    classes: Sequence[RequestClass] = (),
) -> BenchLoad:
    """Lengths, SLO and rate as ``autotune profile`` would scale them, but below what fills the engine, for turns of ``duration``
    seconds."""
    workload = parse_workload(spec)
    alone = request_alone(engine, model, seed=seed, stop=stop)
    measured = measure_steps(engine, model, budget_s=CALIBRATE_S, seed=seed, stop=stop, advance=advance)
    cost = measured.cost(measured.seconds).serving()
    setup = draw_setup(
        engine, model, workload, cost, alone, seed=seed, slo=slo, rate=None, window_s=duration, warmup_s=0.0, classes=classes
    )  # fmt: skip
    given = rate or _own_rate(spec)
    wanted, most = SHARE * setup.calibration.saturated_rate, setup.most_rate
    scaled = setup.apply(workload)
    if scaled.finite:
        most = min(most, scaled.rate * _shortest(scaled, seed, rounds) * (1 - 1e-3) / duration)
    cuts = cuts_in_words(scaled, replace(scaled, cap_prompt=workload.cap_prompt, cap_output=workload.cap_output))
    why = f"{SHARE:.0%} of what fills the engine"
    if wanted > most:
        why = f"the most that can be offered; {wanted:.3g} would be {why}"
    return BenchLoad(
        spec=spec,
        workload=scaled.at_rate(given or rounded(min(wanted, most))),
        slo=setup.slo,
        slo_from=setup.slo_from,
        classes=tuple(classes),
        rate_from="given" if given else why,
        cuts=f"{cuts}, the most that this engine leaves room for" if cuts else "",
    )
