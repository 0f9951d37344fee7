"""An engine's admission while a controller is attached: its policy, fed with what the controller knows, and put back after."""

from __future__ import annotations

from autotune.control.controllers.protocol import Controller
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.prefill_rate import RateSource
from runtime.tunable import Lease, Tunable


class Gate:
    """``policy`` for ``engine``; None: its own, if it has one. Raises ``ValueError`` if it cannot turn requests away."""

    def __init__(self, engine: Tunable, policy: AdmissionPolicy | None) -> None:
        if policy is not None and not engine.capabilities.admission:
            raise ValueError(f"admission is {policy}; {type(engine).__name__} cannot turn requests away")
        self._engine = engine
        self._former = engine.admission
        self._policy = policy or self._former

    def shut(self, source: RateSource, lease: Lease) -> None:
        """Put the policy in force; ``source`` says how fast prompts are computed."""
        if self._policy is not None:
            self._engine.set_admission(self._policy, source=source, lease=lease)

    def put_back(self, lease: Lease) -> None:
        if self._policy is not None:
            self._engine.set_admission(self._former, lease=lease)


class TellsRates:
    """What ``controller`` says of how prompts are computed, for the engine's admission, until it has been detached."""

    controller: Controller
    _ended: bool

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second; 0 where it does not say."""
        return 0.0 if self._ended else float(getattr(self.controller, "prefill_rate", 0.0))

    @property
    def prompts_abreast(self) -> int:
        """How many prompts a step has room for; 1 where it does not say."""
        return 1 if self._ended else int(getattr(self.controller, "prompts_abreast", 1))
