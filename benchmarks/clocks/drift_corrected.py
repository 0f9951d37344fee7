"""A machine whose speed drifts, measured as one that does not: reference steps between real ones, and a clock that follows them.

A shared machine is now faster and now slower, by tens of percent and for seconds at a time, whatever this process does. So a
reference step runs between the steps of the engine that is measured: one decode step, always the same, of an engine of its own.
The clock stands still meanwhile. Then it runs slower than real time by as much as the reference step was slower than the fastest
one seen. On such a clock everything happens at one speed: arrivals come that much later too.

What slows a reference step slows other steps more or less. A neighbour on the core's other hyperthread costs a loop of Python
more than a decode step, and a prompt less. So whoever has time waits, the clock standing still, until reference steps are as fast
as usual again.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from runtime.clock import Clock, MonotonicClock
from runtime.knobs import Knobs
from runtime.llm.core import EngineCore
from runtime.llm.output import OutputProcessor
from runtime.llm.plan import Executor, StepPlan, StepResult
from runtime.llm.prefix import block_hashes
from runtime.llm.scheduler import Scheduler
from runtime.request import Request, SamplingParams, Sequence

EVERY_S = 0.1  # of real time, between reference steps
ROWS, PROMPT, OUTPUT = 8, 512, 33
BLOCK = 16
REFERENCE_BLOCKS = ROWS * ((PROMPT + OUTPUT) // BLOCK + 2)
_BEFORE = 2  # steps that come before the one that counts: the first is 3 to 15% slower, by what ran before it
_SETTLE = 64  # reference steps before any counts
_SMOOTH = 7  # reference steps whose median is compared with the usual one
_DISTURBED = 1.15  # times what a reference step usually takes
_GRACE_S = 30.0  # of waiting, beside as long as it does not wait


class DriftCorrectedClock:
    """Seconds of ``base`` ÷ the slowdown, without those for which it stood still. One thread turns it, any may read it."""

    def __init__(self, base: Clock | None = None) -> None:
        self.base = base or MonotonicClock()
        self._state = (self.base.now(), 0.0, 1.0)  # on ``base``, on this clock, seconds here for one there

    def now(self) -> float:
        since, shown, rate = self._state
        return shown + max(0.0, self.base.now() - since) * rate

    def run(self, rate: float) -> None:
        """From now on ``rate`` seconds pass here for one of ``base``; 0 stands still."""
        now = self.base.now()
        since, shown, before = self._state
        self._state = (now, shown + max(0.0, now - since) * before, rate)


class ReferenceStep:
    """The same decode step over and over: ``ROWS`` sequences of about ``PROMPT`` tokens, through a real executor.

    ``executor`` has a pool of ``REFERENCE_BLOCKS`` of its own.
    """

    def __init__(self, executor: Executor, vocab_size: int) -> None:
        knobs = Knobs(max_batch_size=ROWS, token_budget=ROWS * PROMPT, chunk_size=PROMPT)
        self._core = EngineCore(
            Scheduler(kv_blocks=REFERENCE_BLOCKS, block_size=BLOCK), executor, knobs=knobs, output=OutputProcessor()
        )
        self._vocab_size = vocab_size
        self._now = 1.0
        self._number = 0
        self._left = 0

    def step(self, clock: Clock) -> float:
        """Seconds of one step, on ``clock``, behind ``_BEFORE`` others: what the engine left in the caches is gone by then."""
        if self._left <= _BEFORE:
            self._begin()
        self._left -= _BEFORE + 1
        for _ in range(_BEFORE):
            self._now = self._core.step(self._now).end
        begun = clock.now()
        self._now = self._core.step(self._now).end
        return clock.now() - begun

    def fastest(self) -> float:
        """Seconds of the fastest of many."""
        return min([self.step(MonotonicClock()) for _ in range(_SETTLE)][_SETTLE // 2 :])

    def _begin(self) -> None:
        """Bring the sequences back to where they decode; of their prompts all but the last block is in the prefix cache."""
        while self._core.has_work:
            self._now = self._core.step(self._now).end
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        for row in range(ROWS):
            prompt = tuple((7 * row + 13 * at) % self._vocab_size for at in range(PROMPT))
            hashes = tuple(block_hashes(prompt, BLOCK))
            self._number += 1
            self._core.add(
                Request(f"reference-step-{self._number}", prompt, params, OUTPUT, self._now, block_hashes=hashes)
            )
        while self._core.scheduler.waiting or self._core.scheduler.prefills:
            self._now = self._core.step(self._now).end
        self._core.step(self._now)  # the first decode after a prompt moves its keys and values
        self._left = OUTPUT - 3


class DriftCorrectingExecutor:
    """``executor``, with a reference step between its steps now and then. ``clock`` is the one that the engine is on.

    ``usual``: seconds of a reference step at slowdown 1, the same for all engines that are to be compared. ``patient``: where a
    reference step is slow, wait for two that are not, in all no longer than it does not wait. Then the slowdown is
    corrected for, as without. ``waited``: seconds of it. ``slowdowns``: a reference step ÷ ``usual``, one for each :meth:`look`.
    """

    def __init__(
        self,
        executor: Executor,
        reference_step: ReferenceStep,
        clock: DriftCorrectedClock,
        usual: float,
        *,
        patient: bool = False,
    ) -> None:
        self._executor, self._reference_step, self._clock, self._usual = executor, reference_step, clock, usual
        self._patient, self._patience = patient, _GRACE_S
        self._recent: deque[float] = deque(maxlen=_SMOOTH)
        self._next = 0.0
        self._waited_until = clock.base.now()
        self.slowdowns: list[float] = []
        self.waited = 0.0

    def execute(self, plan: StepPlan, now: float, until: float) -> StepResult:
        if not plan.empty and time.monotonic() >= self._next:
            self.look()
        return self._executor.execute(plan, now, until)

    def release(self, sequence: Sequence) -> None:
        self._executor.release(sequence)

    def look(self) -> None:
        """Run a reference step, the clock standing still, and set its rate."""
        self._clock.run(0.0)
        base = self._clock.base
        begun = base.now()
        self._recent.append(self._reference_step.step(base))
        if self._patient:
            self._wait(begun)
        slowdown = statistics.median(self._recent) / self._usual
        self.slowdowns.append(slowdown)
        self._next = time.monotonic() + EVERY_S
        self._clock.run(1 / slowdown)

    def _wait(self, begun: float) -> None:
        base, slow = self._clock.base, _DISTURBED * self._usual
        self._patience += begun - self._waited_until
        since = base.now()
        undisturbed = 2 if self._recent[-1] <= slow else 0
        while undisturbed < 2 and base.now() - since < self._patience:
            self._recent.append(self._reference_step.step(base))
            undisturbed = undisturbed + 1 if self._recent[-1] <= slow else 0
        self._waited_until = base.now()
        self._patience -= self._waited_until - since
        self.waited += self._waited_until - since
