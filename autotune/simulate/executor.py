"""Runs plans by asking a cost model how long they take."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from typing import Final, cast

from autotune.profile.parts import JitterFacts
from autotune.simulate.drafts import Acceptances, check_acceptances, right
from autotune.simulate.jitter import FACTORS, SlowStretches, jitter_factors
from runtime.llm.plan import StepPlan, StepResult
from runtime.request import Sequence
from runtime.step_model import StepFeatures, StepModel

PredictRun = Callable[[int, int, int], list[float]]
"""``predict_run(decodes, context, count)``: seconds of ``count`` decode steps, the context growing by ``decodes`` after each."""

FASTEST: Final = 0.3  # of the predicted time: noise never makes a step faster than that
_USUAL: Final = StepFeatures(8, 2048, 128, 128, 128 * 129 // 2, 1)
"""A step that takes about as long as one factor of jitter by time lasts."""
_SHORTEST: Final = 1e-9  # s, for a cost model by which it takes none
_MOST_AT_ONCE: Final = FACTORS  # steps predicted together


class CostExecutor:
    """An :class:`~runtime.llm.plan.Executor` whose steps take what ``cost`` predicts, and nothing of the host's time.

    A plan that stands for many decode steps is run until the first of them that ends at or after ``until``. A model with
    ``predict_run`` is asked for such a run at once; it must give what as many calls of ``predict`` would, to the last bit.
    ``noise`` is the deviation of a factor around 1, drawn anew for each step, in order, so that runs of steps and single
    steps are alike; it makes no step faster than :data:`FASTEST` of what it would be. ``jitter``: how step times scatter,
    measured; on top of the noise. It is drawn by the number of a step, or, ``by_time``, by when it is computed: then slow
    stretches come at the same times whatever is run, and settings that make other steps can be compared. ``acceptance``: the
    probability that a drafted token is right, of all requests or by class (:mod:`autotune.simulate.drafts`).
    """

    verifies_drafts = True

    def __init__(
        self,
        cost: StepModel,
        *,
        noise: float = 0.0,
        jitter: JitterFacts | None = None,
        seed: int = 0,
        by_time: bool = False,
        acceptance: Acceptances = 0.0,
    ) -> None:
        if not (math.isfinite(noise) and 0 <= noise < 1):
            raise ValueError(f"noise is {noise}; it must be at least 0 and below 1 (0.03 is 3%)")
        if noise and by_time:
            raise ValueError(f"noise is {noise}; it must be 0 with by_time, which is for jitter alone")
        check_acceptances(acceptance)
        self.cost = cost
        self.noise = noise
        self.acceptance = acceptance
        self._dice = random.Random(seed)
        self._stretches: SlowStretches | None = None
        self._factors: tuple[float, ...] = ()
        if jitter is not None and by_time:
            self._stretches = SlowStretches(jitter, seed, max(cost.predict(_USUAL), _SHORTEST))
        elif jitter is not None:
            self._factors = 2 * jitter_factors(jitter, seed)  # so that any run of them is a slice
        self._step = 0  # which of them is the next
        self._predict_run = cast("PredictRun", getattr(cost, "predict_run", self._one_by_one))

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        if plan.repeat > 1 and now < until:
            ends = self._ends(plan.n_decode, plan.decode_context, plan.repeat, now, until)
            self._step = (self._step + len(ends)) % FACTORS
            return StepResult(ends)
        seconds = self.cost.predict(StepFeatures.of_plan(plan))
        if self._stretches is not None:
            end = self._stretches.end(now, seconds)
        else:
            if self._factors:
                seconds *= self._factors[self._step]
                self._step = (self._step + 1) % FACTORS
            end = now + (self._noisy(seconds) if self.noise else seconds)
        if plan.drafts:
            accepted = [(draft.sequence, right(draft, self.acceptance)) for draft in plan.drafts]
            return StepResult((end,), accepted=accepted)
        return StepResult((end,))

    def release(self, sequence: Sequence) -> None:
        """Nothing is kept for a sequence."""

    def _ends(self, decodes: int, context: int, left: int, now: float, until: float) -> list[float]:
        """End times of the coming decode steps, up to ``left``, the last the first that is not before ``until``."""
        ends: list[float] = []
        guess = 8  # steps until then; later from what one took
        while True:
            count = min(left, guess, _MOST_AT_ONCE)
            seconds = self._predict_run(decodes, context, count)
            if self._factors:
                begin = (self._step + len(ends)) % FACTORS
                seconds = list(map(mul, seconds, self._factors[begin : begin + count]))
            if self.noise:
                # only as many draws as there are steps: drawn one by one until the time is over
                for one in seconds:
                    now += self._noisy(one)
                    ends.append(now)
                    if now >= until:
                        return ends
            else:
                if self._stretches is not None:
                    new = self._stretches.ends(now, seconds)
                else:
                    new = list(accumulate(seconds, initial=now))
                    del new[0]
                now = new[-1]
                if now >= until:
                    ends += new[: bisect_left(new, until) + 1]
                    return ends
                ends += new
            left -= count
            if not left:
                return ends
            context += count * decodes
            guess = left if until == math.inf else int((until - now) / max(seconds[-1], 1e-9)) + 2

    def _one_by_one(self, decodes: int, context: int, count: int) -> list[float]:
        predict = self.cost.predict
        return [predict(StepFeatures(decodes, context + i * decodes, 0, 0, 0)) for i in range(count)]

    def _noisy(self, seconds: float) -> float:
        return seconds * max(FASTEST, self._dice.gauss(1, self.noise))
