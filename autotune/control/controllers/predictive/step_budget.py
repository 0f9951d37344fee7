"""How many tokens each step may hold: what the tightest target of the decoding requests leaves for prompts.

Formula. With t(D, C, P) the learned time of a step of D decodes reading C tokens beside P prompt tokens, b the mean of
actual/predicted, m its 90% quantile and τ the TPOT target: the largest P with b·t(D, C, P) ≤ a, where a = τ + ½·(slack − τ)
shares out what the tightest decoding request is ahead of its schedule; behind schedule, a = slack, unless the waiting prompts
would then miss their TTFT: then a = τ. For an ITL target, m·t ≤ that target as well. (TPOT is a mean over steps, so a mean is
what it needs in reserve; a gap is a single step.) Where an E2E target asks for shorter steps than any TPOT does,
being ahead of the latter is nothing to share out: a = τ. Decoding requests with an infeasible target do not count.

Where prompts had better come together (:mod:`.full_step` says when, and of what size n), a step holds n
prompt tokens if the slack pays for all of it, and else none: half a prefill_quantum costs nearly as much as a whole one.

While the KV pool is nearly full, a step holds the fewest prompt tokens with which nine tenths of the rate of the longest one are
had: decodes end sooner, and free what prompts wait for.

Units: seconds, tokens. Failure mode: a model that is wrong for some steps only; slack then corrects what it cannot know, a few
steps late. Source: deadline-aware chunking as in Sarathi-Serve (OSDI 2024), and the slack of earliest-deadline schedulers.
"""

from __future__ import annotations

import math

from autotune.control.controllers.predictive.feedback import FeedbackGain
from autotune.control.controllers.predictive.traffic import Traffic
from autotune.control.controllers.predictive.trusted_model import TrustedModel
from autotune.control.controllers.targets import SLOTargets
from runtime.step_model import StepFeatures, StepLearner
from runtime.tunable import SchedulerView

_SCARCE = 0.2  # share of the KV pool below which what is free is scarce
_RATE_KEPT = 0.9  # of the rate of prompts that the longest step within the target has
_LEAST_SHORTENED = 64  # prompt tokens
_UNRELIABLE = 0.3  # mean relative error of predictions from which on they say nothing of the rate of prompts


class StepBudget:
    """Goes by what the controller that it is a part of has learned."""

    def __init__(self, model: TrustedModel, traffic: Traffic, targets: SLOTargets, gain: FeedbackGain) -> None:
        self._trusted_model, self._traffic, self._targets, self._gain = model, traffic, targets, gain
        self._granted: tuple[SchedulerView, float] | None = (
            None  # the last step's view and target, until its rate is asked for
        )
        self._rate = 0.0
        self._abreast = 1
        self.prefill_quantum = 0
        """Prompt tokens of a step that holds any, where shorter ones do not carry the load; 0 where they do."""

    @property
    def model(self) -> StepLearner:
        return self._trusted_model.model

    @property
    def target(self) -> float:
        """Seconds that a step may take on average, for the tightest of the classes served lately; inf when nothing bounds it."""
        return min(self._targets.step, self._targets.step_time_for_e2e(self._traffic.outputs)) * self._gain.value

    def budget(self, view: SchedulerView, *, held: bool) -> int:
        """Tokens that the coming step may hold; all that the knobs allow unless ``held``."""
        top = view.knobs.token_budget
        view = self._without_infeasible(view)
        if not (held and view.decoding and self.model.ready) or self._trusted_model.slow.slow(view.decoding):
            self._granted = view, math.inf
            return top
        target = self._target_of(view)
        self._granted = view, target
        if not (view.waiting or view.prefilling):
            return top  # no prompt that it could be for
        if self.prefill_quantum:
            return min(top, view.decoding + self._quantum_or_nothing(view, target))
        allowed = target
        if view.decode_slack < math.inf:
            ahead = view.decode_slack - target
            if ahead > 0:
                allowed = (
                    target + 0.5 * ahead
                    if view.step_time_target <= self._targets.step_time_for_e2e(self._traffic.outputs)
                    else target
                )
            else:
                allowed = max(view.decode_slack, 0.5 * target)
            if ahead < 0 and self._queue_suffers(view, allowed):
                allowed = target
        gap = self._targets.gap
        if gap < math.inf:
            allowed = min(allowed, gap * self._trusted_model.bias / self._trusted_model.margin.value)
        if allowed == math.inf:
            return top
        room = self._room(view, allowed)
        size = top if room >= top else min(top, view.decoding + max(0, int(room)))
        return self._shortened(view, size) if view.kv_free_blocks < _SCARCE * view.kv_total_blocks else size

    def _shortened(self, view: SchedulerView, size: int) -> int:
        """The fewest tokens with which prompts are computed nearly as fast as in steps of ``size``.

        What long steps add to the rate of prompts they take from decodes, which hold the pool that these prompts wait for.
        """
        most = min(size - view.decoding, view.waiting_tokens + view.prefilling_tokens)
        if most < _LEAST_SHORTENED:
            return size
        enough = _RATE_KEPT * most / self._seconds(view, most)
        fewest, least = most, 0
        while fewest - least > most // 16:
            middle = (fewest + least) // 2
            if middle >= enough * self._seconds(view, middle):
                fewest = middle
            else:
                least = middle
        return min(size, view.decoding + fewest)

    def _without_infeasible(self, view: SchedulerView) -> SchedulerView:
        """Without the targets and the slack of decodes whose target is infeasible."""
        if not (left_out := self._targets.left_out):
            return view
        token_deadlines = [(target, left) for target, left in view.token_deadlines if target not in left_out]
        return view._replace(
            step_time_target=min((target for target, _ in token_deadlines), default=math.inf),
            decode_slack=min((left for _, left in token_deadlines), default=math.inf),
        )

    def _quantum_or_nothing(self, view: SchedulerView, target: float) -> int:
        whole = self._seconds(view, self.prefill_quantum)
        behind = view.decode_slack < target
        return (
            self.prefill_quantum if view.decode_slack >= whole or (behind and self._queue_suffers(view, whole)) else 0
        )

    def _room(self, view: SchedulerView, seconds: float) -> float:
        """Prompt tokens of a step that takes ``seconds``, those of prompts in progress first; negative if decodes take longer."""
        most = view.knobs.chunk_size
        in_progress = [(done, min(left, most)) for done, left in view.in_progress] if view.in_progress else ()
        return self.model.most_prefill(
            view.decoding, view.decode_context, seconds / self._trusted_model.bias, in_progress
        )

    def _seconds(self, view: SchedulerView, n: int) -> float:
        """Of a step with ``n`` prompt tokens, as predicted and corrected."""
        return self._trusted_model.bias * self.model.predict(self._features(view, n))

    @staticmethod
    def _features(view: SchedulerView, n: int) -> StepFeatures:
        """A step with ``n`` prompt tokens, those of prompts in progress first."""
        left, context, pairs = n, 0, 0
        for done, rest in view.in_progress:
            chunk = min(left, rest, view.knobs.chunk_size)
            left -= chunk
            context += done + chunk
            pairs += chunk * done + chunk * (chunk + 1) // 2
        context, pairs = context + left, pairs + left * (left + 1) // 2
        return StepFeatures(view.decoding, view.decode_context, n, context, pairs)

    def _target_of(self, view: SchedulerView) -> float:
        """Seconds that a step may take on average for those that decode now; of all classes if the view does not say."""
        if view.step_time_target == math.inf:
            return self.target
        return (
            min(view.step_time_target, self._targets.gap, self._targets.step_time_for_e2e(self._traffic.outputs))
            * self._gain.value
        )

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second that steps as long as the last one was granted compute; 0 if that is not known."""
        if self._granted is not None:
            view, target = self._granted
            self._granted, self._rate = None, self._rate_of(view, target)
        return self._rate

    @property
    def prompts_abreast(self) -> int:
        """How many prompts the last step had room for, each with a chunk."""
        if self._granted is None:
            return self._abreast
        view, target = self._granted
        room = self._fresh(view, target)
        self._abreast = max(1, int(room / view.knobs.chunk_size)) if room < math.inf else 1
        return self._abreast

    def _fresh(self, view: SchedulerView, target: float) -> float:
        """Prompt tokens of a step within the target and the knobs, all of them of fresh prompts."""
        room: float = view.knobs.token_budget - view.decoding
        if target == math.inf:
            return room
        return min(room, self.model.most_prefill(view.decoding, view.decode_context, target / self._trusted_model.bias))

    def _rate_of(self, view: SchedulerView, target: float) -> float:
        if (
            not self.model.ready or self.model.error > _UNRELIABLE
        ):  # who rejects all by a wrong prediction learns nothing better
            return 0.0
        if target < math.inf and self.prefill_quantum:
            whole, alone = self._seconds(view, self.prefill_quantum), self._seconds(view, 0)
            between = max(0.0, whole - target) / (target - alone) if target > alone else 1.0  # steps without prompts
            return self._work(view, self.prefill_quantum) / (whole + between * alone)
        room = self._fresh(view, target)
        if room < 1:
            return 0.0
        n = int(room)
        seconds = self._seconds(view, n)
        return self._work(view, n) / seconds if seconds > 0 else 0.0

    def _work(self, view: SchedulerView, n: int) -> float:
        """Of ``n`` prompt tokens, as tokens: with what their attention counts."""
        return n + self.model.pair_tokens * self._features(view, n).prefill_attention

    def _queue_suffers(self, view: SchedulerView, allowed: float) -> bool:
        """Whether steps of ``allowed`` seconds take longer to compute the waiting prompts than the oldest has left.

        One request behind its schedule would otherwise hold back every prompt, and all of those would be late.
        """
        first = self._targets.first
        if first == math.inf or not (view.waiting or view.prefilling):
            return False
        left = first if view.oldest_arrival == math.inf else view.oldest_arrival + first - view.now
        room = self._room(view, allowed)
        tokens = view.waiting_tokens - view.relegated_tokens + view.prefilling_tokens
        return room < 1 or tokens / room * allowed > left
