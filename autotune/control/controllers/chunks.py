"""How much of one prompt a step may hold: all that it has room for, unless a prompt with time would hold up those without.

Formula. Prompts are computed in the order they came in, so one of a class whose first token may come late is before one whose
may not. With q the 95% quantile of a class's prompts, F its target for first tokens and T the time of a step, q·T/(¾·F) tokens a
step are enough for its long prompts to be in time, a quarter kept for the queue. The chunk is the most that any of the classes
served needs. Where all are promised the same, whatever is gained for short prompts is lost with long ones, and more than that
where the machine is busy: then it is the whole step.

Units: tokens, seconds. Failure mode: long prompts of the class in a hurry itself; they get what they need, and others wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotune.control.controllers.recent import Recent

_SHARE = 0.75  # of the target for first tokens that a long prompt may take to compute
_LEAST = 32


class Chunks:
    """Follows the prompts of each class. The names of classes are few."""

    __slots__ = ("_prompts",)

    def __init__(self) -> None:
        self._prompts: dict[str, Recent] = {}

    def saw(self, request_class: str, tokens: int) -> None:
        """A request of this class had so many prompt tokens to compute."""
        if request_class not in self._prompts:
            self._prompts[request_class] = Recent(128)
        self._prompts[request_class].add(tokens)

    def size(self, firsts: Mapping[str, float], seconds: float, most: int) -> int:
        """The chunk in steps of ``seconds`` that hold ``most`` tokens; ``firsts``: the target of each class served, s."""
        if len(set(firsts.values())) < 2 or not all(name in self._prompts for name in firsts):
            return most
        needed = max(
            0.0 if first == math.inf else self._prompts[name].quantile(0.95) * seconds / (_SHARE * first)
            for name, first in firsts.items()
        )
        return min(most, max(_LEAST, int(min(needed, most))))
