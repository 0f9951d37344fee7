"""Additive increase, multiplicative decrease of the token budget by step times: what servers without a step-time model do.

Formula. Once a decision, with s the mean time of the steps since the last one that held decodes and τ the tightest TPOT (or
ITL) target: s > τ → limit ← max(back·limit, decodes, floor); s ≤ τ and the limit binds → limit ← limit + more. The limit is
``token_budget``, and ``chunk_size`` is the same; a step is given the limit itself, the knob follows when it is off by more than
the guardrails' dead band, both in whole tiles (:mod:`.parts.tiles`). ``max_batch_size`` stays, ``max_wait_ms`` is 0.

Units: tokens; seconds. It goes by step time, not by end-to-end latency: that holds queueing, and a smaller batch when the
queue grows is a spiral. Regimes: ``decrease``, ``increase``, ``hold`` (in time, and nothing binds: a limit that does not bind
says nothing; or bounds hold the knob back), ``learning`` (no step yet), ``throughput`` (no target bounds a step).

Failure mode: it finds a limit by missing the target, again and again; from a start far too high it takes some 20 decisions, and
every decrease is one violated window. A mix of long and short prompts moves it all the time, for a step's time depends on more
than its tokens. Below the time of the decodes alone it is stuck at its floor.

Sources: Clipper (Crankshaw et al., NSDI 2017, 4.3.1: additive increase until the latency objective is exceeded, then a tenth
back); Netflix's concurrency-limits, ``AIMDLimit`` (grow only when half of the limit is in use; its backoff ratio, here ``back``,
is 0.9 and may be 0.5 up to 1). Step size and floor (``more`` and ``floor``, 64 tokens each) are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotune.control.controllers.parts.targets import step_target
from autotune.control.controllers.protocol import Proposal
from autotune.control.controllers.registry import register
from autotune.control.controllers.rival_parts.step_window import StepWindow
from autotune.control.controllers.rival_parts.tiles import in_whole_tiles, step_of_whole_tiles
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.tunable import TILE, SchedulerView

_DEAD_BAND = 0.1  # of the guardrails: the knob does not follow below that


@register
class AimdController:
    """See the module. ``more`` and ``floor`` are tokens."""

    name = "aimd"

    def __init__(
        self, slo: SLO, start: Knobs, *, back: float = 0.9, more: int = 64, floor: int = 64, tile: int = TILE
    ) -> None:
        if not 0.5 <= back < 1:
            raise ValueError(f"back is {back!r}; it must be at least 0.5 and below 1")
        for name, tokens in (("more", more), ("floor", floor)):
            if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
                raise ValueError(f"{name} is {tokens!r}; it must be a whole number of tokens from 1 on")
        self.start = start
        self._back, self._more, self._floor, self._tile = back, more, floor, tile
        self.limit = float(start.token_budget)
        self._target = step_target({"default": slo})
        self._window = StepWindow()
        self._wanted = self._in_force = 0  # token_budget as of the last decision: proposed, and in force before it

    def set_slos(self, slos: Mapping[str, SLO]) -> None:
        self._target = step_target(slos)

    def observe_step(self, record: StepRecord) -> None:
        self._window.add(record)

    def observe_request(self, record: RequestRecord) -> None:
        pass

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        del now
        window, target = self._window, self._target
        regime = "hold"
        evidence = window.evidence()
        took = f"steps take {1e3 * window.seconds:.1f} ms"
        if target == math.inf:
            self.limit, regime, cause = limits.token_budget, "throughput", "no target bounds a step: opening the budget"
        elif not len(window):
            regime, cause = (
                "learning" if not window.seen else "hold",
                "no step with decodes since the last decision: holding the limit",
            )
        elif window.seconds > target:
            self.limit = max(self._back * self.limit, window.decodes, self._floor)
            regime, cause = (
                "decrease",
                f"{took} (target {1e3 * target:g} ms): lowering the limit by {1 - self._back:.0%} to {self.limit:.0f} tokens",
            )
        elif self._held_back(knobs.token_budget):
            cause = f"{took} (target {1e3 * target:g} ms), and token_budget does not follow the limit: holding it"
        elif window.bound > 0 or 2 * window.tokens >= self.limit:
            self.limit += self._more
            regime, cause = (
                "increase",
                f"{took} (target {1e3 * target:g} ms): raising the limit by {self._more} to {self.limit:.0f} tokens",
            )
        else:
            cause = f"{took} (target {1e3 * target:g} ms), and the limit does not bind: holding it"
        self.limit = min(max(self.limit, 1), limits.token_budget)
        window.clear()
        budget = int(self.limit)
        wanted = self.start.with_(max_wait_ms=0.0, token_budget=budget, chunk_size=budget)
        wanted = in_whole_tiles(limits.clamp(wanted), knobs, limits, self._tile)
        self._wanted, self._in_force = wanted.token_budget, knobs.token_budget
        return Proposal(wanted, regime, cause, {**evidence, "limit": round(self.limit, 1)})

    def _held_back(self, in_force: int) -> bool:
        """Whether the knob has not moved though more than the dead band above it was proposed: bounds, a pin or an operator hold
        it. What the limit rises by meanwhile would have to be taken back before a decrease lowers anything."""
        return in_force == self._in_force and self._wanted - in_force > _DEAD_BAND * in_force

    def budget(self, view: SchedulerView) -> int:
        return step_of_whole_tiles(max(int(self.limit), view.decoding, 1), view, self._tile)
