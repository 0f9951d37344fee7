"""``autotune.control``: a controller attached to a live engine.

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
from typing import Any, Protocol, Self

from autotune.controllers.guardrails import Guardrails
from autotune.controllers.predictive import PredictiveController
from autotune.controllers.protocol import Controller
from autotune.decisions import Decision
from autotune.profile import load_profile
from autotune.status import Status
from runtime.errors import AutotuneError, InputError
from runtime.knobs import Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO, attainment
from runtime.tunable import Lease, SchedulerView, Tunable

log = logging.getLogger(__name__)

_KEPT = 1024  # requests that the status speaks of, and decisions kept in memory


class Controllable(Tunable, Protocol):
    """A tunable that holds a promise and a KV pool; :class:`runtime.Engine` is one."""

    @property
    def slos(self) -> Mapping[str, SLO]: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    def set_slo(self, slo: SLO) -> None: ...


class Control:
    """A controller at work. Use as a context manager; leaving it puts the starting knobs' owner back in charge.

    The knobs stay as they are when it ends. ``decisions`` holds the latest ones, newest last.
    """

    def __init__(
        self,
        engine: Controllable,
        controller: Controller,
        slo: SLO,
        *,
        start: Knobs | None = None,
        guardrails: Guardrails,
        observe_only: bool = False,
        interval_s: float = 0.25,
        log_path: str | Path | None = None,
        wall: Callable[[], float] | None = time.time,
    ) -> None:
        if not (math.isfinite(interval_s) and interval_s > 0):
            raise ValueError(f"interval_s is {interval_s}; it must be above 0")
        guardrails.check(engine.limits)
        self.controller = controller
        self.slo = slo
        self.observe_only = observe_only
        self.decisions: deque[Decision] = deque(maxlen=_KEPT)
        self._engine = engine
        self._guardrails = guardrails
        self._interval = interval_s
        self._wall = wall
        self._lock = threading.RLock()
        self._recent: deque[RequestRecord] = deque(maxlen=_KEPT)
        self._regime = ""
        self._next = -math.inf
        self._now = 0.0
        self._paused = False
        self._ended = False
        self._file = None if log_path is None else _open_log(log_path)
        self._start = engine.knobs  # what to put back
        self._last_proposal: Knobs | None = None
        try:
            self._lease: Lease = engine.acquire(f"the {controller.name} controller")
        except AutotuneError:
            self._close_log()
            raise
        engine.set_slo(slo)
        self._unsubscribe = engine.subscribe(self)
        if not observe_only:
            engine.set_step_policy(self, lease=self._lease)
        self._log("attach", "", self._start, self._start, f"{controller.name} controller, SLO {slo}", {})
        self._begin(start)

    # -- on the engine's thread ---------------------------------------------------------------------------------------

    def on_step(self, record: StepRecord) -> None:
        with self._lock:
            if self._ended:
                return
            self._now = record.end
            try:
                self.controller.observe_step(record)
                # time that jumps back must not silence the controller, nor time that stands still make it busy
                if record.end >= self._next or record.end < self._next - 2 * self._interval:
                    self._next = record.end + self._interval
                    if not self._paused:
                        self._decide(record.end)
            except Exception as error:
                self._give_up(error)

    def on_request(self, record: RequestRecord) -> None:
        with self._lock:
            if self._ended:
                return
            self._recent.append(record)
            try:
                self.controller.observe_request(record)
            except Exception as error:
                self._give_up(error)

    def budget(self, view: SchedulerView) -> int:
        if self._paused or self._ended:
            return view.knobs.token_budget
        try:
            return self.controller.budget(view)
        except Exception as error:
            with self._lock:
                self._give_up(error)
            return view.knobs.token_budget

    def _give_up(self, error: Exception) -> None:
        """The controller is broken: back to the knobs it started from, and out of the way."""
        if not self._ended:
            log.error("the %s controller failed; its starting knobs hold now", self.controller.name, exc_info=error)
            self._put_back(f"the controller failed: {type(error).__name__}: {error}")
        self.close()

    def _put_back(self, cause: str) -> None:
        current = self._engine.knobs
        with contextlib.suppress(AutotuneError):  # a closed engine has no knobs to put back
            self._engine.set_knobs(self._engine.effective_limits.clamp(self._start), lease=self._lease)
        self._log("kill", self._regime, current, self._engine.knobs, cause, {})

    def _decide(self, now: float) -> None:
        engine, current = self._engine, self._engine.knobs
        limits = engine.effective_limits
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
        self.close()

    def set(self, **knobs: float) -> Knobs:
        """Set knobs by hand and pause, so that the controller does not undo it. Returns the knobs in force."""
        with self._lock:
            if self._ended:
                raise AutotuneError("the controller has been detached")
            current = self._engine.knobs
            self._engine.set_knobs(current.with_(**knobs), lease=self._lease)
            self._paused = True
            self._log("pause", self._regime, current, self._engine.knobs, "knobs set by the operator", {})
            return self._engine.knobs

    def status(self) -> Status:
        with self._lock:
            return Status(
                knobs=self._engine.knobs,
                regime=self._regime or "learning",
                attainment=attainment(self._recent, self.slo),
                slo=self.slo,
                paused=self._paused,
                observe_only=self.observe_only,
                ended=self._ended,
            )

    def close(self) -> None:
        """Detach. Any number of times."""
        with self._lock:
            if self._ended:
                return
            knobs = self._engine.knobs
            self._log("detach", self._regime, knobs, knobs, "detached; the knobs stay", {})
            self._ended = True
        with contextlib.suppress(AutotuneError):
            if not self.observe_only:
                self._engine.set_step_policy(None, lease=self._lease)
        self._unsubscribe()
        self._lease.release()
        self._close_log()

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
        decision = Decision(at, action, regime, old.as_dict(), new.as_dict(), self._engine.epoch, cause, evidence, wall)
        self.decisions.append(decision)
        if self._file is not None:
            try:
                self._file.write(decision.as_json() + "\n")
                self._file.flush()
            except OSError as error:  # a full disk must not stop the engine
                log.error("the decision log cannot be written and ends here: %s", error)
                self._close_log()

    def _close_log(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def control(
    engine: Controllable,
    *,
    slo: SLO | str | None = None,
    profile: str | Path | None = None,
    observe_only: bool = False,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    pinned: Mapping[str, float] | None = None,
    log: str | Path | None = None,
    interval_s: float = 0.25,
    controller: Controller | None = None,
) -> Control:
    """Attach a controller to ``engine`` so that ``slo`` holds; use as ``with autotune.control(engine, slo=…) as control:``.

    ``slo`` becomes the engine's; without it the engine's own (class ``default``) is kept. ``profile``: a profile YAML whose
    knobs to start from. ``observe_only`` recommends in the log and sets nothing. ``bounds`` and ``pinned`` are the operator's
    word on single knobs. ``log``: a JSONL file of decisions, appended to. Raises :class:`~runtime.errors.LeaseError` when
    another controller holds the engine, ``ValueError`` or :class:`~runtime.errors.InputError` for input that cannot be used.
    """
    target = engine.slos.get("default") if slo is None else SLO.of(slo)
    if target is None:
        raise ValueError('slo is None, and the engine has none either; pass slo="ttft=500ms,tpot=50ms"')
    guardrails = Guardrails(bounds or {}, pinned or {})
    start = engine.knobs
    if profile is not None:
        start = engine.effective_limits.clamp(load_profile(profile).knobs)
    made = controller or PredictiveController(target, start, kv_tokens=engine.kv_tokens, block_size=engine.block_size)
    return Control(
        engine,
        made,
        target,
        start=start if profile is not None else None,
        guardrails=guardrails,
        observe_only=observe_only,
        interval_s=interval_s,
        log_path=log,
    )


def _open_log(path: str | Path) -> Any:
    try:
        return open(path, "a", encoding="utf-8")  # closed with the control
    except OSError as error:
        raise InputError(f"log: {path} cannot be written: {error.strerror}") from None


__all__ = ["Control", "Controllable", "control"]
