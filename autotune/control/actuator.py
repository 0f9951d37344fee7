"""Sets the knobs of an engine for a controller: every change goes through the guardrails and into the decision log.

It sets the engine's SLO as well, and restores both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from autotune.control.controllers.protocol import Proposal
from autotune.control.decision_log import Decision, DecisionLog
from autotune.control.guardrails import Guardrails
from runtime.errors import AutotuneError
from runtime.knobs import Knobs
from runtime.slo import SLO
from runtime.tunable import Lease, Tunable


def check_live(engine: Tunable, knob: str, given: str) -> None:
    """Raise ``ValueError`` where ``knob`` cannot be turned while ``engine`` runs; ``given``: what it was to be, in words."""
    effect = engine.capabilities.knobs[knob]
    if effect != "live":
        why = "has no such knob" if effect == "none" else "takes a restart for it"
        raise ValueError(f"{knob} is {given}; this engine {why}")


class Actuator:
    """Puts proposals in force and logs them.

    ``now``: the engine's time as last known, s; ``regime``: that of the last proposal; ``start``: the knobs that the controller
    began with, the profile's if there is one; ``changed``: whether any proposal has changed the knobs; ``logged``: how many
    decisions there have been. With ``observe_only`` no proposal is set, but what the operator asks for is.
    """

    def __init__(
        self,
        engine: Tunable,
        lease: Lease,
        guardrails: Guardrails,
        decisions: DecisionLog,
        now: float,
        *,
        observe_only: bool,
        wall: Callable[[], float] | None,
    ) -> None:
        self._engine, self._lease, self._guardrails = engine, lease, guardrails
        self._observe_only = observe_only
        self._wall = wall
        self._last: Knobs | None = None  # the last proposal, shaped by the guardrails
        self._before, self._turned = engine.wanted_knobs, False  # to be restored, once any has been set
        self._slo_before = engine.slos.get("default")  # the same
        self._slo: SLO | None = None
        self.decisions = decisions
        self.now = now
        self.regime = ""
        self._unmet = ""
        self.start = self._before
        self.changed = False
        self.logged = 0

    def begin(self, start: Knobs | None) -> None:
        """Set ``start``, within the operator's bounds and pins, at once; in force as far as the memory lasts."""
        current, wanted = self._engine.knobs, self._engine.wanted_knobs
        first = self._guardrails.at_once.apply(start or wanted, wanted, self._engine.limits)
        if first == wanted or self._observe_only:
            return
        self.set(first)
        self.start = first
        if self._engine.knobs != current:
            self.log(
                "set", "starting knobs of the profile" if start else "bounds and pins of the operator", old=current
            )

    def apply(self, proposal: Proposal, *, at_once: bool = False) -> None:
        """Put ``proposal`` in force: ``at_once``, or no further than the guardrails let one decision go."""
        current = self._engine.knobs
        rails = self._guardrails.at_once if at_once else self._guardrails
        wanted = rails.apply(proposal.knobs, current, self._engine.effective_limits)
        news = (proposal.regime, proposal.unmet) != (self.regime, self._unmet)
        self.regime, self._unmet = proposal.regime, proposal.unmet
        if wanted != current and not self._observe_only:
            self.set(wanted)
            self.changed = True
            self.log("set", self._cause(proposal), proposal.evidence, old=current, new=wanted)
        elif self._observe_only and wanted != current and wanted != self._last:
            self.log("observe", self._cause(proposal), proposal.evidence, old=current, new=wanted)
        elif news:
            self.log("hold", self._cause(proposal), proposal.evidence)
        self._last = wanted

    def _cause(self, proposal: Proposal) -> str:
        """Its own, and what of it the operator does not let come in force."""
        live = self._engine.capabilities.knobs
        held = self._guardrails.holds(proposal.knobs, self._engine.effective_limits).items()
        return "; ".join([proposal.cause, *(why for name, why in held if live[name] == "live")])

    def set(self, knobs: Knobs | None = None, /, **changes: float) -> None:
        """Put ``knobs`` in force, or make the ``changes`` named: the others may have been lowered, while memory is short."""
        self._engine.set_knobs(knobs, lease=self._lease, **changes)
        self._turned = True

    def hold_to(self, slo: SLO) -> None:
        """Make ``slo`` the engine's, for requests of no class of their own; not with ``observe_only``."""
        if not self._observe_only:
            self._engine.set_slo(slo)
            self._slo = slo

    def restore(self, cause: str) -> None:
        """Set the knobs and the SLO from before the controller was attached, and log that."""
        current = self._engine.knobs
        self.put_back()
        self.log("kill", cause, old=current)

    def put_back(self) -> None:
        """The same without a word: the knobs, if the controller or the operator has set any since, and the SLO, unless somebody
        else has."""
        with contextlib.suppress(AutotuneError):  # a closed engine has no knobs to restore
            if self._turned:
                self.set(self._before)  # lowered while memory is short
        slo, before = self._slo, self._slo_before
        if slo is None or slo == before or self._engine.slos.get("default") != slo:
            return
        if before is not None:
            self._engine.set_slo(before)
        elif (put_slo := getattr(self._engine, "_put_slo", None)) is not None:  # :class:`~runtime.shared.tuning.Tuning`
            put_slo("default", None)

    def log(
        self,
        action: str,
        cause: str,
        evidence: Mapping[str, Any] | None = None,
        *,
        old: Knobs | None = None,
        new: Knobs | None = None,
    ) -> None:
        """``old`` and ``new`` are the knobs in force unless given."""
        before, after = (knobs or self._engine.knobs for knobs in (old, new))
        wall = None if self._wall is None else round(self._wall(), 3)
        self.logged += 1
        self.decisions.add(
            Decision(
                round(self.now, 6), action, self.regime, before.as_dict(), after.as_dict(), self._engine.epoch, cause,
                evidence or {}, wall,
            )
        )  # fmt: skip
