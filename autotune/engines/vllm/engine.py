"""vLLM in this process, behind the same seam as our own engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from autotune.engines.vllm.core import VllmCore
from autotune.engines.vllm.model import CAPABILITIES
from runtime.clock import Clock, MonotonicClock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.buffer import TokenBuffer
from runtime.llm.intake import Intake, Tokenizer
from runtime.llm.loop import EngineLoop
from runtime.llm.output import Detokenizer, OutputProcessor
from runtime.llm.stream import Stream
from runtime.llm.tuning import TunableEngine
from runtime.ordering import Ordering, ordering_of
from runtime.request import SamplingParams
from runtime.slo import SLO, RequestClass, engine_slos
from runtime.tunable import Capabilities, Facts, ModelInfo


class VllmEngine(TunableEngine):
    """Serves ``model`` (a directory or hub id) by vLLM's LLMEngine, in a thread of this process.

    ``limits`` are what vLLM is started with (``max_num_seqs``, ``max_num_batched_tokens``; None: its own defaults) and
    ``knobs`` move below them while it runs. ``options`` are any of vLLM's EngineArgs, such as ``dtype`` or
    ``gpu_memory_utilization``. The others are those of :class:`runtime.Engine`. Prompts are lists of token ids.

    A step that fails ends vLLM: every request fails, and the engine is closed with
    :class:`~runtime.errors.DeviceError`. Raises what vLLM raises for a model or options that it cannot serve, and
    :class:`~runtime.errors.InputError` where vLLM cannot be tuned (another version, speculative decoding, pipeline
    parallelism, KV connectors).
    """

    _core: VllmCore

    def __init__(
        self,
        model: str,
        *,
        knobs: Knobs | None = None,
        limits: KnobLimits | None = None,
        slo: SLO | str | None = None,
        classes: Iterable[RequestClass] = (),
        max_queue: int = 4096,
        ordering: str | Ordering = "priority",
        admission: AdmissionPolicy | bool = False,
        seed: int = 0,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        classes = tuple(classes)
        slos = engine_slos(slo, classes)
        if knobs is not None and limits is not None:
            limits.check(knobs)
        clock = clock or MonotonicClock()
        core = VllmCore({"model": model, "seed": seed, **options}, clock)
        loop = EngineLoop(core, OutputProcessor(), clock, max_queue=max_queue, name=f"vLLM {model}")
        order = ordering_of(ordering, slos)
        try:
            loop.ask(lambda: core.start(knobs, limits, slos, order))
        except BaseException:
            loop.close(drain=False)
            core.shutdown()
            raise
        super().__init__(core, loop, clock, slos, {c.name: c.weight for c in classes})
        assert core.facts.model is not None
        facts, served = core.facts, _Served(core.facts.model)
        self._intake = Intake(
            served,
            context=served.max_model_len,
            kv_tokens=facts.kv_tokens,
            block_size=facts.block_size,
            share="none",  # vLLM names the blocks
            classes={"default", *slos} if slos.keys() - {"default"} else (),
        )
        self._ids = itertools.count(1)
        if admission:
            self.set_admission(admission)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        request_class: str = "default",
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
        **sampling: Any,
    ) -> Stream:
        """Queue a request of token ids, as :meth:`runtime.Engine.submit` does, with the same errors."""
        arrival = self.clock.now()
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
        buffer = TokenBuffer(request.id, Detokenizer(None), self._loop.cancel_buffer)
        self._loop.submit(request, buffer)
        return Stream(buffer, self, self._loop.may_wait)

    @property
    def capabilities(self) -> Capabilities:
        """Those of our own engine, but a fault ends it, and how it speculates is settled when it starts."""
        return CAPABILITIES

    @property
    def facts(self) -> Facts:
        """As vLLM was started: model, version, KV pool, prefix cache, CUDA graphs."""
        return self._core.facts

    def close(self, drain: bool = True) -> None:
        """As :meth:`runtime.Engine.close`; gives back what vLLM holds, too."""
        super().close(drain)
        if not self._loop.here:
            self._core.shutdown()

    def __repr__(self) -> str:
        model = self.facts.model
        return f"<VllmEngine {'' if model is None else model.name} {'closed' if self.closed else self.knobs}>"


class _Served:
    """What prompts may be."""

    tokenizer: Tokenizer | None = None
    tokenizer_error = ""
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float] = MappingProxyType({})

    def __init__(self, model: ModelInfo) -> None:
        self.name, self.vocab_size, self.max_model_len = model.name, model.vocab_size, model.max_model_len


@dataclass(frozen=True)
class VllmSource:
    """Starts :class:`VllmEngine` for the model in ``path``; ``options`` are those of its constructor."""

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> None:
        """Not known before vLLM has read it: an engine's ``facts`` say."""
        return None

    def start(self, knobs: Knobs | None = None, limits: KnobLimits | None = None, seed: int = 0) -> VllmEngine:
        return VllmEngine(self.path, knobs=knobs, limits=limits, seed=seed, **self.options)
