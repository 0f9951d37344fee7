"""vLLM's LLMEngine in this process, as the core that an engine's thread runs: one call of :meth:`VllmCore.step` is one of its
``step()``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sized
from dataclasses import replace
from math import inf
from typing import Any, Final

from autotune.engines.vllm.model import graphs_of, model_of
from autotune.engines.vllm.scheduler import Steered, unfit
from autotune.engines.vllm.steering import GROWTH_RESERVE, Steering
from runtime.clock import Clock
from runtime.errors import DeviceError, InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy, rejected
from runtime.llm.core import StepOutcome
from runtime.llm.plan import StepResult
from runtime.llm.prefill_rate import RateSource
from runtime.llm.scheduler import Finished
from runtime.llm.slack import SlackTracker
from runtime.ordering import Ordering
from runtime.records import FinishReason, RequestRecord
from runtime.request import Request, SamplingParams, Sequence
from runtime.shared.settings import Settings
from runtime.slo import SLO
from runtime.tunable import Facts, SchedulerView, tile_on

_AGAIN_S: Final = 1e-3  # until the next try where vLLM found nothing that it could do


class VllmCore:
    """``options`` are those of vLLM's EngineArgs. Everything but ``settings`` belongs to the thread that calls :meth:`start`:
    vLLM is made and stepped in one, for OpenMP teams and CUDA contexts are a thread's own."""

    def __init__(self, options: Mapping[str, Any], clock: Clock) -> None:
        self._options, self._clock = dict(options), clock
        self._llm: Any = None
        self._steering: Steering | None = None
        self.facts: Facts

    def start(
        self, knobs: Knobs | None, limits: KnobLimits | None, slos: Mapping[str, SLO], ordering: Ordering
    ) -> None:
        """Load the model. Raises what vLLM raises, and :class:`InputError` for an engine that cannot be tuned."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        options: dict[str, Any] = {
            "scheduler_cls": Steered, "disable_log_stats": True, "skip_tokenizer_init": True, "async_scheduling": False,
            **self._options,
        }  # fmt: skip
        if limits is not None:
            options = {
                "max_num_seqs": limits.max_batch_size, "max_num_batched_tokens": limits.token_budget, **options
            }  # fmt: skip
        for name, above in (
            ("max_num_active_seqs", "max_num_seqs"),
            ("max_num_scheduled_tokens", "max_num_batched_tokens"),
        ):
            if options.get(name) and options.get(above):  # narrower limits than those that it was given for
                options[name] = min(options[name], options[above])
        config = EngineArgs(**options).create_engine_config()
        if (why := unfit(config)) is not None:
            raise InputError(f"vLLM cannot be tuned: {why}")
        self._llm = llm = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        scheduler = llm.engine_core.engine_core.scheduler
        # vLLM's own scheduler, without these names, where it found in the model what cannot be tuned
        if getattr(scheduler, "steering", None) is None:
            raise InputError(f"vLLM cannot be tuned: {getattr(scheduler, 'refused', unfit(config))}")
        self._steering = scheduler.steer(
            self._clock, knobs=knobs, limits=limits, slos=slos, ordering=ordering, tokens=True, contained=False
        )  # whoever waits for tokens would wait for ever, were vLLM to go on without the steering
        self.facts = facts_of(config, self._steering)

    def shutdown(self) -> None:
        """Give back what vLLM holds."""
        if self._llm is not None:
            self._llm.engine_core.shutdown()
            self._llm = None

    @property
    def steering(self) -> Steering:
        assert self._steering is not None, "vLLM has not been started"
        return self._steering

    # -- what the loop and the controller ask --------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        return self.steering.settings

    @property
    def waiting(self) -> Sized:
        return self.steering.waiting

    @property
    def slack(self) -> SlackTracker:
        return self.steering.slack

    @property
    def has_work(self) -> bool:
        return self._steering is not None and self._steering.has_work

    @property
    def next_expiry(self) -> float:
        return inf if self._steering is None else self._steering.next_expiry

    @property
    def admission(self) -> AdmissionPolicy | None:
        return self.steering.admission

    def set_admission(
        self,
        policy: AdmissionPolicy | None,
        *,
        weights: Mapping[str, float] | None = None,
        source: RateSource | None = None,
    ) -> None:
        self.steering.set_admission(policy, weights=weights, source=source)

    def retarget(self) -> None:
        """SLOs have changed: what waits goes by those of now."""
        self.steering.retarget()

    def view(self, now: float) -> SchedulerView:
        return self.steering.view(now)

    # -- requests and steps --------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float | None = None) -> Sequence:
        """Queue ``request``. Raises ``ValueError`` for one that vLLM refuses, RejectedError if it would come too late."""
        steering = self.steering
        steering.coming, steering.newest = request, None
        try:
            self._llm.add_request(
                request.id,
                {"prompt_token_ids": list(request.prompt)},
                _theirs(request.params, request.max_tokens),
                arrival_time=time.time(),
            )
        finally:
            steering.coming = None
        sequence = steering.newest
        assert sequence is not None
        if steering.refusal is not None:
            steering.ended.pop()  # whoever hears of the error records it
            raise rejected(sequence, steering.refusal)
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason, now: float, cause: str = "") -> RequestRecord | None:
        """End ``sequence`` from outside a step, whatever its state. None if it has already ended."""
        record = self.steering.end(sequence, reason, now, cause)
        if record is not None and self._llm is not None:
            self._llm.abort_request([sequence.data.request_id], internal=True)
        return record

    def step(self, now: float, until: float = inf) -> StepOutcome:
        """Run one step that starts at ``now``. Raises :class:`DeviceError` if it fails: vLLM does not go on after that."""
        if self._steering is None:
            return StepOutcome(None, None, (), inf, now)
        steering = self._steering
        held = steering.prepare() if steering.has_work else -inf
        if held > now or not steering.has_work:
            return StepOutcome(None, None, steering.take_ended(), held if held > now else inf, now)
        try:
            self._llm.step()
        except Exception as error:
            raise DeviceError(f"a step of vLLM failed: {error!r}") from error
        finished: list[Finished] = steering.take_ended()
        tokens, made = steering.take_tokens(), steering.take_steps()
        if not made:
            wake = self._clock.now() + _AGAIN_S if steering.has_work else inf
            return StepOutcome(None, None, finished, wake, now)
        record = made[-1]
        failed = [
            (s, RuntimeError("vLLM ended it with an error")) for s, r in finished if r.reason is FinishReason.ERROR
        ]
        return StepOutcome(record, StepResult((record.end,), tokens, failed=failed), finished, -inf, record.end)


def _theirs(params: SamplingParams, max_tokens: int) -> Any:
    from vllm import SamplingParams as Theirs

    return Theirs(
        max_tokens=max_tokens, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p,
        seed=params.seed, repetition_penalty=params.repetition_penalty, stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos, logprobs=params.logprobs, detokenize=False,
    )  # fmt: skip


def facts_of(config: Any, steering: Steering) -> Facts:
    """Of an engine of vLLM's that was started by ``config``."""
    import vllm

    kv, model = steering.kv, model_of(config)
    if kv.bytes:  # what the pool takes is what was made; before that it is an estimate
        held = kv.bytes * config.parallel_config.tensor_parallel_size
        model = replace(
            model, kv_bytes_per_token=-(-held * kv.total_blocks // (kv.total_blocks + 1) // max(1, kv.tokens))
        )
    return Facts(
        "vllm",
        kv_tokens=kv.tokens,
        block_size=kv.block_size,
        prefix_cache=bool(config.cache_config.enable_prefix_caching),
        growth_reserve=GROWTH_RESERVE if kv.grow else 0,
        kv_allocation="chunk",
        parallelism=config.parallel_config.world_size,
        model=model,
        version=str(vllm.__version__),
        graphs=graphs_of(config),
        tile=tile_on(model.device),
        kv_block_size=config.cache_config.block_size,  # it schedules by a multiple of the blocks of all groups
        kv_bytes=kv.bytes or None,
    )
