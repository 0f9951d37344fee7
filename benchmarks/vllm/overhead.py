"""What steering costs the host in a step: CPU time of the thread that steps vLLM, ours beside stock, the model left out.

Both serve the same requests in turns, some sequences that all decode. *Stock* is vLLM's LLMEngine with its own scheduler,
stepped in a loop. *Ours* is :class:`~autotune.engines.vllm.VllmEngine` with a controller attached, its whole thread: hooks,
view, budget, decisions, records and the delivery of tokens. Of either, the CPU time that the model itself takes (forward, logits,
sampling) is left out: on a GPU it is the device's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import autotune
from autotune.engines.vllm import VllmEngine
from benchmarks.vllm.starting import start, start_stock
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO

SEQUENCES = (16, 64)
_PROMPT = 24
_LOOSE = SLO(ttft_ms=60_000, tpot_ms=2_000)  # a target that is asked after in every step, and binds nothing


class Host(NamedTuple):
    """Of one size: medians over rounds, seconds of CPU a step without the model; ``runner``: of ``stock``, what vLLM's model
    runner takes to prepare its inputs."""

    sequences: int
    stock: float
    ours: float
    runner: float

    @property
    def share(self) -> float:
        return (self.ours - self.stock) / self.stock

    @property
    def share_without_runner(self) -> float:
        return (self.ours - self.stock) / (self.stock - self.runner)


class _Model:
    """CPU time that vLLM's model and its runner have taken, in the thread that steps ``llm``."""

    def __init__(self, llm: Any) -> None:
        self.forward = self.runner = 0.0
        core = llm.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        for owner, name in ((runner, "_model_forward"), (runner.model, "compute_logits"), (runner, "_sample")):
            self._time(owner, name, "forward")
        for name in ("execute_model", "sample_tokens"):
            self._time(core.model_executor, name, "runner")

    def _time(self, owner: Any, name: str, total: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                setattr(self, total, getattr(self, total) + time.thread_time() - begun)

        object.__setattr__(owner, name, timed)

    def now(self) -> tuple[float, float]:
        """CPU time of this thread without the model, and without the runner."""
        at = time.thread_time()
        return at - self.forward, at - self.runner


class _Window:
    """The first and the last of the steps in which all decode."""

    def __init__(self, model: _Model, sequences: int) -> None:
        self._model, self._sequences = model, sequences
        self.times: list[tuple[float, float]] = []

    def on_step(self, record: StepRecord) -> None:
        if record.decodes == self._sequences and not record.chunks:
            self.times.append(self._model.now())

    def on_request(self, record: RequestRecord) -> None:
        """Steps are enough."""


def _a_step(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Seconds a step: without the model, without the runner."""
    skip, steps = 3, len(times) - 4
    return tuple((times[-1][i] - times[skip][i]) / steps for i in (0, 1))  # type: ignore[return-value]


def _prompts(sequences: int) -> list[list[int]]:
    return [[2 + (31 * n + 7 * i) % 7000 for i in range(_PROMPT)] for n in range(sequences)]


def _stock(llm: Any, model: _Model, sequences: int, steps: int) -> tuple[float, float]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(_prompts(sequences)):
        llm.add_request(f"{sequences}-{number}", {"prompt_token_ids": prompt}, params)
    times = []
    while llm.has_unfinished_requests():
        llm.step()
        times.append(model.now())
    return _a_step(times[2:-2])


def _ours(engine: VllmEngine, model: _Model, sequences: int, steps: int) -> tuple[float, float]:
    window = _Window(model, sequences)
    with autotune.control(engine, slo=_LOOSE, admission=True) as control:
        forget = engine.subscribe(window)
        streams = [engine.submit(p, max_tokens=steps, ignore_eos=True) for p in _prompts(sequences)]
        for stream in streams:
            stream.result()
        forget()
        if control.status().ended:
            raise RuntimeError("the controller ended while its cost was measured")
    return _a_step(window.times[2:-2])


def measure(
    folder: Path, *, rounds: int, steps: int, say: Callable[[str], None], sizes: tuple[int, ...] = SEQUENCES
) -> list[Host]:
    """Alternate both for ``rounds`` rounds of ``steps`` steps at each size."""
    llm = start_stock(folder)
    plain = _Model(llm)
    with start(folder) as engine:
        steered = _Model(engine._core._llm)
        found = []
        for sequences in sizes:
            pairs = []
            for number in range(rounds + 1):
                theirs = _stock(llm, plain, sequences, steps)
                mine = _ours(engine, steered, sequences, steps)
                if number:  # the first warms up
                    pairs.append((theirs[0], mine[0], theirs[0] - theirs[1]))
            stock, ours, runner = (statistics.median(column) for column in zip(*pairs, strict=True))
            found.append(Host(sequences, stock, ours, runner))
            one = found[-1]
            say(
                f"{sequences} decodes: stock {1e6 * stock:.0f} µs a step ({1e6 * runner:.0f} of it vLLM's model runner), ours "
                f"{1e6 * (ours - stock):+.0f} µs: {one.share:.3f} (without the runner {one.share_without_runner:.3f})"
            )
        llm.engine_core.shutdown()
    return found
