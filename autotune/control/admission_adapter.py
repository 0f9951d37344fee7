"""Puts an admission policy in force on an engine while a controller is attached, and restores the former one after."""

from __future__ import annotations

from autotune.control.controllers.protocol import Controller
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.prefill_rate import RateSource
from runtime.tunable import Lease, Tunable


class AdmissionAdapter:
    """``policy`` for ``engine``; None: the engine's own, if it has one. Raises ``ValueError`` if it cannot reject requests."""

    def __init__(self, engine: Tunable, policy: AdmissionPolicy | None) -> None:
        if policy is not None and not engine.capabilities.admission:
            raise ValueError(f"admission is {policy}; {type(engine).__name__} cannot reject requests")
        self._engine = engine
        self._former = engine.admission
        self._policy = policy or self._former

    def install(self, source: RateSource, lease: Lease) -> None:
        """Put the policy in force; ``source`` says how fast prompts are computed."""
        if self._policy is not None:
            self._engine.set_admission(self._policy, source=source, lease=lease)

    def restore(self, lease: Lease) -> None:
        if self._policy is not None:
            self._engine.set_admission(self._former, lease=lease)


class ReportsRates:
    """Passes on the prefill rate that ``controller`` predicts to the engine's admission policy, until it is detached."""

    controller: Controller
    _ended: bool

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second; 0 if the controller predicts none."""
        return 0.0 if self._ended else float(getattr(self.controller, "prefill_rate", 0.0))

    @property
    def prompts_abreast(self) -> int:
        """How many prompts a step has room for; 1 if the controller predicts none."""
        return 1 if self._ended else int(getattr(self.controller, "prompts_abreast", 1))

    @property
    def pair_tokens(self) -> float:
        """Tokens that take as long as one attention pair; 0 if the controller predicts none."""
        return 0.0 if self._ended else float(getattr(self.controller, "pair_tokens", 0.0))
