"""How many tokens each step may hold: what the tightest target of the decoding requests leaves for prompts.

Formula. With t(D, C, P) the learned time of a step of D decodes reading C tokens beside P prompt tokens, b the mean of
actual/predicted, m its 90% quantile and τ the TPOT target: the largest P with b·t(D, C, P) ≤ a, where a = τ + ½·(slack − τ)
shares out what the tightest decoding request is ahead of its schedule; behind schedule, a = slack, unless the waiting prompts
would then miss their TTFT: then a = τ. For an ITL target, m·t ≤ that target as well. (TPOT is a mean over steps, so a mean is
what it needs in reserve; a gap is a single step.) Where an E2E target asks for shorter steps than any TPOT does,
``token_budget`` is chosen for it (:mod:`.step_size`), and only TPOT and ITL hold a step; until then a = τ. Targets that no step
is short enough for do not count. D + P is rounded down to whole tiles (:mod:`autotune.control.controllers.parts.tiles`).

Where all prompts have longer than the tightest TTFT, as those of batch beside chat, a is at most τ/2, if such steps compute
nearly as many prompt tokens a second: who comes next may have no more time than that, and waits for the step in flight.

Where decodes alone are within the target, and no prompt token has a place beside them, all prompts would wait until nothing
decodes, or decodes are ahead. If by steps of ``STARVED`` tokens the oldest would have less than ``HURRY`` of its TTFT left, one
holds as many, or all where an ITL alone is in the way: each such step makes a gap too long for everybody, so few are better. Not
while predictions are far off: then decodes are behind by chance, and will be ahead by chance.

Where steps overlap, slack is as of the end of the step in flight, as predicted.

Before the model knows what prompts cost, the first ones beside decodes go in steps of :class:`FirstSteps`.

Where prompts had better come together (:mod:`.step_size` says when, and of what size n), a step holds n
prompt tokens if the slack pays for all of it, and else none: half a prefill_quantum costs nearly as much as a whole one.

:attr:`StepBudget.prefill_rate`, by which late prompts are rejected, is that of steps of a seconds, of τ where decodes are behind:
who is judged by τ alone is rejected though a long step that all decodes can wait for would serve it in time.

Units: seconds, tokens. Failure mode: a model that is wrong for some steps only; slack then corrects what it cannot know, a few
steps late. Source: deadline-aware chunking as in Sarathi-Serve (OSDI 2024), and the slack of earliest-deadline schedulers.
"""

from __future__ import annotations

import math
from collections import deque

from autotune.control.controllers.parts.targets import SLOTargets
from autotune.control.controllers.parts.tiles import whole_tiles
from autotune.control.controllers.predictive import constants
from autotune.control.controllers.predictive.feedback import FeedbackGain
from autotune.control.controllers.predictive.traffic import Traffic
from autotune.control.controllers.predictive.trusted_model import TrustedModel
from runtime.records import StepRecord
from runtime.step_model import StepFeatures
from runtime.tunable import TILE, SchedulerView


class FirstSteps:
    """Prompt tokens of a step beside decodes while nothing can be predicted: those of a step lately times what the target is to
    the time it took, and no more than twice as many; of the last few steps the one that says most, since a step may have been
    stalled. Too few where steps have costs besides. An engine that has just started may meet a burst of prompts, which could all
    be in one step by its knobs (slow start: Jacobson, SIGCOMM 1988)."""

    def __init__(self) -> None:
        self._said = deque([constants.FIRST], constants.LATEST)

    @property
    def tokens(self) -> int:
        return max(constants.FLOOR, *self._said)

    def saw(self, record: StepRecord, seconds: float, target: float) -> None:
        """A step that took ``seconds``."""
        prompt = record.prefill_tokens
        if target < math.inf and (seconds > target or 2 * prompt >= self.tokens):
            self._said.append(int(prompt * min(2.0, target / seconds)))


class StepBudget:
    """Goes by what the controller that it is a part of has learned."""

    def __init__(
        self, learned: TrustedModel, traffic: Traffic, targets: SLOTargets, gain: FeedbackGain, tile: int = TILE
    ) -> None:
        self._learned, self._traffic, self._targets, self._gain = learned, traffic, targets, gain
        # the last step's view and target, until its rate is asked for
        self._granted: tuple[SchedulerView, float] | None = None
        self._view: SchedulerView | None = None  # the last step's
        self._rate = 0.0
        self._prompts_per_step = 1
        self._first = FirstSteps()
        self.tile = tile
        self.by_ceiling = False
        """Whether ``token_budget`` is what E2E targets ask of a step, so that no step is held to a mean for their sake."""
        self.prefill_quantum = 0
        """Prompt tokens of a step that holds any, where shorter ones do not carry the load; 0 where they do."""

    @property
    def target(self) -> float:
        """Seconds that a step may take on average, for the tightest of the classes served lately; inf when nothing bounds it."""
        return min(self._targets.step, self._targets.step_time_for_e2e(self._traffic.outputs)) * self._gain.value

    def saw(self, record: StepRecord, seconds: float) -> None:
        """A step that took ``seconds``."""
        if record.prefill_tokens and not self._learned.model.knows_prompts:
            self._first.saw(record, seconds, self.target)

    def ran_dry(self) -> None:
        """Nothing is left to run: the next prompt has a step of its own, whatever the last one had beside it."""
        if self._view is not None:
            empty = self._view._replace(decoding=0, decode_context=0, prefilling=0, in_progress=())
            self._granted = empty, math.inf

    def budget(self, view: SchedulerView) -> int:
        """Tokens that the coming step may hold; all that the knobs allow while the model is not to be trusted."""
        top, decodes, learned = view.knobs.token_budget, view.decoding, self._learned
        self._view = view
        if self._targets.left_out:
            view = self._feasible(view)
        if view.in_flight is not None and learned.model.ready:  # the coming step begins when that one has ended
            ends = view.in_flight_since + learned.bias * learned.model.predict(view.in_flight)
            view = view.after(max(0.0, ends - view.now))
        if not (decodes and learned.trusted) or decodes > learned.slow.max_decodes:
            self._granted = view, math.inf
            return top
        if not learned.model.knows_prompts:
            target = min(view.step_time_target, self.target)
            self._granted = view, target
            if target == math.inf:
                return top
            return min(top, whole_tiles(decodes + self._first.tokens, decodes, self.tile))
        for_e2e = math.inf if self.by_ceiling else self._targets.step_time_for_e2e(self._traffic.outputs)
        tightest, gap = view.step_time_target, self._targets.gap
        if tightest < math.inf:  # of those that decode now
            target = min(tightest, gap, for_e2e) * self._gain.value
        else:  # the view does not say: of all classes
            target = min(self._targets.step, for_e2e) * self._gain.value
        longest = gap * learned.bias / learned.margin
        slack, allowed = view.decode_slack, target
        if target < slack < math.inf and tightest <= for_e2e and not self.prefill_quantum:
            allowed = min(target + constants.AHEAD * (slack - target), longest)
        self._granted = view, allowed  # with or without a prompt: the next to come asks whether it would be in time
        if not (view.waiting or view.prefilling):
            return top  # no prompt that it could be for
        if self.prefill_quantum:
            whole = self._seconds(view, self.prefill_quantum)
            pays = slack >= whole or (slack < target and self._queue_suffers(view, whole))
            return min(top, decodes + (self.prefill_quantum if pays else 0))
        if slack <= target:
            allowed = max(slack, constants.BEHIND * target)
            if slack < target and self._queue_suffers(view, allowed):
                allowed = target
        allowed = min(allowed, longest)
        if view.prompt_slack > self._targets.first:
            allowed = self._short(view, target, allowed)
        if allowed == math.inf:
            return top
        prefill = self._most_prefill(view, allowed)
        sure = learned.unsteady <= 1 and learned.model.error <= constants.UNRELIABLE
        if prefill < 1 and sure and self._seconds(view, 0) <= target / min(1.0, self._gain.value):
            # Decodes alone are within the target, but beside a prompt no step is, or who is behind does not catch up.
            seconds = self._seconds(view, constants.STARVED)
            if self._late_in(view, constants.STARVED, seconds, constants.HURRY):
                prefill = constants.STARVED if self._targets.mean < math.inf else math.inf
        if prefill >= top:
            return top
        tokens = decodes + max(0, int(prefill))
        return min(top, tokens if learned.unsteady > 1 else whole_tiles(tokens, decodes, self.tile))

    def _short(self, view: SchedulerView, target: float, allowed: float) -> float:
        """Seconds of a step whose prompts all have longer than the tightest TTFT; ``allowed`` where short steps compute far fewer
        prompt tokens a second."""
        short = constants.SHORT * target
        if short >= allowed or allowed == math.inf:
            return allowed
        pays = self._most_prefill(view, short) / short >= constants.NEARLY * self._most_prefill(view, allowed) / allowed
        return short if pays else allowed

    def _feasible(self, view: SchedulerView) -> SchedulerView:
        """Without the targets, and the slack, of decodes that no step is short enough for."""
        left = [(target, slack) for target, slack in view.token_deadlines if target >= self._targets.floor]
        return view._replace(
            step_time_target=min((target for target, _ in left), default=math.inf),
            decode_slack=min((slack for _, slack in left), default=math.inf),
            token_deadlines=tuple(left),
        )

    def _queue_suffers(self, view: SchedulerView, allowed: float) -> bool:
        """Whether steps of ``allowed`` seconds take longer to compute the waiting prompts than the oldest has left; where some
        classes have far more time than others, whether the prompt in the greatest hurry has waited, however many wait with it.

        One request behind its schedule would otherwise hold back every prompt, and all of those would be late.
        """
        return self._late_in(view, self._most_prefill(view, allowed), allowed)

    def _late_in(self, view: SchedulerView, prefill: float, seconds: float, reserve: float = 0.0) -> bool:
        """The same of steps of so many prompt tokens and seconds; ``reserve``: of the TTFT, which the oldest is to keep."""
        first = self._targets.first
        if first == math.inf:
            return False
        if self._targets.mixed and view.prompt_slack > -math.inf:  # who has waited longest may have all the time
            return view.prompt_slack < (1 - constants.WAITED) * first
        left = first if view.oldest_arrival == math.inf else view.oldest_arrival + first - view.now
        tokens = view.waiting_tokens - view.relegated_tokens + view.prefilling_tokens
        return prefill < 1 or tokens / prefill * seconds > left - reserve * first

    def _most_prefill(self, view: SchedulerView, seconds: float) -> float:
        """Prompt tokens of a step that takes ``seconds``, those of prompts in progress first; negative if decodes take longer."""
        most = view.knobs.chunk_size
        in_progress = [(done, min(left, most)) for done, left in view.in_progress] if view.in_progress else ()
        learned = self._learned
        return learned.model.most_prefill(view.decoding, view.decode_context, seconds / learned.bias, in_progress)

    def _seconds(self, view: SchedulerView, n: int) -> float:
        """Of a step with ``n`` prompt tokens, as predicted and corrected."""
        return self._learned.bias * self._learned.model.predict(self._features(view, n))

    @staticmethod
    def _features(view: SchedulerView, n: int) -> StepFeatures:
        """A step with ``n`` prompt tokens, those of prompts in progress first. How many chunks they make is left out: with it,
        prompts are judged by a lower rate, and H3 loses 1.6% (seeds 1 to 15)."""
        left, context, pairs = n, 0, 0
        for done, rest in view.in_progress:
            chunk = min(left, rest, view.knobs.chunk_size)
            left -= chunk
            context += done + chunk
            pairs += chunk * done + chunk * (chunk + 1) // 2
        context, pairs = context + left, pairs + left * (left + 1) // 2
        return StepFeatures(view.decoding, view.decode_context, n, context, pairs)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second that steps as long as the last one might have been compute; 0 if that is not known."""
        if self._granted is not None:
            view, target = self._granted
            self._granted, self._rate = None, self._rate_of(view, target)
        return self._rate

    @property
    def prompts_per_step(self) -> int:
        """How many prompts the last step had room for, each with a chunk."""
        if self._granted is not None:
            view, target = self._granted
            prefill = self._fresh(view, target)
            self._prompts_per_step = max(1, int(prefill / view.knobs.chunk_size)) if prefill < math.inf else 1
        return self._prompts_per_step

    def _fresh(self, view: SchedulerView, target: float) -> float:
        """Prompt tokens of a step within the target and the knobs, all of them of fresh prompts."""
        prefill: float = view.knobs.token_budget - view.decoding
        if target == math.inf:
            return prefill
        learned = self._learned
        return min(prefill, learned.model.most_prefill(view.decoding, view.decode_context, target / learned.bias))

    def _rate_of(self, view: SchedulerView, target: float) -> float:
        model = self._learned.model
        if not model.ready or model.error > constants.UNRELIABLE:
            return 0.0  # who rejects all by a wrong prediction learns nothing better
        n = int(self._fresh(view, target))
        rest = 0.0  # seconds of the steps without prompts that each one with some brings with it
        if target < math.inf and self.prefill_quantum:
            n, alone = self.prefill_quantum, self._seconds(view, 0)
            late = max(0.0, self._seconds(view, n) - target)
            rest = alone * (late / (target - alone) if target > alone else 1.0)
        if n < 1:
            return 0.0
        seconds = self._seconds(view, n) + rest
        work = n + model.pair_tokens * self._features(view, n).prefill_attention
        return work / seconds if seconds > 0 else 0.0
