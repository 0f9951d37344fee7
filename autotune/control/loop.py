"""The control loop on a live engine; :func:`autotune.control` makes one.

It receives the engine's records on the engine's own thread, gives each step its budget, and every ``interval_s`` asks the
controller for knobs, which the guardrails shape before they are set. Every change of the knobs or the regime is a
:class:`~autotune.control.decision_log.Decision`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from autotune.control.actuator import Actuator, check_live
from autotune.control.admission_adapter import AdmissionAdapter, ReportsRates, rates_of
from autotune.control.attainment import AttainmentTracker
from autotune.control.controllers.protocol import (
    Budgeted,
    Controller,
    Observing,
    Proposal,
    check_controller,
    checked_proposal,
    failure,
)
from autotune.control.decision_log import Decision, DecisionLog
from autotune.control.guardrails import Guardrails
from autotune.control.profile_drift import ProfileDrift
from autotune.control.status import Status
from autotune.control.watchdog import Watchdog
from runtime.clock import boot
from runtime.errors import AutotuneError, EngineClosedError, InputError
from runtime.knobs import Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.tunable import Lease, SchedulerView, Tunable

if TYPE_CHECKING:
    from autotune.control.remote import SteeringServer

log = logging.getLogger(__name__)

_ATTACHED: weakref.WeakSet[Control] = weakref.WeakSet()
"""Those of this process that have a controller."""
_ATTACHING = threading.Lock()


class Control(ReportsRates):
    """A controller attached to an engine. Use as a context manager; leaving it detaches the controller and leaves the SLO, and
    knobs that hold by themselves."""

    holds_engine = True  # see :meth:`runtime.tunable.Tunable.subscribe`

    def __init__(
        self,
        engine: Tunable,
        controller: Controller,
        slo: SLO,
        *,
        start: Knobs | None = None,
        guardrails: Guardrails,
        observe_only: bool = False,
        admission: AdmissionPolicy | bool | None = None,
        drift: ProfileDrift | None = None,
        interval_s: float = 0.25,
        log_path: str | Path | None = None,
        wall: Callable[[], float] | None = time.time,
    ) -> None:
        if engine.capabilities.virtual_time:  # the hour at which something is simulated says nothing of it
            wall = None
        if not (isinstance(interval_s, int | float) and math.isfinite(interval_s) and interval_s > 0):
            raise ValueError(f"interval_s is {interval_s!r}; it must be a number of seconds above 0")
        check_controller(controller)
        guardrails.check(engine.limits)
        self.controller = controller
        self.observe_only = observe_only
        self._engine = engine
        self._interval, self._next = interval_s, -math.inf
        self._lock = threading.RLock()
        self._attainment = AttainmentTracker(engine, slo, apart=observe_only)
        self._drift = drift
        self._watchdog = Watchdog(engine)
        # after a look at the engine: what was posted to it is in force
        self._admission = AdmissionAdapter(engine, admission)
        self._paused = True  # until it is attached: steps may end meanwhile
        self._ended = False
        self._installed = False  # whether the engine has anything that ends with the controller
        self._failure: Exception | SystemExit | None = None  # what a budget raised
        self.failed: Exception | SystemExit | None = None
        """What ended the controller, if it raised."""
        self._steering: SteeringServer | None = None
        decisions, now = DecisionLog(log_path, over=_closed_or_gone(engine)), engine.view().now
        try:
            self._lease: Lease = engine.acquire(f"the {controller.name} controller")
        except AutotuneError:
            decisions.join()
            raise
        self._actuator = Actuator(engine, self._lease, guardrails, decisions, now, observe_only=observe_only, wall=wall)
        self._unsubscribe: Callable[[], None] = _nothing
        try:
            self._claim()
            self._actuator.hold_to(slo)
            self._begin_controller()
            self._install(start, wall)
        except BaseException:
            self._ended = True
            self._actuator.put_back()
            self._let_go()
            decisions.join()
            raise

    def _claim(self) -> None:
        with _ATTACHING:
            for other in [*_ATTACHED]:
                if other.controller is self.controller and not (other._ended or other._engine.closed):
                    raise ValueError(
                        f"controller is {self.controller!r}, which another engine has; make one for each engine"
                    )
            _ATTACHED.add(self)

    def _begin_controller(self) -> None:
        controller = self.controller
        self._attainment.look()
        self._attainment.changed()
        try:
            self._attainment.pass_slos(controller)
            if self.observe_only and isinstance(controller, Observing):
                controller.only_observes()
            self._budgets_apply(True)
            self._rates = rates_of(controller)
        except (Exception, SystemExit) as error:
            raise InputError(f"the {controller.name} controller failed: {failure(controller, error)}") from error

    def _install(self, start: Knobs | None, wall: Callable[[], float] | None) -> None:
        """Put all in force, and hear of steps from then on: one that ends before could end what is not there yet."""
        engine = self._engine
        if not self.observe_only:
            self._installed = True
            if engine.capabilities.step_budgets:
                engine.set_step_policy(self, lease=self._lease)
            self._admission.install(self, self._lease)
        slo = self._attainment.default
        self._actuator.log(
            "attach",
            f"{self.controller.name} controller, SLO {slo}",
            {
                "slo": str(slo),
                **self._attainment.as_evidence(),
                **self._attainment.weights(),
                **({} if wall is None or not boot() else {"boot": boot()}),
            },
        )
        self._actuator.begin(start)
        with self._lock:
            self._paused = False
            self._unsubscribe = engine.subscribe(self)
            if self._ended:  # in a step that was made meanwhile
                self._unsubscribe()

    # -- on the engine's thread ---------------------------------------------------------------------------------------

    def on_step(self, record: StepRecord) -> None:
        """Have the controller see ``record``, and decide where ``interval_s`` have passed since it last did."""
        with self._lock:
            if self._ended:
                return
            try:
                if self._failure is not None:
                    raise self._failure
                self.controller.observe_step(record)
                if not self._watchdog.check(record):
                    if self._watchdog.unusable():
                        self._fall_back()
                    return
                self._actuator.now = record.end
                self._attainment.look()
                if self._drift is not None and (found := self._drift.observe(record)) is not None:
                    self._actuator.log("note", found.cause, found.evidence)
                # time that jumps back must not stop the controller, nor time that stands still make it busy
                if record.end >= self._next or record.end < self._next - 2 * self._interval:
                    self._next = record.end + self._interval
                    self._follow_slos()
                    if not self._paused:
                        self._decide(record.end)
            except EngineClosedError:  # it drains what it had accepted, and its knobs no longer move
                self._detach("detached: the engine was closed")
            except (Exception, SystemExit) as error:
                self._give_up(error)

    def on_request(self, record: RequestRecord) -> None:
        """Have the controller see ``record``."""
        with self._lock:
            if not self._ended:
                self._attainment.add(record)
                self._watchdog.ends(record)
                try:
                    self.controller.observe_request(record)
                except (Exception, SystemExit) as error:
                    self._give_up(error)

    def on_fault(self, error: Exception, what: str) -> None:
        """The engine can be controlled no more: ``what`` went wrong in whatever steers it (``error``); it goes on without."""
        with self._lock:
            if not self._ended:
                self.failed = error
                self._by_the_clock()
                self._actuator.restore(f"{what}: {error!r}; the engine goes on without")
            self._detach("detached: the engine is steered no more")

    def budget(self, view: SchedulerView) -> int:
        """Tokens of the step that ``view`` is planned for: as the controller says; as the knob while paused or failed."""
        if self._paused or self._ended or self._failure:
            return view.knobs.token_budget
        try:
            if view.decoding and self._watchdog.begins(view):  # never so in a batcher's view
                self._fall_back()
            if self._watchdog.raised:
                return view.knobs.token_budget
            found = self.controller.budget(view)
            try:
                return int(found)
            except (TypeError, ValueError, OverflowError):
                kind = type(self.controller).__qualname__
                raise TypeError(f"{kind}.budget returned {found!r}; it must return a whole number of tokens") from None
        except (Exception, SystemExit) as error:
            self._failure = error  # for the next record: a batcher asks under its own lock, in which no knob can be set
            return view.knobs.token_budget

    @property
    def _gives_budgets(self) -> bool:
        return not (self._paused or self._ended or self._failure or self._watchdog.raised)

    def _fall_back(self) -> None:
        """Hold the starting knobs until a usable record comes."""
        with self._lock:
            if not (self._watchdog.raised or self._paused or self._ended):
                self._watchdog.raised = True
                self._actuator.now = self._watchdog.latest
                self._actuator.apply(self._watchdog.proposal(self._actuator.start), at_once=True)

    def _follow_slos(self) -> None:
        if self._attainment.changed():
            self._attainment.pass_slos(self.controller)
            self._actuator.log("note", "the SLO is now " + self._attainment.as_text(), self._attainment.as_evidence())

    def _give_up(self, error: Exception | SystemExit) -> None:
        """The controller failed: restore the knobs from before it and detach."""
        if not self._ended:
            self.failed = error
            why = failure(self.controller, error)
            log.error("the %s controller failed: %s; the knobs from before it are restored", self.controller.name, why)
            log.debug("the %s controller failed", self.controller.name, exc_info=error)
            self._actuator.restore(f"the controller failed: {why}")
        self._detach("detached: the knobs from before are restored")

    def _decide(self, now: float) -> None:
        proposal = self._decided(now)
        # what served before is safe to go back to in one step, and all of the way
        self._actuator.apply(proposal, at_once=proposal.regime == "fallback")

    def _decided(self, now: float) -> Proposal:
        found = self.controller.decide(now, self._engine.knobs, self._engine.effective_limits)
        return checked_proposal(self.controller, found)

    def _budgets_apply(self, applied: bool) -> bool:
        """Tell the controller whether its per-step budgets are used. False if that makes no difference to it."""
        can = self._engine.capabilities.step_budgets and not self.observe_only
        if isinstance(self.controller, Budgeted):
            self.controller.budgets_apply(can and applied)
            return can
        return False

    def _stand_alone(self) -> None:
        """One last decision: its knobs were ceilings above the per-step budgets, and must hold without them."""
        if not self._budgets_apply(False) or not self._actuator.changed or self._watchdog.raised:
            return
        try:
            last = self._decided(self._actuator.now)
            last = last._replace(cause=f"no per-step budgets from here on, so the knobs alone must hold: {last.cause}")
            self._actuator.apply(last, at_once=True)
        except EngineClosedError:
            pass
        except (Exception, SystemExit) as error:
            self._give_up(error)

    # -- for the operator, from any thread ----------------------------------------------------------------------------

    def _by_the_clock(self) -> None:
        """What an operator does comes now, not when the last step ended: an engine may have been idle since."""
        self._actuator.now = max(self._actuator.now, self._engine.clock.now())

    def pause(self) -> None:
        """Leave the knobs alone until :meth:`resume`, and keep learning. Per-step budgets are off meanwhile, so one last
        decision sets knobs that hold without them."""
        with self._lock:
            self._check_in_force()
            self._by_the_clock()
            if not self._paused:
                self._paused = True
                self._stand_alone()
                if not self._ended:
                    self._actuator.log("pause", "paused by the operator")

    def resume(self) -> None:
        """Have the controller decide again, after :meth:`pause` or :meth:`set`."""
        with self._lock:
            self._check_in_force()
            self._by_the_clock()
            if self._paused:
                self._paused = False
                self._budgets_apply(True)
                self._actuator.log("resume", "resumed by the operator")

    def kill(self) -> None:
        """Restore the knobs and the SLO from before the controller was attached, and detach it, at once."""
        with self._lock:
            self._by_the_clock()
            if not self._ended:
                self._actuator.restore("switched off by the operator")
            self._detach("detached: the knobs from before are restored")

    def set(self, /, **knobs: float) -> Knobs:
        """Set ``knobs`` by hand and pause, so that the controller does not undo it; the others are as :meth:`pause` leaves them.
        Returns the knobs in force. Raises ``ValueError`` for an unknown name, a value above the engine's limits, and a knob that
        it does not turn while it runs; nothing has changed then."""
        with self._lock:
            self._check_in_force()
            self._by_the_clock()
            wanted = self._engine.knobs.with_(**knobs)  # names and bounds
            for name, value in knobs.items():
                check_live(self._engine, name, f"{value:.10g}")
            self._engine.limits.check(wanted)
            if not self._paused:
                self._paused = True
                self._stand_alone()
                self._check_attached()  # the controller may have failed
            current = self._engine.knobs
            if knobs:
                self._actuator.set(**knobs)
            self._budgets_apply(False)  # once more: the knobs are no longer those of its last decision
            self._actuator.log("pause", "knobs set by the operator", old=current)
            return self._engine.knobs

    @property
    def slo(self) -> SLO:
        """The SLO of requests of no class of their own."""
        with self._lock:
            self._look()
            return self._attainment.default

    @property
    def decisions(self) -> deque[Decision]:
        """The latest decisions, newest last; :meth:`latest` copies them while the engine runs."""
        return self._actuator.decisions.recent

    @property
    def log_failure(self) -> OSError | None:
        """Why the decision log could not be written to its end; None if it could. Complete after :meth:`close`."""
        return self._actuator.decisions.failure

    def latest(self, count: int) -> list[Decision]:
        """The last ``count`` decisions, newest last."""
        with self._lock:
            return list(self.decisions)[-count:] if count > 0 else []

    def since(self, number: int) -> tuple[list[Decision], int]:
        """Those after the ``number``-th, as far as they are in memory, newest last; and how many there have been."""
        with self._lock:
            total = self._actuator.logged
            return self.latest(total - number if number <= total else total), total

    def steer(self, path: str | Path | None = None) -> Path:
        """Open the local socket of ``autotune watch``, ``pause`` and ``set`` (:mod:`.remote`); closes with this.

        ``path``: where; without it a private directory, where those commands look. Returns the socket's path.
        """
        if self._steering is not None:
            return self._steering.path
        if not hasattr(socket, "AF_UNIX"):
            raise InputError("steer: this system has no Unix sockets")
        from autotune.control.remote import SteeringServer

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
        """How it stands now. Steps do not wait for it: it copies under their lock, and computes outside."""
        with self._lock:
            self._look()
            regime, paused, ended = self.regime, self._paused, self._ended
            knobs, seen = self._engine.knobs, self._attainment.copy()
            overdue, closed = None if ended else self._watchdog.seconds, self._engine.closed
        return Status(
            knobs, regime, seen.attainment(), seen.default, paused, self.observe_only, ended, seen.by_class(),
            seen.rejections(), overdue,
            tuple(name for name, effect in self._engine.capabilities.knobs.items() if effect == "none"), self._engine.limits,
            closed,
        )  # fmt: skip

    def _look(self) -> None:
        """See the SLOs that an idle engine was given since its last step."""
        if not self._ended:
            self._attainment.look()

    @property
    def regime(self) -> str:
        """The regime of the last proposal. Takes no lock and computes nothing."""
        return self._actuator.regime or "learning"

    def close(self) -> None:
        """Detach, and wait until the decision log is written. Any number of times.

        The knobs of its last decision stay, made to hold without per-step budgets, and so does the SLO.
        """
        with self._lock:
            self._look()
            if not (self._paused or self._ended):
                self._stand_alone()
        self._detach("detached: the knobs stay")
        self._actuator.decisions.join()
        if self._steering is not None:
            self._steering.join()

    def _detach(self, cause: str) -> None:
        with self._lock:
            if self._ended:
                return
            with contextlib.suppress(AutotuneError):
                self._by_the_clock()
            self._actuator.log("detach", cause, self._attainment.outcomes())
            self._ended = True
        self._let_go()

    def _let_go(self) -> None:
        """Give back the engine and all that steers or hears of it."""
        with contextlib.suppress(AutotuneError):
            if self._installed:
                self._engine.set_step_policy(None, lease=self._lease)
                self._admission.restore(self._lease)
        self._unsubscribe()
        self._lease.release()
        self._actuator.decisions.close()
        if self._steering is not None:
            self._steering.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_attached(self) -> None:
        if self._ended:
            raise AutotuneError("the controller has been detached")

    def _check_in_force(self) -> None:
        """The same, and on an engine whose knobs still move."""
        self._check_attached()
        if self._engine.closed:
            raise EngineClosedError("the engine is closed")


def _nothing() -> None:
    """Ends a subscription that has not begun."""


def _closed_or_gone(engine: Tunable) -> Callable[[], bool]:
    """Whether ``engine`` is closed, or is no more: what asks does not keep it alive."""
    found = weakref.ref(engine)

    def over() -> bool:
        engine = found()
        return engine is None or engine.closed

    return over
