"""How many tokens to draft: as many as bring more tokens a second than they take.

Formula. With k drafts behind each decode that has any, a the probability that a drafted token is right, s the share of decodes
that have drafts, and t(D, C, n) the learned time of a step of D decodes reading C tokens beside n further tokens, a step yields
D·(1 + s·(a + a² + … + aᵏ)) tokens in t(D, C, s·D·k). While memory is what a step waits for, further tokens take no time and k
rises; once they are what it computes, k falls, at last to 0. A step is taken to a neighbouring k, and only for a gain of 2%. From
0 a single draft is tried again after a minute, for nothing is learned without drafts.

a follows from the share r of drafted tokens that were right: r = (a + … + aᵏ) / k for the k in force, as tokens behind a wrong
one count as wrong. Units: tokens and seconds. Failure mode: sequences that differ much in how well they can be guessed; a is then
a mean, which is too low for long drafts. Source: the speed-up of speculative decoding, Leviathan et al. (ICML 2023), with a
measured step time in place of a constant.
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.control.controllers.predictive import constants
from runtime.records import StepRecord


class Drafting:
    """``each``: the ``draft_tokens`` in force, which whoever decides says before."""

    def __init__(self, each: int) -> None:
        self.each = each
        self._drafted = self._accepted = 0.0  # decaying sums
        self._decodes = self._drafted_alone = 0.0  # of steps without prompts, which leave room for drafts
        self._stopped = 0.0  # when it last went to 0

    def step(self, record: StepRecord) -> None:
        if not self.each:
            return
        if record.drafted:
            self._drafted += record.drafted - constants.MEMORY * self._drafted
            self._accepted += record.accepted - constants.MEMORY * self._accepted
        if record.decodes and not record.prefill_tokens:
            self._decodes += record.decodes - constants.MEMORY * self._decodes
            self._drafted_alone += record.drafted - constants.MEMORY * self._drafted_alone

    @property
    def right(self) -> float:
        """The share of drafted tokens that were right lately."""
        return self._accepted / self._drafted if self._drafted else 0.0

    def choose(self, now: float, top: int, decodes: int, seconds: Callable[[int], float]) -> tuple[int, str]:
        """``draft_tokens`` from now on, at most ``top``, and why. ``seconds``: of a usual step of ``decodes`` decodes beside so
        many further tokens, as predicted."""
        each = min(self.each, top)
        if not each:
            if not top or now - self._stopped < constants.AGAIN_S:
                return 0, "no drafts: they took longer than they brought"
            self._drafted = self._accepted = self._decodes = self._drafted_alone = 0.0
            return 1, "drafts 1: tried again"
        if self._drafted < constants.DRAFTED or not self._decodes:
            return each, f"drafts {each}: too few yet to tell"
        probability = probability_of(self.right, each)
        share = min(1.0, self._drafted_alone / (self._decodes * each))

        def rate(k: int) -> float:
            tokens = decodes * (1 + share * sum(probability**i for i in range(1, k + 1)))
            return tokens / max(seconds(round(share * decodes * k)), 1e-9)

        stride = 1 + each // 8  # beyond the guardrails' dead band
        fewer, more, here = max(0, each - stride), min(top, each + stride), rate(each)
        known = f"{self.right:.0%} of drafted tokens are right"
        if rate(more) > constants.WORTH * here:
            return more, f"drafts {more}: {known}, and steps have time for more (memory-bound)"
        if rate(fewer) > constants.WORTH * here:
            if not fewer:
                self._stopped = now
            return fewer, f"drafts {fewer}: {known}, and they take longer than they bring (compute-bound)"
        return each, f"drafts {each}: {known}"


def probability_of(right: float, count: int) -> float:
    """The probability a of a single token for which the mean of a, a², …, a^``count`` is ``right``, from 0 to 1."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, count + 1)) / count < right:
            low = middle
        else:
            high = middle
    return (low + high) / 2
