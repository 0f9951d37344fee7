"""How the machine drifts while it is measured: what reference steps, always the same work, took now and then.

Reference steps differ by drift and by chance, and correcting for chance would add it to what is measured. So the drift is a
random walk seen through noise (the local-level model; Durbin and Koopman, Time Series Analysis by State Space Methods, 2012),
and how much it walks is chosen by likelihood: where reference steps scatter without memory, it hardly moves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# variance over all the time ÷ that of one reference
_WALKS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_FEWEST = 4  # references, to tell drift from chance; fewer are taken as they are


class ReferenceStep(NamedTuple):
    """Seconds that the reference work took at a time."""

    at: float
    seconds: float


class Drift:
    """What ``references``, in order of time, say of the time between them. Raises ``ValueError`` where none took any time."""

    def __init__(self, references: Sequence[ReferenceStep]) -> None:
        references = [one for one in references if 0 < one.seconds < math.inf]  # or a clock was set back
        if not references:
            raise ValueError("no reference took any time")
        seconds = [one.seconds for one in references]
        self.unevenness = max(seconds) / min(seconds)
        """The slowest over the fastest, drift and chance together."""
        self._at = np.array([one.at for one in references])
        self._log = np.log(np.array(seconds) / statistics.median(seconds))
        if len(references) >= _FEWEST:
            self._smooth()

    def at(self, when: float) -> float:
        """Times as long as usual that work takes then."""
        return math.exp(float(np.interp(when, self._at, self._log)))

    def _smooth(self) -> None:
        since = self._at - self._at[0]
        walk = np.minimum.outer(since, since) / max(since[-1], 1e-9)
        values, vectors = np.linalg.eigh(walk)
        ones, best = np.ones(len(since)), -math.inf
        seen, expected = self._log, self._log
        for each in _WALKS:
            variances = 1 + each * np.maximum(values, 0.0)
            inverse = (vectors / variances) @ vectors.T
            known = ones @ inverse @ ones
            level = ones @ inverse @ seen / known
            off = seen - level
            # restricted likelihood: of the level nothing is known beforehand
            noise = max(float(off @ inverse @ off) / (len(since) - 1), 1e-12)
            size = float(np.log(variances).sum()) + math.log(known)
            likelihood = -((len(since) - 1) * math.log(noise) + size) / 2
            if likelihood > best + 1e-9:
                best, expected = likelihood, level + each * walk @ inverse @ off
        self._log = expected - np.median(expected)
