"""What :func:`autotune.control` asks of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from runtime.clock import Clock
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.prefill_rate import RateSource
from runtime.slo import SLO
from runtime.tunable import Lease, Tunable


class Controllable(Tunable, Protocol):
    """A tunable that holds a promise and a KV pool; :class:`runtime.Engine` is one."""

    @property
    def slos(self) -> Mapping[str, SLO]: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    def set_slo(self, slo: SLO) -> None: ...


@runtime_checkable
class Admitting(Protocol):
    """An engine that can end requests that come too late."""

    @property
    def admission(self) -> AdmissionPolicy | None: ...
    def set_admission(
        self, policy: AdmissionPolicy | None, *, source: RateSource | None = None, lease: Lease | None = None
    ) -> None: ...


@runtime_checkable
class Clocked(Protocol):
    """An engine that shows the clock of its records."""

    @property
    def clock(self) -> Clock: ...
