"""The engine: a model behind a queue, with knobs that can be turned while it runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from runtime.clock import Clock, MonotonicClock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.buffer import TokenBuffer
from runtime.llm.core import EngineCore
from runtime.llm.drafts import NgramDrafter
from runtime.llm.gather import complete_all
from runtime.llm.intake import Intake, ServedModel
from runtime.llm.loop import EngineLoop
from runtime.llm.output import Detokenizer, OutputProcessor, guarded
from runtime.llm.parts import MAX_KV_TOKENS, check_types, parts_of
from runtime.llm.plan import Executor
from runtime.llm.prefix import token_hasher
from runtime.llm.scheduler import Scheduler
from runtime.llm.stream import Completion, Stream
from runtime.llm.tuning import TunableEngine
from runtime.ordering import Ordering
from runtime.request import SamplingParams
from runtime.shared.progress import progress_bar
from runtime.slo import SLO, RequestClass, engine_slos
from runtime.step_model import NO_GRAPHS
from runtime.tunable import Facts, StepPolicy, tile_on

if TYPE_CHECKING:
    from runtime.torch_backend.loading import LoadedModel

Prompt = str | Sequence[int]


class Engine(TunableEngine):
    """Serves one model to many threads and event loops at once.

    ``model``: a local directory, hub id or preset name, or a loaded model. ``knobs`` may change while it runs, up to
    ``limits``. ``slo`` is the SLO of requests of class ``default``, ``classes`` those of others. ``dtype``, ``device`` and
    ``kv_cache_dtype`` of a model by name are those of :func:`runtime.load_model`. ``kv_tokens``: size of the KV pool in tokens
    (None: what the memory allows), in blocks of ``block_size`` tokens; ``max_model_len``, tokens, lowers the model's context. At
    most ``max_queue`` requests wait, in the order of ``ordering``: the name of one (docs/how-to/order.md has them), or one of
    your own. ``admission`` ends those that can no longer meet their TTFT target. ``prefix_cache``: prompts share the KV of
    equal beginnings; ``"tenant"`` only within a tenant, so that none can learn from response times what others ask. ``seed``:
    that of a preset's random weights, and of the draws of requests that bring none. ``step_policy`` gives each step its own
    token budget, below ``knobs.token_budget``. ``threads``: CPU threads of the model. ``executor`` runs the steps in place of
    the model's own, and needs ``kv_tokens``; its clock must be ``clock``.

    Use it as a context manager: leaving the block finishes what was accepted, or cancels it if the block raised. An engine
    that is forgotten stops by itself, and does not hold up the interpreter's exit. Every method may be called from any
    thread.

    Raises ``ValueError`` for arguments out of bounds, :class:`runtime.errors.ModelError` for a model that cannot be served.
    """

    _core: EngineCore

    def __init__(
        self,
        model: str | LoadedModel | ServedModel,
        *,
        knobs: Knobs | None = None,
        limits: KnobLimits | None = None,
        slo: SLO | str | None = None,
        classes: Iterable[RequestClass] = (),
        dtype: str = "auto",
        device: str = "auto",
        kv_cache_dtype: str = "auto",
        kv_tokens: int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_queue: int = 4096,
        ordering: str | Ordering = "priority",
        admission: AdmissionPolicy | bool = False,
        prefix_cache: bool | Literal["tenant"] = True,
        seed: int = 0,
        step_policy: StepPolicy | None = None,
        threads: int | None = None,
        executor: Executor | None = None,
        clock: Clock | None = None,
    ) -> None:
        for name, value, least in (
            ("block_size", block_size, 1),
            ("kv_tokens", kv_tokens, block_size),
            ("max_model_len", max_model_len, 1),
            ("max_queue", max_queue, 1),
            ("threads", threads, 1),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        if kv_tokens is not None and kv_tokens > MAX_KV_TOKENS:
            raise ValueError(f"kv_tokens is {kv_tokens}; it must be at most {MAX_KV_TOKENS}")
        classes = tuple(classes)
        check_types(knobs=knobs, limits=limits, seed=seed, classes=classes)
        if prefix_cache not in (True, False, "tenant"):
            raise ValueError(f'prefix_cache is {prefix_cache!r}; it must be True, False or "tenant"')
        limits = limits or KnobLimits()
        knobs = limits.clamp(Knobs()) if knobs is None else limits.check(knobs)
        slos = engine_slos(slo, classes)

        clock = clock or MonotonicClock()
        parts = parts_of(
            model,
            executor,
            dtype=dtype,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
            kv_tokens=kv_tokens,
            block_size=block_size,
            max_model_len=max_model_len,
            seed=seed,
            threads=threads,
            clock=clock,
            limits=limits,
        )
        self._model = served = parts.model
        self._block_size, self._kv_tokens = block_size, parts.kv_blocks * block_size
        self._prefix_cache = prefix_cache is not False
        share = {True: "all", False: "none", "tenant": "tenant"}[prefix_cache]
        context = min(served.max_model_len, max_model_len or served.max_model_len)
        self._facts = Facts(
            "autotune-runtime",
            kv_tokens=self._kv_tokens,
            block_size=block_size,
            prefix_cache=share != "none",
            growth_reserve=1,
            model=replace(parts.info, max_model_len=context),
            graphs=getattr(parts.executor, "graphs", NO_GRAPHS),
            tile=tile_on(parts.info.device),
        )
        self._intake = Intake(
            served,
            context=context,
            kv_tokens=self._kv_tokens,
            block_size=block_size,
            share=share,
            classes={"default", *slos} if slos.keys() - {"default"} else (),
        )
        self._decode = None if served.tokenizer is None else guarded(served.tokenizer.decode)
        output = OutputProcessor(served.eos_token_ids, self._decode)
        scheduler = Scheduler(
            kv_blocks=parts.kv_blocks,
            block_size=block_size,
            ordering=ordering,
            slos=slos,
            hasher=None if share == "none" else token_hasher(block_size, self._intake.salt),
            drafter=NgramDrafter() if getattr(parts.executor, "verifies_drafts", False) else None,
            most_sampled=limits.max_batch_size,
        )
        core = EngineCore(scheduler, parts.executor, knobs=knobs, limits=limits, output=output)
        core.settings.set_policy(step_policy)
        self._ids = itertools.count(1)
        self._max_queue = max_queue
        weights = {c.name: c.weight for c in classes}
        core.set_admission(AdmissionPolicy.of(admission), weights=weights)
        loop = EngineLoop(core, output, clock, max_queue=max_queue, name=served.name)
        super().__init__(core, loop, clock, slos, weights)

    # -- requests -------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        request_class: str = "default",
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        arrival: float | None = None,
        **sampling: Any,
    ) -> Stream:
        """Queue one request: ``prompt``, text or token ids, with ``params`` (greedy, 128 tokens, unless given).

        ``sampling`` are fields of :class:`SamplingParams` that replace those of ``params``, such as ``max_tokens=8``. Higher
        ``priority`` goes first under the ordering ``priority``, where a level outweighs ten seconds of waiting. ``tenant``:
        whose it is, for the ordering ``fair`` and a prefix cache by tenant. ``request_class``: whose SLO it has, one of the
        engine's classes or ``default``; an engine without ``classes`` takes any name, with the SLO of ``default``.
        ``deadline_s`` from now orders requests and cancels nothing; after ``timeout_s`` seconds the request ends, whatever
        its state. ``request_id`` (``#1``, ``#2``, … unless given) names it in records, errors and :meth:`cancel`.
        ``arrival``: when it came, on ``clock``, if that was before this call; all its times count from there.

        Raises ``ValueError`` for a prompt that is empty, holds unknown token ids, or is too long with ``max_tokens`` for the
        context or the KV pool, for a class that is not among ``classes`` and for the id of another live request;
        ``TypeError`` for an unknown name; :class:`RejectedError` if the queue is full or the engine closed.
        """
        now = self.clock.now()
        if arrival is None:
            arrival = now
        elif not isinstance(arrival, int | float) or not 0 <= arrival <= now:  # a NaN is not, either
            raise ValueError(
                f"arrival is {arrival!r}; it must be a time on the engine's clock, between 0 and now ({now:g})"
            )
        request = self._intake.request(
            f"#{next(self._ids)}" if request_id is None else request_id,
            prompt,
            self._intake.sampling(params, sampling),
            arrival=arrival,
            priority=priority,
            tenant=tenant,
            request_class=request_class,
            deadline_s=deadline_s,
            timeout_s=timeout_s,
        )
        loop = self._loop
        buffer = TokenBuffer(request.id, Detokenizer(self._decode, request.params.stop), loop.cancel_buffer)
        loop.submit(request, buffer)
        return Stream(buffer, self, loop.may_wait)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """``for token in engine.stream(prompt)``. ``prompt``, ``params`` and ``options`` are those of :meth:`submit`."""
        return self.submit(prompt, params, **options)

    def astream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Stream:
        """``async for token in engine.astream(prompt)``. ``prompt``, ``params`` and ``options`` are those of :meth:`submit`."""
        return self.submit(prompt, params, **options)

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """The completion of one prompt; cancelling the task cancels the request. For many: ``asyncio.gather``.

        ``prompt``, ``params`` and ``options`` are those of :meth:`submit`; it raises what :class:`Stream` does.
        """
        with self.submit(prompt, params, **options) as stream:
            return await stream.aresult()

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        return_exceptions: Literal[False] = False,
        **options: Any,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        return_exceptions: bool,
        **options: Any,
    ) -> list[Completion | Exception]: ...

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        return_exceptions: bool = False,
        **options: Any,
    ) -> Any:
        """The completions of ``prompts``, in their order, however many; ``params`` and ``options`` are those of :meth:`submit`.

        ``return_exceptions``: what a prompt raised stands in its place, so that one fault never loses the others; without
        it the first error is raised and the rest cancelled. ``progress`` draws a bar on stderr.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts is text, {prompts[:40]!r}; it must be a list of prompts")
        todo = list(prompts)
        with progress_bar("prompts", len(todo), show=progress) as advance:
            return complete_all(
                lambda index: self.submit(todo[index], params, **options),
                len(todo),
                most=self._max_queue,
                return_exceptions=return_exceptions,
                advance=advance,
            )

    def cancel(self, request_id: str) -> bool:
        """End the request ``request_id``, whatever its state; its stream raises RequestCancelledError. False if none runs."""
        return self._loop.cancel(request_id)

    # -- the engine itself ----------------------------------------------------------------------------------------------

    @property
    def model(self) -> ServedModel:
        """What is served: name, vocabulary, context, tokenizer."""
        return self._model

    @property
    def facts(self) -> Facts:
        """The engine as it was started: model, KV pool, prefix cache."""
        return self._facts

    @property
    def kv_tokens(self) -> int:
        """Size of the KV pool."""
        return self._kv_tokens

    @property
    def prefix_cache(self) -> bool:
        """Whether prompts share the KV of equal beginnings."""
        return self._prefix_cache

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self._block_size

    @property
    def executor(self) -> Executor:
        return self._core.executor

    def __repr__(self) -> str:
        return f"<Engine {self._model.name} {'closed' if self.closed else self.knobs}>"
