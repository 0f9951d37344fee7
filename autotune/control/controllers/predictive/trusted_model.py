"""A learned step model, how far it is off, and whether it is still to be trusted."""

from __future__ import annotations

import math
from collections import deque

from autotune.control.controllers.parts.running_statistics import error_margin
from autotune.control.controllers.predictive import constants
from runtime.records import StepRecord, StepTimes
from runtime.step_model import StepFeatures, StepLearner


class TrustedModel:
    """``bias`` is the running mean of actual/predicted, ``margin`` its 90% quantile; ``trusted`` whether predictions hold.

    ``model`` may be one that has learned already. It is thrown away when it has been wrong for long. A change of speed, all
    steps longer or shorter by the same factor, is found by cumulative sums (Page, Biometrika 41, 1954) of the logarithm of
    actual/predicted, and the model is scaled by it at once: what it knows of steps of decodes alone, and of mixed ones (with
    prompts or drafts), unless the latest of the kind speak against it. Where there was none lately, the next one has its say.
    Else slow moments without a prompt would stay in what is known of prompts, one on top of the other. Steps of more decodes
    than ``slow.max_decodes`` are not learned from.
    """

    def __init__(self, model: StepLearner | None = None) -> None:
        self.model = model or StepLearner()
        self.margin = 1.1
        self.bias = constants.RESERVE[0]
        self.trusted = True
        self.steps = 0
        self.slow = SlowRegion()
        self.wrong = 0.0
        """Decaying share of wrong predictions."""
        self.unsteady = 0.0
        """Decaying count of changes of speed, a loss of trust counting as two."""
        self._times = StepTimes()
        self._untrusted = 0  # steps since it was
        self._longer = self._shorter = 0.0  # cumulative sums: that steps have become so
        self._noise = 0.0  # mean size of the logarithm
        self._latest: deque[tuple[float, bool]] = deque(maxlen=constants.LATEST)  # ratios, and whether of mixed steps
        self._assumed = [1.0, 1.0]  # by what each kind was scaled since its last step, for what the other took
        self.changes = 0
        """Changes of speed found."""

    def observe(self, record: StepRecord) -> float:
        """Learn from a step. Returns its time, s; 0 if that says nothing."""
        seconds = self._times.of(record)
        if record.failed or not 0 < seconds < math.inf:
            return 0.0
        self.steps += 1
        step = StepFeatures.of(record)
        predicted = None
        if self.model.ready:
            mixed = step.prefill_tokens + step.drafted > 0
            predicted = self._checked(step, seconds, mixed)
            if predicted > 0:
                ratio = min(max(seconds / predicted, constants.LEAST_RATIO), 1 / constants.LEAST_RATIO)
                off = math.log(ratio)
                if self.slow.saw(record.decodes, off, self._noise):
                    return seconds
                self.margin = error_margin(self.margin, ratio)
                self._watch(ratio, off, mixed)
                # a stall speaks as loud as a step four times too long, no louder
                bias = self.bias + constants.MEMORY * (min(ratio, 4.0) - self.bias)
                self.bias = min(max(bias, constants.RESERVE[0]), constants.RESERVE[1])
            wrong = not predicted > 0 or not 1 / (1 + constants.WRONG) < seconds / predicted < 1 + constants.WRONG
            self.wrong += constants.MEMORY * (wrong - self.wrong)
            self.unsteady -= self.unsteady / constants.UNSTEADY
            if self.trusted != (self.wrong < (constants.DISTRUST if self.trusted else constants.TRUST)):
                self.trusted = not self.trusted
                self.unsteady += 2
        self._untrusted = 0 if self.trusted else self._untrusted + 1
        if self._untrusted and self._untrusted % constants.RELEARN == 0:
            self.model = StepLearner(warm_up=0, graphs=self.model.graphs)
            self.slow, self._assumed = SlowRegion(), [1.0, 1.0]
        self.model.observe(step, seconds, predicted)
        return seconds

    def _checked(self, step: StepFeatures, seconds: float, mixed: bool) -> float:
        """What is predicted for a step that took ``seconds``, without what was assumed of its kind unless that is nearer. As
        steps with prompts are predicted to take no less than decodes alone, a wrong assumption need not show: then the longer
        times stand, until a step tells."""
        predicted, assumed = self.model.predict(step), self._assumed[mixed]
        if assumed == 1 or not predicted > 0:
            return predicted
        self.model.rescale(1 / assumed, mixed=mixed)
        before = self.model.predict(step)
        tells = not before > 0 or abs(math.log(predicted / before)) >= constants.DRIFT
        if not tells and assumed > 1:
            self.model.rescale(assumed, mixed=mixed)
            return predicted
        self._assumed[mixed] = 1.0
        if before > 0 and abs(math.log(seconds / predicted)) >= abs(math.log(seconds / before)):
            return before
        self.model.rescale(assumed, mixed=mixed)
        return predicted

    def _watch(self, ratio: float, off: float, mixed: bool) -> None:
        self._latest.append((ratio, mixed))
        off = min(max(off, -constants.LOUDEST), constants.LOUDEST)
        usual = constants.DRIFT + self._noise
        self._noise += constants.MEMORY * (abs(off) - self._noise)
        self._longer = max(0.0, self._longer + off - usual)
        self._shorter = max(0.0, self._shorter - off - usual)
        if (self._longer < constants.ALARM and self._shorter < constants.ALARM) or len(self._latest) < constants.LATEST:
            return
        middle, _ = sorted(self._latest)[constants.LATEST // 2]
        if abs(math.log(middle)) > constants.CHANGED:  # else it was a stall or two
            for kind in (False, True):
                own = sorted(ratio for ratio, of in self._latest if of is kind)
                if own and not _nearer(own[len(own) // 2], middle):
                    continue  # such steps took what was predicted
                self.model.rescale(middle, mixed=kind)
                self._assumed[kind] *= 1.0 if own else middle
            self.slow.rescaled(middle)
            self.bias = constants.RESERVE[0]
            self.changes += 1
            self.unsteady += 1
            self._latest.clear()
        self._longer = self._shorter = 0.0


def _nearer(ratio: float, factor: float) -> bool:
    """Whether ``ratio`` is nearer to ``factor`` than to 1, in logarithms."""
    return abs(math.log(ratio / factor)) < abs(math.log(ratio))


class SlowRegion:
    """``max_decodes``: steps of more take far longer than any smooth model says; inf where no number does.

    Such as a batch larger than any graph that was captured. A region counts when steps became ``SLOWER`` in most of the
    crossings into its first decodes, from one step to the next, and at least twice: a machine that becomes slower as a whole does
    so once, and stalls come anywhere. Failure mode: a region that is entered once and never left is learned as if it were all.
    """

    def __init__(self) -> None:
        self.max_decodes = math.inf
        self._left = 0  # steps until it is forgotten
        self._crossings: dict[int, tuple[int, int]] = {}  # of each band from below: those that became slower, and all
        self._before = -1, 0.0  # band and ``off`` of the step before

    def rescaled(self, by: float) -> None:
        """The model predicts ``by`` times as much as before."""
        self._before = self._before[0], self._before[1] - math.log(by)

    def saw(self, decodes: int, off: float, noise: float) -> bool:
        """A step of so many decodes took e^``off`` times what was predicted, where it usually is off by ``noise``. Whether it is
        in the region."""
        band, (came_from, before) = decodes // constants.WIDTH, self._before
        self._before = band, off
        if 0 <= came_from < band:
            slower, crossings = self._crossings.get(band, (0, 0))
            slower, crossings = slower + (off - before > constants.SLOWER + 3 * noise), crossings + 1
            self._crossings[band] = slower, crossings
            if slower >= constants.ENTRIES and 2 * slower > crossings and band * constants.WIDTH <= self.max_decodes:
                self.max_decodes, self._left = band * constants.WIDTH - 1, constants.AGE
        if self._left:
            self._left -= 1
            if not self._left:
                self.max_decodes = math.inf
                self._crossings.clear()
        return decodes > self.max_decodes
