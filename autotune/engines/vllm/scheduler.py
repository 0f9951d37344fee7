"""``--scheduler-cls autotune.engines.vllm.Scheduler``: vLLM's own scheduler, steered.

What is made is a subclass of the class that vLLM's configuration picks, sync or async. Where that cannot be steered (another
version, something it needs is missing, a feature it does not know) one line in the log says why, and vLLM schedules as if
this were not there.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from autotune.engines.vllm.steering import Steering, missing
from runtime.clock import Clock, MonotonicClock
from runtime.ordering.priority import Priority

log = logging.getLogger(__name__)

VERSIONS: Final = ((0, 31), (0, 33))
"""The first and the last version of vLLM that this has been run with."""
_STRICT_S: Final = 1e9  # vLLM's priorities outweigh any waiting


class Scheduler:
    """Give this to vLLM as its scheduler class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        base = picked(config.scheduler_config)
        made = steered(base) if (why := unfit(config)) is None else base
        if why is not None:
            log.warning("vLLM is not steered: %s. It schedules as it would without autotune", why)
        return made(*args, **kwargs)


def picked(config: Any) -> type[Any]:
    """The scheduler class that vLLM would take by ``config`` if it had been given none."""
    given, config.scheduler_cls = config.scheduler_cls, None
    try:
        found: type[Any] = config.get_scheduler_cls()
    finally:
        config.scheduler_cls = given
    return found


def unfit(config: Any) -> str | None:
    """Why an engine of ``config`` cannot be steered; None if it can."""
    import vllm

    version = str(vllm.__version__)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not VERSIONS[0] <= numbers <= VERSIONS[1]:
        between = " to ".join(".".join(map(str, one)) for one in dict.fromkeys(VERSIONS))
        return f"it is version {version}, and this was made for {between}"
    for name in ("speculative_config", "kv_transfer_config", "ec_transfer_config"):
        if getattr(config, name, None) is not None:
            return f"it has a {name}"
    if config.parallel_config.pipeline_parallel_size > 1:
        return "it is pipeline-parallel"
    return None


def steered(base: type[Any]) -> type[Any]:
    """``base``, a vLLM scheduler, steered; for whoever gives vLLM a scheduler class of their own."""
    return type(f"Steered{base.__name__}", (_Steered, base), {"__module__": __name__})


class _Steered:
    """Mixed over a vLLM scheduler. :attr:`steering` is None where it is left alone."""

    steering: Steering | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.steering = None
        super().__init__(*args, **kwargs)
        if lacking := missing(self):
            log.warning(
                "vLLM is not steered: its scheduler has no %s. It schedules as it would without autotune",
                ", ".join(lacking),
            )
            return
        self.adaptive_long_prefill_threshold = False  # chunk_size is the knob
        _queue_by_number(self)
        self.steer(MonotonicClock())

    def steer(self, clock: Clock, **options: Any) -> Steering:
        """Begin anew under ``options`` of :class:`Steering`; nothing may have been added."""
        ordering = options.pop("ordering", None) or Priority(_STRICT_S)
        self.steering = Steering(self, clock, self._drop, ordering=ordering, **options)
        return self.steering

    def _drop(self, names: list[str]) -> None:
        from vllm.v1.request import RequestStatus

        super().finish_requests(names, RequestStatus.FINISHED_ABORTED)  # type: ignore[misc]

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        steering = self.steering
        fresh = steering is not None and steering.adding(request)
        found = super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        if fresh and steering is not None:
            steering.added()
        return found

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.steering is None:
            return super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids or self.requests)  # type: ignore[attr-defined]
        found = super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]
        self.steering.dropped(names)
        return found

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.steering is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.steering.before()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.steering.planned(output)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if self.steering is not None:
            self.steering.landed(outputs)
            if aborted := self.steering.aborted():
                _tell(outputs, aborted)
        return outputs


def _queue_by_number(scheduler: Any) -> None:
    """Have ``scheduler``, which is empty, queue by a number for each request: ours, which says whose turn it is."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

    scheduler.policy = SchedulingPolicy.PRIORITY
    for name in ("waiting", "kv_holding_waiting", "skipped_waiting"):  # of which each version has its own
        if hasattr(scheduler, name):
            setattr(scheduler, name, create_request_queue(scheduler.policy))


def _tell(outputs: dict[int, Any], aborted: list[Any]) -> None:
    """Add the end of ``aborted`` to what goes to vLLM's clients."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    for request in aborted:
        group = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
        group.outputs.append(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT))
