"""A controller at work on a live engine; :func:`autotune.control` makes one.

It listens to the engine's records on the engine's own thread, gives each step its budget, and every ``interval_s`` asks its
controller for a setting, which the guardrails shape before it is put in force. Every change, and every change of regime, is a
:class:`~autotune.decisions.Decision`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from autotune.controllable import Controllable
from autotune.controllers.guardrails import Guardrails
from autotune.controllers.protocol import Budgeted, Controller, check_controller
from autotune.decisions import Decision, DecisionLog
from autotune.gate import Gate, TellsRates
from autotune.status import Status
from autotune.steering import SteeringServer
from autotune.verdicts import Verdicts
from runtime.errors import AutotuneError, EngineClosedError
from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.tunable import Lease, SchedulerView

log = logging.getLogger(__name__)


class Control(TellsRates):
    """A controller at work. Use as a context manager; leaving it gives the engine back, with the knobs as they are."""

    def __init__(
        self,
        engine: Controllable,
        controller: Controller,
        slo: SLO,
        *,
        start: Knobs | None = None,
        guardrails: Guardrails,
        observe_only: bool = False,
        admission: AdmissionPolicy | None = None,
        interval_s: float = 0.25,
        log_path: str | Path | None = None,
        wall: Callable[[], float] | None = time.time,
    ) -> None:
        if not (isinstance(interval_s, int | float) and math.isfinite(interval_s) and interval_s > 0):
            raise ValueError(f"interval_s is {interval_s!r}; it must be a number of seconds above 0")
        check_controller(controller)
        guardrails.check(engine.limits)
        self.controller = controller
        self.slo = slo
        self.observe_only = observe_only
        self._engine = engine
        self._gate = Gate(engine, admission)
        self._guardrails = guardrails
        self._interval, self._wall = interval_s, wall
        self._lock = threading.RLock()
        self._verdicts = Verdicts()
        self._promised: dict[str, SLO] = {}
        self._regime = ""
        self._next = -math.inf
        self._now = engine.view().now
        self._paused = self._ended = False
        self._steering: SteeringServer | None = None
        self._decisions = DecisionLog(log_path)
        self._start = engine.knobs  # what to put back
        self._last_proposal: Knobs | None = None
        try:
            self._lease: Lease = engine.acquire(f"the {controller.name} controller")
        except AutotuneError:
            self._decisions.close()
            raise
        engine.set_slo(slo)
        self._keep_promises()
        if isinstance(controller, Budgeted):
            controller.budgets_apply(engine.step_budgets and not observe_only)
        self._unsubscribe = engine.subscribe(self)
        if not observe_only:
            engine.set_step_policy(self, lease=self._lease)
            self._gate.shut(self, self._lease)
        self._log("attach", "", self._start, self._start, f"{controller.name} controller, SLO {slo}", {"slo": str(slo)})
        self._begin(start)

    # -- on the engine's thread ---------------------------------------------------------------------------------------

    def on_step(self, record: StepRecord) -> None:
        with self._lock:
            if self._ended:
                return
            try:
                self.controller.observe_step(record)
                if not math.isfinite(record.end):
                    return
                self._now = record.end
                # time that jumps back must not silence the controller, nor time that stands still make it busy
                if record.end >= self._next or record.end < self._next - 2 * self._interval:
                    self._next = record.end + self._interval
                    if not self._paused:
                        self._decide(record.end)
            except EngineClosedError:  # it drains what it had accepted, and its knobs no longer move
                self._detach("the engine was closed")
            except Exception as error:
                self._give_up(error)

    def on_request(self, record: RequestRecord) -> None:
        with self._lock:
            if not self._ended:
                self._verdicts.add(record, self._engine.slos.get(record.request_class, self.slo))
                try:
                    self.controller.observe_request(record)
                except Exception as error:
                    self._give_up(error)

    def budget(self, view: SchedulerView) -> int:
        if self._paused or self._ended:
            return view.knobs.token_budget
        try:
            return int(self.controller.budget(view))  # what is no number is this controller's fault, and told as such
        except Exception as error:
            with self._lock:
                self._give_up(error)
            return view.knobs.token_budget

    def _keep_promises(self) -> None:
        """Tell the controller of the promises, if they are not those it knows: the engine's may change at any time."""
        if (slos := dict(self._engine.slos)) != self._promised:
            self._promised = slos
            self.slo = slos.get("default", self.slo)
            if (promise := getattr(self.controller, "promise", None)) is not None:
                promise(slos or {"default": self.slo})

    def _give_up(self, error: Exception) -> None:
        """The controller is broken: back to the knobs it started from, and out of the way."""
        if not self._ended:
            log.error("the %s controller failed; its starting knobs hold now", self.controller.name, exc_info=error)
            self._put_back(f"the controller failed: {type(error).__name__}: {error}")
        self._detach("detached; the starting knobs hold")

    def _put_back(self, cause: str) -> None:
        current = self._engine.knobs
        with contextlib.suppress(AutotuneError):  # a closed engine has no knobs to put back
            if not self.observe_only:
                self._engine.set_knobs(self._engine.effective_limits.clamp(self._start), lease=self._lease)
        self._log("kill", self._regime, current, self._engine.knobs, cause, {})

    def _decide(self, now: float) -> None:
        engine, current = self._engine, self._engine.knobs
        limits = engine.effective_limits
        self._keep_promises()
        proposal = self.controller.decide(now, current, limits)
        wanted = self._guardrails.apply(proposal.knobs, current, limits)
        new_regime = proposal.regime != self._regime
        self._regime = proposal.regime
        if wanted != current and not self.observe_only:
            engine.set_knobs(wanted, lease=self._lease)
            self._log("set", proposal.regime, current, wanted, proposal.cause, proposal.evidence)
        elif self.observe_only and wanted != current and wanted != self._last_proposal:
            self._log("observe", proposal.regime, current, wanted, proposal.cause, proposal.evidence)
        elif new_regime:
            self._log("hold", proposal.regime, current, current, proposal.cause, proposal.evidence)
        self._last_proposal = wanted

    def _begin(self, start: Knobs | None) -> None:
        """From ``start`` on, and inside what the operator allows, without waiting for evidence."""
        current, engine = self._engine.knobs, self._engine
        first = replace(self._guardrails, slew=math.inf, dead_band=0.0).apply(
            start or current, current, engine.effective_limits
        )
        if first != current and not self.observe_only:
            engine.set_knobs(first, lease=self._lease)
            cause = "starting knobs of the profile" if start is not None else "the operator's bounds and pins"
            self._log("set", "", current, first, cause, {})

    # -- for the operator, from any thread ----------------------------------------------------------------------------

    def pause(self) -> None:
        """Leave the knobs as they are until :meth:`resume`; it goes on learning. The per-step budget is off meanwhile."""
        self._operator("pause", "paused by the operator", paused=True)

    def resume(self) -> None:
        self._operator("resume", "resumed by the operator", paused=False)

    def kill(self) -> None:
        """Off at once: the knobs of before the attachment are put back, and nothing is decided any more."""
        with self._lock:
            if not self._ended:
                self._put_back("switched off by the operator")
            self._detach("detached; the starting knobs hold")

    def set(self, /, **knobs: float) -> Knobs:
        """Set knobs by hand and pause, so that the controller does not undo it. Returns the knobs in force."""
        with self._lock:
            if self._ended:
                raise AutotuneError("the controller has been detached")
            current = self._engine.knobs
            self._engine.set_knobs(current.with_(**knobs), lease=self._lease)
            self._paused = True
            self._log("pause", self._regime, current, self._engine.knobs, "knobs set by the operator", {})
            return self._engine.knobs

    @property
    def decisions(self) -> deque[Decision]:
        """The latest decisions, newest last; :meth:`latest` copies them while the engine runs."""
        return self._decisions.recent

    def latest(self, count: int) -> list[Decision]:
        """The last ``count`` decisions, newest last."""
        with self._lock:
            return list(self.decisions)[-count:] if count > 0 else []

    def steer(self, path: str | Path | None = None) -> Path:
        """Open the local socket of ``autotune watch``, ``pause`` and ``set`` (see :mod:`autotune.steering`); closes with this.

        ``path``: where; without it a private directory, where those commands look. Returns the socket's path.
        """
        if self._steering is not None:
            return self._steering.path
        opened = SteeringServer(self, self.controller.name, path)  # may take a while: not under the engine's nose
        with self._lock:
            if self._steering is None and not self._ended:
                self._steering = opened
        if self._steering is not opened:
            opened.stop()
        if self._steering is None:
            raise AutotuneError("the controller has been detached")
        return self._steering.path

    def status(self) -> Status:
        with self._lock:
            return Status(
                knobs=self._engine.knobs,
                regime=self._regime or "learning",
                attainment=self._verdicts.attainment(),
                slo=self.slo,
                paused=self._paused,
                observe_only=self.observe_only,
                ended=self._ended,
                latencies_ms=self._verdicts.latencies_ms(),
                rejections=self._verdicts.rejections(),
            )

    def close(self) -> None:
        """Detach. Any number of times."""
        self._detach("detached; the knobs stay")
        if self._steering is not None:
            self._steering.join()

    def _detach(self, cause: str) -> None:
        with self._lock:
            if self._ended:
                return
            knobs = self._engine.knobs
            self._log("detach", self._regime, knobs, knobs, cause, {})
            self._ended = True
        with contextlib.suppress(AutotuneError):
            if not self.observe_only:
                self._engine.set_step_policy(None, lease=self._lease)
                self._gate.put_back(self._lease)
        self._unsubscribe()
        self._lease.release()
        self._decisions.close()
        if self._steering is not None:
            self._steering.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _operator(self, action: str, cause: str, *, paused: bool) -> None:
        with self._lock:
            if self._ended:
                raise AutotuneError("the controller has been detached")
            if self._paused != paused:
                self._paused = paused
                knobs = self._engine.knobs
                self._log(action, self._regime, knobs, knobs, cause, {})

    def _log(self, action: str, regime: str, old: Knobs, new: Knobs, cause: str, evidence: Mapping[str, Any]) -> None:
        wall = None if self._wall is None else round(self._wall(), 3)
        at = round(self._now, 6)
        self._decisions.add(
            Decision(at, action, regime, old.as_dict(), new.as_dict(), self._engine.epoch, cause, evidence, wall)
        )
