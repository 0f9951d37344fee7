"""What steering costs the host in a step: CPU time of the thread that steps vLLM, ours beside stock, the model left out.

All serve the same requests by turns, some sequences that all decode:

- *stock*: vLLM's LLMEngine with its own scheduler, stepped in a loop;
- *scheduler*: the same loop with ``scheduler_cls`` ``autotune.engines.vllm.Scheduler`` and its controller, as in ``vllm
  serve``: what is more is hooks, budget, decisions and records;
- *engine*: :class:`~autotune.engines.vllm.VllmEngine` with a controller attached, its whole thread: also the delivery of tokens
  to streams, which stock leaves to whoever called.

The CPU time that the model takes (forward, logits, sampling) is left out of each: on a GPU it is the device's.
The last line is JSON; ``host_overhead`` is what *scheduler* takes more, ÷ what stock takes, the largest over the numbers of
sequences; of *engine* where no controller is attached to the scheduler. Both times hold what vLLM's model runner takes to prepare
inputs: it is the same code in all three, runs none of ours, and may vary by more from turn to turn than ours takes.
``host_overhead_beside_runner`` is what is more beside it, ÷ the same. ``intervals``: of either the 95% interval, by a bootstrap:
rounds are drawn, and the same is made of their medians.

Run ``python -m benchmarks.vllm.overhead`` by a Python that has vLLM; some four minutes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.command import command, exit_code, say
from benchmarks.live.ratios import DRAWS
from benchmarks.vllm.starting import apart, ready, start, start_stock
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO

SEQUENCES = (16, 64)
SCHEDULER = "autotune.engines.vllm.Scheduler"
_PROMPT = 24
_LOOSE = SLO(ttft_ms=60_000, tpot_ms=2_000)  # a target that is asked after in every step, and binds nothing
_SKIP = 5  # steps at either end of a run


class Host(NamedTuple):
    """Of so many sequences: medians over rounds, seconds of CPU a step without the model; ``…runner``: of that, what vLLM's model
    runner takes to prepare its inputs. ``scheduler``: None where no controller was attached. ``rounds``: the seconds of each, of
    stock and of ours, as in the medians: all without the model, and the runner's part."""

    sequences: int
    stock: float
    runner: float
    scheduler: float | None
    scheduler_runner: float
    engine: float
    engine_runner: float
    rounds: list[list[float]]

    def share(self, seconds: float) -> float:
        """What is more than stock, in units of it."""
        return (seconds - self.stock) / self.stock

    @property
    def beside_runner(self) -> tuple[float | None, float]:
        """What *scheduler* and *engine* take more than stock beside the runner, in units of all that stock takes."""
        scheduler = None if self.scheduler is None else self._more(self.scheduler, self.scheduler_runner) / self.stock
        return scheduler, self._more(self.engine, self.engine_runner) / self.stock

    def _more(self, seconds: float, runner: float) -> float:
        return seconds - runner - (self.stock - self.runner)

    def said(self) -> str:
        parts = [
            f"{self.sequences} decodes: stock {1e6 * self.stock:.0f} µs ({1e6 * self.runner:.0f} of it the model runner)"
        ]
        times = ("scheduler", self.scheduler, self.scheduler_runner), ("engine", self.engine, self.engine_runner)
        for name, seconds, runner in times:
            if seconds is None:
                parts.append(f"no controller attached to the {name}")
            else:
                beside = self._more(seconds, runner)
                parts.append(
                    f"{name} {1e6 * (seconds - self.stock):+.0f} µs: {self.share(seconds):.3f} "
                    f"(beside the runner {1e6 * beside:+.0f} µs: {beside / self.stock:.3f})"
                )
        singly = [_shares([one])[1] for one in self.rounds]
        return ", ".join(parts) + f"; beside the runner {min(singly):.3f} to {max(singly):.3f} in single rounds"

    def interval(self, which: int) -> list[float]:
        """95% of the share (0), or of the one beside the runner (1), over rounds drawn anew."""
        picked = np.random.default_rng(3).integers(0, len(self.rounds), size=(DRAWS, len(self.rounds)))
        low, high = np.percentile(_shares(np.array(self.rounds)[picked])[which], [2.5, 97.5])
        return [round(float(low), 4), round(float(high), 4)]


def _shares(rounds: Any) -> tuple[Any, Any]:
    """What the medians of ``rounds`` (of each set of them) say is more than stock, and what beside the runner, in units of it."""
    stock, runner, ours, ours_runner = np.moveaxis(np.median(rounds, axis=-2), -1, 0)
    return (ours - stock) / stock, (ours - ours_runner - (stock - runner)) / stock


def shape(found: Sequence[Host]) -> dict[str, Any]:
    """For the JSON line."""
    attached = all(one.scheduler is not None for one in found)
    whole = [one.scheduler if attached else one.engine for one in found]
    beside = [one.beside_runner[0] if attached else one.beside_runner[1] for one in found]
    shares = [one.share(seconds) for one, seconds in zip(found, whole, strict=True) if seconds is not None]
    more = [share for share in beside if share is not None]
    return {
        "host_overhead": round(max(shares), 4),
        "host_overhead_of": "scheduler" if attached else "engine",
        "host_overhead_beside_runner": round(max(more), 4),
        "intervals": {
            "host_overhead": found[shares.index(max(shares))].interval(0),
            "host_overhead_beside_runner": found[more.index(max(more))].interval(1),
        },
        "hosts": [one._asdict() for one in found],
    }


def measured_apart(folder: Path, *, rounds: int, steps: int) -> list[Host]:
    """Measure in a process whose computation is one thread's: that is what it times."""
    arguments = ["--folder", str(folder), "--rounds", str(rounds), "--steps", str(steps)]
    return [Host(**one) for one in apart(__name__, arguments, threads=1)["hosts"]]


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
    """The ends of the steps in which all decode."""

    def __init__(self, model: _Model, sequences: int) -> None:
        self._model, self._sequences = model, sequences
        self.times: list[tuple[float, float]] = []

    def on_step(self, record: StepRecord) -> None:
        if record.decodes == self._sequences and not record.chunks:
            self.times.append(self._model.now())

    def on_request(self, record: RequestRecord) -> None:
        """Steps are enough."""


def _a_step(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds a step: without the model, without the runner. Raises ``RuntimeError`` where steps were not as they should be."""
    inner = times[_SKIP:-_SKIP]
    if len(inner) < 10:
        raise RuntimeError(f"only {len(times)} steps held all sequences and nothing else; too few to time")
    (first, without), (last, end) = inner[0], inner[-1]
    return (last - first) / (len(inner) - 1), (end - without) / (len(inner) - 1)


def _prompts(sequences: int) -> list[list[int]]:
    return [[2 + (31 * n + 7 * i) % 7000 for i in range(_PROMPT)] for n in range(sequences)]


def _loop(llm: Any, model: _Model, sequences: int, steps: int) -> tuple[float, float]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(_prompts(sequences)):
        llm.add_request(f"{sequences}-{number}", {"prompt_token_ids": prompt}, params)
    times = []
    while llm.has_unfinished_requests():
        llm.step()
        times.append(model.now())
    return _a_step(times)


def _engine(engine: Any, model: _Model, sequences: int, steps: int) -> tuple[float, float]:
    import autotune

    window = _Window(model, sequences)
    with autotune.control(engine, slo=_LOOSE, admission=True) as control:
        forget = engine.subscribe(window)
        for stream in [engine.submit(p, max_tokens=steps, ignore_eos=True) for p in _prompts(sequences)]:
            stream.result()
        forget()
        if control.status().ended:
            raise RuntimeError("the controller ended while its cost was measured")
    return _a_step(window.times)


def measure(folder: Path, *, rounds: int, steps: int, say: Callable[[str], None]) -> list[Host]:
    """Each of :data:`SEQUENCES`: the three by turns for ``rounds`` rounds of ``steps`` steps."""
    stock = start_stock(folder)
    with tempfile.TemporaryDirectory() as kept:
        decisions = Path(kept) / "decisions.jsonl"
        settings = {"AUTOTUNE_SLO": str(_LOOSE), "AUTOTUNE_REJECT_LATE": "1", "AUTOTUNE_LOG": str(decisions)}
        os.environ |= settings
        try:
            tuned = start_stock(folder, scheduler_cls=SCHEDULER)
        finally:
            for name in settings:
                del os.environ[name]
        with start(folder) as engine:
            models = [_Model(llm) for llm in (stock, tuned, engine._core._llm)]
            found = []
            for sequences in SEQUENCES:
                took: list[list[tuple[float, float]]] = [[], [], []]
                for number in range(rounds + 1):
                    run = (
                        _loop(stock, models[0], sequences, steps),
                        _loop(tuned, models[1], sequences, steps),
                        _engine(engine, models[2], sequences, steps),
                    )
                    if number:  # the first warms up
                        for kind, one in zip(took, run, strict=True):
                            kind.append(one)
                attached = decisions.exists() and decisions.stat().st_size > 0
                found.append(_host(sequences, took, attached))
                say(found[-1].said())
        for llm in (stock, tuned):
            llm.engine_core.shutdown()
    return found


def _host(sequences: int, took: Sequence[Sequence[tuple[float, float]]], attached: bool) -> Host:
    """Of the seconds of stock, scheduler and engine in each round: without the model, and without the runner."""
    (plain, runner), (scheduler, scheduler_runner), (engine, engine_runner) = (
        (statistics.median(t for t, _ in kind), statistics.median(t - without for t, without in kind)) for kind in took
    )
    rounds = [
        [whole, whole - without, ours, ours - without_ours]
        for (whole, without), (ours, without_ours) in zip(took[0], took[1 if attached else 2], strict=True)
    ]
    return Host(
        sequences, plain, runner, scheduler if attached else None, scheduler_runner, engine, engine_runner, rounds
    )


@exit_code()
def main(argv: Sequence[str] | None = None) -> None:
    parser = command("vllm.overhead", __doc__)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (7)")
    parser.add_argument("--steps", type=int, default=150, help="steps of a turn (150)")
    parser.add_argument(
        "--folder", type=Path, help="a model directory (default: one of random weights, 57M parameters)"
    )
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.steps < 40:
        parser.error(f"--rounds is {args.rounds} and --steps {args.steps}; they must be at least 1 and 40")
    os.environ["OMP_NUM_THREADS"] = "1"
    ready()

    from benchmarks.vllm.model import model_folder

    with tempfile.TemporaryDirectory() as kept:
        folder = args.folder or model_folder(Path(kept) / "model")
        found = measure(folder, rounds=args.rounds, steps=args.steps, say=say)
    print(json.dumps(shape(found)))


if __name__ == "__main__":
    sys.exit(main())
