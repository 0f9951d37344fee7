"""Puts an admission policy in force on an engine while a controller is attached, and restores the former one after."""

from __future__ import annotations

from abc import ABC, abstractmethod

from autotune.control.controllers.protocol import Controller
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.prefill_rate import RateSource
from runtime.tunable import Lease, Tunable

_RATES = ("prefill_rate", "prompts_per_step", "pair_tokens")
"""Of a :class:`RateSource`."""


class AdmissionAdapter:
    """``policy`` for ``engine``, as :meth:`AdmissionPolicy.of` takes it, but for None: the engine's own, if it has one; False is
    none at all. Raises ``ValueError`` if it cannot reject requests, and for what is no policy."""

    def __init__(self, engine: Tunable, policy: AdmissionPolicy | bool | None) -> None:
        wanted = AdmissionPolicy.of(policy)
        if wanted is not None and not engine.capabilities.admission:
            raise ValueError(f"admission is {wanted}; {type(engine).__name__} cannot reject requests")
        self._engine = engine
        self._former = engine.admission
        self._policy = self._former if policy is None else wanted

    def install(self, source: RateSource, lease: Lease) -> None:
        """Put the policy in force; ``source`` says how fast prompts are computed."""
        if self._policy is not None:
            self._engine.set_admission(self._policy, source=source, lease=lease)
        elif self._former is not None:
            self._engine.set_admission(None, lease=lease)

    def restore(self, lease: Lease) -> None:
        """Put the engine's own policy in force again."""
        if self._policy is not None or self._former is not None:
            self._engine.set_admission(self._former, lease=lease)


def rates_of(controller: Controller) -> RateSource | None:
    """``controller``, if it says how fast prompts are computed. Raises ``ValueError`` if it says but a part of that."""
    if isinstance(controller, RateSource):
        return controller
    said = [name for name in _RATES if hasattr(controller, name)]
    if said:
        lacking = " and ".join(name for name in _RATES if name not in said)
        raise ValueError(
            f"it has {' and '.join(said)} but not {lacking}; a RateSource has all of them, or derives from it"
        )
    return None


class ReportsRates(ABC):
    """Passes on what the controller predicts of prefill (``_rates``; None: nothing) to the engine's admission policy, while
    steps go by its budgets."""

    _rates: RateSource | None
    _ended: bool

    @property
    @abstractmethod
    def _gives_budgets(self) -> bool:
        """Whether steps go by its budgets. What it predicted of them says nothing of steps that do not."""

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second; 0 if the controller predicts none."""
        return self._rates.prefill_rate if self._rates is not None and self._gives_budgets else 0.0

    @property
    def prompts_per_step(self) -> int:
        """How many prompts a step has room for; 1 if the controller predicts none."""
        return self._rates.prompts_per_step if self._rates is not None and self._gives_budgets else 1

    @property
    def pair_tokens(self) -> float:
        """Tokens that take as long as one attention pair; 0 if the controller predicts none. Budgets or not."""
        return 0.0 if self._rates is None or self._ended else self._rates.pair_tokens
