"""For tests in an environment with vLLM: what lives in vLLM's scheduler, behind the whole protocol of an engine.

It takes no requests: they come to vLLM from outside, over HTTP or by ``llm.generate``. :class:`FromOutside` stands for whoever is
there: it steps vLLM's own LLMEngine in a thread, as EngineCore's process does a server's and ``llm.generate`` an ``LLM``'s, and
hands it requests in vLLM's own words. The model is that of :mod:`tests.vllm_fakes`; the scheduler is vLLM's.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

from vllm import SamplingParams as Theirs
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from autotune.engines import Engine, adapt
from autotune.engines.vllm import Steered
from autotune.engines.vllm.requests import CLASS, TENANT
from autotune.engines.vllm.scheduler import config_of, picked
from autotune.engines.vllm.serving import SelfTuningScheduler
from autotune.engines.vllm.tuning import TunableScheduler
from runtime.clock import MonotonicClock
from runtime.errors import RejectedError
from runtime.knobs import KnobLimits, Knobs
from runtime.request import SamplingParams
from runtime.slo import SLO, RequestClass
from tests.integration.llama_folder import weightless_folder
from tests.vllm_fakes import BLOCK, CountingExecutor


class Handle:
    """A request that vLLM has been given."""

    def __init__(self, name: str, cancel: Callable[[str], None]) -> None:
        self.done = False
        """Whether its client has been told of its end."""
        self._name, self._cancel = name, cancel

    def cancel(self) -> None:
        self._cancel(self._name)


class FromOutside:
    """The engine that ``made`` makes, and what a controller sees of it: all but ``submit`` and ``close`` is the latter's own.

    ``has_work(llm)``: whether whoever steps it takes another step.
    """

    def __init__(self, made: Callable[[], tuple[LLMEngine, Any]], has_work: Callable[[LLMEngine], bool]) -> None:
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._names = itertools.count(1)
        self._handles: dict[str, Handle] = {}
        self._accepts = threading.Lock()
        self._closing = False
        self._error: BaseException | None = None
        self._llm: LLMEngine
        self._tunable: Any
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(made, has_work, ready), name="vLLM", daemon=True)
        self._thread.start()
        ready.result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_tunable"], name)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        request_class: str = "default",
        request_id: str | None = None,
    ) -> Handle:
        arrival, params = time.time(), params or SamplingParams()
        name = f"#{next(self._names)}" if request_id is None else request_id
        theirs = Theirs(
            max_tokens=params.max_tokens, temperature=params.temperature, ignore_eos=params.ignore_eos, detokenize=False,
            extra_args={TENANT: tenant, CLASS: request_class},
        )  # fmt: skip
        handle = Handle(name, lambda name: self._inbox.put(lambda: self._llm.abort_request([name], internal=True)))

        def add() -> None:
            self._handles[name] = handle
            self._llm.add_request(name, {"prompt_token_ids": prompt}, theirs, arrival_time=arrival)

        with self._accepts:
            if self._closing or self._error is not None:
                why = "the engine is closed" if self._error is None else f"the engine stopped: {self._error!r}"
                raise RejectedError(why, reason="closed")
            self._inbox.put(add)
        return handle

    def close(self, drain: bool = True) -> None:
        with self._accepts:
            self._closing = True
            self._inbox.put(lambda: None if drain else self._abort_all())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _abort_all(self) -> None:
        self._llm.abort_request(list(self._handles), internal=True)

    # -- the thread that steps vLLM --------------------------------------------------------------------------------------

    def _run(
        self, made: Callable[[], tuple[LLMEngine, Any]], has_work: Callable[[LLMEngine], bool], ready: Future[None]
    ) -> None:
        try:
            self._llm, self._tunable = made()
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while True:
                working = has_work(self._llm)
                self._take(wait=not (working or self._closing))
                if has_work(self._llm):
                    self._step()
                elif self._closing and self._inbox.empty():
                    break
        except Exception as error:  # of vLLM's step: it does not go on
            with self._accepts:
                self._error = error
            self._take(wait=False)  # what was sent before
        finally:
            for handle in self._handles.values():
                handle.done = True  # vLLM's front raises EngineDeadError to whoever still waits
            self._llm.engine_core.shutdown()

    def _take(self, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()

    def _step(self) -> None:
        for output in self._llm.step():
            if output.finished:
                self._handles.pop(output.request_id).done = True


class Controlled(TunableScheduler):
    """Whoever is to control it comes and goes; a server's own controller stays for as long as it serves."""

    @property
    def controlled(self) -> bool:
        return True


class SelfTuning:
    """Give this to vLLM as its scheduler class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        bases = (SelfTuningScheduler, picked(config_of(args, kwargs)))
        return type("SelfTuning", bases, {"__module__": __name__})(*args, **kwargs)


def _llm(limits: KnobLimits, fail_on: int, scheduler: type[Any]) -> LLMEngine:
    class Fake(CountingExecutor):
        pass

    Fake.fail_on = fail_on
    with tempfile.TemporaryDirectory() as folder:
        config = EngineArgs(
            str(weightless_folder(Path(folder) / "model")), load_format="dummy", dtype="float32", enforce_eager=True,
            block_size=BLOCK, skip_tokenizer_init=True, distributed_executor_backend=Fake, scheduler_cls=scheduler,
            max_num_seqs=limits.max_batch_size, max_num_batched_tokens=limits.token_budget, async_scheduling=False,
        ).create_engine_config()  # fmt: skip
        made = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    made.input_processor.assign_request_id = _plain  # else 8 letters by chance are added
    return made


def _plain(request: Any) -> None:
    request.external_req_id = request.request_id


def in_scheduler(
    limits: KnobLimits, knobs: Knobs, *, slo: SLO, fail_on: int = -1, classes: Sequence[RequestClass] = ()
) -> Engine:
    """The part that lives in the scheduler of a server, stepped as EngineCore's process steps it."""

    def made() -> tuple[LLMEngine, TunableScheduler]:
        llm = _llm(limits, fail_on, SelfTuning)
        scheduler: Any = llm.engine_core.engine_core.scheduler
        slos = {**{one.name: one.slo for one in classes}, "default": slo}
        steering = scheduler.steer(MonotonicClock(), knobs=knobs, limits=limits, slos=slos)
        weights = {one.name: one.weight for one in classes}
        scheduler._tunable = Controlled(llm.vllm_config, steering, slos, weights)
        return llm, scheduler._tunable

    return cast(Engine, FromOutside(made, lambda llm: llm.engine_core.engine_core.scheduler.has_requests()))


def attached(
    limits: KnobLimits, knobs: Knobs, *, slo: SLO, fail_on: int = -1, classes: Sequence[RequestClass] = ()
) -> Engine:
    """What :func:`autotune.control` puts around an engine that its user has made and steps, as ``llm.generate`` steps it."""

    def made() -> tuple[LLMEngine, Any]:
        llm = _llm(limits, fail_on, Steered)
        scheduler: Any = llm.engine_core.engine_core.scheduler
        scheduler.steer(MonotonicClock(), knobs=knobs, limits=limits, slos={one.name: one.slo for one in classes})
        found = adapt(llm)
        found.set_slo(slo)
        for one in classes:
            found.set_slo(one.slo, request_class=one.name)
        return llm, found

    return cast(Engine, FromOutside(made, LLMEngine.has_unfinished_requests))
