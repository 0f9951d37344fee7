"""A controller at work on a live engine; :func:`autotune.control` makes one.

It listens to the engine's records on the engine's own thread, gives each step its budget, and every ``interval_s`` asks its
controller for a setting, which the guardrails shape before it is put in force. Every change, and every change of regime, is a
:class:`~autotune.control.decision_log.Decision`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

from autotune.control.actuator import Wheel
from autotune.control.admission_adapter import Gate, TellsRates
from autotune.control.attainment import Kept
from autotune.control.controllers.protocol import Budgeted, Controller, check_controller
from autotune.control.decision_log import Decision, DecisionLog
from autotune.control.expected import Expected
from autotune.control.guardrails import Guardrails
from autotune.control.remote import SteeringServer
from autotune.control.status import Status
from autotune.control.watchdog import Silence
from runtime.errors import AutotuneError, EngineClosedError
from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.tunable import Lease, SchedulerView, Tunable

log = logging.getLogger(__name__)


class Control(TellsRates):
    """A controller at work. Use as a context manager; leaving it gives the engine back, with knobs that hold by themselves."""

    def __init__(
        self,
        engine: Tunable,
        controller: Controller,
        slo: SLO,
        *,
        start: Knobs | None = None,
        guardrails: Guardrails,
        observe_only: bool = False,
        admission: AdmissionPolicy | None = None,
        expected: Expected | None = None,
        interval_s: float = 0.25,
        log_path: str | Path | None = None,
        wall: Callable[[], float] | None = time.time,
    ) -> None:
        if not (isinstance(interval_s, int | float) and math.isfinite(interval_s) and interval_s > 0):
            raise ValueError(f"interval_s is {interval_s!r}; it must be a number of seconds above 0")
        check_controller(controller)
        guardrails.check(engine.limits)
        self.controller = controller
        self.observe_only = observe_only
        self._engine = engine
        self._gate = Gate(engine, admission)
        self._interval, self._next = interval_s, -math.inf
        self._lock = threading.RLock()
        self._kept = Kept(engine, slo)
        self._expected = expected
        self._silence = Silence(engine)
        self._paused = self._ended = False
        self._broken: Exception | None = None  # what a budget raised
        self._steering: SteeringServer | None = None
        decisions, now = DecisionLog(log_path), engine.view().now
        try:
            self._lease: Lease = engine.acquire(f"the {controller.name} controller")
        except AutotuneError:
            decisions.close()
            raise
        self._wheel = Wheel(engine, self._lease, guardrails, decisions, now, observe_only=observe_only, wall=wall)
        engine.set_slo(slo)
        self._kept.changed()
        self._kept.tell(controller)
        self._budgets_apply(True)
        self._unsubscribe = engine.subscribe(self)
        if not observe_only:
            if engine.capabilities.step_budgets:
                engine.set_step_policy(self, lease=self._lease)
            self._gate.shut(self, self._lease)
        self._wheel.log(
            "attach", f"{controller.name} controller, SLO {slo}", {"slo": str(slo), **self._kept.as_evidence()}
        )
        self._wheel.begin(start)

    # -- on the engine's thread ---------------------------------------------------------------------------------------

    def on_step(self, record: StepRecord) -> None:
        with self._lock:
            if self._ended:
                return
            try:
                if self._broken is not None:
                    raise self._broken
                self.controller.observe_step(record)
                if not self._silence.hear(record):
                    if self._silence.cannot_use():
                        self._fall_back()
                    return
                self._wheel.now = record.end
                if self._expected is not None and (found := self._expected.observe(record)) is not None:
                    self._wheel.log("note", found.cause, found.evidence)
                # time that jumps back must not silence the controller, nor time that stands still make it busy
                if record.end >= self._next or record.end < self._next - 2 * self._interval:
                    self._next = record.end + self._interval
                    self._heed_promises()
                    if not self._paused:
                        self._decide(record.end)
            except EngineClosedError:  # it drains what it had accepted, and its knobs no longer move
                self._detach("the engine was closed")
            except Exception as error:
                self._give_up(error)

    def on_request(self, record: RequestRecord) -> None:
        with self._lock:
            if not self._ended:
                self._kept.add(record)
                self._silence.ends()
                try:
                    self.controller.observe_request(record)
                except Exception as error:
                    self._give_up(error)

    def budget(self, view: SchedulerView) -> int:
        if self._paused or self._ended or self._broken:
            return view.knobs.token_budget
        try:
            if view.decoding and self._silence.begins(view):  # never so in a batcher's view
                self._fall_back()
            return int(self.controller.budget(view))  # what is no number is this controller's fault, and told as such
        except Exception as error:
            self._broken = error  # for the next record: a batcher asks under its own lock, in which no knob can be set
            return view.knobs.token_budget

    def _fall_back(self) -> None:
        """The starting knobs, until there is a record again to go by."""
        with self._lock:
            if not (self._silence.told or self._paused or self._ended):
                self._silence.told = True
                self._wheel.now = self._silence.latest
                self._wheel.turn(self._silence.proposal(self._wheel.start), at_once=True)

    def _heed_promises(self) -> None:
        if self._kept.changed():
            self._kept.tell(self.controller)
            self._wheel.log("note", "promised from now on: " + self._kept.as_text(), self._kept.as_evidence())

    def _give_up(self, error: Exception) -> None:
        """The controller is broken: back to the knobs it started from, and out of the way."""
        if not self._ended:
            log.error("the %s controller failed; its starting knobs hold now", self.controller.name, exc_info=error)
            self._wheel.put_back(f"the controller failed: {type(error).__name__}: {error}")
        self._detach("detached; the starting knobs hold")

    def _decide(self, now: float) -> None:
        self._wheel.turn(self.controller.decide(now, self._engine.knobs, self._engine.effective_limits))

    def _budgets_apply(self, applied: bool) -> bool:
        """Tell the controller whether steps go by its budgets. False if that makes no difference to it."""
        can = self._engine.capabilities.step_budgets and not self.observe_only
        if isinstance(self.controller, Budgeted):
            self.controller.budgets_apply(can and applied)
            return can
        return False

    def _stand_alone(self) -> None:
        """A last decision: its knobs were ceilings above the budgets of single steps, and must hold without these."""
        if not self._budgets_apply(False) or not self._wheel.turned or self._silence.told:
            return
        try:
            last = self.controller.decide(self._wheel.now, self._engine.knobs, self._engine.effective_limits)
            last = last._replace(cause=f"knobs that hold without budgets of single steps: {last.cause}")
            self._wheel.turn(last, at_once=True)
        except EngineClosedError:
            pass
        except Exception as error:
            self._give_up(error)

    # -- for the operator, from any thread ----------------------------------------------------------------------------

    def pause(self) -> None:
        """Leave the knobs alone until :meth:`resume`; it goes on learning. Budgets of single steps are off meanwhile, so a last
        decision sets knobs that hold without them."""
        with self._lock:
            self._check_attached()
            if not self._paused:
                self._paused = True
                self._stand_alone()
                if not self._ended:
                    self._wheel.log("pause", "paused by the operator")

    def resume(self) -> None:
        with self._lock:
            self._check_attached()
            if self._paused:
                self._paused = False
                self._budgets_apply(True)
                self._wheel.log("resume", "resumed by the operator")

    def kill(self) -> None:
        """Off at once: the knobs of before the attachment are put back, and nothing is decided any more."""
        with self._lock:
            if not self._ended:
                self._wheel.put_back("switched off by the operator")
            self._detach("detached; the starting knobs hold")

    def set(self, /, **knobs: float) -> Knobs:
        """Set knobs by hand and pause, so that the controller does not undo it. Returns the knobs in force."""
        with self._lock:
            self._check_attached()
            current = self._engine.knobs
            self._engine.set_knobs(current.with_(**knobs), lease=self._lease)
            self._paused = True
            self._budgets_apply(False)
            self._wheel.log("pause", "knobs set by the operator", old=current)
            return self._engine.knobs

    @property
    def slo(self) -> SLO:
        """What is promised to requests of no class of their own."""
        return self._kept.default

    @property
    def decisions(self) -> deque[Decision]:
        """The latest decisions, newest last; :meth:`latest` copies them while the engine runs."""
        return self._wheel.decisions.recent

    def latest(self, count: int) -> list[Decision]:
        """The last ``count`` decisions, newest last."""
        with self._lock:
            return list(self.decisions)[-count:] if count > 0 else []

    def steer(self, path: str | Path | None = None) -> Path:
        """Open the local socket of ``autotune watch``, ``pause`` and ``set`` (:mod:`.remote`); closes with this.

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
                self._engine.knobs, self._wheel.regime or "learning", self._kept.all.attainment(), self.slo, self._paused,
                self.observe_only, self._ended, self._kept.fared(), self._kept.all.rejections(),
                None if self._ended else self._silence.seconds,
            )  # fmt: skip

    def close(self) -> None:
        """Detach. Any number of times. The knobs of its last decision stay, made to hold without budgets of single steps."""
        with self._lock:
            if not (self._paused or self._ended):
                self._stand_alone()
        self._detach("detached; the knobs stay")
        if self._steering is not None:
            self._steering.join()

    def _detach(self, cause: str) -> None:
        with self._lock:
            if self._ended:
                return
            self._wheel.log("detach", cause)
            self._ended = True
        with contextlib.suppress(AutotuneError):
            if not self.observe_only:
                self._engine.set_step_policy(None, lease=self._lease)
                self._gate.put_back(self._lease)
        self._unsubscribe()
        self._lease.release()
        self._wheel.decisions.close()
        if self._steering is not None:
            self._steering.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_attached(self) -> None:
        if self._ended:
            raise AutotuneError("the controller has been detached")
