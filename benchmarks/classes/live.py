"""Both classes on the live engine, in rounds: every contender serves chat alone and beside batch in turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Final, NamedTuple

from autotune.bench import Contender, Estimate, Outcome, PairedComparison, Result, Turn, fixed
from autotune.cost.model import CostModel
from autotune.engines import virtual, waiting
from autotune.measure.evaluate import EvaluationError, Interrupted, offered, recorded, wait_until_idle
from autotune.measure.frozen_heap import frozen_heap
from autotune.profiling.setup import balanced_seeds
from autotune.workload import Workload, parse_workload, prompt_ids
from benchmarks.classes import loads
from benchmarks.classes.contenders import KNOBS, serve
from benchmarks.classes.loads import (
    ATTAINMENT,
    BATCH,
    BATCH_LOAD,
    BATCH_WEIGHT,
    CHAT,
    CHAT_LOAD,
    SHARES,
    Most,
    Offered,
    at_once,
    mean_output,
)
from benchmarks.classes.summary import Measured, Row
from benchmarks.classes.virtual import full
from benchmarks.command import say
from benchmarks.live.learning import calibrate, served
from benchmarks.live.loads import CONVERSATION, setup_of, steady
from benchmarks.live.machine import Machine
from benchmarks.live.ratios import ratio_of_sums
from runtime.errors import EngineClosedError, InputError
from runtime.knobs import Knobs
from runtime.records import RequestRecord
from runtime.request import SamplingParams
from runtime.slo import SLO, RequestClass

E2E_FACTOR: Final = 120
"""Batch's E2E target over chat's TTFT, as in virtual time."""
STARTED_WITH: Final = (
    RequestClass(CHAT, SLO(ttft_ms=600_000)), RequestClass(BATCH, SLO(e2e_ms=600_000), BATCH_WEIGHT),
)  # fmt: skip
"""What an engine is started with: the SLOs follow once the machine is known."""
_SETTINGS = tuple(Knobs(slots, 0, budget, budget) for slots in (8, 16, 32, 64, 128) for budget in (256, 1024))
_BACKLOG = 4000  # requests that are there at once, at most: an engine's queue takes 4,096
_ENOUGH = 2.0  # times as many as are expected to be served
_TIMES = 2  # that a setting is measured, in turn with others: the best of single ones would be the luckiest
_POLL_S = 0.02
_SEED = 9100  # of what keeps the engine full, apart from those of rounds


class Plan(NamedTuple):
    """``window``, ``warmup``: seconds of a turn that count, and before them; ``filled``, ``counted``: of an engine that is kept
    full; ``tried``: of ten settings, how many are measured so; ``calibration``: seconds."""

    rounds: int
    shares: tuple[float, ...]
    window: float
    warmup: float
    filled: float
    counted: float
    tried: int
    calibration: float


FULL = Plan(8, SHARES, 9.0, 3.0, 3.0, 6.0, 2, 30.0)
QUICK = Plan(2, SHARES[1:], 6.0, 2.0, 2.0, 3.0, 1, 10.0)


class Load(NamedTuple):
    """What follows from the machine. ``most`` of each class; ``batch``: such requests alone, and the setting that serves the
    most of them; ``offered`` by chat's share."""

    said: str
    classes: tuple[RequestClass, ...]
    most: Most
    batch: Workload
    best: Knobs
    offered: dict[float, Offered]


class Served(NamedTuple):
    """The turns of each share's whole rounds, and the output tokens/s of batch with nothing else to do in each round."""

    results: dict[float, list[Result]]
    most: dict[int, float]
    failures: int


Stop = Callable[[], bool]


def load_of(machine: Machine, plan: Plan, seed: int, stop: Stop) -> Load:
    """Calibrate ``machine``, and measure the most that it serves. Raises :class:`Interrupted`, and :class:`EvaluationError` where
    the engine cannot be kept full."""
    say(f"calibration, {plan.calibration:g} s")
    cost = calibrate(machine, plan.calibration, seed, stop)
    cost = served(machine, cost, [steady("conversation", CONVERSATION, machine, cost)], plan.window, stop)
    setup = setup_of(CHAT_LOAD, machine, cost)
    target = setup.slo
    assert target.ttft_ms is not None
    classes = (
        RequestClass(CHAT, replace(target, attainment=ATTAINMENT)),
        RequestClass(BATCH, SLO(e2e_ms=E2E_FACTOR * target.ttft_ms), BATCH_WEIGHT),
    )
    chat, batch = (setup.apply(parse_workload(spec)) for spec in (CHAT_LOAD, BATCH_LOAD))
    (_, chat_tokens), (best, batch_tokens) = (_most(machine, cost, load, plan, stop) for load in (chat, batch))
    most = Most(chat_tokens / mean_output(chat, _SEED), batch_tokens)
    said = f"lengths × {setup.length_scale:g}: chat on average {setup.mean_prompt:.0f} in, {setup.mean_output:.0f} out"
    return Load(
        said, classes, most, batch, best,
        {share: loads.offered(share, most, _SEED, setup.apply) for share in plan.shares},
    )  # fmt: skip


def _most(machine: Machine, cost: CostModel, load: Workload, plan: Plan, stop: Stop) -> tuple[Knobs, float]:
    """The setting that serves the most output tokens/s, and how many: of ten in simulation, the best few measured."""
    requests, kv = at_once(load, _BACKLOG), machine.engine.facts.kv_tokens
    expected = {knobs: full(cost, kv, requests, knobs, plan.filled, plan.counted) for knobs in _SETTINGS}
    best = [knobs for knobs in sorted(expected, key=lambda knobs: expected[knobs], reverse=True) if expected[knobs]]
    if not best:
        raise EvaluationError(f"{_BACKLOG} requests of {load.name} keep no setting full, simulated")
    found: dict[Knobs, list[float]] = {knobs: [] for knobs in best[: plan.tried]}
    for seed in _full_seeds(load, expected[best[0]], plan, _SEED, _TIMES):
        for knobs, tokens in found.items():
            tokens.append(kept_full(machine, load, knobs, expected[knobs], plan, seed, stop))
    measured = {knobs: statistics.fmean(tokens) for knobs, tokens in found.items()}
    for knobs, tokens in found.items():
        said = ", ".join(f"{one:.0f}" for one in tokens)
        say(f"  {load.name} alone at {fixed(knobs).name}: {said} output tokens/s, simulated {expected[knobs]:.0f}")
    chosen = max(measured, key=lambda knobs: measured[knobs])
    return chosen, measured[chosen]


def _full_seeds(load: Workload, expected: float, plan: Plan, first: int, count: int) -> list[int]:
    """Seeds under which the requests that are served while an engine is kept full are as long as those of the load are."""
    return balanced_seeds(load.at_rate(expected / mean_output(load, _SEED)), first, count, plan.filled, plan.counted)


def kept_full(
    machine: Machine,
    load: Workload,
    knobs: Knobs,
    expected: float,
    plan: Plan,
    seed: int,
    stop: Stop,
    prompt_seed: int | None = None,
) -> float:
    """Output tokens/s while requests of ``load`` wait all the time. ``expected``: about as many. Raises :class:`Interrupted`, and
    :class:`EvaluationError` where none waits in the end."""
    engine, clock = machine.engine, machine.clock
    wait_until_idle(engine)
    engine.set_knobs(knobs)
    some = _ENOUGH * (plan.filled + plan.counted) * expected / mean_output(load, seed) + knobs.max_batch_size
    requests = at_once(load, min(_BACKLOG, math.ceil(some)), seed)
    prompt_seed = seed if prompt_seed is None else prompt_seed
    prompts = [prompt_ids(request, machine.facts.vocab_size, prompt_seed) for request in requests]
    pause = waiting(engine)
    with recorded(engine) as log, nullcontext() if virtual(engine) else frozen_heap():
        begun = clock.now() + plan.filled
        handles = [
            engine.submit(prompt, SamplingParams(max_tokens=request.output_tokens, ignore_eos=True))
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        try:
            while clock.now() < begun + plan.counted:
                if stop():
                    raise Interrupted("interrupted")
                pause(_POLL_S)
            left = engine.view().waiting
        finally:
            for handle in handles:
                handle.cancel()
            wait_until_idle(engine)
    if not left:
        raise EvaluationError(f"{len(requests)} requests of {load.name} are served in {plan.filled + plan.counted:g} s")
    inside = [s for s in log.steps if begun <= s.start and s.end <= begun + plan.counted]
    return sum(s.sampled for s in inside) / (inside[-1].end - inside[0].start)


class Rounds:
    """``names`` serve each load of ``load`` in turn, alone and beside batch, until all rounds are served or ``stop`` says so."""

    def __init__(self, machine: Machine, load: Load, names: Sequence[str], plan: Plan, seed: int, stop: Stop) -> None:
        self._machine, self._load, self._names, self._plan = machine, load, names, plan
        self._seed, self._stop = seed, stop
        self._turns = self._failures = 0
        self._seeds = {
            share: balanced_seeds(o.beside, 10_000 * (seed + 1), plan.rounds, plan.warmup, plan.window)
            for share, o in load.offered.items()
        }
        self._full_seeds = _full_seeds(load.batch, load.most.batch, plan, 10_000 * (seed + 1), plan.rounds)

    def run(self) -> Served:
        results: dict[float, list[Result]] = {share: [] for share in self._load.offered}
        most: dict[int, float] = {}
        try:
            for number in range(self._plan.rounds):
                self._round(number, results, most)
        except Interrupted:
            pass
        except EngineClosedError as error:  # so are all turns that were to come; those before it count
            say(f"  stopped: {error}")
            self._failures += 1
        return Served(results, most, self._failures)

    def _round(self, number: int, results: dict[float, list[Result]], most: dict[int, float]) -> None:
        """Adds each load once all of its turns are served. Raises :class:`Interrupted`."""
        load = self._load
        try:
            most[number] = kept_full(
                self._machine,
                load.batch,
                load.best,
                load.most.batch,
                self._plan,
                self._full_seeds[number],
                self._stop,
                self._prompts(),
            )
        except Interrupted:
            raise
        except EvaluationError as error:
            self._fail(f"round {number}, batch alone", error)
            return
        say(f"  round {number} batch alone: {most[number]:.0f} output tokens/s{self._drift()}")
        for share in load.offered:
            found = list[Result]()
            at = number % len(self._names)
            for place, name in enumerate((*self._names[at:], *self._names[:at])):
                kinds = (False, True) if (number + place) % 2 == 0 else (True, False)
                for beside in kinds:
                    if (result := self._turn(share, name, beside, number, most[number])) is not None:
                        found.append(result)
            results[share] += found

    def _turn(self, share: float, name: str, beside: bool, number: int, most: float) -> Result | None:
        """None: it failed, and was named; it never becomes a bad score."""
        engine, plan, load = self._machine.engine, self._plan, self._load.offered[share]
        seed, prompts = self._seeds[share][number], self._prompts()
        requests, chat = load.beside if beside else load.alone, self._load.classes[0].slo
        kept: list[RequestRecord] = []
        wait_until_idle(engine)
        for one in self._load.classes:
            engine.set_slo(one.slo, request_class=one.name)
        engine.set_slo(chat)
        engine.set_knobs(KNOBS)
        try:
            score = serve(
                name, engine, requests, self._load.classes, seed=seed, window=plan.window, warmup=plan.warmup,
                vocab_size=self._machine.facts.vocab_size, prompt_seed=prompts, label=f"turn-{prompts}", stop=self._stop,
                keep=kept.extend,
            )  # fmt: skip
        except Interrupted:
            raise
        except (EvaluationError, InputError) as error:
            self._fail(f"round {number} chat {share:.0%} {name} {'beside' if beside else 'alone'}", error)
            return None
        inside = [a for a in offered(requests, seed, plan.warmup + plan.window) if a.time >= plan.warmup]
        outcomes = tuple(
            Outcome(arrival.time - plan.warmup, chat.met(record), None, None, None, CHAT)
            for arrival, record in zip(inside, kept, strict=True)
            if record.request_class == CHAT and record.offered
        )
        of_chat = score.classes[CHAT]
        text = f"{of_chat.attainment:6.1%} of {of_chat.offered} chats"
        if beside:
            tokens = score.classes[BATCH].throughput
            text += f", {tokens:.0f} batch tokens/s, {tokens / ((1 - share) * most):.1%} of what is left"
        say(
            f"  round {number} chat {share:.0%} {name:<9} {'beside' if beside else 'alone':<6} {text}, "
            f"steps {score.steps.mean_ms:.1f} ms{self._drift()}"
        )
        return Result(Turn(_contender(name, beside), number, seed, prompts), score, outcomes, ())

    def _fail(self, what: str, error: Exception) -> None:
        self._failures += 1
        say(f"  {what}: left out: {error}")

    def _prompts(self) -> int:
        """The seed of token ids of its own: no turn finds another's prefixes."""
        self._turns += 1
        return 1_000_003 * (self._seed + 1) + self._turns

    def _drift(self) -> str:
        return f", {self._machine.drift():.2f} times its fastest step"


def rows(served: Served, names: Sequence[str], plan: Plan, machine: str = "tiny") -> list[Row]:
    """With 95% intervals over rounds, of those in which chat was served both alone and beside batch."""
    found = []
    for index, (share, results) in enumerate(served.results.items()):
        if not results:
            continue
        comparison = PairedComparison(results, plan.window)
        for at, name in enumerate(names):
            alone, beside = _contender(name, False), _contender(name, True)
            difference = comparison.difference(beside, alone)
            if difference is None:
                continue
            singly, jointly = ({r.turn.round: r.score for r in comparison.of(c)} for c in (alone, beside))
            left = {number: (1 - share) * served.most[number] for number in sorted(singly.keys() & jointly.keys())}
            runs = tuple(Measured.of(singly[number], jointly[number], left[number]) for number in left)
            tokens = [jointly[number].classes[BATCH].throughput for number in left]
            batch: Estimate = ratio_of_sums(tokens, [*left.values()], seed=10 * index + at)
            found.append(Row(machine, share, name, runs, difference.difference, batch))
    return found


def _contender(name: str, beside: bool) -> Contender:
    return fixed(KNOBS, f"{name} {'beside' if beside else 'alone'}")
