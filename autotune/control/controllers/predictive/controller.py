"""The predictive controller: learn what a step costs, and solve for the largest one that meets the targets.

Formula. With t(D, C, P) the learned time of a step of D decodes reading C tokens beside P prompt tokens, b the mean of
actual/predicted and τ the TPOT target:

- per step: :mod:`.step_budget`;
- ``max_batch_size``: the largest D with b·t(D, D·c̄, 0) ≤ τ (c̄: mean context), no more than four times the decodes
  ever seen (at least 64), or than stay below a slow region (:mod:`.trusted_model`). What
  D decodes leave of τ is shared out by the budget, step by step; slots that leave room for prompts in advance would hold back the
  queue whenever the machine is slow for a moment, and sequences at once are what makes it fast;
- ``token_budget``: D plus the P that a step of 2τ holds, in whole tiles (at least 64, a token for each slot, and prompts that
  had better come together), a ceiling for the per-step budget. Where the engine asks for no such budget
  (:meth:`budgets_apply`), the ceiling is all that holds a step: then it is what fits τ, or what carries the load
  (:mod:`.step_size`), at least 32. Where τ follows from an E2E target, it is the size with which most requests are in time;
- ``chunk_size``: the whole budget; where knobs are all there is, less if long prompts that have time would hold up those that
  have none (:class:`.step_size.Chunks`);
- ``max_wait_ms``: 0, always; in continuous batching waiting gains nothing;
- ``draft_tokens``: stays at 0 where it starts there, else up while steps wait for memory and down when they compute
  (:mod:`.drafting`).

Units: seconds and tokens. Regimes: ``learning`` (too few steps: knobs stay), ``demand-limited`` (nothing binds: nothing is
raised), ``compute-limited``, ``kv-limited`` (the pool preempts; slots for no more than it holds on average would lose more),
``throughput`` (no target bounds a step: the knobs open), ``infeasible`` (the same, because a decode alone takes longer than every
target that would), ``fallback`` (the model has been wrong for long, or requests fared better before: the starting knobs hold, and
no step has a budget of its own, so that nothing is served less than they would serve). A target that a decode alone exceeds does
not count, and the cause names it.

Feedback. ``gain`` scales τ by the targets that requests met and missed (:mod:`.feedback`), those that do not count left out.

TTFT and E2E contain queueing: one that is missed never makes a batch or a step smaller, for that would cut capacity just when it
is short.

Do no harm. Where knobs alone hold, the starting ones come back when requests fared better under them (:mod:`.start_comparison`).
On a host that others keep busy, step times jump for reasons that no model of a step knows. Where steps have budgets, and the
speed of the machine keeps changing, no prediction cuts a knob below its start. Where the model says that no batch meets the
target, a smaller one gains nothing: the starting one stays. Nor does ``max_batch_size`` go below the most sequences that met the
target lately.

Failure mode: a step time that depends on something the model cannot see (another process, a region of slow steps that is never
left). Both ratios widen first; then the fallback takes over, and the model is learned anew until it is right again. In words and
with an example: ``docs/concepts/control.md``; the step model is in :mod:`runtime.step_model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autotune.control.controllers.parts.galloping import largest
from autotune.control.controllers.parts.targets import SLOTargets
from autotune.control.controllers.parts.tiles import whole_tiles
from autotune.control.controllers.predictive import constants
from autotune.control.controllers.predictive.attainment_model import attainment
from autotune.control.controllers.predictive.drafting import Drafting
from autotune.control.controllers.predictive.feedback import FeedbackGain, worth_missing
from autotune.control.controllers.predictive.start_comparison import StartComparison
from autotune.control.controllers.predictive.step_budget import StepBudget
from autotune.control.controllers.predictive.step_size import Chunks, as_fast, full_step, most_in_time
from autotune.control.controllers.predictive.traffic import Demand, Traffic
from autotune.control.controllers.predictive.trusted_model import TrustedModel
from autotune.control.controllers.protocol import Proposal
from autotune.control.controllers.registry import register
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.records import QUEUE_TIMEOUT_REASON, SLO_REASON, FinishReason, RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.step_model import StepFeatures, StepLearner
from runtime.tunable import TILE, SchedulerView

_TURNED = ("max_batch_size", "max_wait_ms", "token_budget", "chunk_size")
_LEFT_ALONE = tuple(
    spec.name for spec in KNOBS if spec.name not in _TURNED
)  # they stay where they started, but for drafts
_LATE = (SLO_REASON, QUEUE_TIMEOUT_REASON)  # why a request was rejected that left the queue, or a late one
_LEARNING = "learning step times and output lengths: holding the knobs until they can be predicted"


@register
class PredictiveController:
    """See the module. ``start`` are the knobs to fall back on; ``model`` may be one that has learned already."""

    name = "predictive"

    def __init__(self, slo: SLO, start: Knobs, *, model: StepLearner | None = None, tile: int = TILE) -> None:
        self.start = start
        self._left_alone: dict[str, Any] = {name: getattr(start, name) for name in _LEFT_ALONE}
        self._gain = FeedbackGain()
        self._budgeted = True  # whether each step goes by `budget`
        self._learned = TrustedModel(model)
        self._traffic = Traffic()
        self._demand, self._usual = Demand(), Demand(constants.USUAL_S)
        self._chunks = Chunks()
        self._cut = False  # whether the last decision that could cut prompts that have time for others did so
        self._targets = SLOTargets({"default": slo})
        self._comparison = StartComparison()
        self._observes = False  # whether no decision is put in force
        self._drafting = Drafting(start.draft_tokens) if start.draft_tokens else None
        self._steps = StepBudget(self._learned, self._traffic, self._targets, self._gain, tile)
        self._most = 65536  # sequences at once that met the target, as of the last decision
        self._ceiling = 0  # token_budget as of the last decision
        self._in_force, self._moved = 0, -math.inf  # the one in force then, and since when
        self._beyond = False  # whether steps exceed the target to carry the load
        self._full = 8192  # tokens of a step that meets the target, as of the last decision
        self._decided = math.inf  # when it last did
        # Requests that came before teach nothing of the SLO in force, or of the target; inf: nothing was decided for it yet.
        self._judged_from = -math.inf

    @property
    def model(self) -> StepLearner:
        return self._learned.model

    @property
    def target(self) -> float:
        """Seconds that a step may take on average, for the tightest of the classes served lately; inf when nothing bounds it."""
        return self._steps.target

    def set_slos(self, slos: Mapping[str, SLO]) -> None:
        """The SLO of each class from now on. What the old SLOs taught is forgotten."""
        if self._targets.change(slos):
            self._gain.clear()
            self._comparison.forget()
            self._judged_from = math.inf

    def budgets_apply(self, applied: bool) -> None:
        self._budgeted = applied
        if self._decided < math.inf:  # an operator may have set other knobs since
            self._comparison.forget()
            self._judged_from = math.inf

    def only_observes(self) -> None:
        self._observes = True

    def observe_step(self, record: StepRecord) -> None:
        if seconds := self._learned.observe(record):
            self._steps.saw(record, seconds)
            self._traffic.step(record, seconds, self._ceiling)
            self._demand.step(record)
            self._usual.step(record)
            if self._drafting is not None:
                self._drafting.step(record)
        if record.leaves_idle:
            self._steps.ran_dry()

    def observe_request(self, record: RequestRecord) -> None:
        self._targets.saw(record.request_class, record.output_tokens if record.completed else None)
        if not (self._budgeted or self._observes) and record.offered:
            self._comparison.saw(record.arrival, self._targets.met(record))
        if not record.completed:
            if record.scheduled is None:
                lost = record.prompt_tokens * self._traffic.uncached
                self._demand.lost(lost)
                self._usual.lost(lost)
                if record.reason is FinishReason.TIMEOUT or record.cause in _LATE:
                    self._gain.shed()
            return
        self._traffic.request(record)
        self._chunks.saw(self._targets.name_of(record.request_class), record.prompt_tokens - record.cached_tokens)
        self._feed_back(record)

    def _feed_back(self, record: RequestRecord) -> None:
        """Move the gain by what became of a completed request."""
        slo, targets = self._targets.of(record.request_class), self._targets.targets(record.request_class)
        if slo is None or targets is None:
            return
        if record.ttft is not None and 1e3 * record.ttft > min(targets.ttft, targets.e2e):
            self._gain.served_late()
        if record.tpot is None or record.arrival < self._judged_from:
            return
        gaps = not self._budgeted and targets.itl < math.inf  # nothing else holds a single step then
        if not (targets.tpot < math.inf or gaps):
            return
        if not self._budgeted and (self._observes or self._comparison.at_start):
            return  # a miss says nothing of a target that no step goes by
        slow = self._targets.slow(record, self._traffic.outputs) and not self._beyond  # such steps are long on purpose
        slow |= gaps and 1e3 * (record.itl_p99 or 0.0) > targets.itl
        late = record.ttft is not None and 1e3 * record.ttft > targets.ttft
        if late:  # where a prompt alone usually takes as long, they are late whatever is done
            usual = self._learned.bias * self._predicted(0, int(self._traffic.prompts.mean))
            late = 1e3 * usual <= targets.ttft
        loaded, relief = self._traffic.bound > 0.1, self._relief if late else 0.0
        if self._budgeted:
            worth = 0.0
            if self._unsteady:  # then misses say little of how long steps are
                worth = math.inf
            elif loaded and self._gain.value < 1:
                worth = worth_missing(self._relief)
            self._gain.budgeted(
                slow=slow, late=late, loaded=loaded, attainment=slo.attainment, worth=worth, relief=relief
            )
        else:
            self._gain.unbudgeted(slow=slow, late=late, loaded=loaded, attainment=slo.attainment, relief=relief)

    def budget(self, view: SchedulerView) -> int:
        return self._steps.budget(view)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second that steps as long as the last one might have been compute; 0 if that is not known."""
        return self._steps.prefill_rate

    @property
    def pair_tokens(self) -> float:
        """Tokens that take as long as one attention pair of a prompt; 0 if that is not known."""
        return self.model.pair_tokens

    @property
    def prompts_per_step(self) -> int:
        """How many prompts such a step has room for."""
        return self._steps.prompts_per_step

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        proposal = self._solve(now, knobs, limits)
        if self._judged_from == math.inf:
            self._judged_from = now
        if self._drafting is not None:
            proposal = self._with_drafts(self._drafting, proposal, now, knobs, limits)
        if self._budgeted or self._observes:
            return proposal
        start = limits.clamp(self.start)
        if self._comparison.holds(now, self._tried_below()):
            cause = f"{self._comparison.said}; {proposal.cause}"
            proposal = proposal._replace(knobs=start, regime="fallback", cause=cause)
        self._comparison.decided(now, proposal.knobs == start)
        return proposal

    def _with_drafts(
        self, drafting: Drafting, proposal: Proposal, now: float, knobs: Knobs, limits: KnobLimits
    ) -> Proposal:
        """``proposal`` with as many drafts as pay. While the model is not to be relied on, they are as at the start."""
        drafting.each = knobs.draft_tokens
        decodes = int(self._traffic.decodes.quantile(0.5))
        if proposal.regime in ("learning", "fallback") or not self.model.ready or not decodes:
            return proposal
        context = self._traffic.context(decodes)

        def seconds(further: int) -> float:
            return self.model.predict(StepFeatures(decodes, context, 0, 0, 0, 0, further))

        count, why = drafting.choose(now, limits.draft_tokens, decodes, seconds)
        return proposal._replace(knobs=proposal.knobs.with_(draft_tokens=count), cause=f"{proposal.cause}; {why}")

    def _tried_below(self) -> float:
        """The share of requests in time below which the starting knobs are to be tried, where nothing is known of them.

        ``GOOD`` where they may do better than requests have fared. By the model of attainment, where that says less of the budget
        in force; where that has done worse, there are bursts or stalls that no model knows of. Then, unless the model says
        clearly less of the start than has been in time: if answers are so short that a few requests soon tell, where larger steps
        are cheaper, and steps meet the target on average if each holds the prompts that came during the one before. ``DOUBTED``
        where the model has requests miss their targets under those in force, too, and not clearly more under the start. Otherwise
        ``HOPELESS``.
        """
        target = self.target / self._gain.value
        below = constants.HOPELESS
        if not self._traffic.prompts or target == math.inf or not (self.model.ready and self._ceiling):
            return below
        alike = len(set(self._targets.firsts.values())) == 1 or not self._cut  # it knows of no chunks that classes need
        decodes = int(max(1, min(self._traffic.decodes.quantile(0.5), self.start.max_batch_size)))
        if alike and self._usual.per_second > 0 and self._targets.gap == math.inf:
            attains = self._attains(decodes)
            known, start = attains(self._ceiling), attains(self.start.token_budget)
            # Where none will be in time in the end, what was attained does not last.
            attained = self._comparison.attained if known else self._comparison.lately
            if start < attained - constants.WORSE:
                return below
            if start > max(attained, known) + constants.BETTER:
                return constants.GOOD
            if known - constants.WORSE <= start and known < constants.GOOD:
                below = constants.DOUBTED
        target /= self._learned.bias
        usual = self._step_of(decodes, decodes + int(self._demand.per_second * target))
        soon = self._traffic.outputs.mean * target <= constants.DECODING_S
        return constants.GOOD if soon and self._relief > constants.HELPS and usual <= target else below

    def _attains(self, decodes: int, gain: float = 1.0) -> Callable[[int], float]:
        """The share of requests in time, by tokens of a step, ``decodes`` of them decodes; not a number before any has ended.
        ``gain``: what scales TPOT."""
        bias, targets = self._learned.bias, self._targets

        def share(tokens: int) -> float:
            requests = self._traffic.requests(self._usual.per_second, stay=self._gain.keeps)
            return math.nan if requests is None else attainment(
                lambda n: bias * self._step_of(decodes, n), decodes, max(1, tokens - decodes), gain * targets.step,
                targets.first, requests, targets.whole,
            )  # fmt: skip

        return share

    def _solve(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        """What the model says."""
        traffic, targets, ready = self._traffic, self._targets, self.model.ready
        idle = traffic.demand_limits()
        if idle:
            self._gain.rest(min(max(0.0, now - self._decided), constants.LONG_S))
        self._decided = now
        if not self._learned.trusted:
            off = f"{self._learned.wrong:.0%} of recent steps took over 1.5 times or under 0.67 of their predicted time"
            return self._propose("fallback", limits.clamp(self.start), f"{off}: holding the starting knobs")
        alone = traffic.alone
        if ready and alone > targets.shortest and targets.no_step_below(min(self._predicted(1), alone)):
            self._gain.clear()  # it was taught by targets that no longer bound steps, or did not yet
            self._comparison.forget()
        target = self.target
        whole = targets.whole < math.inf == targets.step  # how long a step may take follows from how long answers are
        learning = not ready or ((self._budgeted or whole) and len(traffic.outputs) < 4)
        if target == math.inf and ready and (targets.unmet or not learning):
            self._beyond, self._steps.prefill_quantum = False, 0
            opened = Knobs(limits.max_batch_size, 0.0, limits.token_budget, limits.chunk_size, **self._left_alone)
            if targets.unmet:
                return self._propose("infeasible", opened, "maximizing throughput")
            return self._propose("throughput", opened, "no target bounds a step: opening the knobs")
        if learning:
            return self._propose("learning", limits.clamp(knobs), _LEARNING)
        seconds = target / self._learned.bias
        batch, slots = self._slots(self._targets.step * self._gain.value / self._learned.bias, knobs, limits)
        decodes = int(min(batch, max(traffic.decodes.quantile(0.5), 1)))
        budget = self._ceiling_for(decodes, seconds, limits.token_budget)
        if self._budgeted and not self._steps.by_ceiling:
            # The ceiling leaves each step room to spend what requests are ahead, at a typical load.
            prefill = self.model.most_prefill(decodes, traffic.context(decodes), constants.CEILING * seconds)
            room = decodes + int(min(prefill, 1e9))
            if targets.mean == math.inf and self._no_prompt_within_gap(decodes):
                room = limits.token_budget
            if self._steps.prefill_quantum:  # the budget is a size that was looked for
                budget = max(budget, self._ceiling_in_tiles(room, knobs.token_budget, limits.token_budget))
            else:
                budget = self._ceiling_in_tiles(max(budget, room), knobs.token_budget, limits.token_budget)
        elif budget < limits.token_budget:
            budget = whole_tiles(budget, decodes, self._steps.tile)
        least = constants.FLOOR if self._budgeted or targets.step == math.inf else constants.LEAST_BUDGET
        least = self.start.token_budget if self._unsteady else least
        budget = min(limits.token_budget, max(least, batch if self._budgeted else 0, budget))
        if self._comparison.at_start or knobs.token_budget != self._in_force:
            self._in_force, self._moved = knobs.token_budget, now
        on_its_way = now - self._moved <= constants.SETTLE_S  # and is not pinned
        if not self._budgeted and on_its_way and budget < constants.FAR * knobs.token_budget:
            self._judged_from = now  # who comes until then decodes in steps that are longer than wanted
        chunk = min(limits.chunk_size, budget)
        why = self._why(budget, batch, limits.token_budget, _ms(target))
        if not (self._budgeted or self._beyond):
            cut = self._chunks.size(targets.firsts, target, budget - decodes, self._demand.per_second, chunk)
            self._cut = cut < chunk
            if self._cut:
                slots = f"{slots}; chunks of {cut}: longer ones of prompts that have time hold up others"
            chunk = cut
        bound = traffic.tokens_bound
        if knobs.token_budget < knobs.max_batch_size:  # no more sequences than tokens
            bound = max(bound, traffic.slots_bound)
        if bound < constants.BINDS:
            if budget > knobs.token_budget:
                budget, why = knobs.token_budget, "token_budget does not bind: not raised"
            chunk = min(chunk, knobs.chunk_size)
        self._ceiling = budget
        regime = "demand-limited" if idle else "compute-limited"
        if traffic.preemptions >= 0.05 and not idle:
            regime, slots = "kv-limited", f"{slots}; the KV pool preempts"
        prompt = budget - decodes
        took = _ms(self._predicted(decodes, prompt))
        cause = f"predicted {took} for {decodes} decodes and {prompt} prompt tokens ({why}); {slots}"
        return self._propose(regime, Knobs(batch, 0.0, budget, chunk, **self._left_alone), cause)

    def _slots(self, seconds: float, knobs: Knobs, limits: KnobLimits) -> tuple[int, str]:
        """``max_batch_size`` for steps of ``seconds``, as predicted, and what had the last word in it."""
        top, max_decodes = limits.max_batch_size, self._learned.slow.max_decodes
        predict, context = self.model.predict, self._traffic.contexts.mean
        self._most = largest(lambda n: predict(StepFeatures(n, int(n * context), 0, 0, 0)) <= seconds, top, self._most)
        at_once = int(self._traffic.decodes.quantile(1))
        known = max(constants.FLOOR, constants.REACH * at_once)  # beyond that the model only guesses
        batch = int(max(1, min(max(self._most, self._least(top, at_once)), max_decodes, known, top)))
        if self._traffic.slots_bound < constants.BINDS and batch > knobs.max_batch_size:
            batch = knobs.max_batch_size
            why = f"max_batch_size {batch} does not bind: not raised"
        elif batch == top:
            why = f"{batch} sequences, as many as the engine takes"
        elif batch == max_decodes:
            why = f"{batch} sequences: steps of more have been slow"
        elif batch == known:
            why = f"{batch} sequences: at most {at_once} have run at once"
        elif batch <= max(self._most, 1):
            why = f"predicted {_ms(self._predicted(batch))} for {batch} decodes alone"
        elif self._unsteady:
            why = f"{batch} sequences, while the speed keeps changing"
        elif self._budgeted and self.model.error > constants.UNRELIABLE:
            why = f"{batch} sequences, while predictions are off by {self.model.error:.0%}"
        elif self._most < 1:
            why = f"{batch} sequences, as no batch meets the target"
        else:
            why = f"{batch} sequences, which met the target lately"
        return batch, why

    def _least(self, top: int, at_once: int) -> int:
        """Sequences that the model is not trusted to go below: the starting ones where the speed keeps changing, where it has
        been far off, or where no batch meets the target, so that a smaller one gains nothing; else the most that met the target
        lately (``at_once``: the most that any step held)."""
        start = min(self.start.max_batch_size, top)
        if self._most < 1 or self._unsteady or (self._budgeted and self.model.error > constants.UNRELIABLE):
            return start
        return 1 if self._most >= min(start, at_once) else min(start, self._traffic.in_time(self.target))

    @property
    def _unsteady(self) -> bool:
        """Whether the speed of the machine keeps changing, so that predictions are not to cut a knob by."""
        return self._budgeted and self._learned.unsteady > 1

    def _ceiling_for(self, decodes: int, target: float, top: int) -> int:
        """Tokens of a step that fits the target, or that carries the load where such a one does not. Where the target follows
        from an E2E, those with which most requests are in time: a ceiling that no step has a budget below."""
        demand, gap = self._demand.per_second, self._targets.gap
        longest = min(self._gain.value, 1.0) * gap / self._learned.margin
        if gap < math.inf and not self._budgeted:  # a gap is a single step, the fullest one too, and no mean
            most = max(decodes, int(self._traffic.decodes.quantile(0.95)))
            if self._no_prompt_within_gap(most):
                target = self._targets.mean * self._gain.value / self._learned.bias
                if target == math.inf:
                    self._beyond, self._steps.by_ceiling = False, False
                    return top
            else:
                target = min(target, longest)
                decodes, demand = most, 0.0
        e2e_binds = self._targets.step_time_for_e2e(self._traffic.outputs) < min(self._targets.step, gap)
        self._steps.by_ceiling = e2e_binds and len(self._traffic.prompts) > 0
        if self._budgeted and not self._steps.by_ceiling:
            prefill = self.model.most_prefill(decodes, self._traffic.context(decodes), target)
            if prefill >= demand * target:  # nearly always, and cheaper to find out than how large a step may be
                self._beyond, self._steps.prefill_quantum = False, 0
                return decodes
        attains = self._attains(decodes, self._gain.value)
        long = constants.LONG_BUDGETED if self._budgeted else constants.LONG

        def seconds(tokens: int) -> float:
            return self._step_of(decodes, tokens)

        if self._steps.by_ceiling:
            self._full = largest(lambda n: seconds(n) <= target, top, self._full)
            most = top
            if gap < math.inf and not self._budgeted:
                most = largest(lambda n: seconds(n) <= longest, top, self._full)
            size = most_in_time(attains, max(self._full, decodes + 16), max(most, decodes + 16))
            self._beyond, self._steps.prefill_quantum = size > self._full, 0
            return size
        size, self._full = full_step(seconds, decodes, target, demand, top, self._full, attains, long)
        self._beyond = size > self._full
        if not (self._beyond or self._budgeted):
            size = as_fast(seconds, decodes, size)
        self._steps.prefill_quantum = size - decodes if self._beyond and gap == math.inf else 0
        return max(size, decodes + 16)

    def _no_prompt_within_gap(self, decodes: int) -> bool:
        """Whether no step with a prompt is as short as an ITL target: the fewer there are, the fewer gaps are too long."""
        longest = min(self._gain.value, 1.0) * self._targets.gap / self._learned.margin
        return self._step_of(decodes, decodes + constants.LEAST_BUDGET) > longest

    def _ceiling_in_tiles(self, tokens: int, in_force: int, top: int) -> int:
        """A ceiling of at most ``tokens``, in whole tiles unless it is all that the engine takes (``top``).

        The one in force, if it is of whole tiles, stays while ``tokens`` are not a tenth fewer: predictions that scatter about
        the edge of a tile would move it at each decision.
        """
        if tokens >= top:
            return top
        ceiling = whole_tiles(tokens, 0, self._steps.tile)
        if ceiling < in_force <= constants.NEAR * tokens and in_force == whole_tiles(in_force, 0, self._steps.tile):
            return in_force
        return ceiling

    def _why(self, budget: int, batch: int, top: int, target: str) -> str:
        """Why ``token_budget`` is to be ``budget``: what it was that had the last word."""
        if budget == self.start.token_budget and self._unsteady:
            return f"no fewer than at the start while the speed keeps changing; step-time target {target}"
        if budget == top:
            return f"as many as the engine takes; step-time target {target}"
        if self._beyond:
            aim = "have most answers whole in time" if self._steps.by_ceiling else "carry the load"
            return f"above the step-time target of {target}, to {aim}"
        if self._budgeted:
            slots = "a token for each slot, " if budget == batch else ""
            return f"{slots}a ceiling: each step has its own budget for {target}"
        return f"step-time target {target}"

    def _predicted(self, decodes: int, prompt: int = 0) -> float:
        """Seconds of a step of so many decodes of the usual context, beside one fresh prompt."""
        context, pairs = self._traffic.context(decodes), prompt * (prompt + 1) // 2
        return self.model.predict(StepFeatures(decodes, context, prompt, prompt, pairs))

    def _step_of(self, decodes: int, tokens: int) -> float:
        """Seconds of a step of so many tokens, ``decodes`` of them decodes, its prompts as prompts have been lately."""
        prompt = max(0, tokens - decodes)
        context, pairs = self._traffic.chunk(prompt)
        return self.model.predict(StepFeatures(decodes, self._traffic.context(decodes), prompt, context, pairs))

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

    def _propose(self, regime: str, knobs: Knobs, cause: str) -> Proposal:
        unmet = self._targets.unmet
        if unmet:
            cause = f"a single decode takes {1e3 * self._targets.floor:.1f} ms, so {unmet} cannot be met; {cause}"
        if any(getattr(knobs, name) != value for name, value in self._left_alone.items()):
            knobs = knobs.with_(**self._left_alone)
        return Proposal(knobs, regime, cause, self._evidence(), unmet)

    def _evidence(self) -> dict[str, Any]:
        traffic, learned = self._traffic, self._learned
        return {
            "steps": learned.steps,
            "model_error": round(learned.model.error, 4),
            "bias": round(learned.bias, 4),
            "margin": round(learned.margin, 4),
            "gain": round(self._gain.value, 4),
            "changes": learned.changes,
            "decodes": traffic.decodes.quantile(0.5),
            "context": round(traffic.contexts.mean, 1),
            "prompt": round(traffic.prompts.mean, 1),
            "output": round(traffic.outputs.mean, 1),
            "demand": round(self._demand.per_second, 1),
            "bound": round(traffic.bound, 3),
            "preemptions": round(traffic.preemptions, 2),
        }


def _ms(seconds: float) -> str:
    """For people: ``48 ms``, and ``0.63 ms`` rather than 0."""
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"
