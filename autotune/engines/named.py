"""The engines that ``--engine`` names, for a language model: what a verb asks of one before and after its model is loaded.

A verb finds an engine here by its name, and goes by what :class:`NamedEngine` and :class:`NamedSource` say of it: it compares no
name. A new engine is a module of this room that holds its :class:`NamedEngine` as ``ENGINE``, and a row in :data:`_ENGINES`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, Protocol, Self

from autotune.engines.protocol import EngineSource
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO, RequestClass
from runtime.tunable import ModelInfo

if TYPE_CHECKING:
    from runtime.llm.engine import Engine

DEFAULT: Final = "own"
"""The engine that is meant where none is named. Messages, file names and studies leave its name out: older ones do."""
DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What any engine may compute a model in, with the bytes of a number."""


class NamedSource(EngineSource, Protocol):
    """An :class:`~autotune.engines.protocol.EngineSource` of a language model that the command line can be told.

    ``name`` and ``version`` are those in the engine's facts. ``arguments``: what else it is started with, as ``--engine-arg``
    had it. ``limits``: the ceilings to search below; ``stock``: the knobs that the engine would start with if nobody tuned it.
    ``introduction``: what there is to say of it once it has been loaded, line by line.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def arguments(self) -> Mapping[str, str]: ...
    @property
    def model(self) -> ModelInfo: ...
    @property
    def limits(self) -> KnobLimits: ...
    @property
    def stock(self) -> Knobs: ...
    @property
    def introduction(self) -> Sequence[str]: ...

    def default_kv_tokens(self) -> int | None:
        """The KV pool that an engine started now would have; None: it is known when it has been started."""
        ...

    def free_bytes(self) -> int | None:
        """Memory that is free where the model will be; None: nobody knows, and the engine complains itself."""
        ...

    def with_kv_tokens(self, tokens: int) -> Self:
        """The same with a KV pool of ``tokens``, in blocks of the engine's own size."""
        ...

    def with_classes(self, classes: Iterable[RequestClass]) -> Self:
        """The same for requests of these classes, and of none of them."""
        ...

    def as_profiled(self, kv_tokens: int, block_size: int | None, prefix_cache: bool, threads: int | None) -> Self:
        """The same with the KV pool, prefix cache and CPU threads of a profile of this engine. ``block_size``: what it is told;
        None: its own."""
        ...


class Host(Protocol):
    """A machine, as far as a model is chosen by it: a profile's fingerprint is one.

    ``kind``: ``cpu`` or ``gpu``; ``cores`` that may be used; ``flags``: names of CPU features.
    """

    @property
    def kind(self) -> str: ...
    @property
    def cores(self) -> int: ...
    @property
    def flags(self) -> Collection[str]: ...


class Loader(Protocol):
    """Reads ``model``, so that engines can be started; see :func:`load`."""

    def __call__(
        self,
        model: str,
        *,
        dtype: str,
        device: str,
        seed: int,
        max_model_len: int | None,
        kv_cache_dtype: str,
        arguments: Mapping[str, str],
    ) -> NamedSource: ...


# -- serving --------------------------------------------------------------------------------------------------------------

REFUSABLE: Final = ("--device", "--kv-tokens", "--max-queue", "--ordering", "--threads", "--records", "--for", "--json")
"""Options of ``autotune serve`` that may mean nothing to an engine."""


@dataclass(frozen=True, kw_only=True)
class ToServe:
    """What ``autotune serve`` is asked for: options and profile put together. None leaves a thing to the engine.

    ``classes`` are as ``--class`` spells them. ``knobs`` to start with, below ``limits``; those ``pinned`` were given by hand and
    are the operator's. ``kv_tokens`` in blocks of ``block_size``, in tokens.

    Only an engine that is served by a command of its own needs to know the rest: where to listen, what controls it
    (``controlled``: whether anything does), seconds of ``grace_s`` at the end, the ``profile``'s file, the ``prefill_rate`` by it
    in prompt tokens a second (None where it is of another model or engine), the ``longest`` context of the model in tokens, where
    that is known, the ``arguments`` with which this very engine was profiled (``another_model``: with another one than
    ``model``), and ``more``, what stood after ``--``.
    """

    model: str
    slo: SLO | None
    classes: tuple[str, ...] = ()
    reject_late: bool = False
    relegate_late: bool = False
    knobs: Knobs
    limits: KnobLimits
    pinned: Mapping[str, float] = field(default_factory=dict)
    dtype: str | None = None
    device: str = "auto"
    kv_cache_dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    kv_tokens: int | None = None
    block_size: int | None = None
    prefix_cache: bool = True
    max_queue: int
    ordering: str | None = None
    threads: int | None = None

    host: str
    port: int
    served_model_name: str | None = None
    controlled: bool = True
    controller: str | None = None
    decisions: Path | None = None
    grace_s: float
    profile: Path | None = None
    prefill_rate: float | None = None
    longest: int | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    another_model: bool = False
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class InProcess:
    """Served over HTTP by this process, which attaches the controller to the engine that ``start`` has started. The server
    (``runtime/serving``) needs more than the seam: our own engine, with its tokenizer, prompts as text, and what ended it.

    ``start`` raises :class:`InputError` or :class:`~runtime.errors.ModelError` for what cannot be served. ``refuses``: those of
    :data:`REFUSABLE` that mean nothing to it, and what to do instead.
    """

    start: Callable[[ToServe], Engine]
    refuses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ByCommand:
    """Served by a command of the engine's own: ``become`` turns this process into it. The controller is attached in there.

    ``become`` raises :class:`InputError` for what cannot be served. ``refuses`` as in :class:`InProcess`. What stands after
    ``--`` goes to the command.
    """

    become: Callable[[ToServe], NoReturn]
    refuses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServerMetrics:
    """What a server of an engine calls its metrics.

    Gauges of requests that are ``running`` and ``waiting``, counters of those that ``ended`` (``_total`` and all), of
    ``preemptions`` and of tokens that were looked for (``cache_queries``) and found (``cache_hits``) in the prefix cache, and
    histograms, over requests, of lengths in tokens and of latencies in seconds. ``replica``: the labels that tell apart the
    engines behind one page.
    """

    running: str
    waiting: str
    ended: str
    preemptions: str
    cache_queries: str
    cache_hits: str
    prompt_tokens: str
    output_tokens: str
    ttft_seconds: str
    tpot_seconds: str
    e2e_seconds: str
    replica: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return frozenset(value for value in vars(self).values() if isinstance(value, str))


# -- engines --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NamedEngine:
    """What a verb asks of an engine before it loads a model.

    ``name`` as ``--engine`` has it, ``title`` as sentences have it. ``load`` and ``dtypes`` (those that --dtype takes, ``auto``
    first) may import what takes seconds. ``check`` raises :class:`InputError`, which says what to do, where the engine is not
    installed. ``limits``: the ceilings that it always has; None: they are known when it has been loaded. ``default_model``: the
    one that suits a machine, where none is named; None: it must be named. ``takes_arguments``: whether --engine-arg is for it.
    ``metrics``: what its servers call theirs; None: its settings are live, and nobody needs to look from outside. ``version``:
    the one installed here, as its facts and profiles have it.
    """

    name: str
    title: str
    version: Callable[[], str]
    load: Loader
    serving: InProcess | ByCommand
    dtypes: Callable[[], Sequence[str]]
    check: Callable[[], None] = lambda: None
    limits: KnobLimits | None = None
    default_model: Callable[[Host], str] | None = None
    takes_arguments: bool = False
    metrics: ServerMetrics | None = None

    @property
    def in_facts(self) -> str:
        """Its name in facts and profiles."""
        return _ENGINES[self.name].in_facts

    @property
    def label(self) -> str:
        """As messages and file names tell it from the engine that is meant where none is named; empty for that one."""
        return label(self.name)


class _Row(NamedTuple):
    """What is known of an engine before its module is imported.

    ``in_facts``: its name in facts and profiles. ``about``, ``needs`` and ``served``: what the help of --engine says of it, of
    what it then needs, and of how it is served. ``module``: where its ``ENGINE`` is.
    """

    in_facts: str
    about: str
    needs: str
    served: str
    module: str
    knobs: Mapping[str, str] = MappingProxyType({})


_ENGINES: Final[dict[str, _Row]] = {
    "own": _Row(
        in_facts="autotune-runtime",
        about="this project's own engine",
        needs="",
        served="this project's own engine",
        module="autotune.engines.own",
    ),
    "vllm": _Row(
        in_facts="vllm",
        about="vLLM in this process",
        needs="needs --model",
        served="`vllm serve` with autotune's scheduler",
        module="autotune.engines.vllm.named",
        knobs={
            "max_batch_size": "max_num_seqs",
            "token_budget": "max_num_batched_tokens",
            "chunk_size": "long_prefill_token_threshold",
        },
    ),
}
"""By the name that ``--engine`` has."""


def engine_named(name: str) -> NamedEngine:
    """The engine that ``--engine`` calls ``name``. Raises :class:`InputError` where none is called so."""
    if name not in _ENGINES:
        raise InputError(f"--engine is {name}; it must be {either()}")
    found = import_module(_ENGINES[name].module).ENGINE
    assert isinstance(found, NamedEngine) and found.name == name
    return found


def engine_of_metrics(names: Collection[str]) -> NamedEngine | None:
    """The engine whose servers have metrics among these ``names``; None where nobody's do."""
    known = (engine_named(name) for name in _ENGINES)
    return next((engine for engine in known if engine.metrics is not None and engine.metrics.running in names), None)


def named(engine: str) -> str:
    """What ``--engine`` calls the engine that a profile calls ``engine``. Raises :class:`InputError` for one not known here."""
    found = next((name for name, row in _ENGINES.items() if row.in_facts == engine), None)
    if found is None:
        raise InputError(f"engine {engine} cannot be started here; --engine takes {either()}")
    return found


def knob_name(engine: str, knob: str) -> str:
    """What the engine that a profile calls ``engine`` calls ``knob``; our name for it where it has none."""
    known = (row.knobs for row in _ENGINES.values() if row.in_facts == engine)
    return next(known, {}).get(knob, knob)


def label(name: str) -> str:
    """As :attr:`NamedEngine.label`, of the engine that ``--engine`` calls ``name``."""
    return "" if name == DEFAULT else name


def ours(engine: str) -> bool:
    """Whether what a profile calls ``engine`` is this project's own."""
    return engine == _ENGINES[DEFAULT].in_facts


def engine_identity(source: NamedSource) -> dict[str, object]:
    """What makes a study of ``source`` another one than that of another engine.

    Nothing of our own engine: its version is that of autotune, and studies that are older than ``--engine`` are of it.
    """
    if ours(source.name):
        return {}
    return {"engine": {"name": source.name, "version": source.version, "arguments": dict(source.arguments)}}


# -- what the command line says of them -------------------------------------------------------------------------------------


def either() -> str:
    """``own or vllm``."""
    return " or ".join(_ENGINES)


def choices() -> str:
    """For the help of ``--engine``: each with what it is, and what it then needs."""
    return "; ".join(f"{name}: {row.about}{row.needs and f' ({row.needs})'}" for name, row in _ENGINES.items())


def choices_briefly() -> str:
    """The same without what each needs, and without a word on the one that is meant where none is named."""
    return ", or ".join(f"{name}: {row.about}" if label(name) else name for name, row in _ENGINES.items())


def choices_to_serve() -> str:
    """For the help of ``--engine`` where engines are served."""
    return "; ".join(f"{name}: {row.served}" for name, row in _ENGINES.items())


# -- what is given to them --------------------------------------------------------------------------------------------------


def check_engine(name: str, arguments: Sequence[str] = ()) -> dict[str, str]:
    """``--engine`` and ``--engine-arg``, before anything slow is done: the arguments by name. Raises :class:`InputError`."""
    engine = engine_named(name)
    given: dict[str, str] = {}
    for text in arguments:
        key, equals, value = (part.strip() for part in text.partition("="))
        key = key.lstrip("-").replace("-", "_")
        if not equals or not key or not value:
            raise InputError(f'--engine-arg: "{text}" is not NAME=VALUE, such as dtype=float32 or enforce_eager=true')
        if key in given:
            raise InputError(f"--engine-arg: {key} is given twice")
        given[key] = value
    if given and not engine.takes_arguments:
        others = _names(lambda other: other.takes_arguments)
        raise InputError(
            f"--engine-arg: {next(iter(given))} is given; it goes with --engine {others}: {engine.title} has none"
        )
    engine.check()
    return given


def check_serving(engine: NamedEngine, given: Collection[str], more: Sequence[str]) -> None:
    """Raise :class:`InputError` for an option of ``autotune serve`` that says nothing to ``engine``.

    ``given``: the options that were given, ``--device`` and so on; ``more``: what stood after ``--``.
    """
    if more and not isinstance(engine.serving, ByCommand):
        titles = " or ".join(f"{one.title}'s" for one in _engines() if isinstance(one.serving, ByCommand))
        others = _names(lambda other: isinstance(other.serving, ByCommand))
        raise InputError(f"{shlex.join(more)} is of {titles} options; they go with --engine {others}")
    for option, instead in engine.serving.refuses.items():
        if option in given:
            raise InputError(f"{option} does not go with --engine {engine.name}; {instead}")


def _engines() -> list[NamedEngine]:
    return [engine_named(name) for name in _ENGINES]


def _names(have: Callable[[NamedEngine], bool]) -> str:
    return " or ".join(engine.name for engine in _engines() if have(engine))


def load(
    name: str,
    model: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    seed: int = 0,
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    arguments: Mapping[str, str] | None = None,
) -> NamedSource:
    """The engine ``name`` for ``model`` on ``device`` (``cpu`` or ``cuda``): our own loads it now, vLLM reads its configuration.

    ``kv_cache_dtype``: ``auto`` or ``fp8``. ``arguments``: as :func:`check_engine` returns them. Raises :class:`InputError` or
    :class:`~runtime.errors.ModelError` for what cannot be served.
    """
    return engine_named(name).load(
        model,
        dtype=dtype,
        device=device,
        seed=seed,
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype,
        arguments=arguments or {},
    )
