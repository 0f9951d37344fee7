"""What else one could do with the same hours on the machine: other ways to look for a setting, measured in hardware time.

Each takes a machine it has to itself, a bound on its seconds, and a seed, and returns its choice. A measurement begins only
while at least half of it is expected to fit.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import optuna
from optuna.distributions import IntDistribution
from optuna.samplers import TPESampler

from autotune.engines import defaults
from autotune.measure.score import Score
from autotune.workload import Arrival, Workload
from benchmarks.sweep.cases import LIMITS, Grid
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, percentile
from runtime.slo import SLO

VLLM_DEFAULTS = LIMITS.clamp(defaults.VLLM_DEFAULTS)

RESTART_S = 70.0
"""From starting a server to its first answer: vLLM 0.32 on CPU with random weights took 70 s; compiling for a GPU adds to it."""

OPTUNA_STARTUP = 10
"""``n_startup_trials`` of Optuna's TPESampler unless told otherwise."""

EXPERT_BUDGETS = (2048, 8192)
"""Of vLLM's guide: the smaller for inter-token latency, the larger for TTFT and throughput."""

_KILL_S, _RESET_S = 10.0, 5.0  # pauses in the script: after a server is killed, and before each rate


class Load(Protocol):
    """What settings are compared under, and the grid in which they lie."""

    @property
    def grid(self) -> Grid: ...
    @property
    def slo(self) -> SLO: ...
    def load(self, rate: float | None = None) -> Workload: ...


class Rig(Protocol):
    """A machine that one search has to itself. ``spent_s``: seconds it was busy or restarting."""

    @property
    def case(self) -> Load: ...
    @property
    def limits(self) -> KnobLimits: ...
    @property
    def spent_s(self) -> float: ...

    def rest(self, seconds: float) -> None:
        """Let time pass in which nothing is measured: a restart, a pause."""

    def measure(self, knobs: Knobs, seed: int, *, part: float = 1.0) -> Score:
        """The load under ``knobs``, in ``part`` of the usual window; equal seeds, equal requests."""
        ...

    def serve(self, knobs: Knobs, arrivals: Sequence[Arrival], seed: int) -> tuple[list[RequestRecord], float]:
        """``arrivals`` under ``knobs`` to the end: records, and seconds from the first arrival to the last token."""
        ...


@dataclass(frozen=True)
class Choice:
    """``knobs`` None: nothing was found. ``measured``: settings that were measured; ``runs``: measurements made."""

    knobs: Knobs | None
    spent_s: float
    measured: int
    runs: int


def exhaustive(machine: Rig, repeats: int, seed: int) -> list[tuple[Choice, dict[Knobs, float]]]:
    """The whole grid, ``repeats`` times under other seeds: what is chosen after each round, and the mean goodputs then."""
    found: dict[Knobs, list[float]] = {knobs: [] for knobs in machine.case.grid.cells()}
    rounds = []
    for repeat in range(repeats):
        for knobs, values in found.items():
            values.append(machine.measure(knobs, load_seed(seed, repeat)).goodput)
        means = {knobs: statistics.fmean(values) for knobs, values in found.items()}
        best = max(means, key=lambda knobs: means[knobs])
        rounds.append((Choice(best, machine.spent_s, len(means), len(means) * (repeat + 1)), means))
    return rounds


def random_search(machine: Rig, budget_s: float, seed: int) -> Choice:
    """Settings drawn log-uniformly from the grid's ranges, all under the same requests; the best of them."""
    return _search(machine, budget_s, seed, _drawn(machine.case, seed), lambda knobs, goodput: None)


def tpe(machine: Rig, budget_s: float, seed: int, *, random_trials: int = 5, restart_s: float = 0.0) -> Choice:
    """Optuna's TPE on the hardware, beginning with vLLM's defaults (moved into the grid's ranges); the best of all trials.

    All meet the same requests. ``random_trials``: ``n_startup_trials``, drawn before it models anything. Five are half of what
    the time of a search here allows, ten are Optuna's default (:data:`OPTUNA_STARTUP`). Parameters are modelled together, as
    Optuna's documentation of ``multivariate`` advises (Falkner et al., ICML 2018). ``restart_s``: of each trial, for a server of
    its own.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = TPESampler(seed=seed, n_startup_trials=random_trials, multivariate=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    space = {name: IntDistribution(low, high, log=True) for name, (low, high) in ranges_of(machine.case).items()}
    study.enqueue_trial(_first(machine))
    trials: list[optuna.Trial] = []

    def ask() -> Iterator[Knobs]:
        while True:
            trials.append(study.ask(space))  # type: ignore[arg-type]  # a dict of one kind of distribution is one of them
            yield _knobs(trials[-1].params)

    def tell(knobs: Knobs, goodput: float) -> None:
        study.tell(trials[-1], goodput)

    return _search(machine, budget_s, seed, ask(), tell, restart_s)


def halving(
    machine: Rig, budget_s: float, seed: int, *, window_s: float, warmup_s: float, eta: int = 3, rungs: int = 3
) -> Choice:
    """Successive halving over the window's length (Karnin, Koren and Somekh, ICML 2013; Jamieson and Talwalkar, AISTATS 2016).

    vLLM's defaults (moved into the grid's ranges) and settings drawn as by :func:`random_search` are measured in a short window,
    1/``eta``^(``rungs`` − 1) of the usual one; the best 1/``eta`` of them in one ``eta`` times as long, and so on; the best of
    the whole window is chosen. As many as fit into ``budget_s`` by ``window_s`` and ``warmup_s``, which no window is without. All
    measurements begin with the same requests. What a rung that the time cut short did not measure is out.
    """
    parts = [float(eta) ** (number + 1 - rungs) for number in range(rungs)]
    costs = [warmup_s + part * window_s for part in parts]

    def takes(count: int) -> float:
        return sum(math.ceil(count / float(eta) ** number) * cost for number, cost in enumerate(costs))

    count = 1
    while takes(count + 1) <= budget_s:
        count += 1
    drawn = _drawn(machine.case, seed)
    left = list(dict.fromkeys([_knobs(_first(machine)), *(next(drawn) for _ in range(count - 1))]))
    measured, runs = len(left), 0
    for number, part in enumerate(parts):
        found: dict[Knobs, float] = {}
        for knobs in left:
            if runs and machine.spent_s + costs[number] / 2 > budget_s:
                break
            found[knobs] = machine.measure(knobs, load_seed(seed), part=part).goodput
            runs += 1
        if not found:
            break
        ranked = sorted(found, key=lambda knobs: found[knobs], reverse=True)
        left = ranked[: math.ceil(len(ranked) / eta)]
    return Choice(left[0], machine.spent_s, measured, runs)


def expert(machine: Rig, budget_s: float, seed: int, *, kv_tokens: int) -> Choice:
    """What somebody does who has read vLLM's guide (docs/configuration/optimization.md, "Optimization and Tuning", 2026).

    It says of max_num_batched_tokens that small values, 2,048 say, are better for inter-token latency, larger ones for TTFT, and
    8,192 or more for throughput; of max_num_seqs, that fewer need less of the KV pool and so keep requests from being preempted.
    So: as many sequences as the pool of ``kv_tokens`` holds of mean length, no limit to a prompt's chunk, and of the two budgets
    the one that measures better, each once; where the grid ends lower, they are as much lower. However little ``budget_s`` is,
    one is measured.
    """
    batch = min(max(1, kv_tokens // sum(mean_lengths(machine.case))), max(machine.case.grid.batches))
    smaller = 8192 // max(machine.case.grid.budgets)
    settings = [Knobs(batch, 0, budget // smaller, budget // smaller) for budget in EXPERT_BUDGETS]
    return _search(machine, budget_s, seed, iter(settings), lambda knobs, goodput: None)


def auto_tune(
    machine: Rig,
    budget_s: float,
    seed: int,
    *,
    restart_s: float = RESTART_S,
    burst: int = 1000,
) -> Choice:
    """The procedure of vLLM's ``benchmarks/auto_tune`` (README and script, 2025).

    For each pair a server is started. ``burst`` prompts are sent at once; if the p99 of their E2E latency keeps the limit, their
    throughput is the pair's. Else the rate begins at the integer above that throughput and goes down by 1, 100 Poisson
    arrivals each, until it does. The pair of the highest throughput (completed requests/s) is chosen. Prompts and outputs
    all have the load's mean length. It knows no TTFT nor TPOT: the limit is the E2E latency that the two targets allow a
    request of that length, TTFT + TPOT · (output − 1). ``restart_s`` 0 leaves the script's pauses out too.
    Its lists are 128 and 256 sequences, 512 to 4,096 tokens; where the grid ends lower, they are as much lower.
    When ``budget_s`` is over it stops and takes the best so far.
    """
    batches, budgets = lists_of(machine.case)
    prompt, output = mean_lengths(machine.case)
    limit = e2e_limit(machine.case.slo, output)
    runs, settings, most = 0, 0, 0.0
    best: Knobs | None = None

    def run(knobs: Knobs, rate: float, count: int) -> tuple[float, float]:
        nonlocal runs
        runs += 1
        if restart_s and rate < inf:
            machine.rest(_RESET_S)
        number = seed * 1000 + runs
        records, seconds = machine.serve(knobs, _arrivals(rate, count, prompt, output, number), number)
        return len(records) / seconds, percentile([r.e2e or inf for r in records], 99) or inf

    for batch in batches:
        for budget in budgets:
            if machine.spent_s + restart_s >= budget_s:
                return Choice(best, machine.spent_s, settings, runs)
            machine.rest(restart_s + (_KILL_S if restart_s and settings else 0.0))
            settings += 1
            knobs = Knobs(max_batch_size=batch, max_wait_ms=0, token_budget=budget, chunk_size=budget)
            throughput, latency = run(knobs, inf, burst)
            rate = int(throughput) + 1
            while latency > limit and rate > 0 and machine.spent_s < budget_s:
                throughput, latency = run(knobs, rate, 100)
                rate -= 1
            if latency <= limit and throughput > most:
                most, best = throughput, knobs
    return Choice(best, machine.spent_s, settings, runs)


def ranges_of(case: Load) -> dict[str, tuple[int, int]]:
    """Where random search and TPE look: from the least to the greatest value of the grid."""
    values = {"max_batch_size": case.grid.batches, "token_budget": case.grid.budgets, "chunk_size": case.grid.budgets}
    return {name: (min(given), max(given)) for name, given in values.items()}


def lists_of(case: Load) -> tuple[list[int], list[int]]:
    """auto_tune's values of max-num-seqs and max-num-batched-tokens, made for a grid that ends at 512 and 8,192."""
    fewer, smaller = 512 // max(case.grid.batches), 8192 // max(case.grid.budgets)
    return [128 // fewer, 256 // fewer], [tokens // smaller for tokens in (512, 1024, 2048, 4096)]


def mean_lengths(case: Load) -> tuple[int, int]:
    """(prompt, output) tokens, the means of the case's load."""
    drawn = list(case.load().arrivals(0, limit=4000))
    return (
        round(statistics.fmean(a.prompt_tokens for a in drawn)),
        round(statistics.fmean(a.output_tokens for a in drawn)),
    )


def e2e_limit(slo: SLO, output: int) -> float:
    """Seconds that TTFT and TPOT targets allow a request of ``output`` tokens."""
    return ((slo.ttft_ms or inf) + (slo.tpot_ms or inf) * (output - 1)) / 1000


def load_seed(seed: int, number: int = 0) -> int:
    """Seeds of the requests a contender measures under; the truth's are others."""
    return 1_000_003 * (seed + 1) + number


def _search(
    machine: Rig,
    budget_s: float,
    seed: int,
    proposals: Iterator[Knobs],
    tell: Callable[[Knobs, float], None],
    restart_s: float = 0.0,
) -> Choice:
    found: dict[Knobs, float] = {}
    runs = 0
    while not runs or machine.spent_s + machine.spent_s / runs / 2 <= budget_s:
        knobs = next(proposals, None)
        if knobs is None:
            break
        machine.rest(restart_s)
        found[knobs] = machine.measure(knobs, load_seed(seed)).goodput
        runs += 1
        tell(knobs, found[knobs])
    return Choice(max(found, key=lambda knobs: found[knobs]), machine.spent_s, len(found), runs)


def _drawn(case: Load, seed: int) -> Iterator[Knobs]:
    """Settings drawn log-uniformly from the grid's ranges, without end."""
    dice = random.Random(seed)
    ranges = ranges_of(case)
    while True:
        yield _knobs({n: round(math.exp(dice.uniform(math.log(a), math.log(b)))) for n, (a, b) in ranges.items()})


def _knobs(values: dict[str, int]) -> Knobs:
    return Knobs(max_wait_ms=0, **{**values, "chunk_size": min(values["chunk_size"], values["token_budget"])})


def _first(machine: Rig) -> dict[str, int]:
    """vLLM's defaults, moved into the grid's ranges."""
    defaults = machine.limits.clamp(VLLM_DEFAULTS)
    return {n: min(max(getattr(defaults, n), low), high) for n, (low, high) in ranges_of(machine.case).items()}


def _arrivals(rate: float, count: int, prompt: int, output: int, seed: int) -> list[Arrival]:
    """``count`` requests of these lengths by Poisson; all at once where ``rate`` is infinite."""
    dice, now = random.Random(seed), 0.0
    arrivals = []
    for number in range(count):
        arrivals.append(Arrival(now, prompt, output, ((seed * 2000 + number, prompt),)))
        now += dice.expovariate(rate) if rate < inf else 0.0
    return arrivals
