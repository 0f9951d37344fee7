"""How many tokens each step may hold: what the tightest promise among those that decode leaves for prompts.

Formula. With t(D, C, P) the learned time of a step of D decodes reading C tokens beside P prompt tokens, b the mean of
actual/predicted, m its 90% quantile and τ the TPOT target: the largest P with b·t(D, C, P) ≤ a, where a = τ + ½·(slack − τ)
shares out what the tightest decoding request is ahead of its schedule; behind schedule, a = slack, unless the waiting prompts
would then miss their TTFT: then a = τ. For an ITL target, m·t ≤ that target as well. (TPOT is a mean over steps, so a mean is
what it needs in reserve; a gap is a single step.) Where the end of an answer (E2E) asks for a shorter pace than any TPOT does,
being ahead of the latter is nothing to share out: a = τ. Decoding requests with a promise that nothing can keep are not asked.

Where prompts had better come together (:mod:`.full_step` says when, and of what size n), a step holds n
prompt tokens if the slack pays for all of it, and else none: half a lump costs nearly as much as a whole one.

Units: seconds, tokens. Failure mode: a model that is wrong for some steps only; slack then corrects what it cannot know, a few
steps late. Source: deadline-aware chunking as in Sarathi-Serve (OSDI 2024), and the slack of earliest-deadline schedulers.
"""

from __future__ import annotations

import math

from autotune.control.controllers.targets import Promises
from autotune.control.controllers.traffic import Traffic
from autotune.control.controllers.trim import Trim
from autotune.control.controllers.trusted_model import TrustedModel
from runtime.step_model import StepFeatures, StepLearner
from runtime.tunable import SchedulerView

_DOUBTFUL = 0.3  # mean relative error of predictions from which on they say nothing of the rate of prompts


class StepBudget:
    """Goes by what the controller that it is a part of has learned."""

    def __init__(self, belief: TrustedModel, traffic: Traffic, promises: Promises, trim: Trim) -> None:
        self._belief, self._traffic, self._promises, self._trim = belief, traffic, promises, trim
        self._granted: tuple[SchedulerView, float] | None = (
            None  # the last step's view and pace, until its rate is asked for
        )
        self._rate = 0.0
        self._abreast = 1
        self.lump = 0
        """Prompt tokens of a step that holds any, where shorter ones do not carry the load; 0 where they do."""

    @property
    def model(self) -> StepLearner:
        return self._belief.model

    @property
    def target(self) -> float:
        """Seconds that a step may take on average, for the tightest of the classes served lately; inf when nothing bounds it."""
        return min(self._promises.step, self._promises.pace_of(self._traffic.outputs)) * self._trim.value

    def budget(self, view: SchedulerView, *, held: bool) -> int:
        """Tokens that the coming step may hold; all that the knobs allow unless ``held``."""
        top = view.knobs.token_budget
        view = self._of_those_that_count(view)
        if not (held and view.decoding and self.model.ready) or self._belief.slow.slow(view.decoding):
            self._granted = view, math.inf
            return top
        pace = self._pace(view)
        self._granted = view, pace
        if not (view.waiting or view.prefilling):
            return top  # no prompt that it could be for
        if self.lump:
            return min(top, view.decoding + self._lump_or_nothing(view, pace))
        allowed = pace
        if view.decode_slack < math.inf:
            ahead = view.decode_slack - pace
            if ahead > 0:
                allowed = pace + 0.5 * ahead if view.pace <= self._promises.pace_of(self._traffic.outputs) else pace
            else:
                allowed = max(view.decode_slack, 0.5 * pace)
            if ahead < 0 and self._queue_suffers(view, allowed):
                allowed = pace
        gap = self._promises.gap
        if gap < math.inf:
            allowed = min(allowed, gap * self._belief.bias / self._belief.margin.value)
        if allowed == math.inf:
            return top
        room = self._room(view, allowed)
        return top if room >= top else min(top, view.decoding + max(0, int(room)))

    def _of_those_that_count(self, view: SchedulerView) -> SchedulerView:
        """Without the pace and the slack of decodes whose promise nothing can keep."""
        if not (left_out := self._promises.left_out):
            return view
        dues = [(target, left) for target, left in view.dues if target not in left_out]
        return view._replace(
            pace=min((target for target, _ in dues), default=math.inf),
            decode_slack=min((left for _, left in dues), default=math.inf),
        )

    def _lump_or_nothing(self, view: SchedulerView, pace: float) -> int:
        whole = self._seconds(view, self.lump)
        behind = view.decode_slack < pace
        return self.lump if view.decode_slack >= whole or (behind and self._queue_suffers(view, whole)) else 0

    def _room(self, view: SchedulerView, seconds: float) -> float:
        """Prompt tokens of a step that takes ``seconds``, those of prompts that go on first; negative if decodes take longer."""
        most = view.knobs.chunk_size
        going_on = [(done, min(left, most)) for done, left in view.going_on] if view.going_on else ()
        return self.model.most_prefill(view.decoding, view.decode_context, seconds / self._belief.bias, going_on)

    def _seconds(self, view: SchedulerView, n: int) -> float:
        """Of a step with ``n`` prompt tokens, those of prompts that go on first, as predicted and corrected."""
        left, context, pairs = n, 0, 0
        for done, rest in view.going_on:
            chunk = min(left, rest, view.knobs.chunk_size)
            left -= chunk
            context += done + chunk
            pairs += chunk * done + chunk * (chunk + 1) // 2
        context, pairs = context + left, pairs + left * (left + 1) // 2
        step = StepFeatures(view.decoding, view.decode_context, n, context, pairs)
        return self._belief.bias * self.model.predict(step)

    def _pace(self, view: SchedulerView) -> float:
        """Seconds that a step may take on average for those that decode now; of all classes if the view does not say."""
        if view.pace == math.inf:
            return self.target
        return min(view.pace, self._promises.gap, self._promises.pace_of(self._traffic.outputs)) * self._trim.value

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second that steps as long as the last one was granted compute; 0 if that is not known."""
        if self._granted is not None:
            view, pace = self._granted
            self._granted, self._rate = None, self._rate_of(view, pace)
        return self._rate

    @property
    def prompts_abreast(self) -> int:
        """How many prompts the last step had room for, each with a chunk."""
        if self._granted is None:
            return self._abreast
        view, pace = self._granted
        room = self._fresh(view, pace)
        self._abreast = max(1, int(room / view.knobs.chunk_size)) if room < math.inf else 1
        return self._abreast

    def _fresh(self, view: SchedulerView, pace: float) -> float:
        """Prompt tokens of a step within the pace and the knobs, all of them of fresh prompts."""
        room: float = view.knobs.token_budget - view.decoding
        if pace == math.inf:
            return room
        return min(room, self.model.most_prefill(view.decoding, view.decode_context, pace / self._belief.bias))

    def _rate_of(self, view: SchedulerView, pace: float) -> float:
        if (
            not self.model.ready or self.model.error > _DOUBTFUL
        ):  # who turns all away by a wrong word learns nothing better
            return 0.0
        if pace < math.inf and self.lump:
            whole, alone = self._seconds(view, self.lump), self._seconds(view, 0)
            between = max(0.0, whole - pace) / (pace - alone) if pace > alone else 1.0  # steps without prompts
            return self.lump / (whole + between * alone)
        room = self._fresh(view, pace)
        if room < 1:
            return 0.0
        n = int(room)
        seconds = self._seconds(view, n)
        return n / seconds if seconds > 0 else 0.0

    def _queue_suffers(self, view: SchedulerView, allowed: float) -> bool:
        """Whether steps of ``allowed`` seconds take longer to compute the waiting prompts than the oldest has left.

        One request behind its schedule would otherwise hold back every prompt, and all of those would be late.
        """
        first = self._promises.first
        if first == math.inf or not (view.waiting or view.prefilling):
            return False
        left = first if view.oldest_arrival == math.inf else view.oldest_arrival + first - view.now
        room = self._room(view, allowed)
        return room < 1 or (view.waiting_tokens + view.prefilling_tokens) / room * allowed > left
