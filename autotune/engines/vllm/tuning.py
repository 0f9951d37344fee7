"""A steered scheduler as a controller sees it, where vLLM's own process steps it: under ``vllm serve``."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from autotune.engines.vllm.core import facts_of
from autotune.engines.vllm.model import CAPABILITIES
from autotune.engines.vllm.steering import Steering
from runtime.errors import EngineClosedError
from runtime.llm.tuning import TunableCore
from runtime.shared.listeners import Listeners
from runtime.slo import SLO
from runtime.tunable import Capabilities, Facts, SchedulerView

log = logging.getLogger("vllm.autotune")
T = TypeVar("T")
_LOOKS: Final = 16  # at what vLLM's thread may be changing
_TOGETHER: Final = 4  # steps of decodes alone that listeners hear of at once, at most


class TunableScheduler(TunableCore):
    """``steering`` of a vLLM engine of ``config``. Whoever runs the scheduler calls :meth:`between_steps`, and :meth:`release`
    when nobody controls it any more."""

    def __init__(self, config: Any, steering: Steering, slos: dict[str, SLO], weights: Mapping[str, float]) -> None:
        super().__init__(steering, Listeners(), steering.clock, slos, weights)
        self._steering = steering
        self._facts = facts_of(config, steering)
        self._changing = threading.Lock()  # held for microseconds
        self._closed = False
        self._thread = threading.get_ident()  # vLLM's
        self._posted: deque[Callable[[], None]] = deque()

    @property
    def capabilities(self) -> Capabilities:
        """Those of our own engine, but a fault ends it, and how it speculates is settled when it starts."""
        return CAPABILITIES

    @property
    def facts(self) -> Facts:
        """As vLLM was started: model, version, KV pool, prefix cache, CUDA graphs."""
        return self._facts

    @property
    def closed(self) -> bool:
        """Whether it is steered no more."""
        return self._closed

    def _change(self, change: Callable[[], T]) -> T:
        with self._changing:
            self._check_open()
            return change()

    def _post(self, change: Callable[[], None]) -> None:
        self._check_open()
        self._posted.append(change)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("vLLM is not tuned any more")

    def view(self) -> SchedulerView:
        """The scheduler as it is. Exact on vLLM's thread; from another it may be in the middle of a step."""
        elsewhere = threading.get_ident() != self._thread
        for _ in range(_LOOKS):
            try:
                return self._steering.view(self.clock.now(), elsewhere=elsewhere)
            except (RuntimeError, IndexError):  # something came or went while it was looked at
                continue
        return self._steering.view(self.clock.now(), elsewhere=elsewhere)

    @property
    def controlled(self) -> bool:
        """Whether a controller is attached."""
        return self._lease.held

    # -- vLLM's thread --------------------------------------------------------------------------------------------------

    def between_steps(self) -> None:
        """Tell the listeners what has happened, and make the changes that others have asked for: at once where that can make a
        difference to the coming step, or a request has ended.

        While decodes run alone, up to four steps are told together. A model has flushed the caches of this code in each of them,
        and what is told next takes a fourth of the time that the first takes.
        """
        steering, self._thread = self._steering, threading.get_ident()
        if not steering.decodes_alone or steering.ended or len(steering.steps) >= _TOGETHER or self._posted:
            self.catch_up()

    def catch_up(self) -> None:
        """The same, at once."""
        self._tell()
        self._make_changes()

    def _tell(self) -> None:
        steps, ended = self._steering.take_steps(), [record for _, record in self._steering.take_ended()]
        for step in steps[:-1]:
            self._listeners.tell(step, ())
        if steps or ended:
            self._listeners.tell(steps[-1] if steps else None, ended)

    def _make_changes(self) -> None:
        while self._posted:
            try:
                self._posted.popleft()()
            except Exception:
                log.exception("a change of the scheduler failed")

    def release(self) -> None:
        """vLLM schedules alone from now on: accept no more changes."""
        with self._changing:
            self._closed = True

    def stop(self) -> None:
        """vLLM has stopped: whoever listens hears of what it left, too, and no change is accepted any more."""
        if self._closed:
            return
        try:
            self._steering.end_all("vLLM stopped before it had ended")
            self._tell()
        finally:
            self.release()
            self._posted.clear()

    def fail(self, error: Exception, what: str) -> None:
        """The same after a fault in what steers vLLM: whoever listens and has ``on_fault`` (a controller) hears of it, and before
        that of the last steps. What others have asked for is not done any more."""
        try:
            with suppress(Exception):  # this may be what failed
                self._tell()
            for listener in self._listeners.known:
                heard = getattr(listener, "on_fault", None)
                if heard is not None:
                    heard(error, what)
        finally:
            self.release()
            self._posted.clear()
