"""Measuring the best few: which settings, for how long, and the rounds in which they take turns."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autotune.measure.evaluate import Interrupted
from autotune.profiling.callables.kept import Kept
from autotune.profiling.callables.load import Load
from autotune.profiling.callables.measure import measure
from autotune.profiling.callables.outcome import Outcome, best_first
from autotune.profiling.callables.settings import AS_IT_COMES, ONE_AT_A_TIME, Setting
from autotune.profiling.callables.subject import Subject
from autotune.profiling.reporting import Reporter
from runtime.knobs import Knobs

if TYPE_CHECKING:
    from autotune.profiling.callables.sweep import Findings

_MEASURED, _ROUNDS = 4, 2  # settings, and runs of each
_SHORTEST_S, _LONGEST_S = 0.5, 60.0  # of a window
_PLAN = "plan"


class Plan(NamedTuple):
    """``each_s``: what a run takes in all. ``tried``: settings simulated to come to it."""

    settings: Sequence[Setting]
    window_s: float
    warmup_s: float
    each_s: float
    tried: int

    @property
    def runs(self) -> int:
        return _ROUNDS * len(self.settings)

    def keep(self, study: Kept) -> None:
        settings = [{"strategy": s.strategy, "knobs": s.knobs.as_dict()} for s in self.settings]
        study.put(_PLAN, {**self._asdict(), "settings": settings})

    @classmethod
    def kept(cls, study: Kept) -> Plan | None:
        """That of an earlier session of the same study."""
        known: dict[str, Any] | None = study.get(_PLAN)
        if known is None:
            return None
        settings = [Setting(s["strategy"], Knobs(**s["knobs"])) for s in known["settings"]]
        return cls(**{**known, "settings": settings})


def plan(simulated: Sequence[Outcome], left_s: float) -> Plan:
    """What to measure in ``left_s`` seconds."""
    chosen = choose(simulated, min(_MEASURED, max(2, int(left_s / 5))))
    each = left_s / (_ROUNDS * len(chosen))
    warmup = min(2.0, each / 5)
    window = min(_LONGEST_S, max(_SHORTEST_S, each - warmup - 0.2))
    return Plan(chosen, window, warmup, each, len(simulated))


def choose(simulated: Sequence[Outcome], count: int) -> list[Setting]:
    """What is measured: the best by simulation, the batcher as it comes, and the next best unlike those before it."""
    ranked = [o.setting for o in best_first(simulated) if o.setting != ONE_AT_A_TIME]
    chosen = ranked[:1]
    if AS_IT_COMES in ranked and AS_IT_COMES not in chosen:
        chosen.append(AS_IT_COMES)
    for setting in ranked:
        if len(chosen) >= count:
            break
        if all(_unlike(setting, other) for other in chosen):
            chosen.append(setting)
    return chosen


def _unlike(a: Setting, b: Setting) -> bool:
    sizes = sorted((a.knobs.max_batch_size, b.knobs.max_batch_size))
    return a.strategy != b.strategy or sizes[1] >= 2 * sizes[0]


class Rounds:
    """Rounds over the chosen few, each round under a seed of its own, until the next would end too late."""

    def __init__(
        self,
        found: Findings,
        subject: Subject,
        seed: int,
        study: Kept,
        stop: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        self._found, self._subject, self._seed = found, subject, seed
        self._study, self._stop, self._now = study, stop, now
        self._warm = False

    def warm_up(self) -> None:
        """A run that nobody sees: what the simulation left to be collected, and whatever is slow once, would hit the first."""
        if self._warm:
            return
        self._warm = True
        gc.collect()
        load = Load(self._found.rate, _SHORTEST_S, 0.0, self._seed + 2_000_002)
        with contextlib.suppress(Interrupted):
            self._measure(self._found.simulated[0].setting, load)

    def run(self, plan: Plan, reporter: Reporter, end: float) -> None:
        """Fill ``found.measured``, with what was measured before and with what was not."""
        found, now = self._found, self._now
        found.measured = [Outcome(setting, simulated=False) for setting in plan.settings]
        done, begun = 0, now()
        for round_ in range(_ROUNDS):
            if self._stop() or (round_ and now() + (now() - begun) / round_ > end + plan.each_s):
                break
            load = Load(found.rate, plan.window_s, plan.warmup_s, self._seed + 2_000_003 + round_)
            for outcome in found.measured if round_ % 2 == 0 else reversed(found.measured):
                try:
                    outcome.include(self._one(round_, outcome.setting, load))
                except Interrupted:
                    break
                done += 1
                found.load = load
                left = max(0.0, end - now())
                reporter.progress(done / plan.runs, f"{done}/{plan.runs}", f"{outcome.share:.1%} in SLO", left)
        if not done:
            found.measured = []
        reporter.stage_done(f"{done}/{plan.runs}", f"windows of {plan.window_s:.3g} s")

    def _one(self, round_: int, setting: Setting, load: Load) -> dict[str, Any]:
        def run() -> dict[str, Any]:
            self.warm_up()
            return self._measure(setting, load).plain()

        knobs = "/".join(f"{value:g}" for value in setting.knobs.as_dict().values())
        return self._study.measured(f"run/{round_}/{setting.strategy}/{knobs}", run, stop=self._stop)

    def _measure(self, setting: Setting, load: Load) -> Outcome:
        found = self._found
        return measure(setting, self._subject, load, found.slo, self._stop, replicas=found.calibration.workers)
