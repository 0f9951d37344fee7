"""What is said of a server's traffic, and of settings that were simulated under it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from autotune.advise.traffic import Traffic
from autotune.export import ExportTarget, Fit, export
from autotune.profile import PURPOSES, RECOMMENDED, Profile
from autotune.profile.parts import Point
from runtime.knobs import Knobs
from runtime.slo import SLO, RequestClass, attained

_OFF = 1.3  # times that a simulated median may lie outside the bucket of the live one before the profile is doubted
_CACHED = 0.1  # of prompt tokens found in the prefix cache: more makes the server faster than it is simulated
_LENGTHS = 0.1  # relative difference of mean lengths that makes other requests of them
_WORTH = 0.02  # of goodput: less is no reason to restart a server


def live(traffic: Traffic, slo: SLO) -> Iterator[str]:
    """What the server did, a line each."""
    known = traffic.dispersion is not None
    bursts = f", dispersion {traffic.dispersion:.2g}" if known else ", too few to tell bursts"
    preempted = f", {traffic.preemptions:.0f} preempted" if traffic.preemptions else ""
    yield (
        f"live: {traffic.rate:.3g} requests/s{bursts}; prompts {traffic.prompt.mean:.0f}, outputs {traffic.output.mean:.0f} "
        f"tokens on average; {traffic.running:.1f} running, {traffic.waiting:.1f} waiting{preempted}"
    )
    if traffic.engines > 1:
        yield f"live: {traffic.engines} engines share them; one is simulated, with {1 / traffic.engines:.0%} of the requests"
    found = traffic.attainment(slo)
    each = [f"{name.upper()} within {slo.targets_ms[name]:g} ms: {share}" for name, share in found.items()]
    yield f"live: of {traffic.ended:.0f} requests, " + (
        "; ".join(each) if each else "the metrics tell of no target of the SLO"
    )


def cautions(traffic: Traffic, now: Point, lengths: tuple[float, float], *, elsewhere: str) -> Iterator[str]:
    """Why the simulation may not be of this server.

    ``lengths``: means of the prompts and outputs simulated, in tokens. ``elsewhere``: the engine that the profile is of, if it is
    another one.
    """
    if elsewhere:
        yield f"warning: the profile was measured on {elsewhere}, which takes another time for a step"
    for name, histogram, simulated in (
        ("TPOT", traffic.tpot, now.tpot_p50_ms),
        ("TTFT", traffic.ttft, now.ttft_p50_ms),
    ):
        low, high = (1e3 * bound for bound in histogram.bucket(0.5))
        if math.isnan(low):
            yield f"warning: the server's metrics do not tell {name}: the profile was not checked by it"
            continue
        if not simulated or low / _OFF <= simulated <= high * _OFF:
            continue
        yield (
            f"warning: under the settings it has, {name} p50 is {simulated:.3g} ms simulated and {low:.3g} to {high:.3g} ms "
            "live: the profile is of another machine or model, or --now is not what the server has"
        )
    for name, mean, simulated in zip(
        ("prompts", "outputs"), (traffic.prompt.mean, traffic.output.mean), lengths, strict=True
    ):
        if abs(simulated / mean - 1) > _LENGTHS:
            yield f"warning: {name} of {simulated:.0f} tokens on average were simulated, and they are {mean:.0f} live"
    if traffic.cached > _CACHED:
        yield (
            f"warning: {traffic.cached:.0%} of the prompt tokens were in the server's prefix cache, and none are when it is "
            "simulated: it is faster than that"
        )


def without_counterpart(profile: Profile, target: ExportTarget) -> dict[str, list[str]]:
    """By purpose, the knobs that the server cannot be started with: exporting the setting drops them."""
    return {
        str(purpose): [
            entry.name
            for entry in export(profile, target, purpose=purpose, allow_lossy=True).entries
            if entry.lossy and entry.fit is Fit.UNSUPPORTED and entry.name in target.knobs
        ]
        for purpose in profile.settings
    }


def startable(profile: Profile, dropped: Mapping[str, Sequence[str]]) -> dict[str, Knobs]:
    """The settings by purpose, with the knobs ``dropped`` at their defaults, where they do nothing."""
    stock = Knobs()
    return {
        str(purpose): setting.knobs.with_(**{name: getattr(stock, name) for name in dropped[purpose]})
        for purpose, setting in profile.settings.items()
    }


def left_out(dropped: Mapping[str, Sequence[str]], target: ExportTarget) -> Iterator[str]:
    """That settings are simulated without knobs that the profile measured, and why."""
    for purpose, names in dropped.items():
        for name in names:
            yield f"note: {purpose} is simulated without {name}: {target.knobs[name].said}"


def advice(
    points: Sequence[Point], slo: SLO, classes: Sequence[RequestClass], command: Callable[[str], str]
) -> Iterator[str]:
    """What to do: a setting that meets the SLO goes before one that does not, then the one that serves more within it.

    The first of ``points`` is what the server has. ``command``: the one that writes the setting of a purpose for it.
    """
    if not any(point.goodput.mean for point in points):
        yield "No setting serves a request of this traffic within the SLO, simulated."
        return
    now = points[0]
    meets = {id(point): attained(point, slo, classes) for point in points}
    best = max(points, key=lambda point: (meets[id(point)], point.goodput.mean))
    gain = best.goodput.mean / now.goodput.mean - 1 if now.goodput.mean else math.inf
    if best is now or (gain < _WORTH and (meets[id(now)] or not meets[id(best)])):
        yield f"Keep the settings it has: no other serves {_WORTH:.0%} more of this traffic within the SLO, simulated."
        return
    if not meets[id(now)] and meets[id(best)]:
        why = "it meets the SLO, and the settings it has do not"
    elif math.isfinite(gain):
        why = f"{gain:.0%} more requests within the SLO than with the settings it has"
    else:
        why = "with the settings it has no request is within the SLO"
    yield f"At its next start, {best.label}: {why}, simulated."
    purpose = best.label.partition(",")[0]  # one setting may be that of several purposes, or of all
    yield f"  {command(purpose if purpose in PURPOSES else RECOMMENDED)}"
