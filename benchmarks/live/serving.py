"""Turns: contenders serve the same requests, one after the other, in rounds that have fewer and fewer of the fixed settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from autotune.bench import Contender, Failure, Result, Turn, measure
from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profiling.setup import balanced_seeds
from benchmarks.command import say
from benchmarks.live.loads import Case
from benchmarks.live.machine import Machine
from runtime.records import RequestRecord, StepRecord


class Midway:
    """Does something when the first step after ``at`` has ended."""

    def __init__(self, at: float, do: Callable[[], None]) -> None:
        self._at, self._do, self.done = at, do, False

    def on_step(self, record: StepRecord) -> None:
        if not self.done and record.end >= self._at:
            self.done = True
            self._do()

    def on_request(self, record: RequestRecord) -> None:
        """Steps are enough."""


@contextmanager
def shift(machine: Machine, case: Case, duration: float) -> Iterator[None]:
    """Take a core away in the middle of the run that is about to begin, if the case says so, and give it back at the end."""
    core = machine.core
    if not case.taken or core is None:
        yield
        return
    midway = Midway(machine.clock.now() + duration / 2, core.start)
    unsubscribe = machine.engine.subscribe(midway)
    try:
        yield
    finally:
        unsubscribe()
        core.stop()


def turn(
    machine: Machine,
    case: Case,
    contender: Contender,
    number: int,
    seed: int,
    prompts: int,
    duration: float,
    stop: Callable[[], bool] | None = None,
) -> Result:
    """One contender's turn in round ``number``. Raises :class:`EvaluationError`, or :class:`Interrupted` on ``stop``."""
    planned = [Turn(contender, number, seed, prompts)]
    with shift(machine, case, duration):
        for found in measure(
            machine.engine, planned, case.workload, case.slo, vocab_size=machine.facts.vocab_size, duration=duration,
            stop=stop,
        ):  # fmt: skip
            if isinstance(found, Failure):
                raise EvaluationError(found.cause)
            return found
    raise Interrupted("interrupted")


def average_seeds(case: Case, seed: int, count: int, duration: float) -> list[int]:
    """``count`` seeds under which the requests of a turn are as many, and have as many tokens, as the load has on average.

    A few seconds may by luck hold half as much again as others, and what is then compared is how contenders do under a load
    that nobody asked for.
    """
    return balanced_seeds(case.workload, 10_000 * (seed + 1), count, 0.0, duration)


class Contest:
    """All rounds of all cases. ``statics``: the fixed settings of each case, best first by what is known of them.

    ``plan``: how many of them take part in each round, the best so far; as many again of those with admission. Every
    round visits every case, so that what else the machine does meets all alike, and a run that is cut short has something to say
    of each. ``everywhere``: who takes part in all.
    """

    def __init__(
        self,
        machine: Machine,
        cases: Sequence[Case],
        everywhere: Sequence[Contender],
        statics: Mapping[str, Sequence[Contender]],
        plan: Sequence[int],
        *,
        seed: int,
        duration: float,
        stop: Callable[[], bool],
        tell: Callable[[Case, Result], None],
        fail: Callable[[Case, Contender, str], None],
    ) -> None:
        self.failures = 0
        self._seeds = {case.name: average_seeds(case, seed, len(plan), duration) for case in cases}
        self._results: dict[str, list[Result]] = {case.name: [] for case in cases}
        self._rounds = dict.fromkeys(self._results, 0)
        self._machine, self._cases, self._plan = machine, cases, plan
        self._everywhere, self._statics = everywhere, statics
        self._seed, self._duration, self._stop, self._tell, self._fail = seed, duration, stop, tell, fail
        self._turns = 0

    def run(self) -> None:
        """Until all is served, or ``stop`` says so."""
        for number, keep in enumerate(self._plan):
            for case in self._cases:
                leading = self.leading(case)
                plain, admitted = ([c for c in leading if c.control is kind][:keep] for kind in (False, True))
                taking_part = [*self._everywhere, *plain, *admitted]
                at = number % len(taking_part)
                for contender in (*taking_part[at:], *taking_part[:at]):
                    if not self._serve(case, contender, number):
                        return
                self._rounds[case.name] += 1

    def results(self, case: Case) -> list[Result]:
        """Those of the rounds that were served to the end."""
        return [r for r in self._results[case.name] if r.turn.round < self._rounds[case.name]]

    def leading(self, case: Case) -> list[Contender]:
        """The fixed settings that have been in every whole round so far, those with most requests within the SLO first."""
        met: dict[Contender, list[int]] = {contender: [] for contender in self._statics[case.name]}
        for result in self.results(case):
            if result.turn.contender in met:
                met[result.turn.contender].append(result.score.met)
        left = [contender for contender, kept in met.items() if len(kept) == self._rounds[case.name]]
        # stable: as they came, before any round
        return sorted(left, key=lambda contender: sum(met[contender]), reverse=True)

    def _serve(self, case: Case, contender: Contender, number: int) -> bool:
        """False when it was stopped. A turn that fails is left out, and named; it never becomes a bad score."""
        self._turns += 1
        prompts = 1_000_003 * (self._seed + 1) + self._turns  # token ids of its own: nobody finds another's prefixes
        seed = self._seeds[case.name][number]
        try:
            result = turn(self._machine, case, contender, number, seed, prompts, self._duration, self._stop)
        except Interrupted:
            return False
        except EvaluationError as error:
            self.failures += 1
            self._fail(case, contender, str(error))
            return True
        self._results[case.name].append(result)
        self._tell(case, result)
        return True


def say_turn(case: Case, result: Result, more: str = "") -> None:
    """A turn is over."""
    s = result.score
    say(
        f"  round {result.turn.round} {case.name:<12} {result.turn.contender.name:<26} {s.attainment:6.1%} of {s.offered:4} "
        f"TTFT {s.ttft_ms.p50 or 0:5.0f}/{s.ttft_ms.p99 or 0:5.0f} TPOT {s.tpot_ms.p50 or 0:5.1f}/{s.tpot_ms.p99 or 0:6.1f} "
        f"missed {s.violations}, steps {s.steps.mean_ms:.1f} ms{more}"
    )


def say_failed(case: Case, contender: Contender, cause: str) -> None:
    say(f"  {case.name}: the turn of {contender.name} is left out: {cause}")
