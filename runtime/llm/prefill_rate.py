"""How fast prompts are computed: measured where they had to wait, and else what a model of the steps says.

Measured are the steps in which something other than demand kept prompts from going on, with a memory of a second: whatever
limits (the budget, the slots, the KV pool), it is in the figure. Steps without any prompt, in which all wait for a slot or
for KV blocks, are time of the next ones that have some, and count at once while they last. Who waits for neither is judged by
full steps alone, those that the budget or the chunk size cut: one whose turn it is, unless the pool is short, and all after a
step that nothing held back. While little is measured, the word of a :class:`RateSource`, such as a controller that predicts
steps, counts as much as :data:`PRIOR_S` of it.

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
_CUT: Final = (LimitedBy.BUDGET, LimitedBy.CHUNK)
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


class _Measured:
    """Steps and what they computed of prompts, with a memory of a second. Steps without a prompt are time of the next that has
    one."""

    __slots__ = ("_begun", "_pairs", "_seconds", "_steps", "_tokens", "_until", "_waits", "_waits_steps")

    def __init__(self) -> None:
        self._tokens = self._pairs = self._seconds = self._steps = 0.0
        self._begun = self._until = -math.inf  # the ends of the latest step with prompts, and of the latest
        self._waits, self._waits_steps = 0.0, 0  # of steps since without any

    def add(self, record: StepRecord) -> None:
        self._waits += record.end - record.start
        self._waits_steps += record.steps
        self._until = record.end
        if not record.prefill_tokens:
            return
        keep = math.exp(-max(0.0, record.end - self._begun) / _MEMORY_S)
        # what is new weighs as much as a memory that fades takes up of it, however many steps it held
        fresh = (1 - math.exp(-self._waits / _MEMORY_S)) * _MEMORY_S / self._waits
        self._tokens = keep * self._tokens + fresh * record.prefill_tokens * record.steps
        self._pairs = keep * self._pairs + fresh * record.prefill_attention * record.steps
        self._seconds = keep * self._seconds + fresh * self._waits
        self._steps = keep * self._steps + fresh * self._waits_steps
        self._begun = record.end
        self.nothing_waits()

    def nothing_waits(self) -> None:
        """Steps since the latest prompt held none because none had to wait."""
        self._waits, self._waits_steps = 0.0, 0

    @property
    def step(self) -> float:
        """Seconds of one, on average; 0 before any."""
        return self._seconds / self._steps if self._steps > 0 else 0.0

    def per_second(self, now: float, pair_tokens: float, said: float) -> float:
        """Tokens, with what pairs count; 0 if nothing is known. ``said``: what a source predicts, 0 where it does not."""
        old = max(0.0, now - self._until)
        work, seconds = self._tokens + pair_tokens * self._pairs, self._seconds + self._waits
        if said > 0:
            left = math.exp(-old / _MEMORY_S)
            return (left * work + PRIOR_S * said) / (left * seconds + PRIOR_S)
        return work / seconds if self._seconds > 0 and old < STALE_S else 0.0


class PrefillRate:
    """Prompt tokens a second, with what pairs count, measured over steps in which prompts had to wait for something."""

    __slots__ = ("_cut", "_free", "_limited", "short_of_kv", "source")

    def __init__(self, source: RateSource | None = None) -> None:
        self.source = source
        # whatever limited the step, and where it held all that it may
        self._limited, self._cut = _Measured(), _Measured()
        self._free = False  # whether nothing held prompts back in the latest step
        self.short_of_kv = False
        """Whether the next prompt found no KV blocks in the latest step: then it waits at its turn, too."""

    def observe(self, record: StepRecord) -> None:
        self._free = record.limited_by is LimitedBy.DEMAND
        self.short_of_kv = record.limited_by is LimitedBy.KV
        if self._free:
            self._limited.nothing_waits()
            self._cut.nothing_waits()
        seconds = record.end - record.start
        if record.limited_by in (LimitedBy.DEMAND, LimitedBy.WAIT) or record.failed:
            return
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self._limited.add(record)
        if record.limited_by in _CUT or record.decodes + record.prefill_tokens >= record.budget_used:
            self._cut.add(record)

    def tokens(self, work: Work) -> float:
        """``work`` in tokens, by what pairs count at present."""
        return work.tokens + self.pair_tokens * work.pairs

    def per_second(self, now: float, *, begins: bool = False) -> float:
        """0 if nothing is known. What was measured fades while nothing is. ``begins``: of one that waits for no slot."""
        measured = self._cut if begins or self._free else self._limited
        return measured.per_second(now, self.pair_tokens, self._ask(lambda source: source.prefill_rate, 0.0))

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

    def seconds_for(self, work: float, now: float, *, begins: bool = False) -> float:
        """Until ``work`` (:meth:`tokens`) is computed: whole steps, for a first token comes at the end of one. 0 if nothing is
        known. ``begins``: of one that waits for no slot.

        Steps as long as those measured are waited for only while they are made: after one that nothing held back, a prompt has
        its own. One cold start with a step of all that had come would else turn all others away.
        """
        rate = self.per_second(now, begins=begins)
        if rate <= 0:
            return 0.0
        if self._free:
            return work / rate
        step, plain = self._limited.step, work / rate
        return step * math.ceil(plain / step - _HAIR) if 0 < step < plain else max(step, plain)
