"""The knobs in force, their ceilings, and what each call may make of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from runtime.knobs import KnobLimits, Knobs
from runtime.tunable import SchedulerView, StepPolicy

log = logging.getLogger(__name__)

BATCHER_LIMITS = KnobLimits(max_batch_size=4096, max_wait_ms=10000, token_budget=1048576, chunk_size=1048576)
"""Ceilings unless others are given: wide, for sizes are learned."""


class Settings:
    """(epoch, knobs) as one reference, swapped whole. ``set_knobs`` may be called from any thread."""

    def __init__(self, knobs: Knobs | None, limits: KnobLimits | None) -> None:
        self.limits = limits or BATCHER_LIMITS
        self.effective_limits = self.limits
        self._wanted = self.limits.check(knobs) if knobs is not None else self.limits.clamp(Knobs())
        self.current = (0, self._wanted)
        self.policy: StepPolicy | None = None
        self._turning = threading.Lock()  # so that no two settings get one epoch

    def set_knobs(self, knobs: Knobs) -> int:
        """Put ``knobs`` in force from the next call on; returns the epoch, which grows only if something changed."""
        with self._turning:
            self._wanted = self.limits.check(knobs)
            return self._turn()

    def limit(self, ceilings: KnobLimits) -> None:
        """Keep the knobs below ``ceilings``; when these rise again, so do the knobs, up to what was last set."""
        with self._turning:
            self.effective_limits = ceilings
            self._turn()

    def _turn(self) -> int:
        knobs = self.effective_limits.clamp(self._wanted)
        epoch, current = self.current
        if knobs != current:
            self.current = (epoch + 1, knobs)
        return self.current[0]

    def for_call(self, view: Callable[[], SchedulerView]) -> Knobs:
        """The knobs, with the budget that a step policy gives this call."""
        knobs, policy = self.current[1], self.policy
        if policy is None:
            return knobs
        try:
            budget = max(1, int(policy.budget(view())))
        except Exception:
            log.exception("the step policy failed and has been taken off; the knobs alone hold now")
            if self.policy is policy:  # else another has been set meanwhile
                self.policy = None
            return knobs
        return knobs if budget >= knobs.token_budget else knobs.with_(token_budget=budget)
