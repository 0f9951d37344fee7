"""What a controller sees of anything it can tune, and what a per-step policy may see of a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, Self, get_args

from runtime.clock import Clock
from runtime.errors import LeaseError
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO, SLOHistory
from runtime.step_model import NO_GRAPHS, StepFeatures, StepGraphs

if TYPE_CHECKING:
    from runtime.llm.admission import AdmissionPolicy
    from runtime.llm.prefill_rate import RateSource

KV_CACHE_DTYPES: Final = ("auto", "fp8")
"""What our own engine can keep keys and values in: as they are computed, or in 8 bits (e4m3)."""

Effect = Literal["live", "restart", "none"]
"""What setting a knob does: ``live``: in force from the next step on; ``restart``: refused, it takes a new engine;
``none``: nothing, there is no such knob."""
TILE: Final = 512
"""Tokens of the largest tile by which kernels of a GPU compute a step, as far as they are known."""
KvAllocation = Literal["whole", "chunk"]
"""How a prompt gets its KV blocks: ``whole``: all as it begins; ``chunk``: those of each chunk as that is planned."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do, as plain data. Whoever measures or tunes an engine asks this and never its type.

    ``knobs``: what setting each knob does. ``step_records``: listeners hear of every step. ``step_budgets``: a step policy
    is asked before every step; without it :meth:`Tunable.set_step_policy` takes None alone. ``admission``: an admission
    policy can be put in force; without it :meth:`Tunable.set_admission` takes None alone. ``fault_isolation``: a step that fails
    ends the requests in it, or the one at fault; without it, it ends the engine. ``virtual_time``: time passes only in the calls
    that let it pass (:class:`autotune.engines.VirtualEngine`).

    Raises ``ValueError`` unless ``knobs`` has an effect for each knob and no other name.
    """

    knobs: Mapping[str, Effect]
    step_records: bool = True
    step_budgets: bool = True
    admission: bool = True
    fault_isolation: bool = True
    virtual_time: bool = False

    def __post_init__(self) -> None:
        names = [spec.name for spec in KNOBS]
        if set(self.knobs) != set(names):
            raise ValueError(f"knobs is of {', '.join(self.knobs)}; it must say what each of {', '.join(names)} does")
        for name, effect in self.knobs.items():
            if effect not in get_args(Effect):
                raise ValueError(f"knobs[{name!r}] is {effect!r}; it must be one of {', '.join(get_args(Effect))}")

    @classmethod
    def live(cls, *, none: tuple[str, ...] = (), **others: bool) -> Capabilities:
        """Every knob is live, but for those in ``none``, which are not there."""
        return cls({spec.name: "none" if spec.name in none else "live" for spec in KNOBS}, **others)


@dataclass(frozen=True)
class ModelInfo:
    """A language model as it is served. What nobody knows of it is empty or 0.

    ``device``: "cpu", "cuda" or "cuda:N". ``max_model_len``: most tokens (prompt + output) of one request.
    ``kv_bytes_per_token``: K and V of all layers, kept in ``kv_cache_dtype``: "auto" is ``dtype``.
    """

    name: str
    vocab_size: int
    max_model_len: int
    architecture: str = ""
    parameters: int = 0
    dtype: str = ""
    device: str = ""
    kv_bytes_per_token: int = 0
    random_weights: bool = False
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class CallableInfo:
    """A function behind a batcher: the ``strategy`` that says when a call goes, how many ``workers`` call the function,
    and how many calls (``slots``) run at a time."""

    strategy: str
    workers: int
    slots: int


def own_kv_cache_dtype(name: str) -> str:
    """``name`` as our own engine calls it: vLLM knows ``fp8`` as ``fp8_e4m3`` too."""
    return "fp8" if name == "fp8_e4m3" else name


def tile_on(device: str) -> int:
    """The ``tile`` of :class:`Facts` on a device of this kind ("cpu", "cuda"): one of a CPU computes rows nearly one by one."""
    return 1 if device == "cpu" else TILE


def _version() -> str:
    from runtime.version import __version__  # reading it takes longer than importing all of this

    return __version__


@dataclass(frozen=True)
class Facts:
    """An engine as it was started.

    ``model``: the language model it serves, if it does and that is known; ``callable``: the function it calls, if it is
    a batcher. ``kv_tokens``: size of the KV pool in tokens, in blocks of ``block_size`` (without a pool: what a step may
    hold); ``prefix_cache``: whether prompts share the KV of equal beginnings; ``growth_reserve``: free KV blocks that it keeps
    for each decoding sequence when it admits a prompt; ``kv_allocation``: how it hands them out. ``parallelism``: devices that
    the model is split over. ``graphs``: the steps that it has recorded. ``tile``: steps are best of whole tiles of so many
    tokens, or of a smaller power of two; 1: of any number. ``kv_block_size``: tokens in a block as the engine is told, where it
    may schedule by larger ones; ``kv_bytes``: of the KV pool on each device. None: not known.
    """

    engine: str
    kv_tokens: int
    block_size: int = 1
    prefix_cache: bool = False
    growth_reserve: int = 0
    kv_allocation: KvAllocation = "whole"
    parallelism: int = 1
    model: ModelInfo | None = None
    callable: CallableInfo | None = None
    version: str = field(default_factory=_version)
    graphs: StepGraphs = NO_GRAPHS
    tile: int = TILE
    kv_block_size: int | None = None
    kv_bytes: int | None = None


class SchedulerView(NamedTuple):
    """A read-only look at a scheduler, made when requested.

    ``now``: s on the engine's clock. ``decoding``, ``prefilling`` and ``waiting``: sequences in each state;
    ``decode_context``: tokens of context, of all that decode. ``oldest_arrival``: of what waits, s on that clock (inf:
    nothing does). ``kv_free_blocks`` of ``kv_total_blocks`` are held by nobody. ``knobs``: those in force, as ``epoch``;
    ``effective_limits``: their ceilings. ``least_slack``: seconds until the first deadline among the running and waiting
    sequences is missed (negative: already missed; inf: no targets); ``decode_slack``: the same for the next tokens of
    decoding sequences alone; ``step_time_target``: the tightest TPOT target among those, s (inf: none has one).
    ``waiting_tokens``: prompt tokens queued and not found in the prefix cache; ``relegated_tokens``: those of them that wait
    behind the others, for requests that have missed their SLO. ``prefilling_tokens``: prompt tokens admitted and not yet
    computed; ``in_progress``: (tokens computed, tokens left) of each of those prompts, in the order of their turns.
    ``token_deadlines``: for each TPOT and ITL target of decoding sequences, s, the seconds until the first next token is due;
    those who get their first token from the step in flight are a pair of their own.
    ``in_flight``: where the coming step begins only when another one has ended, that one, and ``in_flight_since`` when it began;
    all the rest is as of its end but for ``now``, so what is left of it comes off slack (:meth:`after`).
    ``prompt_slack``: seconds until the first TTFT or E2E target is missed of those whose prompts wait or are being computed (inf:
    none has one; -inf: not known).
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
    relegated_tokens: int = 0
    in_flight: StepFeatures | None = None
    in_flight_since: float = 0.0
    prompt_slack: float = -inf

    def after(self, seconds: float) -> Self:
        """As of the end of the step in flight, ``seconds`` from now.

        Deadlines that count from that end, of a next gap or of who gets a first token then, are whole targets, and stay so.
        """
        deadlines = tuple([
            (target, left if abs(left - target) < 1e-9 else left - seconds) for target, left in self.token_deadlines
        ])  # fmt: skip
        return self._replace(
            now=self.now + seconds,
            least_slack=self.least_slack - seconds,
            decode_slack=min([left for _, left in deadlines]) if deadlines else self.decode_slack,
            token_deadlines=deadlines,
            in_flight=None,
            prompt_slack=self.prompt_slack - seconds,
        )

    @property
    def running(self) -> int:
        return self.decoding + self.prefilling


class StepPolicy(Protocol):
    """Gives each step its own token budget, below the knob. Asked before every ``schedule()``."""

    def budget(self, view: SchedulerView) -> int:
        """Most tokens (a batcher: cost units) of the step that ``view`` is planned for; the knob holds where it is less."""
        ...


class Listener(Protocol):
    """Hears every record. One that raises is cut off; the engine goes on."""

    def on_step(self, record: StepRecord) -> None:
        """A step has ended: ``record`` is of it."""
        ...

    def on_request(self, record: RequestRecord) -> None:
        """A request has ended, in whatever way: ``record`` is of it."""
        ...


class Tunable(Protocol):
    """Anything with knobs, as a controller sees it. Every call may come from any thread."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def facts(self) -> Facts: ...

    @property
    def clock(self) -> Clock:
        """The clock of every record."""
        ...

    @property
    def limits(self) -> KnobLimits:
        """Start-up ceilings."""
        ...

    @property
    def effective_limits(self) -> KnobLimits:
        """Ceilings in force: they shrink below ``limits`` when a step runs out of memory."""
        ...

    @property
    def knobs(self) -> Knobs:
        """Those in force."""
        ...

    @property
    def wanted_knobs(self) -> Knobs:
        """Those last set: ``knobs`` are these, lowered to ``effective_limits``."""
        ...

    @property
    def epoch(self) -> int: ...

    @property
    def closed(self) -> bool:
        """Whether it accepts nothing more and its knobs no longer move."""
        ...

    def set_knobs(self, knobs: Knobs | None = None, *, lease: Lease | None = None, **changes: float) -> int:
        """Put ``knobs`` in force from the next step on, or make the ``changes`` named; returns the new epoch (the old one if
        nothing changed).

        Raises ``ValueError`` for values above ``limits`` and for a knob that takes a restart, :class:`LeaseError` if a
        controller holds the engine and ``lease`` is not its own, :class:`~runtime.errors.EngineClosedError`.
        """
        ...

    def acquire(self, owner: str) -> Lease:
        """Become the one controller, until the lease is released; ``owner`` is what errors call it.

        Raises :class:`LeaseError` if another holds it.
        """
        ...

    def set_step_policy(self, policy: StepPolicy | None, *, lease: Lease | None = None) -> None:
        """Have ``policy`` give each step its own budget; None ends that.

        Raises ``ValueError`` for a policy without ``step_budgets``, :class:`LeaseError` by ``lease`` as :meth:`set_knobs`.
        """
        ...

    @property
    def slos(self) -> Mapping[str, SLO]:
        """The SLO of each request class; that of ``default`` is for classes not named."""
        ...

    def set_slo(self, slo: SLO, *, request_class: str = "default") -> None:
        """Hold requests of ``request_class`` to ``slo`` from now on."""
        ...

    @property
    def weights(self) -> Mapping[str, float]:
        """What a request of each class is worth relative to others; those of classes not named are worth 1."""
        ...

    @property
    def admission(self) -> AdmissionPolicy | None:
        """What is done about requests that come too late; None accepts them all."""
        ...

    def set_admission(
        self, policy: AdmissionPolicy | None, *, source: RateSource | None = None, lease: Lease | None = None
    ) -> None:
        """Have ``policy`` end what comes too late from now on; ``source`` says how fast prompts are computed.

        Raises ``ValueError`` for a policy without ``admission``, :class:`LeaseError` by ``lease`` as :meth:`set_knobs`.
        """
        ...

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` hear every record; returns a function that ends it. One that holds the engine may say so by
        ``holds_engine = True``, so that it does not keep alive what everybody else has forgotten."""
        ...

    def view(self) -> SchedulerView:
        """How the queue and what runs stand, between two steps."""
        ...


def slo_history_of(engine: Tunable) -> Callable[[], SLOHistory]:
    """What gives the SLOs of ``engine`` over time: those it keeps, as all of ours do (:class:`~runtime.shared.tuning.Tuning`), or
    else from when on a call finds them changed."""
    kept: SLOHistory | None = getattr(engine, "slo_history", None)
    if kept is not None:
        return lambda: kept
    seen = SLOHistory(dict(engine.slos))

    def look() -> SLOHistory:
        seen.follow(engine.slos, engine.clock)
        return seen

    return look


class Lease:
    """The right to turn a tunable's knobs. Use as a context manager, or call ``release()``.

    ``holder`` keeps it; ``owner`` is what errors call whoever has it. :meth:`Tunable.acquire` makes one.
    """

    __slots__ = ("_holder", "owner")

    def __init__(self, holder: LeaseHolder, owner: str) -> None:
        self._holder = holder
        self.owner = owner

    def release(self) -> None:
        """Give it back, any number of times; another may acquire it from now on."""
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

    @property
    def held(self) -> bool:
        """Whether a controller is attached."""
        return self._lease is not None

    def acquire(self, owner: str) -> Lease:
        if self._lease is not None:
            raise LeaseError(f"{self._lease.owner} controls this engine; release it before {owner} takes over")
        self._lease = Lease(self, owner)
        return self._lease

    def release(self, lease: Lease) -> None:
        if self._lease is lease:
            self._lease = None

    def check(self, lease: Lease | None) -> None:
        if lease is self._lease:
            return
        if self._lease is not None:
            raise LeaseError(f"{self._lease.owner} controls this engine; its knobs cannot be set from elsewhere")
        if lease is not None:
            raise LeaseError(f"the lease of {lease.owner} is not in force; acquire this engine again")
