"""The predictive controller: learn what a step costs, and solve for the largest one that keeps the promise.

Formula. With t(D, C, P) the learned time of a step of D decodes reading C tokens beside P prompt tokens, b the mean of
actual/predicted, m its 90% quantile and τ the TPOT target:

- per step (``budget``): the largest P with b·t(D, C, P) ≤ a, where a = τ + ½·(slack − τ) shares out what the tightest
  decoding request is ahead of its schedule; behind schedule, a = slack, unless the waiting prompts would then miss their TTFT:
  then a = τ. For an ITL target, m·t ≤ that target as well. (TPOT is a mean over steps, so a mean is what it needs in reserve;
  a gap is a single step.)
- ``max_batch_size``: the largest D with b·t(D, D·c̄, 0) ≤ τ (c̄: mean context), and no more than the KV pool holds. What D
  decodes leave of τ is shared out by the budget, step by step; slots that leave room for prompts in advance would hold back the
  queue whenever the machine is slow for a moment, and sequences at once are what makes it fast;
- ``token_budget``: D plus the P that a step of 2τ holds (at least 64, and a token for each slot), a ceiling for the per-step
  budget;
- ``chunk_size``: the whole budget, or a quarter of it when prompts are mixed (p95 > 4 × median), so that a long prompt leaves
  room for short ones;
- ``max_wait_ms``: 0, always; in continuous batching waiting gains nothing.

Units: seconds and tokens. Regimes: ``learning`` (too few steps: knobs stay), ``demand-limited`` (nothing binds: nothing is
raised), ``compute-limited``, ``kv-limited`` (preemptions), ``infeasible`` (one sequence alone is slower than τ: throughput
is all there is to win, so the knobs open), ``fallback`` (the model has been wrong for long: the last knobs it vouched for
hold, those it started from if there are none; steps still get a budget, for slack corrects what a model cannot know).

Feedback. ``trim`` scales τ: up with every TTFT missed, down with every other TPOT missed, and slowly up again while nothing is.
A request lost to its queue is as lost as one that decoded too slowly. Where both are missed the pace itself cannot be had: small
steps compute fewer tokens a second, and only larger ones shorten the queue.

TTFT and E2E contain queueing and never make a batch or a step smaller: that would cut capacity just when it is short.

Failure mode: a step time that depends on something the model cannot see (another process, a slow region). Both ratios
widen first; then the fallback takes over, and the model is learned anew until it is right again. Sources: DESIGN "What the
controller must know"; the step model in :mod:`runtime.step_model`; sharing out slack follows deadline-aware chunking as in
Sarathi-Serve (OSDI 2024) and the slack of earliest-deadline schedulers.
"""

from __future__ import annotations

import math

from autotune.controllers.protocol import Proposal
from autotune.controllers.quantile import OnlineQuantile
from autotune.controllers.recent import Recent
from runtime.knobs import KnobLimits, Knobs
from runtime.records import LimitedBy, RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.step_model import StepFeatures, StepLearner
from runtime.tunable import SchedulerView

_WRONG = 0.5  # relative error that counts as a wrong prediction
_DISTRUST, _TRUST = 0.4, 0.1  # share of wrong predictions that ends the trust in the model, and that restores it
_RELEARN = 128  # untrusted steps after which what was learned is thrown away: a machine may have changed for good
_TRIM_RATE, _TRIM = 0.02, (0.6, 4.0)
_FLOOR = 64  # tokens that a step may always hold, and slots that need no proof
_REACH = 4  # how many times the decodes ever seen together may be admitted on the model's word
_RESERVE = (1.05, 2.0)  # bounds of the mean ratio of actual to predicted time


class PredictiveController:
    """See the module. ``start`` are the knobs to fall back on; ``model`` may be one that has learned already."""

    name = "predictive"

    def __init__(
        self, slo: SLO, start: Knobs, *, kv_tokens: int, block_size: int = 16, model: StepLearner | None = None
    ) -> None:
        self.slo = slo
        self.start = start
        self.model = model or StepLearner()
        self.regime = "learning"
        self.margin = OnlineQuantile(0.9, 1.1, low=1.0, high=2.0)
        self.bias = _RESERVE[0]  # running mean of actual/predicted
        self.trim = 1.0
        self._first = None if slo.ttft_ms is None else slo.ttft_ms / 1e3
        self._pace = None if slo.tpot_ms is None else slo.tpot_ms / 1e3
        self._gap = None if slo.itl_ms is None else slo.itl_ms / 1e3
        self._kv_tokens = kv_tokens
        self._block_size = block_size
        self._prompts = Recent(256)  # tokens to compute of each request's prompt
        self._outputs = Recent(256)
        self._contexts = Recent(256)  # mean context of a decode, by step
        self._decodes = Recent(256)
        self._wrong = 0.0  # decaying share of wrong predictions
        self._trusted = True
        self._untrusted = 0  # steps since it was
        self._vouched: Knobs | None = None  # the last setting that the model was trusted with
        self._mixed = False  # whether prompts differ much in length
        self._idle = True  # whether demand is what limits
        self._preemptions = 0.0  # decaying count
        self._bound = 0.0  # decaying shares of steps: that anything limited,
        self._slots_bound = 0.0  # that max_batch_size limited,
        self._tokens_bound = 0.0  # and that token_budget or chunk_size limited, rather than the per-step budget
        self._most = 65536  # sequences at once that kept the pace, as of the last decision
        self._ceiling = 0  # token_budget as of the last decision
        self._steps = 0

    @property
    def target(self) -> float:
        """Seconds that a step may take on average; inf when nothing bounds it."""
        bounds = [t for t in (self._pace, self._gap) if t is not None]
        return min(bounds) * self.trim if bounds else math.inf

    def observe_step(self, record: StepRecord) -> None:
        seconds = record.duration
        if record.failed or not (math.isfinite(seconds) and seconds > 0):
            return
        step = StepFeatures(
            record.decodes,
            record.decode_context,
            record.prefill_tokens,
            record.prefill_context,
            record.prefill_attention,
        )
        predicted = None
        if self.model.ready:
            predicted = self.model.predict(step)
            if predicted > 0:
                ratio = seconds / predicted
                self.margin.add(ratio)
                # a stall speaks as loud as a step four times too long, no louder
                self.bias = min(max(self.bias + 0.02 * (min(ratio, 4.0) - self.bias), _RESERVE[0]), _RESERVE[1])
            wrong = not predicted > 0 or not 1 / (1 + _WRONG) < seconds / predicted < 1 + _WRONG
            self._wrong += 0.02 * (wrong - self._wrong)
            self._trusted = self._wrong < (_DISTRUST if self._trusted else _TRUST)
        self._untrusted = 0 if self._trusted else self._untrusted + 1
        if self._untrusted and self._untrusted % _RELEARN == 0:
            self.model = StepLearner(warm_up=0)
        self.model.observe(step, seconds, predicted)
        self._steps += 1
        self._preemptions += record.preemptions - 0.002 * self._preemptions
        short = record.limited_by in (LimitedBy.BUDGET, LimitedBy.CHUNK)
        self._bound += 0.02 * ((record.limited_by is not LimitedBy.DEMAND) - self._bound)
        self._slots_bound += 0.02 * ((record.limited_by is LimitedBy.SLOTS) - self._slots_bound)
        self._tokens_bound += 0.02 * ((short and record.budget_used >= self._ceiling) - self._tokens_bound)
        if record.decodes:
            self._decodes.add(record.decodes)
            self._contexts.add(record.decode_context / record.decodes)

    def observe_request(self, record: RequestRecord) -> None:
        if not record.completed:
            return
        self._prompts.add(record.prompt_tokens - record.cached_tokens)
        self._outputs.add(record.output_tokens)
        if self._pace is None or record.tpot is None or self.regime == "infeasible":
            return
        slow = record.tpot > self._pace
        late = self._first is not None and record.ttft is not None and record.ttft > self._first
        if slow or late:
            move = _TRIM_RATE * (1 if late else -1) * self.trim
        elif self._bound > 0.1 and self.trim < 1:  # without load, a kept promise says nothing about the limit
            move = _TRIM_RATE * max(1 - self.slo.attainment, 0.05)
        else:
            move = 0.0
        self.trim = min(max(self.trim + move, _TRIM[0]), _TRIM[1])

    def budget(self, view: SchedulerView) -> int:
        top = view.knobs.token_budget
        if not view.decoding or not self.model.ready or self.regime == "infeasible":
            return top
        pace = self.target
        allowed = pace
        if view.decode_slack < math.inf:
            ahead = view.decode_slack - pace
            allowed = pace + 0.5 * ahead if ahead > 0 else max(view.decode_slack, 0.5 * pace)
            if ahead < 0 and self._queue_suffers(view, allowed):
                allowed = pace
        if self._gap is not None:
            allowed = min(allowed, self._gap * self.bias / self.margin.value)
        if allowed == math.inf:
            return top
        room = self.model.most_prefill(view.decoding, view.decode_context, allowed / self.bias)
        return top if room >= top else min(top, view.decoding + max(0, int(room)))

    def _queue_suffers(self, view: SchedulerView, allowed: float) -> bool:
        """Whether steps of ``allowed`` seconds take longer to compute the waiting prompts than the oldest has left.

        One request behind its schedule would otherwise hold back every prompt, and all of those would be late.
        """
        if self._first is None or not (view.waiting or view.prefilling):
            return False
        left = self._first if view.oldest_arrival == math.inf else view.oldest_arrival + self._first - view.now
        room = self.model.most_prefill(view.decoding, view.decode_context, allowed / self.bias)
        return room < 1 or (view.waiting_tokens + view.prefilling_tokens) / room * allowed > left

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        del now  # nothing here depends on the time of day, only on what was seen
        evidence = self._evidence()
        if not self._trusted:
            held = limits.clamp(self._vouched or self.start)
            what = "the last knobs it vouched for hold" if self._vouched else "starting knobs hold"
            return self._propose("fallback", held, evidence, f"step times have not followed the model; {what}")
        if not self.model.ready or len(self._outputs) < 4:
            return self._propose(
                "learning", limits.clamp(knobs), evidence, f"{self.model.samples} steps seen: too few to judge"
            )
        if self.target == math.inf:
            opened = _opened(limits, limits.max_batch_size)
            return self._propose(
                "throughput", opened, evidence, "no target bounds a step, so nothing needs to be held back"
            )
        alone = self._alone(1)
        wanted = self.target / self.trim
        if alone > wanted:
            cause = f"decode alone takes {alone * 1e3:.1f} ms at batch 1; {wanted * 1e3:g} ms cannot be met: throughput instead"
            opened = _opened(limits, self._kv_bound(limits.max_batch_size))
            return self._propose("infeasible", opened, evidence, cause)
        pace = self.target / self.bias
        fits = max(1, self._most_decodes(pace, limits.max_batch_size))
        most = min(
            fits, max(_FLOOR, int(_REACH * self._decodes.quantile(1)))
        )  # beyond what was seen the model only guesses
        pool = self._kv_bound(limits.max_batch_size)
        batch = min(most, pool)
        if self._slots_bound < 0.01:  # a limit that does not bind is not raised
            batch = min(batch, knobs.max_batch_size)
        # at a typical load the ceiling leaves the per-step budget room to spend what requests are ahead
        decodes = int(min(batch, max(self._decodes.quantile(0.5), 1)))
        room = self.model.most_prefill(decodes, int(decodes * self._contexts.mean), 2 * pace)
        budget = min(limits.token_budget, max(_FLOOR, decodes + int(min(room, 1e9)), batch))
        # both with a gap between on and off: a value that hovers at a threshold must not turn a knob at every decision
        self._mixed = self._prompts.quantile(0.95) > (3 if self._mixed else 4) * max(1.0, self._prompts.quantile(0.5))
        self._idle = self._bound < (0.1 if self._idle else 0.01)
        chunk = min(limits.chunk_size, max(32, budget // 4) if self._mixed else budget)
        regime = "demand-limited" if self._idle else "kv-limited" if pool < most else "compute-limited"
        if self._tokens_bound < 0.01:
            budget, chunk = min(budget, knobs.token_budget), min(chunk, knobs.chunk_size)
        self._ceiling = budget
        cause = self._cause(regime, budget, decodes, batch)
        self._vouched = Knobs(batch, 0.0, budget, chunk)
        return self._propose(regime, self._vouched, evidence, cause)

    def _cause(self, regime: str, budget: int, decodes: int, batch: int) -> str:
        pace = self.target * 1e3
        full = self.model.predict(self._mix(decodes, budget - decodes)) * 1e3
        text = f"{decodes} decodes and {budget - decodes} prompt tokens take {full:.0f} ms (target {pace:.0f})"
        steady = f"{batch} decodes alone take {self._alone(batch) * 1e3:.0f} ms"
        if regime == "kv-limited":
            steady = f"the KV pool holds {batch} sequences of this length"
        return f"{text}; {steady}"

    def _mix(self, decodes: int, prefill: int) -> StepFeatures:
        return StepFeatures(decodes, int(decodes * self._contexts.mean), prefill, prefill, prefill * (prefill + 1) // 2)

    def _alone(self, decodes: int) -> float:
        return self.model.predict(self._mix(decodes, 0))

    def _most_decodes(self, seconds: float, top: int) -> int:
        """The largest number up to ``top`` whose decodes alone fit; the search begins at its last answer, mostly the same."""
        low, high, reach = 0, top + 1, 1  # low fits, high does not or is not allowed
        guess = max(1, min(self._most, top))
        if self._alone(guess) <= seconds:
            low = guess
            while low + reach < high and self._alone(low + reach) <= seconds:
                low, reach = low + reach, 2 * reach
            high = min(high, low + reach)
        else:
            high = guess
            while high - reach > 0 and self._alone(high - reach) > seconds:
                high, reach = high - reach, 2 * reach
            low = max(0, high - reach)
        while high - low > 1:
            middle = (low + high) // 2
            if self._alone(middle) <= seconds:
                low = middle
            else:
                high = middle
        self._most = low
        return low

    def _kv_bound(self, top: int) -> int:
        """Sequences that the KV pool holds without preempting; only asked of it once it has preempted."""
        if self._preemptions < 0.05:
            return top
        each = self._prompts.mean + self._outputs.mean + self._block_size
        return max(1, min(top, int(0.9 * self._kv_tokens / max(1.0, each))))

    def _propose(self, regime: str, knobs: Knobs, evidence: dict[str, float], cause: str) -> Proposal:
        self.regime = regime
        return Proposal(knobs, regime, cause, evidence)

    def _evidence(self) -> dict[str, float]:
        return {
            "steps": self._steps,
            "model_error": round(self.model.error, 4),
            "bias": round(self.bias, 4),
            "margin": round(self.margin.value, 4),
            "trim": round(self.trim, 4),
            "decodes": self._decodes.quantile(0.5),
            "context": round(self._contexts.mean, 1),
            "prompt": round(self._prompts.mean, 1),
            "output": round(self._outputs.mean, 1),
            "bound": round(self._bound, 3),
            "preemptions": round(self._preemptions, 2),
        }


def _opened(limits: KnobLimits, batch: int) -> Knobs:
    """Nothing held back, but for the sequences at once."""
    return Knobs(batch, 0.0, limits.token_budget, limits.chunk_size)
