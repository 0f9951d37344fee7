"""The engine in virtual time: what :class:`runtime.Engine` is to live traffic, with a cost model for a machine.

It runs the live engine's own core, scheduler, orderings and KV allocator; time is a number that each step moves on by what the
cost model says. Nothing happens but in the calls that move it on (:meth:`SimulatedEngine.wait`, ``run`` and ``serve``), all in
the caller's thread, and nothing of the host's time gets in.

Runs of identical decode steps are made in one go, up to the next arrival, timeout, end of a request or of the call. That
changes no result. A step policy, or a listener that might turn knobs, must be asked after each step: while there is one, every
step is made by itself. A listener with ``on_run`` says that it only listens.

Prefix cache. While no two requests share a prefix and none has been preempted, no block can be found by its content, and
none is named: it costs nothing. From the first request that may share, or the first preemption, on, blocks are named as live.
Until then all blocks that nobody holds are alike, and older than any that can be found, so the moment of the change shows in
no result. Segments of one ``prompt_seed`` are taken to be unlike those of another, as their tokens would be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Self, TypeVar, get_args

from autotune.profile.parts import JitterFacts
from autotune.simulate.drafts import Acceptances, LikelyDrafter
from autotune.simulate.executor import CostExecutor
from autotune.simulate.names import name_from_now_on, own_names, prompt_names, shares_prefixes
from autotune.simulate.open_loop import offer_open_loop
from autotune.workload import Arrival, ReplayReport
from runtime.clock import VirtualClock
from runtime.errors import EngineClosedError, RejectedError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.llm.core import EngineCore
from runtime.llm.intake import never_ran
from runtime.llm.prefix import block_hashes
from runtime.llm.scheduler import Finished, Scheduler
from runtime.llm.tuning import TunableCore
from runtime.ordering import Ordering
from runtime.records import FinishReason, RequestRecord
from runtime.request import Request, SamplingParams
from runtime.request import Sequence as RunningSequence
from runtime.shared.listeners import Listeners
from runtime.slo import SLO, RequestClass, engine_slos
from runtime.step_model import NO_GRAPHS, StepGraphs, StepModel
from runtime.tunable import TILE, Capabilities, Facts, KvAllocation, Listener, SchedulerView

T = TypeVar("T")

_ASK_EVERY = 256  # steps between two questions whether to stop
_PARAMS = SamplingParams()


class SimulatedRequest:
    """What :meth:`SimulatedEngine.submit` returns. ``record`` is None until the request has ended."""

    __slots__ = ("_engine", "_sequence", "record")

    def __init__(self, engine: SimulatedEngine, sequence: RunningSequence) -> None:
        self._engine = engine
        self._sequence = sequence
        self.record: RequestRecord | None = None

    def cancel(self) -> bool:
        """End it, whatever its state. False if it has ended already."""
        return self._engine.end(self._sequence, FinishReason.CANCELLED, "by the client")


class SimulatedEngine(TunableCore):
    """Serves requests in virtual time on the machine that ``cost`` describes (seconds of a step).

    ``kv_tokens``, ``block_size``: the KV pool, in tokens; ``prefix_cache``: prompts share the KV of equal beginnings;
    ``growth_reserve``: free blocks kept for each decode when a prompt is admitted; ``kv_allocation``: ``"whole"``, as our engine
    hands them out, or ``"chunk"``, as vLLM does; ``limits``, ``knobs``, ``slo``,
    ``classes``, ``ordering``, ``admission`` and ``max_queue`` are those of :class:`runtime.Engine`. ``noise``: deviation of
    each step's time, relative, and ``jitter``, how such times scatter, measured (``jitter_by_time``: slow stretches come at
    the same times whatever is run); both drawn from ``seed``. ``graphs``: the steps that it has recorded, a
    fact that it tells; ``cost`` says what padding takes. ``fast_forward=False`` makes every step by itself, with
    the same results. ``acceptance``: the probability that a drafted token is right, of all requests or by class; at 0 none is
    drafted, whatever ``draft_tokens`` says. Not to be shared between threads, but for turning knobs.
    :meth:`set_slo` takes any class.

    Raises ``ValueError`` for arguments out of bounds.
    """

    clock: VirtualClock

    def __init__(
        self,
        cost: StepModel,
        *,
        kv_tokens: int,
        limits: KnobLimits | None = None,
        block_size: int = 16,
        knobs: Knobs | None = None,
        slo: SLO | str | None = None,
        classes: Iterable[RequestClass] = (),
        ordering: str | Ordering = "priority",
        admission: AdmissionPolicy | bool = False,
        prefix_cache: bool = True,
        growth_reserve: int = 1,
        kv_allocation: KvAllocation = "whole",
        max_queue: int = 4096,
        noise: float = 0.0,
        jitter: JitterFacts | None = None,
        jitter_by_time: bool = False,
        seed: int = 0,
        fast_forward: bool = True,
        acceptance: Acceptances = 0.0,
        graphs: StepGraphs = NO_GRAPHS,
        tile: int = TILE,
    ) -> None:
        for name, value, least in (
            ("block_size", block_size, 1), ("kv_tokens", kv_tokens, block_size), ("max_queue", max_queue, 1),
            ("growth_reserve", growth_reserve, 0),
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        if kv_allocation not in get_args(KvAllocation):
            raise ValueError(
                f"kv_allocation is {kv_allocation!r}; it must be one of {', '.join(get_args(KvAllocation))}"
            )
        classes = tuple(classes)
        slos = engine_slos(slo, classes)
        limits = limits or KnobLimits()
        knobs = limits.clamp(Knobs()) if knobs is None else knobs
        scheduler = Scheduler(
            kv_blocks=kv_tokens // block_size, block_size=block_size, ordering=ordering, slos=slos,
            growth_reserve=growth_reserve, by_chunk=kv_allocation == "chunk",
            drafter=LikelyDrafter(acceptance) if acceptance else None,
            most_sampled=limits.max_batch_size,
        )  # fmt: skip
        executor = CostExecutor(
            cost, noise=noise, jitter=jitter, seed=seed, by_time=jitter_by_time, acceptance=acceptance
        )
        core = EngineCore(scheduler, executor, knobs=knobs, limits=limits)
        super().__init__(core, Listeners(), VirtualClock(), slos, {c.name: c.weight for c in classes})
        self.core, self.scheduler = core, scheduler
        self._facts = Facts(
            "simulation", kv_tokens // block_size * block_size, block_size, prefix_cache, growth_reserve,
            kv_allocation, graphs=graphs, tile=tile,
        )  # fmt: skip
        self._closed = False
        self._woken = False  # whether something has come that may end a wait
        if admission:
            self.set_admission(admission)
        self.fast_forward = fast_forward
        self._max_queue = max_queue
        self._handles: dict[RunningSequence, SimulatedRequest] = {}
        self._numbers = itertools.count(1)
        self.prefix_cache = prefix_cache
        self._named = False
        self._running = False
        if prefix_cache:
            self.scheduler.before_preempting = self._name_blocks

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        request_class: str = "default",
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> SimulatedRequest:
        """Queue a request of token ids now. It yields ``params.max_tokens`` tokens (128 without ``params``).

        Raises ``ValueError`` for one that cannot run, RejectedError when ``max_queue`` requests wait or by ``admission``.
        """
        params = params or _PARAMS
        hashes: tuple[int, ...] = ()
        if self.prefix_cache:
            self._name_blocks()
            hashes = block_hashes(prompt, self.block_size)
        now = self.clock.now()
        request = Request(
            id=f"#{next(self._numbers)}" if request_id is None else request_id,
            prompt=(),
            params=params,
            max_tokens=self.scheduler.most_request_tokens - len(prompt)
            if params.max_tokens is None
            else params.max_tokens,
            arrival=now,
            priority=priority,
            tenant=tenant,
            request_class=request_class,
            deadline=None if deadline_s is None else now + deadline_s,
            expires=None if timeout_s is None else now + timeout_s,
            block_hashes=hashes,
            prompt_len=len(prompt),
        )
        sequence = self.add(request)
        handle = self._handles[sequence] = SimulatedRequest(self, sequence)
        return handle

    def add(self, request: Request) -> RunningSequence:
        """Queue ``request`` as it is. Raises as :meth:`submit`, and tells listeners of a rejection."""
        if self._closed or self.scheduler.waiting.count >= self._max_queue:
            reason, why = "closed", "the engine is closed"
            if not self._closed:
                waiting = len(self.scheduler.waiting)
                reason, why = "queue_full", f"{waiting} requests are waiting and max_queue is {self._max_queue}"
            self._listeners.tell(None, [never_ran(request, FinishReason.REJECTED, self.clock.now(), reason)])
            raise RejectedError(f"request {request.id}: {why}", reason=reason, retry_after_s=None)
        number = next(self._numbers)
        if self._named and not request.block_hashes:
            request.block_hashes = tuple(own_names(number, 0, request.prompt_len // self.block_size))
        try:
            sequence = self.core.add(request, self.clock.now())
        except RejectedError as error:
            now = self.clock.now()
            record = never_ran(request, FinishReason.REJECTED, now, error.reason, error.retry_after_s)
            self._listeners.tell(None, [record])
            raise
        sequence.data = number
        self._woken = True
        return sequence

    def end(self, sequence: RunningSequence, reason: FinishReason, cause: str) -> bool:
        """End ``sequence`` now, whatever its state. False if it has ended already."""
        record = self.core.finish(sequence, reason, self.clock.now(), cause)
        if record is not None:
            self._ended([(sequence, record)])
            self._listeners.tell(None, [record])
        return record is not None

    def cancel_all(self, reason: FinishReason = FinishReason.CANCELLED, cause: str = "by the client") -> int:
        """End everything that runs or waits, by its client's wish unless ``reason`` and ``cause`` say otherwise; returns how many
        that were."""
        left = [*self.scheduler.decodes, *self.scheduler.prefills, *self.scheduler.waiting]
        return sum(self.end(sequence, reason, cause) for sequence in left)

    def close(self, drain: bool = True) -> None:
        """Accept nothing more; serve what was accepted to its end (``drain=False``: cancel it). Any number of times.

        From a listener it returns at once, and the run that told the listener goes on to the end.
        """
        self._closed = True
        if not drain:
            self.cancel_all(FinishReason.ERROR, "the engine was closed")
        elif not self._running:
            self.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, at: object) -> None:
        self.close(drain=kind is None)

    # -- as a controller sees it --------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """Those of the live engine, in virtual time."""
        return Capabilities.live(virtual_time=True)

    @property
    def facts(self) -> Facts:
        return self._facts

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def kv_tokens(self) -> int:
        """Size of the KV pool."""
        return self._facts.kv_tokens

    @property
    def block_size(self) -> int:
        return self._facts.block_size

    def _change(self, change: Callable[[], T]) -> T:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        self._woken = True
        return change()

    def _post(self, change: Callable[[], None]) -> None:
        self._change(change)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` hear every record; returns a function that ends it.

        A listener with ``on_run(record, ends)`` is told of identical steps at once: the record of all of them, and when each
        ended. Without it, every step is made and told by itself.
        """
        return super().subscribe(listener)

    def view(self) -> SchedulerView:
        return self.core.view(self.clock.now())

    # -- time ---------------------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Let ``seconds`` pass. A step in progress then is finished, and time is as it ends."""
        self.run_until(self.clock.now() + seconds)

    def run_until(self, when: float) -> None:
        """The same up to a time."""
        self.run(when)
        self.clock.advance_to(when)

    def run(self, until: float = inf, *, stop: Callable[[], bool] | None = None) -> bool:
        """Make steps until nothing is left, or one ends at or after ``until``. False if ``stop`` ended it before."""
        core, clock, scheduler, listeners = self.core, self.clock, self.scheduler, self._listeners
        settings = core.settings
        now = clock.now()
        countdown = 0
        self._running = True
        try:
            while now < until:
                if stop is not None:
                    countdown -= 1
                    if countdown < 0:
                        if stop():
                            return False
                        countdown = _ASK_EVERY
                scheduler.fast_forward = self.fast_forward and settings.policy is None and listeners.hear_runs
                self._woken = False
                record, result, finished, wake_at, end = core.step(now, until)
                now = clock.advance_to(end)
                ended: list[RequestRecord] = []
                if finished:
                    self._ended(finished)
                    ended = [request for _, request in finished]
                listeners.tell(record, ended, () if result is None else result.ends)
                if record is None and not self._woken:  # a listener may have brought work, or turned a knob
                    if not core.has_work:
                        break
                    now = clock.advance_to(min(wake_at, until))
        finally:
            self._running = False
        return True

    def serve(
        self,
        arrivals: Iterable[Arrival],
        *,
        start: float | None = None,
        label: str = "r",
        prompt_seed: int = 0,
        shared: bool | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> ReplayReport:
        """Offer each of ``arrivals`` at ``start`` (now, unless given) + its time, open-loop, and return after the last.

        Request i is called ``<label>-<i>``. ``shared``: whether prompts may begin alike; looked up in a list of arrivals, and
        taken for granted of an iterator. ``stop`` ends it early. What the full queue rejects goes to listeners alone.
        Raises ``ValueError`` for a request that cannot run.
        """
        if shared is None:
            shared = shares_prefixes(arrivals) if isinstance(arrivals, Sequence) else True

        def offer(number: int, arrival: Arrival, due: float) -> None:
            self.offer(arrival, f"{label}-{number}", due=due, prompt_seed=prompt_seed, shared=shared)

        return offer_open_loop(arrivals, self.clock, self.run, offer, start=start, stop=stop)

    def offer(
        self,
        arrival: Arrival,
        name: str,
        *,
        due: float,
        prompt_seed: int = 0,
        shared: bool = True,
        priority: int = 0,
        deadline: float | None = None,
        expires: float | None = None,
    ) -> RunningSequence | None:
        """Queue what ``arrival`` asks for, as of ``due``; ``deadline`` and ``expires`` are times. None if it is rejected.

        Listeners hear of a rejection. ``shared``: another prompt may begin like this one. Raises ``ValueError`` for a
        request that cannot run.
        """
        hashes: tuple[int, ...] = ()
        if shared and self.prefix_cache:
            self._name_blocks()
            hashes = prompt_names(arrival.segments, self.block_size, prompt_seed)
        request = Request(
            name, (), _PARAMS, arrival.output_tokens, due, priority, arrival.tenant, arrival.request_class, deadline,
            expires, hashes, arrival.prompt_tokens,
        )  # fmt: skip
        try:  # contextlib.suppress takes as long as all of this
            return self.add(request)
        except RejectedError:
            return None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _ended(self, finished: Sequence[Finished]) -> None:
        if self._handles:
            for sequence, record in finished:
                handle = self._handles.pop(sequence, None)
                if handle is not None:
                    handle.record = record

    def _name_blocks(self) -> None:
        """From now on blocks are known by content, those that are held already included."""
        if self._named:
            return
        self._named = True
        self.scheduler.before_preempting = None
        name_from_now_on(self.scheduler)
