"""What share of requests meet TTFT, TPOT and E2E where steps hold so many prompt tokens, by a queue in front of the step model.

Formula. With t(n) the time of a step of D decodes beside n prompt tokens, c the most that it may hold, λ the request rate, p the
prompts and g the gaps of answers (samples of them):

- a prompt takes k = ⌈p/c⌉ steps where it is alone, and p/c of their time where others fill the rest: with ρ the share of the time
  that goes into steps with prompts, s = (1 − ρ)·k̄ + ρ·p̄/c steps on average, of n = p̄/s tokens, and ρ = λ·s·t(n), iterated.
  Above ``BUSY`` the queue grows, and the share ``BUSY``/ρ of the requests is served, at that ρ. Where late requests do not
  leave the queue and ρ is 1 or more, in the end none is in time;
- TTFT: the queue of an M/G/1 server with service times k·t(n) (s·t(n) beside others); its wait, W by Pollaczek and Khinchine,
  exceeds x with probability ρ·exp(−ρ·x/W);
- TPOT: a step without prompts leaves τ − t(0) of the target, one with them takes t(n) − t(0) more, so an answer of g gaps bears
  m = g·(τ − t(0))/(t(n) − t(0)) of the latter. It first meets those of the prompts behind it: with ρ, some, as long as the busy
  periods of the L requests that a departure leaves, exponential with mean L·s/(ρ(1 − ρ)), L = ρ + ρ²·(1 + v²)/(2(1 − ρ)). Then a
  Poisson number of busy periods of s·(1 + v²)/(1 − ρ) steps each (v: coefficient of variation of k);
- E2E: a TPOT of each answer's own, what the mean time until its first token leaves, divided by its gaps.

Units: tokens, seconds. Failure mode: arrivals burstier than Poisson, and stalls; for all sizes of a step alike, so what it says
of one is to be compared with what it says of another. With the true step times of 43 phases of ``benchmarks.controller``, the
size that it prefers serves 4% less than the best fixed one on average (``docs/log.md``). Source: M/G/1 from any book on queues,
such as Kleinrock, Queueing Systems I (1975); how queue and steps hang together is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from autotune.control.controllers.predictive import constants


class Requests(NamedTuple):
    """As they come: ``rate`` a second, with ``prompts``, tokens to compute of each, and answers of so many ``gaps``. ``stay``:
    whether they stay in the queue however late they are."""

    rate: float
    prompts: Sequence[float]
    gaps: Sequence[float]
    stay: bool = False


def attainment(
    seconds: Callable[[int], float],
    decodes: int,
    chunk: int,
    tpot: float,
    ttft: float,
    requests: Requests,
    e2e: float = math.inf,
) -> float:
    """The share of ``requests`` in time, where a step of so many ``decodes`` holds at most ``chunk`` prompt tokens (at least 1).

    ``seconds``: of a step of so many tokens, ``decodes`` of them decodes. Targets in seconds, inf where there is none.
    """
    rate, prompts, gaps, stay = requests
    alone = [math.ceil(prompt / chunk) for prompt in prompts]
    mean, mean_alone, busy = fmean(prompts), fmean(alone), 0.0
    for _ in range(4):
        per_prompt = (1 - busy) * mean_alone + busy * mean / chunk
        took = seconds(decodes + int(min(chunk, mean / per_prompt)))
        load = rate * per_prompt * took
        busy = min(constants.BUSY, load)
    if stay and load >= 1:
        return 0.0
    if not busy > 0:
        return 1.0  # nothing comes, or a step takes no time
    served = min(1.0, constants.BUSY / load)
    rate *= served
    idle_step = seconds(decodes) if decodes else 0.0
    varied = fmean(k * k for k in alone) / mean_alone**2  # 1 + v²
    services = [((1 - busy) * k + busy * p / chunk) * took for k, p in zip(alone, prompts, strict=True)]
    wait = rate * fmean(s * s for s in services) / (2 * (1 - busy))
    running = (busy * took + (1 - busy) * idle_step) / 2  # what is left of the step that a request comes upon
    late = fmean(_late(ttft - service - running, busy, wait) for service in services) if ttft < math.inf else 0.0
    slow, whole = 0.0, e2e - wait - fmean(services) - running
    if gaps and idle_step > 0 and took > min(tpot, whole / max(gaps)):
        gap = 1 / (rate * per_prompt + (1 - busy) / idle_step)
        behind = busy + busy * busy * varied / (2 * (1 - busy))
        first = behind * per_prompt / (busy * (1 - busy))
        each = max(1.0, per_prompt * varied / (1 - busy))
        often = rate * per_prompt * gap

        def too_slow(g: float) -> float:
            target = min(tpot, whole / g)
            left, longer = target - idle_step, took - idle_step
            if took <= target or left <= 0:
                return float(took > target)
            return _slow(g, g * left / longer, busy, first, min(each, g), often)

        slow = fmean(map(too_slow, gaps))
    return served * (1 - slow) * (1 - late)


def _slow(gaps: float, bears: float, busy: float, first: float, each: float, often: float) -> float:
    """The probability that an answer of so many gaps meets more steps with prompts than it ``bears``.

    ``busy``: that it meets some right away, then ``first`` on average; ``often``: how many come with a gap, in runs of ``each``.
    """
    at_once = busy * first * (1 - math.exp(-gaps / first))
    mean = often * max(0.0, gaps - at_once) / each  # runs that come later
    if mean > constants.RUNS:  # so many that they come to their mean
        return float(at_once + mean * each > bears)
    chance = math.exp(-mean)  # of none of them
    too_many = fewer = 0.0
    runs = 0
    while runs * each <= bears:
        too_many += chance * busy * math.exp(-(bears - runs * each) / first)
        fewer += chance
        runs += 1
        chance *= mean / runs
    return min(1.0, too_many + max(0.0, 1 - fewer))


def _late(left: float, busy: float, wait: float) -> float:
    """The probability that a queue with this mean wait takes more than what is ``left``."""
    if left <= 0:
        return 1.0
    return busy * math.exp(-left * busy / wait) if wait > 0 else 0.0
