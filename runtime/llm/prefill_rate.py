"""How fast prompts are computed: measured where they had to wait, and else what a model of the steps says.

Measured are the steps in which something other than demand kept prompts from going on, with a memory of a second: whatever
limits (the budget, the slots, the KV pool), it is in the figure. While there is little of that, the word of a
:class:`RateSource`, such as a controller that predicts steps, counts as much as :data:`PRIOR_S` of it.

What is counted is :class:`Work`, tokens + κ · attention pairs: the tokens at the end of a long prompt attend to all before
them and take longer. By tokens alone the rate falls while such a prompt ends, and short ones behind it seem late that are not.
κ is the source's too; where it knows none, tokens are all that counts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, Self, runtime_checkable

from runtime.records import LimitedBy, StepRecord

log = logging.getLogger(__name__)

PRIOR_S: Final = 0.2
STALE_S: Final = 5.0
"""Seconds after which what was measured says nothing any more."""
_MEMORY_S: Final = 1.0
_HAIR: Final = 1e-6  # of a step: no step more for a rounding error


class Work(NamedTuple):
    """Of computing prompts: their tokens, and the (query, key) pairs of their attention."""

    tokens: int = 0
    pairs: int = 0

    @classmethod
    def of(cls, tokens: int, start: int = 0) -> Self:
        """``tokens`` of one prompt, behind ``start`` that are computed."""
        return cls(tokens, tokens * start + tokens * (tokens + 1) // 2)


@runtime_checkable
class RateSource(Protocol):
    """Says how fast prompts are computed. A class that derives from it needs the first alone; the others are not known then."""

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, an attention pair counted as :attr:`pair_tokens`, as things stand; 0 if that is not known."""
        ...

    @property
    def prompts_per_step(self) -> int:
        """How many prompts a step has room for, each with the most tokens that it may compute in one; 1 if that is not known."""
        return 1

    @property
    def pair_tokens(self) -> float:
        """Tokens that take as long as one attention pair does (κ); 0 if that is not known."""
        return 0.0


class PrefillRate:
    """Prompt tokens a second, with what pairs count, measured over steps in which prompts had to wait for something."""

    __slots__ = ("_free", "_pairs", "_seconds", "_steps", "_tokens", "_until", "source")

    def __init__(self, source: RateSource | None = None) -> None:
        self.source = source
        self._tokens = self._pairs = self._seconds = self._steps = 0.0
        self._until = -math.inf  # the end of what was measured
        self._free = False  # whether nothing held prompts back in the latest step

    def observe(self, record: StepRecord) -> None:
        self._free = record.limited_by is LimitedBy.DEMAND
        if record.limited_by in (LimitedBy.DEMAND, LimitedBy.WAIT) or record.failed:
            return
        seconds = record.end - record.start
        if not (math.isfinite(seconds) and seconds > 0):
            return
        keep = math.exp(-max(0.0, record.end - self._until) / _MEMORY_S)
        # what is new weighs as much as a memory that fades takes up of it, however many steps it held
        fresh = (1 - math.exp(-seconds / _MEMORY_S)) * _MEMORY_S / seconds
        self._tokens = keep * self._tokens + fresh * record.prefill_tokens * record.steps
        self._pairs = keep * self._pairs + fresh * record.prefill_attention * record.steps
        self._seconds = keep * self._seconds + fresh * seconds
        self._steps = keep * self._steps + fresh * record.steps
        self._until = record.end

    def tokens(self, work: Work) -> float:
        """``work`` in tokens, by what pairs count at present."""
        return work.tokens + self.pair_tokens * work.pairs

    def per_second(self, now: float) -> float:
        """0 if nothing is known. What was measured fades while nothing is."""
        old = max(0.0, now - self._until)
        said = self._ask(lambda source: source.prefill_rate, 0.0)
        measured = self._tokens + self.pair_tokens * self._pairs
        if said > 0:
            left = math.exp(-old / _MEMORY_S)
            return (left * measured + PRIOR_S * said) / (left * self._seconds + PRIOR_S)
        return measured / self._seconds if self._seconds > 0 and old < STALE_S else 0.0

    @property
    def prompts_per_step(self) -> int:
        """How many prompts go on side by side; 1, one after the other, where nobody says."""
        return max(1, int(self._ask(lambda source: source.prompts_per_step, 1.0)))

    @property
    def pair_tokens(self) -> float:
        """κ; 0 where nobody says."""
        return max(0.0, self._ask(lambda source: source.pair_tokens, 0.0))

    def _ask(self, what: Callable[[RateSource], float], unknown: float) -> float:
        if self.source is None:
            return unknown
        try:
            said = float(what(self.source))
        except Exception:  # it must not stop an engine
            log.exception("the source of the prefill rate failed and is no longer used")
            self.source = None
            return unknown
        return said if math.isfinite(said) else unknown

    def seconds_for(self, work: float, now: float) -> float:
        """Until ``work`` (:meth:`tokens`) is computed: whole steps, for a first token comes at the end of one. 0 if nothing is
        known.

        Steps as long as those measured are waited for only while they are made: after one that nothing held back, a prompt has
        its own. One cold start with a step of all that had come would else turn all others away.
        """
        rate = self.per_second(now)
        if rate <= 0:
            return 0.0
        if self._free:
            return work / rate
        step = self._seconds / self._steps if self._steps > 0 else 0.0
        plain = work / rate
        return step * math.ceil(plain / step - _HAIR) if 0 < step < plain else max(step, plain)
