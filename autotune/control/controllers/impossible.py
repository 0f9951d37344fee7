"""Which promises no setting can keep, on this machine and for these requests.

Formula. With t(D, C, P) the learned time of a step, c̄ the mean context and b the mean of actual/predicted:

- TPOT, ITL, and the pace of an E2E (:meth:`Promises.pace_of`) are out of reach if t(1, c̄, 0), a decode alone, takes longer, and
  none of the latest steps of decodes was as short: a model of few steps may be wrong about smaller ones;
- TTFT and E2E are if b·t(0, 0, p) takes longer, p the median prompt of the class, and no more than half of its first tokens
  have been in time lately. At least four requests must have ended.

What was out of reach has to be within 95% of the target to count again, so that noise does not turn a promise off and on.

Units: seconds and tokens. Failure mode: a class of which less than half can be in time is given up although some could be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autotune.control.controllers.recent import Recent
from autotune.control.controllers.targets import Promises
from autotune.control.controllers.traffic import Traffic
from runtime.records import RequestRecord

_FEW = 4
_AGAIN = 0.95


class Impossible:
    """Tells :class:`Promises` which to give up. The names of classes are few."""

    def __init__(self, promises: Promises, traffic: Traffic) -> None:
        self._promises, self._traffic = promises, traffic
        self._prompts: dict[str, Recent] = {}  # tokens to compute, of each class
        self._firsts: dict[str, Recent] = {}  # seconds until first tokens, of each class
        self._slow: dict[str, dict[str, float]] = {}  # class -> metric -> seconds that a decode alone takes
        self._late: dict[str, dict[str, float]] = {}  # class -> metric -> seconds that the median prompt alone takes

    def saw(self, record: RequestRecord) -> None:
        """A request has ended, whatever became of it: where all are turned away, those say what is asked for."""
        name = self._promises.name_of(record.request_class)
        self._prompts.setdefault(name, Recent(128)).add(record.prompt_tokens - record.cached_tokens)
        if record.ttft is not None and math.isfinite(record.ttft):
            self._firsts.setdefault(name, Recent(128)).add(record.ttft)

    def judge(self, decode: Callable[[], float], prompt: Callable[[int], float]) -> bool:
        """``decode``: seconds of a step with one decode; ``prompt``: of a prompt of so many tokens alone.
        False if what is out of reach is what was before."""
        slow: dict[str, dict[str, float]] = {}
        late: dict[str, dict[str, float]] = {}
        for name, metric, wanted in self._promises.paces(self._traffic.outputs):
            if wanted < self._traffic.shortest:
                again = _AGAIN if metric in self._slow.get(name, ()) else 1.0
                if (alone := decode()) > again * wanted:
                    slow.setdefault(name, {})[metric] = alone
        for name, metric, wanted in self._promises.first_targets():
            prompts = self._prompts.get(name)
            if wanted < math.inf and prompts is not None and len(prompts) >= _FEW and not self._in_time(name, wanted):
                again = _AGAIN if metric in self._late.get(name, ()) else 1.0
                if (alone := prompt(int(prompts.quantile(0.5)))) > again * wanted:
                    late.setdefault(name, {})[metric] = alone
        self._slow, self._late = slow, late
        return self._promises.give_up({n: frozenset((*slow.get(n, ()), *late.get(n, ()))) for n in (*slow, *late)})

    def _in_time(self, name: str, wanted: float) -> bool:
        """Whether half of the first tokens of this class came by then."""
        return name in self._firsts and self._firsts[name].quantile(0.5) <= wanted

    @property
    def unmet(self) -> str:
        """The promises to classes served lately that nothing keeps, in words that stay the same while they do."""
        return ", ".join(self._promises.named(name, metrics) for name, metrics in self._promises.lost.items())

    def told(self, cause: str, pace: float) -> str:
        """``cause`` with such promises and their figures before it; ``pace``: seconds of a step that others still ask for."""
        if not self._promises.lost:
            return cause
        said = "; ".join(self._sentences())
        if self._promises.all_lost:
            said += (
                ": throughput instead"
                if pace == math.inf
                else f"; {self._promises.tightest(pace)} is held nevertheless"
            )
        return f"{said}; {cause}" if cause else said

    def _sentences(self) -> Iterator[str]:
        for name in self._promises.lost:
            slow = self._slow.get(name, {})
            late = {metric: s for metric, s in self._late.get(name, {}).items() if metric not in slow}
            if slow:
                took = f"decode alone takes {1e3 * max(slow.values()):.1f} ms at batch 1"
                yield f"{took}; {self._promises.named(name, slow)} cannot be met"
            if late:
                took = f"half of the prompts take {1e3 * max(late.values()):.1f} ms or more alone"
                yield f"{took}; {self._promises.named(name, late)} cannot be met"
