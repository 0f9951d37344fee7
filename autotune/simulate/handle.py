"""What submitting a request to a simulated engine returns."""

from __future__ import annotations

from typing import Protocol

from runtime.records import FinishReason, RequestRecord
from runtime.request import Sequence


class Ender(Protocol):
    """What can end a request: a simulated engine."""

    def end(self, sequence: Sequence, reason: FinishReason, cause: str) -> bool: ...


class SimulatedRequest:
    """What :meth:`autotune.simulate.SimulatedEngine.submit` returns. ``record`` is None until the request has ended."""

    __slots__ = ("_engine", "_sequence", "record")

    def __init__(self, engine: Ender, sequence: Sequence) -> None:
        self._engine = engine
        self._sequence = sequence
        self.record: RequestRecord | None = None

    def cancel(self) -> bool:
        """End it, whatever its state. False if it has ended already."""
        return self._engine.end(self._sequence, FinishReason.CANCELLED, "by the client")
