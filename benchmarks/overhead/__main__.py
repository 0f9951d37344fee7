"""What the machinery around the model costs.

1. Scheduling plus input preparation as a share of step time, on the ``tiny`` preset with 32 sequences decoding on the real
   engine core and executor (process CPU time, one thread).
2. CPU time that ``schedule`` + ``update`` take for each further running decode, between 32 and 256, no model involved.
   Sequences end and others take their place all the while, as in service.
3. CPU time in which an 8k prompt is added, scheduled and ended where every block of a pool of 760k tokens holds a known prefix.
4. CPU time of the controller in a step of 64 decodes: it learns the step and the requests that ended, gives the next one its
   budget, and decides. ``controller_us_per_step`` is all of it, deciding after every step; of that,
   ``budget_and_decision_us_per_step`` is what learning leaves. ``attached_us_per_step`` is everything that ``autotune.control``
   adds to a step, at the interval it decides at in service. ``budget_and_decision_us_by_decodes`` is the second of these where
   more sequences decode, deciding after every step and every 0.25 s. And whether the controller grows or slows.

Run ``python -m benchmarks.overhead``; the last line is JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from benchmarks.command import at_least, command, exit_code
from benchmarks.overhead.controller import (
    KNOBS,
    TARGET,
    NullExecutor,
    attached_cost,
    controller_cost,
    controller_growth,
    decision_cost,
    request,
    served,
)
from runtime.knobs import KnobLimits
from runtime.llm.core import EngineCore
from runtime.llm.plan import StepResult
from runtime.llm.scheduler import Scheduler
from runtime.records import FinishReason
from runtime.request import Sequence


def schedule_cost(batch: int, steps: int) -> float:
    """Median µs of CPU of one step's ``schedule`` + ``update`` (+ ``add`` of what replaces the ended), in blocks of 200."""
    scheduler = Scheduler(kv_blocks=batch * 40, slos={"default": TARGET})
    scheduler.followed(scheduler.slack)  # as while a controller gives each step its budget
    number = 0

    def add(now: float) -> None:
        nonlocal number
        number += 1
        scheduler.add(request(number, 40 + number % 64, 100 + 37 * number % 200, now))

    for _ in range(batch):
        add(0.0)
    executor = NullExecutor()
    now, costs, running = 0.0, [], []
    for block in range(-2, steps // 200):  # two to settle
        started = time.process_time()
        for _ in range(200):
            now += 1.0
            plan = scheduler.schedule(now, KNOBS)
            for _ended in scheduler.update(plan, executor.execute(plan, now, now)):
                add(now)
        if block >= 0:
            costs.append((time.process_time() - started) / 200 * 1e6)
            running.append(len(scheduler.decodes))
    assert statistics.mean(running) > 0.95 * batch, "the batch was not kept full"
    return statistics.median(costs)


def extra_sequence(rounds: int) -> tuple[float, list[tuple[float, float]]]:
    """µs for each further decode, and (cost at 32, cost at 256) of each round, alternating."""
    pairs = [(schedule_cost(32, 1000), schedule_cost(256, 1000)) for _ in range(rounds)]
    return statistics.median((b - a) / (256 - 32) for a, b in pairs), pairs


CACHED_TOKENS, LONG_PROMPT = 760_000, 8192


def full_cache_cost(prompts: int) -> tuple[float, float]:
    """(median, worst) ms of CPU that the scheduler takes for one prompt of ``LONG_PROMPT`` tokens, each with a new prefix.

    The pool of ``CACHED_TOKENS`` holds nothing but prefixes of earlier prompts: each block taken is one that is given up.
    """
    blocks = CACHED_TOKENS // 16
    scheduler, executor = Scheduler(kv_blocks=blocks), NullExecutor()
    settle = 2 * blocks // (LONG_PROMPT // 16)
    costs = []
    for number in range(settle + prompts):
        made, now = request(number, LONG_PROMPT, 1), float(number)
        started = time.process_time()
        scheduler.add(made, now)
        plan = scheduler.schedule(now, KNOBS)
        ended = scheduler.update(plan, executor.execute(plan, now, now))
        costs.append((time.process_time() - started) * 1e3)
        assert len(ended) == 1, "the prompt was not computed in one step"
    assert scheduler.kv.cached == scheduler.kv.total, "the cache is not full"
    return statistics.median(costs[settle:]), max(costs[settle:])


def scheduler_share(rounds: int, steps: int, dtype: str) -> list[tuple[float, float, float, float]]:
    """For each round: CPU ms a step of scheduling, of input preparation, in all, and the share of the first two."""
    import torch

    from runtime.torch_backend.executor import TorchExecutor
    from runtime.torch_backend.loading import load_model

    torch.set_num_threads(1)
    batch = 32
    limits = KnobLimits(max_batch_size=64, token_budget=8192, chunk_size=8192)
    executor = TorchExecutor(load_model("tiny", dtype=dtype, device="cpu"), kv_blocks=2048)
    rows = []
    number = 0
    for _ in range(rounds):
        scheduler = Scheduler(kv_blocks=2048, slos={"default": TARGET})
        core = EngineCore(scheduler, executor, knobs=KNOBS.with_(max_batch_size=64), limits=limits, output=Append())
        # Outputs of different lengths, and a new request for each that ends: membership changes as in service.
        for i in range(batch):
            core.add(request(number := number + 1, 100 + 2 * i, 8 + 3 * i))
        core.step(0.0)
        timers = executor.timers
        prepared, timed, started = timers.prepare_s, Timed(scheduler), time.process_time()
        done = 0
        while done < steps:
            done += 1
            for _ in core.step(float(done)).finished:
                core.add(request(number := number + 1, 100 + number % 60, 8 + 3 * (number % 32), float(done)))
        total = time.process_time() - started
        prepare = timers.prepare_s - prepared
        share = (timed.seconds + prepare) / total
        rows.append((timed.seconds / done * 1e3, prepare / done * 1e3, total / done * 1e3, share))
        for sequence in [*scheduler.decodes, *scheduler.prefills]:
            executor.release(sequence)
    return rows


class Append:
    """The least an output processor does."""

    def process(self, result: StepResult) -> list[tuple[Sequence, FinishReason]]:
        for token in result.tokens:
            token.sequence.output.append(token.id)
        return []


class Timed:
    """Counts the CPU time spent in a scheduler's ``schedule`` and ``update``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.seconds = 0.0
        for name in ("schedule", "update"):
            self._wrap(scheduler, name)

    def _wrap(self, scheduler: Scheduler, name: str) -> None:
        inner = getattr(scheduler, name)

        def timed(*args: object, **kwargs: object) -> object:
            started = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - started

        setattr(scheduler, name, timed)


@exit_code()
def main(argv: list[str] | None = None) -> None:
    parser = command("overhead", __doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--steps", type=at_least(1), default=120, help="steps of the real engine in each round")
    parser.add_argument("--growth-steps", type=int, default=100_000, help="steps of the controller's long run")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    args = parser.parse_args(argv)

    per_sequence, pairs = extra_sequence(args.rounds)
    print("schedule + update, µs of CPU a step (no model)")
    print(f"{'round':>6} {'32 decodes':>11} {'256 decodes':>12} {'per extra':>10}")
    for i, (small, large) in enumerate(pairs):
        print(f"{i:6} {small:11.2f} {large:12.2f} {(large - small) / 224:10.4f}")
    cached = [full_cache_cost(100) for _ in range(args.rounds)]
    print(f"\none prompt of {LONG_PROMPT} tokens, prefix cache full ({CACHED_TOKENS} tokens), ms of CPU")
    print(f"{'round':>6} {'median':>9} {'worst':>9}")
    for i, (median, worst) in enumerate(cached):
        print(f"{i:6} {median:9.3f} {worst:9.3f}")
    rows = scheduler_share(args.rounds, args.steps, args.dtype)
    print(f"\ntiny ({args.dtype}), 32 sequences decoding, one thread, ms of CPU a step")
    print(f"{'round':>6} {'schedule':>9} {'prepare':>9} {'step':>9} {'share':>7}")
    for i, (schedule, prepare, total, share) in enumerate(rows):
        print(f"{i:6} {schedule:9.3f} {prepare:9.3f} {total:9.2f} {share:7.2%}")
    shares = [row[3] for row in rows]
    print(f"share: median {statistics.median(shares):.2%}, from {min(shares):.2%} to {max(shares):.2%}")

    events = served(64, 2000)
    deciding, attached = controller_cost(events, args.rounds), attached_cost(events, args.rounds)
    print("\ncontroller, µs of CPU a step at 64 decodes")
    decision = decision_cost(events, args.rounds)
    print(f"observe, budget and decide, every step {deciding:7.1f}")
    print(f"budget and decide alone                {decision:7.1f}")
    print(f"attached, deciding every 0.25 s        {attached:7.1f}")
    by_decodes = {}
    print(f"{'decodes':>12} {'budget and decide, every step':>30} {'every 0.25 s':>13}")
    for batch in (64, 128, 256, 512):
        recorded = served(batch, 2000)
        by_decodes[batch] = [round(decision_cost(recorded, args.rounds, every), 1) for every in (0.0, 0.25)]
        print(f"{batch:12} {by_decodes[batch][0]:30} {by_decodes[batch][1]:13}")
    growth = controller_growth(events, args.growth_steps)
    print(f"{'steps seen':>12} {'state, bytes':>13} {'µs a step':>10}")
    for seen, size, cost in growth:
        print(f"{seen:12} {size:13} {cost:10.1f}")
    found = {
        "scheduler_share": round(statistics.median(shares), 4),
        "us_per_extra_sequence": round(per_sequence, 4),
        "full_cache_prompt_ms": round(statistics.median(median for median, _ in cached), 3),
        "controller_us_per_step": round(deciding, 1),
        "budget_and_decision_us_per_step": round(decision, 1),
        "budget_and_decision_us_by_decodes": by_decodes,
        "attached_us_per_step": round(attached, 1),
        "controller_growth": round(growth[-1][1] / growth[0][1], 3),
        "controller_slowdown": round(growth[-1][2] / growth[0][2], 3),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
