"""The settings of a callable's batcher: the baselines, a grid small enough to be simulated whole, and which to measure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.profile.callable import BatcherSetting, StrategyName
from runtime.batching.options import BATCHER_LIMITS
from runtime.knobs import Knobs

STRATEGIES: tuple[StrategyName, ...] = ("adaptive", "dynamic")

OPEN = Knobs(**BATCHER_LIMITS.as_dict())  # type: ignore[arg-type]  # its values are those of knobs
_WAITS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)  # of what the SLO leaves beside one call

AS_IT_COMES = BatcherSetting("adaptive", OPEN)
"""``Batcher(fn, slo=…)`` with no size and no window."""

ONE_AT_A_TIME = BatcherSetting("dynamic", OPEN.with_(max_batch_size=1, max_wait_ms=0))
"""No batching."""


_CALIBRATED_TO = 256  # items in a call, where the user sets no bound


@dataclass(frozen=True)
class BatcherSpace:
    """What may be tried. ``most``: items in any call; None where the user set no bound."""

    strategies: Sequence[StrategyName] = STRATEGIES
    most: int | None = None

    @property
    def calibrated_to(self) -> int:
        """Items in the largest call of the calibration."""
        return self.most or _CALIBRATED_TO

    @property
    def as_it_comes(self) -> BatcherSetting:
        """The baseline: ``Batcher(fn, slo=…)``, with ``max_batch_size`` where there is a bound."""
        if self.most is None:
            return AS_IT_COMES
        return AS_IT_COMES._replace(knobs=AS_IT_COMES.knobs.with_(max_batch_size=min(self.most, OPEN.max_batch_size)))

    def allows(self, setting: BatcherSetting) -> bool:
        """Whether it may be recommended."""
        return setting.strategy in self.strategies and (self.most is None or setting.knobs.max_batch_size <= self.most)


def adaptive_alone(setting: BatcherSetting) -> bool:
    """Whether it leaves all but the size to the adaptive strategy, as the batcher as it comes does."""
    knobs = setting.knobs
    return setting.strategy == "adaptive" and (knobs.max_wait_ms, knobs.token_budget) == (
        OPEN.max_wait_ms,
        OPEN.token_budget,
    )


def grid(
    strategies: Sequence[StrategyName],
    *,
    largest: int,
    slack_ms: float,
    mean_cost: float | None,
    seed: int,
    workers: int = 1,
) -> list[BatcherSetting]:
    """Every setting to simulate, in an order drawn by ``seed`` so that an early end leaves a sample of all.

    Sizes are the powers of two up to ``largest``. Windows are shares of ``slack_ms``, what the SLO leaves beside one
    call; the adaptive strategy with one worker holds nothing back, so its window is 0; with several it is open as well, for it
    may keep calls apart that slow one another down. ``mean_cost``: None where all
    inputs cost the same, and a budget of cost would say no more than the size does.
    """
    sizes = sorted({min(1 << i, largest) for i in range(largest.bit_length() + 1)})
    budgets = [OPEN.token_budget]
    if mean_cost is not None:
        budgets += [max(1, round(mean_cost * largest * share)) for share in (0.125, 0.25, 0.5)]
    waits = sorted({float(f"{max(0.0, slack_ms) * share:.2g}") for share in _WAITS})
    found = []
    for strategy in strategies:
        for size in sizes:
            for wait in _windows(strategy, waits, workers) if size > 1 or strategy == "adaptive" else [0.0]:
                for budget in budgets:
                    wanted = {"max_batch_size": size, "max_wait_ms": wait, "token_budget": budget}
                    capped = {name: min(value, getattr(OPEN, name)) for name, value in wanted.items()}
                    found.append(BatcherSetting(strategy, OPEN.with_(**capped)))
    random.Random(seed).shuffle(found)
    return list(dict.fromkeys(found))


def _windows(strategy: StrategyName, waits: Sequence[float], workers: int) -> Sequence[float]:
    if strategy == "dynamic":
        return waits
    return [0.0] if workers == 1 else [0.0, OPEN.max_wait_ms]


def choose(
    ranked: Sequence[BatcherSetting], count: int, baseline: BatcherSetting = AS_IT_COMES
) -> list[BatcherSetting]:
    """Which of the settings ``ranked`` by simulation to measure: the best, the ``baseline``, and the next best unlike
    those before it. No batching only if there is nothing else."""
    ranked = [setting for setting in ranked if setting != ONE_AT_A_TIME] or ranked
    chosen = list(ranked[:1])
    if baseline in ranked and baseline not in chosen:
        chosen.append(baseline)
    for setting in ranked:
        if len(chosen) >= count:
            break
        if not any(alike(setting, other) for other in chosen):
            chosen.append(setting)
    return chosen


def alike(a: BatcherSetting, b: BatcherSetting) -> bool:
    """Whether two settings are of one strategy, and their sizes within a factor of two."""
    small, large = sorted((a.knobs.max_batch_size, b.knobs.max_batch_size))
    return a.strategy == b.strategy and large < 2 * small
