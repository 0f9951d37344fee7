"""What is said of a server's traffic, and of settings that were simulated under it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autotune.advise.traffic import Traffic
from autotune.profile.parts import Point
from runtime.slo import SLO

_OFF = 1.3  # times that a simulated median may differ from the live one before the profile is doubted
_WORTH = 0.02  # of goodput: less is no reason to restart a server


def live(traffic: Traffic, slo: SLO) -> Iterator[str]:
    """What the server did, a line each."""
    bursts = "" if traffic.dispersion is None else f", dispersion {traffic.dispersion:.2g}"
    preempted = f", {traffic.preemptions:.0f} preempted" if traffic.preemptions else ""
    yield (
        f"live: {traffic.rate:.3g} requests/s{bursts}; prompts {traffic.prompt.mean:.0f}, outputs {traffic.output.mean:.0f} "
        f"tokens on average; {traffic.running:.1f} running, {traffic.waiting:.1f} waiting{preempted}"
    )
    found = traffic.attainment(slo)
    each = [f"{name.upper()} within {slo.targets_ms[name]:g} ms: {share}" for name, share in found.items()]
    yield f"live: of {traffic.ended:.0f} requests, " + (
        "; ".join(each) if each else "the metrics tell of no target of the SLO"
    )


def cautions(traffic: Traffic, now: Point, *, elsewhere: str) -> Iterator[str]:
    """Why the simulation may not be of this server. ``elsewhere``: the engine that the profile is of, if it is another one."""
    if elsewhere:
        yield f"warning: the profile was measured on {elsewhere}, which takes another time for a step"
    for name, histogram, simulated in (
        ("TPOT", traffic.tpot, now.tpot_p50_ms),
        ("TTFT", traffic.ttft, now.ttft_p50_ms),
    ):
        median = 1e3 * histogram.quantile(0.5)
        if not simulated or math.isnan(median) or 1 / _OFF <= simulated / max(median, 1e-9) <= _OFF:
            continue
        yield (
            f"warning: under the settings it has, {name} p50 is {simulated:.3g} ms simulated and {median:.3g} ms live: the "
            "profile is of another machine or model, or --now is not what the server has"
        )


def advice(points: Sequence[Point], export: str) -> Iterator[str]:
    """What to do; the first of ``points`` is what the server has. ``export``: the command that writes a setting for it."""
    now, best = points[0], max(points, key=lambda point: point.goodput.mean)
    gain = best.goodput.mean / now.goodput.mean - 1 if now.goodput.mean else math.inf
    if best is now or gain < _WORTH:
        yield "Keep the settings it has: no other serves more of this traffic within the SLO, simulated."
        return
    more = f"{gain:.0%} more" if math.isfinite(gain) else "what the others do not: any"
    yield f"At its next start, {best.label}: {more} requests within the SLO than with the settings it has, simulated."
    yield f"  {export.format(best.label.partition(',')[0])}"  # one setting may be that of several purposes
