"""What running out of memory teaches: lower ceilings of the knobs, and a way back. The engine and the batcher share it.

A step (or a call) that does not fit is halved until its parts do. Which parts fitted and which did not says what is to
blame: if all that failed held more sequences than all that fitted, the most that fitted is the ceiling of
``max_batch_size`` from then on; the same with tokens and ``token_budget``, and with the longest chunk and ``chunk_size``. A
sequence that does not fit even alone says nothing of the others; its caller leaves out the parts that held it.

The way back: when so many steps in a row that filled at least half of a lowered ceiling have fitted, the lowered ceilings are
doubled, or, once that has failed, raised by a quarter. A rise that runs out of memory is taken back and doubles the number of
steps before the next, so a limit that is there to stay is run into ever more rarely, and one that has gone is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from runtime.knobs import KnobLimits

log = logging.getLogger(__name__)

_PATIENCE, _MOST_PATIENCE = 64, 65536  # steps before a rise
_DOUBLE, _QUARTER = 2.0, 1.25


class StepLoad(NamedTuple):
    """What a step or a part of it held: sequences (or items), tokens (or cost units), and the longest prompt chunk."""

    sequences: int
    tokens: int
    chunk: int = 0


_KNOBS: Final = ("max_batch_size", "token_budget", "chunk_size")  # the ceiling of each field of a load


class MemoryCeilings:
    """Ceilings below ``limits``, by what ran out of memory and what fitted. One thread at a time."""

    def __init__(self, limits: KnobLimits) -> None:
        self._limits = limits
        self.effective = limits
        """The ceilings in force."""
        self.lowered = False
        """Whether any of them is below ``limits``."""
        self._fitted = 0  # steps in a row
        self._patience = _PATIENCE
        self._rise = _DOUBLE
        self._before: KnobLimits | None = None  # the last rise, if it is on trial

    def ran_out(self, load: StepLoad, failed: Sequence[StepLoad], fitted: Sequence[StepLoad] = ()) -> bool:
        """Of the parts of a step with ``load`` these ``failed`` and those ``fitted``. Whether the ceilings changed."""
        self._fitted = 0
        if not any(part.sequences > 1 or part.chunk > 1 for part in failed):
            return False
        old, before, self._before = self.effective, self._before, None
        new = _as_dict(old)
        for field, (knob, ceiling) in enumerate(new.items()):
            most = _ceiling([part[field] for part in failed], [part[field] for part in fitted])
            if most is not None:
                new[knob] = min(ceiling, most)
        if before is not None and any(held > most for held, most in zip(load, _as_dict(before).values(), strict=True)):
            self._patience, self._rise = min(2 * self._patience, _MOST_PATIENCE), _QUARTER
            for knob, most in _as_dict(before).items():
                new[knob] = min(getattr(old, knob), max(new[knob], most))
        return self._put(new, "%d sequences and %d tokens ran out of memory", load)

    def fitted(self, load: StepLoad) -> bool:
        """A step with ``load`` fitted. Whether the ceilings changed."""
        old, start = _as_dict(self.effective), _as_dict(self._limits)
        lowered = [(held, old[knob]) for held, knob in zip(load, _KNOBS, strict=True) if old[knob] < start[knob]]
        if not any(2 * held >= ceiling for held, ceiling in lowered):
            return False
        self._fitted += 1
        if self._fitted < self._patience:
            return False
        self._fitted = 0
        self._before = self.effective
        risen = {knob: min(start[knob], max(most + 1, int(most * self._rise))) for knob, most in old.items()}
        return self._put(risen, "%d sequences and %d tokens fitted many times", load)

    def _put(self, ceilings: dict[str, int], why: str, load: StepLoad) -> bool:
        new = replace(self.effective, **ceilings)
        if new == self.effective:
            return False
        self.lowered = new != self._limits
        if not self.lowered:
            self._patience, self._rise = _PATIENCE, _DOUBLE
        level = logging.INFO if self._before is not None else logging.WARNING
        log.log(level, f"{why}; the ceilings are now %s", load.sequences, load.tokens, _listed(ceilings))
        self.effective = new
        return True


def _as_dict(limits: KnobLimits) -> dict[str, int]:
    return {knob: getattr(limits, knob) for knob in _KNOBS}


def _listed(ceilings: dict[str, int]) -> str:
    return ", ".join(f"{knob} {most}" for knob, most in ceilings.items())


def _ceiling(failed: Sequence[int], fitted: Sequence[int]) -> int | None:
    """The most that fits, if that is what tells ``failed`` from ``fitted``; with none to go by, half of what failed."""
    least, most = min(failed), max(fitted, default=0)
    if most >= least:
        return None
    return most or max(1, max(failed) // 2)
