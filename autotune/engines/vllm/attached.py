"""``autotune.control(llm)``: a vLLM engine that somebody else has made and steps, steered from now on.

In the place of its scheduler stands a :class:`~autotune.engines.vllm.serving.SelfTuningScheduler` with the same state, so it need
not have been made with a scheduler class of ours. vLLM is not imported: what is found is told by what it has.
"""

from __future__ import annotations

from typing import Any

from autotune.engines.vllm.scheduler import unfit
from autotune.engines.vllm.serving import SelfTuningScheduler
from autotune.engines.vllm.tuning import TunableScheduler

_SERVED = "vllm serve MODEL --scheduler-cls autotune.engines.vllm.Scheduler"


def is_vllm(engine: object) -> bool:
    """Whether ``engine`` is a ``vllm.LLM``, or one of the engines behind it."""
    of_vllm = any(one.__module__.partition(".")[0] == "vllm" for one in type(engine).__mro__)
    return of_vllm and (hasattr(engine, "llm_engine") or hasattr(engine, "engine_core"))


def tunable_of(engine: Any) -> TunableScheduler:
    """What a controller sees of ``engine``, for which :func:`is_vllm`; the same one whenever it is asked for.

    Raises ``ValueError``, which says what to do, for an engine in another process, one that has requests in progress and was not
    steered before, and one that cannot be tuned.
    """
    made = getattr(engine, "llm_engine", engine)
    core: Any = getattr(made.engine_core, "engine_core", None)
    if not hasattr(core, "scheduler"):
        raise ValueError(
            f"engine is a {type(engine).__name__} of vLLM whose engine core runs in another process, where its scheduler cannot "
            "be reached; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported and make it anew, or have a server tune "
            f"itself: {_SERVED}"
        )
    if not isinstance(core.scheduler, SelfTuningScheduler):
        while getattr(core, "batch_queue", None) and not core.scheduler.requests:
            core.step_fn()  # an empty step is left over under async scheduling; its outcome would pass for that of our first
        core.scheduler = _taken_over(core.scheduler, made.vllm_config)
    scheduler: SelfTuningScheduler = core.scheduler
    found, steering = scheduler._tunable, scheduler.steering
    if found is None:
        if steering is None:
            raise ValueError("engine cannot be tuned: the controller that it was made with has let it go; make it anew")
        found = scheduler._tunable = _Attached(made.vllm_config, steering, {}, {})
        steering.take_steps(), steering.take_ended()  # of before: nobody was there to hear of them
    return found


class _Attached(TunableScheduler):
    """Stays steered when its controller is gone: the knobs of the last decision are in force."""

    @property
    def controlled(self) -> bool:
        return True

    def aborted(self) -> None:
        """Requests were aborted, and vLLM has none left: listeners hear of it now, for nobody makes a step until others come."""
        self._tell()


class _TakenOver(SelfTuningScheduler):
    """Stepped by its user, who stops when no request is left."""

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        found = super().finish_requests(*args, **kwargs)
        tunable, steering = self._tunable, self.steering
        between = steering is not None and steering.planned_last is None
        if between and isinstance(tunable, _Attached) and not self.has_unfinished_requests():
            try:
                tunable.aborted()
            except Exception as error:
                self._failed(error, "it told the controller of requests that were aborted")
        return found


def _taken_over(scheduler: Any, config: Any) -> SelfTuningScheduler:
    """What stands in the place of ``scheduler`` from now on: its state, steered by whoever attaches.

    A new object that has the state in common with it, for Python gives no object a class with further bases.
    """
    if (why := unfit(config)) is not None:
        raise ValueError(f"engine cannot be tuned: {why}")
    base, steered = type(scheduler), getattr(scheduler, "steering", None) is not None
    if not steered and (count := len(scheduler.requests)):
        raise ValueError(
            f"engine has {count} requests in progress; attach the controller while it has none, or make the engine with "
            'scheduler_cls="autotune.engines.vllm.Steered"'
        )
    bases = (_TakenOver, base)
    kind: Any = type(f"SelfTuning{base.__name__.removeprefix('Steered')}", bases, {"__module__": __name__})
    made: SelfTuningScheduler = kind.__new__(kind)
    made.__dict__ = vars(scheduler)
    if not steered:
        made.install()
    if made.steering is None:
        raise ValueError(f"engine cannot be tuned: {made.refused}")
    return made
