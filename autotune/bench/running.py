"""Taking turns: every contender serves the same arrivals, one after the other, in rounds.

Within a round all contenders get the same requests at the same times (common random numbers) under token ids of their own,
so that none profits from a prefix that another left in the cache; each round has another seed. The order rotates from round
to round, so that what else the machine does, and whatever drifts, meets each alike. Every turn begins with an idle engine and
nothing is left out: what a controller loses while it learns counts against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from autotune.bench.contenders import Contender
from autotune.control.decision_log import Decision
from autotune.engines import Engine
from autotune.measure.evaluate import EvaluationError, Interrupted, evaluate
from autotune.measure.score import Score
from autotune.workload import Workload
from runtime.errors import AutotuneError, EngineClosedError, InputError
from runtime.records import RequestRecord
from runtime.slo import SLO, RequestClass


class Turn(NamedTuple):
    """One measurement to make. ``prompts`` seeds the token ids, ``seed`` the arrivals and their lengths."""

    contender: Contender
    round: int
    seed: int
    prompts: int


class Outcome(NamedTuple):
    """One request: seconds from the start of the turn at which it was due, and latencies in ms (None: it had none); its class,
    and what it counts for."""

    due: float
    met: bool
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    request_class: str = "default"
    weight: float = 1.0


class Result(NamedTuple):
    """What a turn measured. ``decisions`` are the controller's, their times counted from the turn's first arrival."""

    turn: Turn
    score: Score
    outcomes: tuple[Outcome, ...]
    decisions: tuple[Decision, ...]


class Failure(NamedTuple):
    """A turn that could not be measured; it never becomes a bad score."""

    turn: Turn
    cause: str


def turns(contenders: Sequence[Contender], rounds: int, seed: int) -> list[Turn]:
    """All turns in their order. Round r begins with contender r; its arrivals have the seed ``seed`` + r."""
    planned: list[Turn] = []
    for r in range(rounds):
        at = r % len(contenders)
        for contender in (*contenders[at:], *contenders[:at]):
            planned.append(Turn(contender, r, seed + r, 1_000_003 * (seed + 1) + len(planned)))
    return planned


def measure(
    engine: Engine,
    planned: Sequence[Turn],
    workload: Workload,
    slo: SLO,
    *,
    vocab_size: int,
    duration: float,
    stop: Callable[[], bool] | None = None,
    classes: Sequence[RequestClass] = (),
) -> Iterator[Result | Failure]:
    """Make the measurements one by one. Ends early, without an error, when ``stop`` says so.

    ``classes`` have an SLO and a weight of their own; the engine must know them.
    """
    engine.set_slo(slo)
    for one in classes:
        engine.set_slo(one.slo, request_class=one.name)
    for turn in planned:
        if stop is not None and stop():
            return
        try:
            yield _measure(engine, turn, workload, slo, classes, vocab_size, duration, stop)
        except Interrupted:
            return
        except EngineClosedError as error:  # so are all turns that were to come; those before it count
            yield Failure(turn, str(error))
            return
        except InputError:
            raise
        except AutotuneError as error:
            yield Failure(turn, str(error))


def _measure(
    engine: Engine,
    turn: Turn,
    workload: Workload,
    slo: SLO,
    classes: Sequence[RequestClass],
    vocab_size: int,
    duration: float,
    stop: Callable[[], bool] | None,
) -> Result:
    records: list[RequestRecord] = []
    engine.set_knobs(turn.contender.knobs)
    engine.view()  # waits until what the turn before has set is gone
    with turn.contender.at_work(engine, slo) as attached:
        score = evaluate(
            engine,
            None,
            workload,
            slo,
            vocab_size=vocab_size,
            seed=turn.seed,
            prompt_seed=turn.prompts,
            duration=duration,
            label=f"bench-{turn.prompts}",
            stop=stop,
            keep=records.extend,
            classes=classes,
        )
        decisions = () if attached is None else tuple(attached.decisions)
        if attached is not None and attached.status().ended:
            cause = decisions[-2].cause if len(decisions) > 1 else "no cause given"
            raise EvaluationError(f"the controller failed: {cause.removeprefix('the controller failed: ')}")
    first = next(workload.arrivals(turn.seed, duration=duration), None)
    start = records[0].arrival - first.time if records and first is not None else 0.0
    return Result(
        turn,
        score,
        tuple(_outcome(record, start, slo, classes) for record in records if record.offered),
        tuple(d._replace(at=max(0.0, d.at - start)) for d in decisions),
    )


def _outcome(record: RequestRecord, start: float, slo: SLO, classes: Sequence[RequestClass]) -> Outcome:
    own = next((one for one in classes if one.name == record.request_class), None)
    ttft, tpot, e2e = (None if s is None else 1000 * s for s in (record.ttft, record.tpot, record.e2e))
    due, weight = record.arrival - start, 1.0 if own is None else own.weight
    return Outcome(due, (slo if own is None else own.slo).met(record), ttft, tpot, e2e, record.request_class, weight)
