"""Interactive and batch requests on one engine, in virtual time: what chat loses to batch, and what batch gets of the rest.

Chat (lengths and arrivals fitted to Azure's conversation trace) comes at a share of what the machine serves of it at most;
batch (prompts of 2,000 tokens, outputs of 200, lognormal) at 1.3 times what is left. What is left: with chat at a share u of
its own most, 1 - u of the batch tokens that the same engine makes with nothing else to do. Most: output tokens/s with a queue
that never empties, at the best of ten settings, no SLO. Chat's SLO makes steps small, and small steps are less efficient; so
all that is left by this count cannot be had.

Chat is served alone, then beside batch, the very same chat requests at the same times, by each contender:

- ``default``: ``autotune.control(engine, admission=True)``: late chat is rejected, late batch relegated;
- ``reject``: the same, late batch rejected too;
- ``knobs``: the controller without admission, in the order of arrival;
- ``defaults``: vLLM's defaults, in the order of arrival.

Run ``python -m benchmarks.classes``; the last line is JSON. It takes some minutes, ``--quick`` a quarter of that.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from autotune import control
from autotune.engines.defaults import VLLM_DEFAULTS
from autotune.measure.evaluate import Recorder, evaluate
from autotune.measure.score import Score
from autotune.simulate import SimulatedEngine
from autotune.workload import Workload, parse_workload
from benchmarks.attached import at_work
from benchmarks.command import command, exit_code
from benchmarks.controller.hardware import A100, H200, Hardware
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import AdmissionPolicy
from runtime.slo import SLO, RequestClass

CHAT: Final = RequestClass("chat", SLO(ttft_ms=500, tpot_ms=50, attainment=0.95))
BATCH: Final = RequestClass("batch", SLO(e2e_ms=60_000), 0.2)
CHAT_LOAD, BATCH_LOAD = "azure-conv", "poisson:prompt=2000~1,output=200~1"
SHARES: Final = (0.3, 0.6)
"""Chat's load, of what the machine serves of it at most."""
BEYOND: Final = 1.3
"""Batch's load, of what is left."""
CONTENDERS: Final = ("default", "reject", "knobs", "defaults")
_SLOTS, _BUDGETS = (64, 128, 256, 512, 1024), (2048, 8192)  # settings of which one serves the most
_BACKLOG = 10_000  # requests that are there at once
_FILLED_S, _FULL_S = 60.0, 60.0  # until the engine is full, and what is counted then
_LIMITS = KnobLimits()
_KNOBS: Knobs = _LIMITS.clamp(VLLM_DEFAULTS)


class Measured(NamedTuple):
    """One seed of one contender: chat's attainment alone and beside batch, and batch tokens as a share of what is left."""

    alone: float
    beside: float
    batch_share: float
    goodput: float


def most(hardware: Hardware, load: str) -> tuple[float, float]:
    """(requests/s, output tokens/s) of ``hardware`` with nothing but such requests, of which there are always enough: the most
    of a few settings."""
    tokens = max(_tokens(hardware, load, Knobs(slots, 0, budget, budget)) for slots in _SLOTS for budget in _BUDGETS)
    return tokens / _mean_output(load, 0), tokens


def _tokens(hardware: Hardware, load: str, knobs: Knobs) -> float:
    engine = SimulatedEngine(
        hardware.cost(), kv_tokens=hardware.kv_tokens, limits=_LIMITS, knobs=knobs, ordering="fcfs", max_queue=10**9
    )
    waiting = [arrival._replace(time=0.0) for arrival in parse_workload(load).arrivals(0, limit=_BACKLOG)]
    recorder = Recorder()
    engine.subscribe(recorder)
    engine.serve(waiting, shared=False)
    engine.run(_FILLED_S + _FULL_S)
    inside = [s for s in recorder.steps if s.start >= _FILLED_S]
    if not engine.view().waiting:
        raise SystemExit(
            f"{hardware.name}: {_BACKLOG} requests of {load} are served in less than {_FILLED_S + _FULL_S:g} s"
        )
    return sum(s.sampled for s in inside) / (inside[-1].end - inside[0].start)


def _mean_output(load: str, seed: int) -> float:
    return statistics.fmean(a.output_tokens for a in parse_workload(load).arrivals(seed, limit=4000))


@contextmanager
def contender(name: str, hardware: Hardware, classes: list[RequestClass]) -> Iterator[SimulatedEngine]:
    """An engine under control, as ``name`` has it."""
    engine = SimulatedEngine(
        hardware.cost(), kv_tokens=hardware.kv_tokens, limits=_LIMITS, knobs=_KNOBS, slo=CHAT.slo, classes=classes,
        ordering="fcfs", max_queue=10**9,
    )  # fmt: skip
    policies: dict[str, AdmissionPolicy | bool] = {"default": True, "reject": AdmissionPolicy(late="reject")}
    if name == "defaults":
        yield engine
        return
    with at_work(control(engine, slo=CHAT.slo, admission=policies.get(name, False))):
        yield engine


def serve(name: str, hardware: Hardware, load: Workload, seed: int, window: float, warmup: float) -> Score:
    classes = [CHAT, BATCH]
    with contender(name, hardware, classes) as engine:
        return evaluate(
            engine, None, load, CHAT.slo, classes=classes, vocab_size=2, seed=seed, duration=window, warmup=warmup
        )


def measure(
    name: str, hardware: Hardware, share: float, seed: int, window: float, warmup: float, left: tuple[float, float]
) -> Measured:
    """``left``: requests/s of chat at most, and output tokens/s of batch at most."""
    chat_most, batch_most = left
    chat_rate, tokens_left = share * chat_most, (1 - share) * batch_most
    batch_rate = BEYOND * tokens_left / _mean_output(BATCH_LOAD, seed)
    total = chat_rate + batch_rate
    alone = parse_workload(f"chat={CHAT_LOAD}").at_rate(chat_rate)
    both = parse_workload(f"chat={CHAT_LOAD}@{chat_rate / total:.9f}+batch={BATCH_LOAD}@{batch_rate / total:.9f}")
    first = serve(name, hardware, alone, seed, window, warmup)
    second = serve(name, hardware, both.at_rate(total), seed, window, warmup)
    return Measured(
        first.classes["chat"].attainment, second.classes["chat"].attainment,
        second.classes["batch"].throughput / tokens_left, second.goodput,
    )  # fmt: skip


@exit_code()
def main() -> None:
    parser = command("classes", __doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, the H200 alone")
    parser.add_argument("--seeds", type=int, default=3, help="sets of requests, from 1 on (default: 3)")
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help="only this; repeatable")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds is {args.seeds}; it must be at least 1")
    machines = [H200] if args.quick else [H200, A100]
    seeds = range(1, 2 if args.quick else args.seeds + 1)
    window, warmup = 180.0, 60.0
    print(
        f"{'':<6}{'chat':>6}  {'contender':<10}{'chat alone':>12}{'beside':>9}{'difference':>12}{'batch/left':>12}{'goodput':>9}"
    )
    found: dict[str, list[Measured]] = {}
    for hardware in machines:
        left = most(hardware, CHAT_LOAD)[0], most(hardware, BATCH_LOAD)[1]
        for share in SHARES:
            for name in args.contender or CONTENDERS:
                runs = [measure(name, hardware, share, seed, window, warmup, left) for seed in seeds]
                found.setdefault(name, []).extend(runs)
                alone, beside, batch, goodput = (statistics.fmean(column) for column in zip(*runs, strict=True))
                print(
                    f"{hardware.name:<6}{share:>6.0%}  {name:<10}{alone:>12.2%}{beside:>9.2%}{beside - alone:>+12.2%}"
                    f"{batch:>12.1%}{goodput:>9.2f}",
                    flush=True,
                )
    summary = {
        name: {
            "interactive_difference_mean": round(statistics.fmean(r.beside - r.alone for r in runs), 4),
            "interactive_difference_min": round(min(r.beside - r.alone for r in runs), 4),
            "batch_share_of_left_mean": round(statistics.fmean(r.batch_share for r in runs), 4),
            "batch_share_of_left_min": round(min(r.batch_share for r in runs), 4),
        }
        for name, runs in found.items()
    }
    print(json.dumps({"seeds": len(seeds), "machines": [m.name for m in machines], "contenders": summary}))


if __name__ == "__main__":
    sys.exit(main())
