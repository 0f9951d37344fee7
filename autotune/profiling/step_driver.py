"""Makes a live engine run the steps one wants to see, by submitting requests at the right moments, and keeps their records.

A script is a generator: it submits, cancels and turns knobs, and each ``yield`` gives it the record of the next step. It runs
on the engine's own thread, between steps, so what it does takes effect with the very next one: the steps are those of live
serving, with all that surrounds them, and yet the wanted ones.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from autotune.engines import Engine, Handle, waiting
from autotune.measure.evaluate import EvaluationError, Interrupted, wait_until_idle
from autotune.workload import Arrival, prompt_ids
from runtime.knobs import Knobs
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.request import SamplingParams

Script = Generator[None, StepRecord, None]

_DRIVERS = itertools.count()
_STARTER = 4  # prompt tokens of the request that sets a script going
_MOST_STEPS = 4000
_STEP_TIMEOUT_S = 60.0  # without a step, while a script runs
_POLL_S = 0.005


class Sample(NamedTuple):
    """One step as it was served: ``seconds`` from the end of the one before to its own, were they back to back."""

    record: StepRecord
    seconds: float


class StepDriver:
    """Runs scripts on ``engine``, one at a time. ``longest``: tokens that a request may have in all.

    Raises :class:`EvaluationError` for an engine whose steps nobody hears of.
    """

    def __init__(self, engine: Engine, vocab_size: int, longest: int, *, seed: int, stop: Callable[[], bool]) -> None:
        if not engine.capabilities.step_records:
            raise EvaluationError("this engine reports no steps, so what they cost cannot be measured")
        self._engine, self._vocab_size, self.longest = engine, vocab_size, longest
        # no two drivers of a process send the same tokens, or the second would find the first one's prefixes in the cache
        self._seed = (seed << 20) + next(_DRIVERS)
        self._clock, self._stop = engine.clock, stop
        self._count = 0
        self._handles: dict[str, Handle] = {}
        self._live: set[str] = set()
        self._script: Script | None = None
        self._records: list[StepRecord] = []
        self._disturbed: set[int] = set()  # records after which the script did something, by number
        self._error: Exception | None = None
        self._acting = False

    # -- for scripts, on the engine's thread --------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def submit(self, lengths: Sequence[int], output: int) -> list[str]:
        """Submit prompts of these lengths, each of tokens of its own; returns their ids."""
        return [self._send(length, output) for length in lengths]

    def cancel(self, names: Sequence[str]) -> None:
        self._disturbed.add(len(self._records))
        for name in names:
            handle = self._handles.pop(name, None)
            if handle is not None:
                handle.cancel()

    def bound(self, *, budget: int, chunk: int) -> None:
        """At most ``budget`` tokens in a step, ``chunk`` of them of one prompt; as many sequences as the engine takes."""
        limits = self._engine.effective_limits
        self._engine.set_knobs(limits.clamp(Knobs(limits.max_batch_size, 0, budget, chunk)))

    def _send(self, length: int, output: int) -> str:
        if self._script is None:
            raise Interrupted("interrupted")  # while the script was at work
        self._disturbed.add(len(self._records))
        self._count += 1
        name = f"calibration-{self._count}"
        ids = prompt_ids(Arrival(0.0, length, output, ((self._count, length),)), self._vocab_size, self._seed)
        self._live.add(name)
        self._handles[name] = self._engine.submit(
            ids, SamplingParams(max_tokens=output, ignore_eos=True), request_id=name
        )
        return name

    # -- running one --------------------------------------------------------------------------------------------------

    def run(self, script: Script) -> list[Sample]:
        """The steps of ``script``, in order; the engine is left idle.

        Raises :class:`EvaluationError` when a request fails or the engine falls silent, :class:`Interrupted` on ``stop``.
        """
        self._records, self._disturbed, self._error, self._script = [], set(), None, script
        next(script)
        unsubscribe = self._engine.subscribe(self)
        pause, seen, since = waiting(self._engine), 0, self._clock.now()
        try:
            self.submit([_STARTER], 1)
            while self._script is not None and self._error is None and not self._stop():
                pause(_POLL_S)
                if len(self._records) > seen:
                    seen, since = len(self._records), self._clock.now()
                if self._clock.now() - since > _STEP_TIMEOUT_S:
                    self._error = EvaluationError(
                        f"the engine made no step for {_STEP_TIMEOUT_S:g} s while it was calibrated"
                    )
        finally:
            unsubscribe()
            self._script = None
            for handle in list(self._handles.values()):
                handle.cancel()
            self._handles.clear()
            self._live.clear()
        if self._error is not None:
            raise self._error
        wait_until_idle(self._engine)
        if self._stop():
            raise Interrupted("interrupted")
        return samples(self._records, self._disturbed)

    def on_step(self, record: StepRecord) -> None:
        script = self._script
        if script is None:
            return
        self._records.append(record)
        self._acting = True
        try:
            if record.failed:
                raise EvaluationError("a step failed while the engine was calibrated")
            if len(self._records) > _MOST_STEPS:
                raise EvaluationError(f"a calibration script was not done after {_MOST_STEPS} steps")
            script.send(record)
        except StopIteration:
            self._script = None
        except Exception as error:
            self._script, self._error = None, error
        finally:
            self._acting = False
        self._end_if_idle()

    def on_request(self, record: RequestRecord) -> None:
        self._live.discard(record.id)
        self._handles.pop(record.id, None)
        if record.reason is FinishReason.ERROR and self._script is not None:
            self._error = EvaluationError(f"request {record.id} failed: {record.cause or 'no cause given'}")
        if not self._acting:  # a script that cancels goes on to submit
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        """With nothing live no other step will come: the steps there are, are all there will be."""
        if not self._live:
            self._script = None


def idle_before(records: Sequence[StepRecord]) -> set[int]:
    """Numbers of the steps before which the engine had nothing to do, by what the step before left running and waiting.

    What lies before any other step is the host's time, however long: tokens are delivered in it, and with many sequences that
    takes milliseconds.
    """
    return {number for number, before in enumerate(records[:-1], start=1) if before.leaves_idle}


def samples(records: Sequence[StepRecord], disturbed: set[int], *, whole: bool = False) -> list[Sample]:
    """What each step took of the engine's time, with the time between steps, and without what is not its own.

    The gap before a step counts (tokens are delivered in it) unless the script submitted or cancelled in it; then the usual
    gap stands in. What the first decode step behind a prompt's last chunk takes longer than those that follow (its keys and
    values are laid out for decoding) belongs to the chunk, so the step itself is left out. So is a step behind a cancel.
    ``whole``: neither; every step with what came about in it.
    """
    gaps = [b.start - a.end for i, (a, b) in enumerate(itertools.pairwise(records), start=1) if i not in disturbed]
    usual = statistics.median(gaps) if gaps else 0.0
    spans = [
        r.duration + (r.start - records[i - 1].end if i and i not in disturbed else usual)
        for i, r in enumerate(records)
    ]
    if whole:
        return [Sample(record, span) for record, span in zip(records, spans, strict=True)]
    found: list[Sample] = []
    for i, record in enumerate(records):
        seconds = spans[i]
        finishing = record.sampled > record.decodes  # a prompt's last chunk is in it
        if finishing:
            seconds += _first_decode_extra(records, spans, i + 1)
        elif not record.prefill_tokens and i and (i in disturbed or records[i - 1].sampled > records[i - 1].decodes):
            continue
        found.append(Sample(record, seconds))
    return found


def _first_decode_extra(records: Sequence[StepRecord], spans: Sequence[float], at: int) -> float:
    """How much longer decode step ``at`` takes than the same decodes right behind it; 0 where nothing is there to tell."""
    alike = records[at : at + 4]
    if len(alike) < 3 or any(r.prefill_tokens or r.decodes != alike[0].decodes for r in alike):
        return 0.0
    return max(0.0, spans[at] - statistics.median(spans[at + 1 : at + len(alike)]))
