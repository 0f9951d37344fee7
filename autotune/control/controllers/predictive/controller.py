"""The predictive controller: learn what a step costs, and solve for the largest one that meets the targets.

Formula. With t(D, C, P) the learned time of a step of D decodes reading C tokens beside P prompt tokens, b the mean of
actual/predicted and τ the TPOT target:

- per step: :mod:`.step_budget`;
- ``max_batch_size``: the largest D with b·t(D, D·c̄, 0) ≤ τ (c̄: mean context), no more than the KV pool holds, than
  four times the decodes ever seen (at least 64), or than stay below a slow region (:mod:`.slow_bands`). What
  D decodes leave of τ is shared out by the budget, step by step; slots that leave room for prompts in advance would hold back the
  queue whenever the machine is slow for a moment, and sequences at once are what makes it fast;
- ``token_budget``: D plus the P that a step of 2τ holds (at least 64, and a token for each slot), a ceiling for the per-step
  budget. Where the engine asks for no such budget (:meth:`budgets_apply`), the ceiling is all that holds a step: then it is what
  fits τ, or what carries the load (:mod:`.step_size`);
- ``chunk_size``: the whole budget, or part of it where some class's long prompts may come late and another's short ones may
  not (:mod:`.step_size`);
- ``max_wait_ms``: 0, always; in continuous batching waiting gains nothing.

Units: seconds and tokens. Regimes: ``learning`` (too few steps: knobs stay), ``demand-limited`` (nothing binds: nothing is
raised), ``compute-limited``, ``kv-limited`` (preemptions), ``infeasible`` (:mod:`.infeasible`: every class
served has a target that nothing meets; its other targets bound steps as ever, and where none does, throughput is all there is to
win, so the knobs open), ``fallback`` (the model has been wrong for long, or requests fared better before: the starting knobs
hold, and no step has a budget of its own, so that nothing is served less than they would serve). A class
with an infeasible target beside others without is named in the cause, and its targets do not count.

Feedback. ``gain`` scales τ by the targets that requests met and missed (:mod:`.feedback`), infeasible ones left out.

TTFT and E2E contain queueing and never make a batch or a step smaller: that would cut capacity just when it is short.

Do no harm. Where knobs alone hold, the starting ones come back when requests fared better under them (:mod:`.start_comparison`).
On a host that others keep busy, step times jump for reasons that no model of a step knows. Where steps have budgets, a model that
is far off, or a machine whose speed keeps changing, cuts no knob below its start. Where the model says that no batch meets the
target, a smaller one gains nothing: the starting one stays. Nor does ``max_batch_size`` go below the most sequences that met the
target lately.

Failure mode: a step time that depends on something the model cannot see (another process, a region of slow steps that is never
left). Both ratios widen first; then the fallback takes over, and the model is learned anew until it is right again. Source:
DESIGN "What the controller must know"; the step model in :mod:`runtime.step_model`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotune.control.controllers.galloping import largest
from autotune.control.controllers.predictive.feedback import FeedbackGain
from autotune.control.controllers.predictive.infeasible import InfeasibleTargets
from autotune.control.controllers.predictive.start_comparison import StartComparison
from autotune.control.controllers.predictive.step_budget import StepBudget
from autotune.control.controllers.predictive.step_size import Chunks, full_step
from autotune.control.controllers.predictive.traffic import Demand, Traffic
from autotune.control.controllers.predictive.trusted_model import TrustedModel
from autotune.control.controllers.protocol import Proposal
from autotune.control.controllers.registry import register
from autotune.control.controllers.running_statistics import OnlineQuantile
from autotune.control.controllers.targets import SLOTargets
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.step_model import PRIOR_ERROR, StepFeatures, StepLearner
from runtime.tunable import SchedulerView

_TURNED = ("max_batch_size", "max_wait_ms", "token_budget", "chunk_size")
_LEFT_ALONE = tuple(spec.name for spec in KNOBS if spec.name not in _TURNED)  # they stay where they started
# When the starting knobs are worth a trial; tuned with the constants of :mod:`.start_comparison`.
_HELPS = 0.25  # how much cheaper larger steps are, from which on smaller ones may cost goodput
_TRIAL_S = 0.5  # of decoding, of which a few requests soon tell
_FLOOR = 64  # tokens that a step may always hold, and slots that need no proof
_LONG_S = 5.0  # between two decisions: longer than that, a clock may have jumped
_LEARNING = "learning step times and output lengths: holding the knobs until they can be predicted"
_REACH = 4  # how many times the decodes ever seen together may be admitted on the model's word


@register
class PredictiveController:
    """See the module. ``start`` are the knobs to fall back on; ``model`` may be one that has learned already."""

    name = "predictive"

    def __init__(
        self, slo: SLO, start: Knobs, *, kv_tokens: int, block_size: int = 16, model: StepLearner | None = None
    ) -> None:
        self.start = start
        self.regime = "learning"
        self._gain = FeedbackGain()
        self._budgeted = True  # whether each step goes by `budget`
        self._trusted_model = TrustedModel(model)
        self._traffic = Traffic()
        self._demand = Demand()
        self._chunks = Chunks()
        self._targets = SLOTargets({"default": slo})
        self._infeasible = InfeasibleTargets(self._targets, self._traffic)
        self._comparison = StartComparison()
        self._steps = StepBudget(self._trusted_model, self._traffic, self._targets, self._gain)
        self._kv_tokens = kv_tokens
        self._block_size = block_size
        self._most = 65536  # sequences at once that met the target, as of the last decision
        self._ceiling = 0  # token_budget as of the last decision
        self._beyond = False  # whether steps exceed the target to carry the load
        self._full = 8192  # tokens of a step that meets the target, as of the last decision
        self._decided = math.inf  # when it last did

    @property
    def model(self) -> StepLearner:
        return self._trusted_model.model

    @property
    def margin(self) -> OnlineQuantile:
        return self._trusted_model.margin

    @property
    def bias(self) -> float:
        return self._trusted_model.bias

    @property
    def gain(self) -> float:
        return self._gain.value

    @property
    def target(self) -> float:
        """Seconds that a step may take on average, for the tightest of the classes served lately; inf when nothing bounds it."""
        return self._steps.target

    def set_slos(self, slos: Mapping[str, SLO]) -> None:
        """The SLO of each class from now on. What the old SLOs taught is forgotten."""
        if self._targets.change(slos):
            self._gain.clear()
            self._comparison = StartComparison()

    def budgets_apply(self, applied: bool) -> None:
        self._budgeted = applied

    def observe_step(self, record: StepRecord) -> None:
        if self._trusted_model.observe(record):
            self._traffic.step(record, self._ceiling)
            self._demand.step(record)

    def observe_request(self, record: RequestRecord) -> None:
        self._targets.saw(record.request_class, record.output_tokens if record.completed else None)
        self._infeasible.saw(record)
        if not self._budgeted and record.offered:
            self._comparison.saw(record.arrival, self._targets.met(record))
        if not record.completed:
            if record.scheduled is None:
                self._demand.lost(record)
                self._gain.sheds |= record.reason in (FinishReason.REJECTED, FinishReason.TIMEOUT)
            return
        self._traffic.request(record)
        self._chunks.saw(self._targets.name_of(record.request_class), record.prompt_tokens - record.cached_tokens)
        slo, targets = self._targets.of(record.request_class), self._targets.targets(record.request_class)
        gaps = (
            not self._budgeted and targets is not None and targets.itl < math.inf
        )  # nothing else holds a single step then
        if slo is None or targets is None or not (targets.tpot < math.inf or gaps) or record.tpot is None:
            return
        if not self._budgeted and self._comparison.at_start:  # a miss says nothing of a target that no step goes by
            return
        slow = self._targets.slow(record, self._traffic.outputs) and not self._beyond  # such steps are long on purpose
        slow |= gaps and 1e3 * (record.itl_p99 or 0.0) > targets.itl
        late = record.ttft is not None and 1e3 * record.ttft > targets.ttft
        loaded = self._traffic.bound > 0.1
        if self._budgeted:
            self._gain.budgeted(slow=slow, late=late, loaded=loaded, attainment=slo.attainment)
        else:
            relief = self._relief if late else 0.0
            self._gain.unbudgeted(slow=slow, late=late, loaded=loaded, attainment=slo.attainment, relief=relief)

    def budget(self, view: SchedulerView) -> int:
        held = self.regime != "infeasible" or self.target < math.inf
        return self._steps.budget(view, held=held and self._trusted_model.trusted)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second that steps as long as the last one was granted compute; 0 if that is not known."""
        return self._steps.prefill_rate

    @property
    def pair_tokens(self) -> float:
        """Tokens that take as long as one attention pair of a prompt; 0 if that is not known."""
        return self.model.pair_tokens

    @property
    def prompts_abreast(self) -> int:
        """How many prompts such a step has room for."""
        return self._steps.prompts_abreast

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        proposal = self._solve(now, knobs, limits)
        if self._budgeted:
            return proposal
        start = limits.clamp(self.start)
        if self._comparison.holds(now, self._worth_trying()):
            self.regime = "fallback"
            proposal = proposal._replace(
                knobs=start, regime="fallback", cause=f"{self._comparison.said}; {proposal.cause}"
            )
        self._comparison.decided(now, proposal.knobs == start)
        return proposal

    def _worth_trying(self) -> bool:
        """Whether the starting knobs may do better, and a few requests soon tell: larger steps are cheaper, steps meet the target
        on average if each holds the prompts that came during the one before, and answers are short."""
        target = self.target / self.gain / self.bias
        if not self.model.ready or target == math.inf or self._traffic.outputs.mean * target > _TRIAL_S:
            return False
        decodes = int(self._traffic.decodes.quantile(0.5))
        usual = self._step_of(decodes, decodes + int(self._demand.per_second * target))
        return self._relief > _HELPS and usual <= target

    def _solve(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        """What the model says."""
        if self._traffic.idle():
            self._gain.rest(min(max(0.0, now - self._decided), _LONG_S))
        self._decided = now
        evidence = self._evidence()
        if not self._trusted_model.trusted:
            off = f"{self._trusted_model.wrong:.0%} of recent steps took over 1.5 times or under 0.67 of their predicted time"
            return self._propose("fallback", limits.clamp(self.start), evidence, f"{off}: holding the starting knobs")
        if self.model.ready and self._infeasible.judge(lambda: self._alone(1), self._first):
            self._gain.clear()  # it was taught by targets that no longer bound steps, or did not yet
        if self.model.ready and self._targets.all_lost and self.target == math.inf:
            opened = _opened(limits, self._kv_bound(limits.max_batch_size))
            return self._propose("infeasible", opened, evidence, "")
        if not self.model.ready or (self._budgeted and len(self._traffic.outputs) < 4):
            return self._propose("learning", limits.clamp(knobs), evidence, _LEARNING)
        if self.target == math.inf:
            opened = _opened(limits, limits.max_batch_size)
            return self._propose("throughput", opened, evidence, "no target bounds a step: opening the knobs")
        target = self.target / self.bias
        self._most = largest(lambda decodes: self._alone(decodes) <= target, limits.max_batch_size, self._most)
        at_once = int(self._traffic.decodes.quantile(1))
        known = max(_FLOOR, _REACH * at_once)  # beyond that the model only guesses
        most = int(max(1, min(max(self._most, self._least(limits, at_once)), self._trusted_model.slow.room, known)))
        pool = self._kv_bound(limits.max_batch_size)
        batch = min(most, pool)
        sequences = self._sequences(batch, pool, at_once, known, limits)
        if (
            self._traffic.slots_bound < 0.01 and batch > knobs.max_batch_size
        ):  # a limit that does not bind is not raised
            batch, sequences = knobs.max_batch_size, f"max_batch_size {knobs.max_batch_size} does not bind: not raised"
        decodes = int(min(batch, max(self._traffic.decodes.quantile(0.5), 1)))
        budget = self._ceiling_for(decodes, target, limits.token_budget)
        if self._budgeted:  # the ceiling leaves it room to spend what requests are ahead, at a typical load
            room = self.model.most_prefill(decodes, int(decodes * self._traffic.contexts.mean), 2 * target)
            budget = max(budget, decodes + int(min(room, 1e9)), batch)
        least = self.start.token_budget if self._unreliable else _FLOOR
        budget = min(limits.token_budget, max(least, budget))
        chunk = min(
            limits.chunk_size, budget if self._budgeted else self._chunks.size(self._targets.firsts, target, budget)
        )
        why = self._why(budget, batch, limits)
        regime = "demand-limited" if self._traffic.idle() else "kv-limited" if pool < most else "compute-limited"
        if self._traffic.tokens_bound < 0.01:
            if budget > knobs.token_budget:
                budget, why = knobs.token_budget, "token_budget does not bind: not raised"
            chunk = min(chunk, knobs.chunk_size)
        self._ceiling = budget
        prompt, took = budget - decodes, _ms(self.model.predict(self._mix(decodes, budget - decodes)))
        cause = f"predicted {took} for {decodes} decodes and {prompt} prompt tokens ({why}); {sequences}"
        wanted = Knobs(batch, 0.0, budget, chunk)
        return self._propose("infeasible" if self._targets.all_lost else regime, wanted, evidence, cause)

    @property
    def _unreliable(self) -> bool:
        """Whether predictions are too far off to cut a knob by."""
        return self._budgeted and (self.model.error > PRIOR_ERROR or self._trusted_model.unsteady > 1)

    def _least(self, limits: KnobLimits, seen: int) -> int:
        """Sequences that the model is not trusted to go below: the starting ones where it is far off, or where it says that no
        batch meets the target, so that a smaller one gains nothing; else the most that met the target lately (``seen``: the most
        that any step held)."""
        start = min(self.start.max_batch_size, limits.max_batch_size)
        if self._most < 1 or self._unreliable:
            return start
        if self._most >= min(start, seen):
            return 1
        return min(start, self._traffic.in_time(self.target))

    def _ceiling_for(self, decodes: int, target: float, top: int) -> int:
        """Tokens of a step that fits the target, or that carries the load where such a one does not."""
        demand = self._demand.per_second
        if (
            self._targets.gap < math.inf and not self._budgeted
        ):  # a gap is a single step, the fullest one too, and no mean
            target = min(target, min(self.gain, 1.0) * self._targets.gap / self.margin.value)
            decodes, demand = max(decodes, int(self._traffic.decodes.quantile(0.95))), 0.0
        if self._budgeted:
            room = self.model.most_prefill(decodes, int(decodes * self._traffic.contexts.mean), target)
            if room >= demand * target:  # nearly always, and cheaper to find out than how large a step may be
                self._beyond, self._steps.prefill_quantum = False, 0
                return decodes
        size, self._full = full_step(lambda n: self._step_of(decodes, n), decodes, target, demand, top, self._full)
        self._beyond = size > self._full
        self._steps.prefill_quantum = size - decodes if self._beyond and self._targets.gap == math.inf else 0
        return max(size, decodes + 16)

    def _step_of(self, decodes: int, tokens: int) -> float:
        """Seconds of a step of so many tokens, ``decodes`` of them decodes, its prompts as prompts have been lately."""
        prompt = max(0, tokens - decodes)
        context, pairs = self._traffic.chunk(prompt)
        return self.model.predict(
            StepFeatures(decodes, int(decodes * self._traffic.contexts.mean), prompt, context, pairs)
        )

    @property
    def _relief(self) -> float:
        """How much faster, as a share of how much larger, larger steps compute prompts: 0 where time is all tokens, 1 where a
        step costs the same whatever it holds."""
        decodes = int(self._traffic.decodes.quantile(0.5))
        full = max(self._full, decodes + 32)
        before, after = self._step_of(decodes, full), self._step_of(decodes, 2 * full)
        if not 0 < before <= after:
            return 0.0
        rate = math.log2((2 * full - decodes) / (full - decodes)) - math.log2(after / before)
        return min(max(rate, 0.0), 1.0)

    def _why(self, budget: int, batch: int, limits: KnobLimits) -> str:
        """Why ``token_budget`` is to be ``budget``: what it was that had the last word."""
        target = _ms(self.target)
        if budget == limits.token_budget:
            return f"as many as the engine takes; step-time target {target}"
        if self._unreliable and budget == self.start.token_budget:
            return f"no fewer than at the start while predictions are off; step-time target {target}"
        if self._beyond:
            return f"above the step-time target of {target}, to carry the load"
        if self._budgeted:
            slots = "a token for each slot, " if budget == batch else ""
            return f"{slots}a ceiling: each step has its own budget for {target}"
        return f"step-time target {target}"

    def _sequences(self, batch: int, pool: int, at_once: int, known: int, limits: KnobLimits) -> str:
        """Why ``max_batch_size`` is to be ``batch``: what it was that had the last word."""
        if batch == pool < limits.max_batch_size:
            return f"the KV pool holds {batch} sequences of this length"
        if batch == limits.max_batch_size:
            return f"{batch} sequences, as many as the engine takes"
        if batch == self._trusted_model.slow.room:
            return f"{batch} sequences: steps of more have been slow"
        if batch == known:
            return f"{batch} sequences: at most {at_once} have run at once"
        if batch > max(self._most, 1):
            held = "while predictions are off" if self._unreliable else "as no batch meets the target"
            return f"{batch} sequences, {held if self._unreliable or self._most < 1 else 'which met the target lately'}"
        return f"predicted {_ms(self._alone(batch))} for {batch} decodes alone"

    def _mix(self, decodes: int, prefill: int) -> StepFeatures:
        return StepFeatures(
            decodes, int(decodes * self._traffic.contexts.mean), prefill, prefill, prefill * (prefill + 1) // 2
        )

    def _alone(self, decodes: int) -> float:
        return self.model.predict(self._mix(decodes, 0))

    def _first(self, prompt: int) -> float:
        """Seconds until the first token of a prompt of so many tokens that has the machine to itself."""
        return self.bias * self.model.predict(StepFeatures(0, 0, prompt, prompt, prompt * (prompt + 1) // 2))

    def _kv_bound(self, top: int) -> int:
        """Sequences that the KV pool holds without preempting; only asked of it once it has preempted."""
        if self._traffic.preemptions < 0.05:
            return top
        each = self._traffic.prompts.mean + self._traffic.outputs.mean + self._block_size
        return max(1, min(top, int(0.9 * self._kv_tokens / max(1.0, each))))

    def _propose(self, regime: str, knobs: Knobs, evidence: dict[str, float], cause: str) -> Proposal:
        self.regime = regime
        cause = self._infeasible.explain(cause, self.target / self.gain)
        if _LEFT_ALONE:
            knobs = knobs.with_(**{name: getattr(self.start, name) for name in _LEFT_ALONE})
        return Proposal(knobs, regime, cause, evidence, self._infeasible.unmet)

    def _evidence(self) -> dict[str, float]:
        return {
            "steps": self._trusted_model.steps,
            "model_error": round(self.model.error, 4),
            "bias": round(self.bias, 4),
            "margin": round(self.margin.value, 4),
            "gain": round(self.gain, 4),
            "changes": self._trusted_model.changes,
            "decodes": self._traffic.decodes.quantile(0.5),
            "context": round(self._traffic.contexts.mean, 1),
            "prompt": round(self._traffic.prompts.mean, 1),
            "output": round(self._traffic.outputs.mean, 1),
            "demand": round(self._demand.per_second, 1),
            "bound": round(self._traffic.bound, 3),
            "preemptions": round(self._traffic.preemptions, 2),
        }


def _ms(seconds: float) -> str:
    """For people: ``48 ms``, and ``0.63 ms`` rather than 0."""
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"


def _opened(limits: KnobLimits, batch: int) -> Knobs:
    """Nothing held back, but for the sequences at once."""
    return Knobs(batch, 0.0, limits.token_budget, limits.chunk_size)
