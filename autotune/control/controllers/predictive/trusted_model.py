"""A learned step model, how far it is off, and whether it is still to be trusted."""

from __future__ import annotations

import math
from collections import deque

from autotune.control.controllers.predictive.slow_bands import SlowBands
from autotune.control.controllers.running_statistics import OnlineQuantile
from runtime.records import StepRecord
from runtime.step_model import StepFeatures, StepLearner

_WRONG = 0.5  # relative error that counts as a wrong prediction
_DISTRUST, _TRUST = 0.4, 0.1  # share of wrong predictions that ends the trust in the model, and that restores it
_RELEARN = 128  # untrusted steps after which what was learned is thrown away: a machine may have changed for good
_RESERVE = (1.05, 2.0)  # bounds of the mean ratio of actual to predicted time
_DRIFT, _ALARM = (
    0.1,
    1.0,
)  # of the logarithm of actual/predicted: what is no change, and how much of more adds up to one
_LOUDEST = 0.7  # what a single step may add: a stall of ten times is no more than one twice too long
_LATEST = 5  # steps whose middle ratio says how much has changed
_LEAST_RATIO = 1e-9
_UNSTEADY = 500  # steps after which a change of speed is forgotten
_CHANGED = 0.15  # change of speed that is worth acting on, relative


class TrustedModel:
    """``bias`` is the running mean of actual/predicted, ``margin`` its 90% quantile; ``trusted`` whether predictions hold.

    ``model`` may be one that has learned already. It is thrown away when it has been wrong for long. A change of speed, all
    steps longer or shorter by the same factor, is found by cumulative sums (Page, Biometrika 41, 1954) of the logarithm of
    actual/predicted, and the model is scaled by it at once.
    """

    def __init__(self, model: StepLearner | None = None) -> None:
        self.model = model or StepLearner()
        self.margin = OnlineQuantile(0.9, 1.1, low=1.0, high=2.0)
        self.bias = _RESERVE[0]
        self.trusted = True
        self.steps = 0
        self.slow = SlowBands()
        self.wrong = 0.0
        """Decaying share of wrong predictions."""
        self.unsteady = 0.0
        """Decaying count of changes of speed, a loss of trust counting as two."""
        self._untrusted = 0  # steps since it was
        self._longer = self._shorter = 0.0  # cumulative sums: that steps have become so
        self._noise = 0.0  # mean of the logarithm's size
        self._latest: deque[float] = deque(maxlen=_LATEST)  # ratios
        self.changes = 0
        """Changes of speed found."""

    def observe(self, record: StepRecord) -> bool:
        """Learn from a step. False if its time says nothing."""
        seconds = record.duration
        if record.failed or not 0 < seconds < math.inf:
            return False
        step = StepFeatures.of(record)
        predicted = None
        if self.model.ready:
            predicted = self.model.predict(step)
            if predicted > 0:
                ratio = seconds / predicted
                if not _LEAST_RATIO < ratio < 1 / _LEAST_RATIO:  # so that it has a logarithm, whatever a record claims
                    ratio = min(max(ratio, _LEAST_RATIO), 1 / _LEAST_RATIO)
                if (
                    self.slow.saw(record.decodes, ratio) and record.decodes
                ):  # a cliff: the model is right about the rest
                    self.steps += 1
                    return True
                self.margin.add(ratio)
                self._watch(ratio)
                # a stall speaks as loud as a step four times too long, no louder
                self.bias = min(max(self.bias + 0.02 * (min(ratio, 4.0) - self.bias), _RESERVE[0]), _RESERVE[1])
            wrong = not predicted > 0 or not 1 / (1 + _WRONG) < seconds / predicted < 1 + _WRONG
            self.wrong += 0.02 * (wrong - self.wrong)
            self.unsteady -= self.unsteady / _UNSTEADY
            if self.trusted != (self.wrong < (_DISTRUST if self.trusted else _TRUST)):
                self.trusted = not self.trusted
                self.unsteady += 2
        self._untrusted = 0 if self.trusted else self._untrusted + 1
        if self._untrusted and self._untrusted % _RELEARN == 0:
            self.model = StepLearner(warm_up=0)
            self.slow.clear()
        self.model.observe(step, seconds, predicted)
        self.steps += 1
        return True

    def _watch(self, ratio: float) -> None:
        self._latest.append(ratio)
        off = min(max(math.log(ratio), -_LOUDEST), _LOUDEST)
        usual = _DRIFT + self._noise
        self._noise += 0.02 * (abs(off) - self._noise)
        longer, shorter = self._longer + off - usual, self._shorter - off - usual
        self._longer = longer if longer > 0 else 0.0
        self._shorter = shorter if shorter > 0 else 0.0
        if (longer < _ALARM and shorter < _ALARM) or len(self._latest) < _LATEST:
            return
        middle = sorted(self._latest)[_LATEST // 2]
        if abs(math.log(middle)) > _CHANGED:  # else it was a stall or two
            self.model.rescale(middle)
            self.slow.rescaled(middle)
            self.bias = _RESERVE[0]
            self.changes += 1
            self.unsteady += 1
            self._latest.clear()
        self._longer = self._shorter = 0.0
