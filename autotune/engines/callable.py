"""A callable as an engine: a batcher over it, and the inputs that requests are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from runtime.batching.batcher import Batcher
from runtime.batching.future import ItemFuture
from runtime.clock import Clock
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.prefill_rate import RateSource
from runtime.slo import SLO
from runtime.tunable import Capabilities, Facts, Lease, Listener, SchedulerView, StepPolicy


class CallableEngine:
    """``batcher`` with ``inputs``: ``submit(prompt)`` submits the input that ``prompt``'s first number picks, or, if it is
    empty, the next one. Raises ``ValueError`` without inputs."""

    def __init__(self, batcher: Batcher, inputs: Sequence[Any]) -> None:
        if not inputs:
            raise ValueError("inputs is empty; at least one item is needed")
        self.batcher = batcher
        self.inputs = inputs
        self._turns = count()

    def submit(
        self,
        prompt: list[int],
        params: object = None,
        *,
        tenant: str = "",
        request_class: str = "default",
        request_id: str | None = None,
    ) -> ItemFuture:
        """``params`` are those of a language model and say nothing here."""
        del params
        index = prompt[0] if prompt else next(self._turns)
        item = self.inputs[index % len(self.inputs)]
        return self.batcher.submit(item, tenant=tenant, request_class=request_class, request_id=request_id)

    def close(self, drain: bool = True) -> None:
        self.batcher.close(drain)

    @property
    def capabilities(self) -> Capabilities:
        return self.batcher.capabilities

    @property
    def facts(self) -> Facts:
        return self.batcher.facts

    @property
    def clock(self) -> Clock:
        return self.batcher.clock

    @property
    def limits(self) -> KnobLimits:
        return self.batcher.limits

    @property
    def effective_limits(self) -> KnobLimits:
        return self.batcher.effective_limits

    @property
    def knobs(self) -> Knobs:
        return self.batcher.knobs

    @property
    def epoch(self) -> int:
        return self.batcher.epoch

    @property
    def closed(self) -> bool:
        return self.batcher.closed

    @property
    def slos(self) -> Mapping[str, SLO]:
        return self.batcher.slos

    @property
    def weights(self) -> Mapping[str, float]:
        return self.batcher.weights

    @property
    def admission(self) -> None:
        return self.batcher.admission

    def set_slo(self, slo: SLO | str, *, request_class: str = "default") -> None:
        self.batcher.set_slo(slo, request_class=request_class)

    def set_admission(
        self, policy: AdmissionPolicy | None, *, source: RateSource | None = None, lease: Lease | None = None
    ) -> None:
        self.batcher.set_admission(policy, source=source, lease=lease)

    def set_knobs(self, knobs: Knobs, *, lease: Lease | None = None) -> int:
        return self.batcher.set_knobs(knobs, lease=lease)

    def acquire(self, owner: str) -> Lease:
        return self.batcher.acquire(owner)

    def set_step_policy(self, policy: StepPolicy | None, *, lease: Lease | None = None) -> None:
        self.batcher.set_step_policy(policy, lease=lease)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self.batcher.subscribe(listener)

    def view(self) -> SchedulerView:
        return self.batcher.view()


@dataclass(frozen=True)
class CallableSource:
    """Starts batchers of ``function`` that serve ``inputs``; ``options`` are those of :class:`runtime.Batcher`."""

    function: Callable[..., Any]
    inputs: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> None:
        return None

    def start(self, knobs: Knobs | None = None, limits: KnobLimits | None = None, seed: int = 0) -> CallableEngine:
        """``seed`` is not used: a batcher draws nothing at random."""
        del seed
        first = {} if knobs is None else {s.name: getattr(knobs, s.name) for s in KNOBS if s.batcher}
        batcher: Batcher = Batcher(self.function, limits=limits, **{**self.options, **first})
        return CallableEngine(batcher, self.inputs)
