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
from collections.abc import Mapping

from autotune.controllers.galloping import largest
from autotune.controllers.promises import Promises
from autotune.controllers.protocol import Proposal
from autotune.controllers.quantile import OnlineQuantile
from autotune.controllers.traffic import Traffic
from autotune.controllers.trusted_model import TrustedModel
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.step_model import StepFeatures, StepLearner
from runtime.tunable import SchedulerView

_TRIM_RATE, _TRIM = 0.02, (0.6, 4.0)
_FLOOR = 64  # tokens that a step may always hold, and slots that need no proof
_REACH = 4  # how many times the decodes ever seen together may be admitted on the model's word


class PredictiveController:
    """See the module. ``start`` are the knobs to fall back on; ``model`` may be one that has learned already."""

    name = "predictive"

    def __init__(
        self, slo: SLO, start: Knobs, *, kv_tokens: int, block_size: int = 16, model: StepLearner | None = None
    ) -> None:
        self.start = start
        self.regime = "learning"
        self.trim = 1.0
        self._granted: tuple[SchedulerView, float] | None = (
            None  # the last step's view and pace, until its rate is asked for
        )
        self._rate = 0.0
        self._belief = TrustedModel(model)
        self._traffic = Traffic()
        self._promises = Promises({"default": slo})
        self._kv_tokens = kv_tokens
        self._block_size = block_size
        self._vouched: Knobs | None = None  # the last setting that the model was trusted with
        self._most = 65536  # sequences at once that kept the pace, as of the last decision
        self._ceiling = 0  # token_budget as of the last decision

    @property
    def model(self) -> StepLearner:
        return self._belief.model

    @property
    def margin(self) -> OnlineQuantile:
        return self._belief.margin

    @property
    def bias(self) -> float:
        return self._belief.bias

    @property
    def target(self) -> float:
        """Seconds that a step may take on average, for the tightest of the classes served lately; inf when nothing bounds it."""
        return min(self._promises.step, self._promises.pace_of(self._traffic.outputs)) * self.trim

    def promise(self, slos: Mapping[str, SLO]) -> None:
        """What is promised to each class from now on. What the old promise had taught the trim is no longer so."""
        if self._promises.change(slos):
            self.trim = 1.0

    def observe_step(self, record: StepRecord) -> None:
        if self._belief.observe(record):
            self._traffic.step(record, self._ceiling)

    def observe_request(self, record: RequestRecord) -> None:
        self._promises.saw(record.request_class)
        if not record.completed:
            return
        self._traffic.request(record)
        slo = self._promises.of(record.request_class)
        if slo is None or slo.tpot_ms is None or record.tpot is None or self.regime == "infeasible":
            return
        slow = 1e3 * record.tpot > slo.tpot_ms
        late = slo.ttft_ms is not None and record.ttft is not None and 1e3 * record.ttft > slo.ttft_ms
        if slow or late:
            move = _TRIM_RATE * (1 if late else -1) * self.trim
        elif self._traffic.bound > 0.1 and self.trim < 1:  # without load, a kept promise says nothing about the limit
            move = _TRIM_RATE * max(1 - slo.attainment, 0.05)
        else:
            move = 0.0
        self.trim = min(max(self.trim + move, _TRIM[0]), _TRIM[1])

    def budget(self, view: SchedulerView) -> int:
        top = view.knobs.token_budget
        if not view.decoding or not self.model.ready or self.regime == "infeasible":
            self._granted = view, math.inf
            return top
        pace = self._pace(view)
        self._granted = view, pace
        allowed = pace
        if view.decode_slack < math.inf:
            ahead = view.decode_slack - pace
            allowed = pace + 0.5 * ahead if ahead > 0 else max(view.decode_slack, 0.5 * pace)
            if ahead < 0 and self._queue_suffers(view, allowed):
                allowed = pace
        gap = self._promises.gap
        if gap < math.inf:
            allowed = min(allowed, gap * self.bias / self.margin.value)
        if allowed == math.inf:
            return top
        most = view.knobs.chunk_size
        going_on = [(done, min(left, most)) for done, left in view.going_on]
        room = self.model.most_prefill(view.decoding, view.decode_context, allowed / self.bias, going_on)
        return top if room >= top else min(top, view.decoding + max(0, int(room)))

    def _pace(self, view: SchedulerView) -> float:
        """Seconds that a step may take on average for those that decode now; of all classes if the view does not say."""
        if view.pace == math.inf:
            return self.target
        return min(view.pace, self._promises.gap, self._promises.pace_of(self._traffic.outputs)) * self.trim

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second that steps as long as the last one was granted compute; 0 if that is not known."""
        if self._granted is not None:
            view, pace = self._granted
            self._granted, self._rate = None, self._rate_of(view, pace)
        return self._rate

    def _rate_of(self, view: SchedulerView, pace: float) -> float:
        if not self.model.ready:
            return 0.0
        room: float = view.knobs.token_budget - view.decoding
        if pace < math.inf:
            room = min(room, self.model.most_prefill(view.decoding, view.decode_context, pace / self.bias))
        if room < 1:
            return 0.0
        n = int(room)
        seconds = self.bias * self.model.predict(
            StepFeatures(view.decoding, view.decode_context, n, n, n * (n + 1) // 2)
        )
        return n / seconds if seconds > 0 else 0.0

    def _queue_suffers(self, view: SchedulerView, allowed: float) -> bool:
        """Whether steps of ``allowed`` seconds take longer to compute the waiting prompts than the oldest has left.

        One request behind its schedule would otherwise hold back every prompt, and all of those would be late.
        """
        first = self._promises.first
        if first == math.inf or not (view.waiting or view.prefilling):
            return False
        left = first if view.oldest_arrival == math.inf else view.oldest_arrival + first - view.now
        room = self.model.most_prefill(view.decoding, view.decode_context, allowed / self.bias)
        return room < 1 or (view.waiting_tokens + view.prefilling_tokens) / room * allowed > left

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        del now  # nothing here depends on the time of day, only on what was seen
        evidence = self._evidence()
        if not self._belief.trusted:
            held = limits.clamp(self._vouched or self.start)
            what = "the last knobs it vouched for hold" if self._vouched else "starting knobs hold"
            return self._propose("fallback", held, evidence, f"step times have not followed the model; {what}")
        if self.model.ready and (cause := self._impossible()):
            opened = _opened(limits, self._kv_bound(limits.max_batch_size))
            return self._propose("infeasible", opened, evidence, cause)
        if not self.model.ready or len(self._traffic.outputs) < 4:
            return self._propose(
                "learning", limits.clamp(knobs), evidence, f"{self.model.samples} steps seen: too few to judge"
            )
        if self.target == math.inf:
            opened = _opened(limits, limits.max_batch_size)
            return self._propose(
                "throughput", opened, evidence, "no target bounds a step, so nothing needs to be held back"
            )
        pace = self.target / self.bias
        self._most = largest(lambda decodes: self._alone(decodes) <= pace, limits.max_batch_size, self._most)
        most = min(
            max(1, self._most), max(_FLOOR, int(_REACH * self._traffic.decodes.quantile(1)))
        )  # beyond what was seen the model only guesses
        pool = self._kv_bound(limits.max_batch_size)
        batch = min(most, pool)
        if self._traffic.slots_bound < 0.01:  # a limit that does not bind is not raised
            batch = min(batch, knobs.max_batch_size)
        # at a typical load the ceiling leaves the per-step budget room to spend what requests are ahead
        decodes = int(min(batch, max(self._traffic.decodes.quantile(0.5), 1)))
        room = self.model.most_prefill(decodes, int(decodes * self._traffic.contexts.mean), 2 * pace)
        budget = min(limits.token_budget, max(_FLOOR, decodes + int(min(room, 1e9)), batch))
        chunk = min(limits.chunk_size, max(32, budget // 4) if self._traffic.mixed() else budget)
        regime = "demand-limited" if self._traffic.idle() else "kv-limited" if pool < most else "compute-limited"
        if self._traffic.tokens_bound < 0.01:
            budget, chunk = min(budget, knobs.token_budget), min(chunk, knobs.chunk_size)
        self._ceiling = budget
        cause = self._cause(regime, budget, decodes, batch)
        self._vouched = Knobs(batch, 0.0, budget, chunk)
        return self._propose(regime, self._vouched, evidence, cause)

    def _impossible(self) -> str:
        """Why no setting keeps the promise about token times; empty if one may. A step as short as that must not have been
        seen either: a model of few steps may be wrong about smaller ones."""
        wanted = self.target / self.trim
        alone = self._alone(1) if wanted < self._traffic.shortest else 0.0
        if alone <= wanted:
            return ""
        broken = self._promises.tightest(wanted)
        return f"decode alone takes {alone * 1e3:.1f} ms at batch 1; {broken} cannot be met: throughput instead"

    def _cause(self, regime: str, budget: int, decodes: int, batch: int) -> str:
        pace = self.target * 1e3
        full = self.model.predict(self._mix(decodes, budget - decodes)) * 1e3
        text = f"{decodes} decodes and {budget - decodes} prompt tokens take {full:.0f} ms (target {pace:.0f})"
        steady = f"{batch} decodes alone take {self._alone(batch) * 1e3:.0f} ms"
        if regime == "kv-limited":
            steady = f"the KV pool holds {batch} sequences of this length"
        prompt = int(self._traffic.prompts.quantile(0.5))
        first = self.bias * self.model.predict(StepFeatures(0, 0, prompt, prompt, prompt * (prompt + 1) // 2))
        if first > self._promises.first:
            steady += f"; half of the prompts take {first * 1e3:.0f} ms alone, and their first token is promised sooner"
        return f"{text}; {steady}"

    def _mix(self, decodes: int, prefill: int) -> StepFeatures:
        return StepFeatures(
            decodes, int(decodes * self._traffic.contexts.mean), prefill, prefill, prefill * (prefill + 1) // 2
        )

    def _alone(self, decodes: int) -> float:
        return self.model.predict(self._mix(decodes, 0))

    def _kv_bound(self, top: int) -> int:
        """Sequences that the KV pool holds without preempting; only asked of it once it has preempted."""
        if self._traffic.preemptions < 0.05:
            return top
        each = self._traffic.prompts.mean + self._traffic.outputs.mean + self._block_size
        return max(1, min(top, int(0.9 * self._kv_tokens / max(1.0, each))))

    def _propose(self, regime: str, knobs: Knobs, evidence: dict[str, float], cause: str) -> Proposal:
        self.regime = regime
        return Proposal(knobs, regime, cause, evidence)

    def _evidence(self) -> dict[str, float]:
        return {
            "steps": self._belief.steps,
            "model_error": round(self.model.error, 4),
            "bias": round(self.bias, 4),
            "margin": round(self.margin.value, 4),
            "trim": round(self.trim, 4),
            "decodes": self._traffic.decodes.quantile(0.5),
            "context": round(self._traffic.contexts.mean, 1),
            "prompt": round(self._traffic.prompts.mean, 1),
            "output": round(self._traffic.outputs.mean, 1),
            "bound": round(self._traffic.bound, 3),
            "preemptions": round(self._traffic.preemptions, 2),
        }


def _opened(limits: KnobLimits, batch: int) -> Knobs:
    """Nothing held back, but for the sequences at once."""
    return Knobs(batch, 0.0, limits.token_budget, limits.chunk_size)
