"""vLLM's own scheduler, steered. What is made is a subclass of the class that vLLM's configuration picks, sync or async.

:class:`Steered` is for whoever has a controller of their own; :class:`autotune.engines.vllm.serving.Scheduler` brings one.
Where vLLM cannot be tuned (another version, something needed is missing, a feature that is not known here) one line in the log
says why, and it schedules as if this were not there. So it does after a fault of this code: what is ours is called between calls
of vLLM's own methods, never around them, so that an exception of vLLM's own passes unchanged.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Callable
from typing import Any, Final

from autotune.engines.vllm.requests import QUEUES, Aborted
from autotune.engines.vllm.steering import Steering
from runtime.clock import Clock, MonotonicClock
from runtime.ordering.priority import Priority

log = logging.getLogger("vllm.autotune")  # where vLLM's own lines go

VERSIONS: Final = ((0, 31), (0, 33))
"""The first and the last version of vLLM that this has been run with."""
REJECTED: Final = "autotune: "
"""How the ``stop_reason`` of a request begins that was ended here; after it come the seconds to retry in, and why."""
UNTOUCHED: Final = "vLLM schedules as it would without autotune"
NEEDED: Final = (
    "running", "waiting", "requests", "max_num_running_reqs", "max_num_active_reqs", "max_num_scheduled_tokens",
    "scheduler_config.max_num_batched_tokens", "scheduler_config.long_prefill_token_threshold", "policy",
    "kv_cache_manager.watermark_blocks", "kv_cache_manager.get_computed_blocks", "kv_cache_manager.enable_caching",
    "kv_cache_manager.block_pool.get_num_free_blocks", "kv_cache_manager.block_pool.num_gpu_blocks", "block_size",
    "kv_cache_manager.coordinator.single_type_managers", "max_model_len", "kv_cache_config",
)  # fmt: skip
"""What a scheduler must have to be tuned."""
_STRICT_S: Final = 1e9  # vLLM's priorities outweigh any waiting
_AnyScheduler: Any = object  # to mypy: a class that may have any attribute, as vLLM's schedulers may


class Steered:
    """Give this to vLLM as its scheduler class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        config = config_of(args, kwargs)
        base = picked(config)
        made = steered(base) if (why := unfit(config)) is None else base
        if why is not None:
            log.warning("not tuned: %s. %s", why, UNTOUCHED)
        return made(*args, **kwargs)


def config_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The configuration among what vLLM gives to the constructor of a scheduler."""
    return kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]


def picked(config: Any) -> type[Any]:
    """The scheduler class that vLLM would take by ``config``, its whole configuration, if it had been given none."""
    scheduler = config.scheduler_config
    given, scheduler.scheduler_cls = scheduler.scheduler_cls, None
    try:
        found: type[Any] = scheduler.get_scheduler_cls()
    finally:
        scheduler.scheduler_cls = given
    if getattr(config, "diffusion_config", None) is None:
        return found
    own = importlib.import_module("vllm.v1.core.sched.diffusion_scheduler")  # picked with the configuration
    made: type[Any] = getattr(own, f"Diffusion{found.__name__}", found)  # some versions have none for sync
    return made


def unfit(config: Any) -> str | None:
    """Why an engine of ``config`` cannot be tuned; None if it can."""
    import vllm

    if (why := unfit_version(str(vllm.__version__))) is not None:
        return why
    for name in ("speculative_config", "diffusion_config", "kv_transfer_config", "ec_transfer_config"):
        if getattr(config, name, None) is not None:
            return f"it has a {name}"
    scheduler = getattr(config, "scheduler_config", None)
    if not getattr(scheduler, "enable_chunked_prefill", True):
        return "chunked prefill is off, so no prompt may be longer than a step"
    images = getattr(getattr(config, "model_config", None), "is_multimodal_model", False)
    if images and getattr(scheduler, "disable_chunked_mm_input", False):
        return "disable_chunked_mm_input is on, so no image may be longer than a chunk"
    if config.parallel_config.pipeline_parallel_size > 1:
        return "it is pipeline-parallel"
    if config.parallel_config.data_parallel_size > 1:  # ranks that are independent of each other say 1
        return "its data-parallel ranks step together"
    return None


def unfit_version(version: str) -> str | None:
    """Why vLLM of ``version`` cannot be tuned; None if it can."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if VERSIONS[0] <= numbers <= VERSIONS[1]:
        return None
    between = " to ".join(".".join(map(str, one)) for one in dict.fromkeys(VERSIONS))
    return f"it is version {version}, and this was made for {between}"


def missing(scheduler: object) -> list[str]:
    """Those of :data:`NEEDED` that ``scheduler`` does not have."""
    return [name for name in NEEDED if not _has(scheduler, name)]


def _has(found: object, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def steered(base: type[Any]) -> type[Any]:
    """``base``, a vLLM scheduler, steered; for whoever gives vLLM a scheduler class of their own."""
    return type(f"Steered{base.__name__}", (SteeredScheduler, base), {"__module__": __name__})


class SteeredScheduler(_AnyScheduler):  # type: ignore[misc]  # what it is mixed over is picked when the server starts
    """Mixed over a vLLM scheduler. :attr:`steering` is None where it is left alone."""

    steering: Steering | None
    refused = ""
    """Why :meth:`install` left it alone; empty where it did not."""
    fault: Exception | None = None
    """What switched the steering off, if it was a fault of its own."""
    contained = True
    """Whether such a fault leaves vLLM running; else it is raised, for whoever cannot go on without the steering."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.steering = None
        super().__init__(*args, **kwargs)
        self.install()

    def install(self) -> None:
        """Begin to steer. Nothing may have been added; :attr:`steering` stays None where that is not possible, and the log and
        :attr:`refused` say why."""
        self.steering = None
        self.refused = ""
        self._unreported: list[Aborted] = []  # left over when it was let go
        if lacking := missing(self):
            self.refused = f"the scheduler has no {', '.join(lacking)}"
            log.warning("not tuned: %s. %s", self.refused, UNTOUCHED)
            return
        self._stock_policy = self.policy
        self._stock_adaptive = getattr(self, "adaptive_long_prefill_threshold", False)  # which older versions lack
        try:
            from vllm.v1.core.sched.request_queue import SchedulingPolicy

            _queue_by(self, SchedulingPolicy.PRIORITY)  # a number for each request: ours, which says whose turn it is
            self.adaptive_long_prefill_threshold = False  # chunk_size is the knob
            self.steer(MonotonicClock())
        except Exception as error:  # a scheduler that has all it needs, but not as it is known here
            self.refused = f"it cannot be steered: {error!r}"
            log.warning("not tuned: %s. %s", self.refused, UNTOUCHED)
            self.steering = None
            self.adaptive_long_prefill_threshold = self._stock_adaptive
            if self.policy != self._stock_policy:
                _queue_by(self, self._stock_policy)

    def steer(self, clock: Clock, *, contained: bool = True, **options: Any) -> Steering:
        """Begin anew under ``options`` of :class:`Steering`; nothing may have been added. ``contained``: see the attribute."""
        self.contained = contained
        ordering = options.pop("ordering", None) or Priority(_STRICT_S)
        self.steering = Steering(self, clock, self._drop, ordering=ordering, **options)
        return self.steering

    def let_go(self) -> None:
        """vLLM schedules as if this were not there from the coming step on."""
        if self.steering is None:
            return
        self.steering.let_go()
        self._unreported += self.steering.aborted()
        self.steering = None
        self.adaptive_long_prefill_threshold = self._stock_adaptive
        _queue_by(self, self._stock_policy)

    def give_up(self, why: str) -> None:
        """Let go, because of something in vLLM that is not known here."""
        log.warning("not tuned any more: %s. %s", why, UNTOUCHED)
        self.let_go()

    def _failed(self, error: Exception, doing: str) -> None:
        """A fault of this code: switch off what is ours, and leave vLLM as it would be without it. Called in an ``except``."""
        if not self.contained:
            raise error
        steering, self.steering, self.fault = self.steering, None, error
        log.error("autotune failed while %s: %r; it is switched off. %s", doing, error, UNTOUCHED, exc_info=error)
        if steering is None:
            return
        self._each(
            steering.put_back, steering.give_back_limits, self._stop_adapting, steering.give_back_priorities,
            lambda: self._unreported.extend(steering.aborted()), self._recover, lambda: _queue_by(self, self._stock_policy),
        )  # fmt: skip

    def _each(self, *parts: Callable[[], object]) -> None:
        """Do all of them, whatever becomes of the others."""
        for part in parts:
            try:
                part()
            except Exception:
                log.exception("a part of switching autotune off failed")

    def _stop_adapting(self) -> None:
        self.adaptive_long_prefill_threshold = self._stock_adaptive

    def _recover(self) -> None:
        """Give back to vLLM's queue whatever was out of it when the fault came."""
        from vllm.v1.request import RequestStatus

        known = {id(request) for name in QUEUES for request in getattr(self, name, ())}
        for request in self.requests.values():
            waits = not request.is_finished() and request.status != RequestStatus.RUNNING
            if waits and id(request) not in known:
                self.waiting.add_request(request)

    def _drop(self, names: list[str]) -> None:
        from vllm.v1.request import RequestStatus

        super().finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        fresh = False
        if self.steering is not None and getattr(request, "resumable", False):
            self.give_up(f"request {request.request_id} goes on with further input")
        if self.steering is not None:
            try:
                fresh = self.steering.adding(request)
            except Exception as error:
                self._failed(error, f"it took in request {request.request_id}")
        try:
            found = super().add_request(request, *args, **kwargs)
        except BaseException:
            if fresh and self.steering is not None:
                self.steering.refused()
            raise
        if fresh and self.steering is not None:
            try:
                self.steering.added()
            except Exception as error:
                self._failed(error, f"it judged request {request.request_id}")
        return found

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.steering is None:
            return super().finish_requests(request_ids, *args, **kwargs)
        if request_ids is None:
            names = list(self.requests)
        else:
            request_ids = names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        found = super().finish_requests(request_ids, *args, **kwargs)
        try:
            self.steering.dropped(names)
        except Exception as error:
            self._failed(error, "requests were aborted")
        return found

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.steering is None:
            return super().schedule(*args, **kwargs)
        try:
            self.steering.before()
        except Exception as error:
            self._failed(error, "it prepared a step")
            return super().schedule(*args, **kwargs)
        steering = self.steering
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            steering.put_back()
        try:
            steering.planned(output)
        except Exception as error:
            self._failed(error, "it took note of a step")
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        if self.steering is not None:
            try:
                self.steering.landed(args[0] if args else kwargs["scheduler_output"], outputs)
                self._unreported += self.steering.aborted()
            except Exception as error:
                self._failed(error, "it took note of what came of a step")
        if self._unreported:
            unreported, self._unreported = self._unreported, []
            try:
                _tell(outputs, unreported)
            except Exception as error:
                self._failed(error, f"{len(unreported)} clients were to be told of their rejection")
        return outputs


def _queue_by(scheduler: Any, policy: Any) -> None:
    """Have ``scheduler`` queue by ``policy``, what waits included."""
    from vllm.v1.core.sched.request_queue import create_request_queue

    made = {}
    for name in QUEUES:
        if hasattr(scheduler, name):
            made[name] = create_request_queue(policy)
            for request in sorted(getattr(scheduler, name), key=lambda r: (not r.num_preemptions, r.arrival_time)):
                made[name].add_request(request)
    scheduler.policy = policy
    for name, queue in made.items():
        setattr(scheduler, name, queue)


def _tell(outputs: dict[int, Any], aborted: list[Aborted]) -> None:
    """Add the end of ``aborted`` to what goes to vLLM's clients."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    for request, why, retry_after_s in aborted:
        group = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        seconds = 1.0 if retry_after_s is None else max(0.001, math.ceil(retry_after_s * 1000) / 1000)
        said = f"{REJECTED}{seconds:g} s: {why}"
        group.outputs.append(
            EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT, stop_reason=said)
        )
