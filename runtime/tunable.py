"""What a controller sees of anything it can tune, and what a per-step policy may see of a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

from runtime.errors import LeaseError
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord


class SchedulerView(NamedTuple):
    """A read-only look at a scheduler, made when asked for.

    ``least_slack``: seconds until the first deadline among the running and waiting sequences is missed (negative: already
    missed; inf: no targets); ``decode_slack``: the same for the next tokens of decoding sequences alone; ``step_time_target``:
    the tightest TPOT target among those, s (inf: none has one).
    ``waiting_tokens``: prompt tokens queued and not found in the prefix cache. ``prefilling_tokens``: prompt tokens admitted
    and not yet computed; ``in_progress``: (tokens computed, tokens left) of each of those prompts, in the order of their turns.
    ``token_deadlines``: for each TPOT and ITL target of decoding sequences, s, the seconds until the first next token is due.
    """

    now: float
    decoding: int
    prefilling: int
    waiting: int
    waiting_tokens: int
    prefilling_tokens: int
    decode_context: int
    kv_free_blocks: int
    kv_total_blocks: int
    oldest_arrival: float
    least_slack: float
    decode_slack: float
    knobs: Knobs
    epoch: int
    effective_limits: KnobLimits
    step_time_target: float = inf
    in_progress: tuple[tuple[int, int], ...] = ()
    token_deadlines: tuple[tuple[float, float], ...] = ()

    @property
    def running(self) -> int:
        return self.decoding + self.prefilling


class StepPolicy(Protocol):
    """Gives each step its own token budget, below the knob. Asked before every ``schedule()``."""

    def budget(self, view: SchedulerView) -> int: ...


class Listener(Protocol):
    """Hears every record. One that raises is cut off; the engine goes on."""

    def on_step(self, record: StepRecord) -> None: ...

    def on_request(self, record: RequestRecord) -> None: ...


class Tunable(Protocol):
    """Anything with the four knobs. Every call may come from any thread."""

    @property
    def limits(self) -> KnobLimits:
        """Start-up ceilings."""
        ...

    @property
    def effective_limits(self) -> KnobLimits:
        """Ceilings in force: they shrink below ``limits`` when a step runs out of memory."""
        ...

    @property
    def knobs(self) -> Knobs: ...

    @property
    def epoch(self) -> int: ...

    def set_knobs(self, knobs: Knobs, *, lease: Lease | None = None) -> int:
        """Put ``knobs`` in force from the next step on; returns the new epoch (the old one if nothing changed)."""
        ...

    def acquire(self, owner: str) -> Lease:
        """Become the one controller, until the lease is released. Raises :class:`LeaseError` if another holds it."""
        ...

    @property
    def step_budgets(self) -> bool:
        """Whether a step policy's word counts; where it does not, the knobs are all there is."""
        ...

    def set_step_policy(self, policy: StepPolicy | None, *, lease: Lease | None = None) -> None: ...

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` hear every record; returns a function that ends it."""
        ...

    def view(self) -> SchedulerView: ...


class Lease:
    """The right to turn a tunable's knobs. Use as a context manager, or call ``release()``."""

    __slots__ = ("_holder", "owner")

    def __init__(self, holder: LeaseHolder, owner: str) -> None:
        self._holder = holder
        self.owner = owner

    def release(self) -> None:
        self._holder.release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class LeaseHolder:
    """Keeps at most one lease. While one is held, only calls that bring it may turn knobs."""

    __slots__ = ("_lease",)

    def __init__(self) -> None:
        self._lease: Lease | None = None

    def acquire(self, owner: str) -> Lease:
        if self._lease is not None:
            raise LeaseError(f"{self._lease.owner} controls this engine; release it before {owner} takes over")
        self._lease = Lease(self, owner)
        return self._lease

    def release(self, lease: Lease) -> None:
        if self._lease is lease:
            self._lease = None

    def check(self, lease: Lease | None) -> None:
        if self._lease is not None and lease is not self._lease:
            raise LeaseError(f"{self._lease.owner} controls this engine; its knobs cannot be set from elsewhere")
