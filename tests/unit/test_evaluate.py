"""One setting measured on a real engine with known step times, and the arithmetic from records to a score."""

from __future__ import annotations

import gc
import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest

from autotune.measure.evaluate import QUEUED_S, TOKEN_S, EvaluationError, Interrupted, evaluate, last_deadline, offered
from autotune.measure.frozen_heap import frozen_heap
from autotune.measure.score import Score, deadline, score, step_stats
from autotune.simulate import SimulatedEngine
from autotune.workload import Arrival, parse_workload
from autotune.workload.replay import ReplayReport
from runtime.errors import DeviceError, EngineClosedError
from runtime.knobs import Knobs
from runtime.llm.engine import Engine
from runtime.llm.plan import StepPlan, StepResult
from runtime.records import FinishReason, LimitedBy, StepRecord
from runtime.request import Sequence
from runtime.shared.ceilings import StepLoad
from runtime.slo import SLO, RequestClass
from runtime.step_model import StepFeatures
from tests.building import request_record
from tests.fakes import Records, count_up
from tests.unit.paced import WORKLOAD, paced

EASY = SLO(ttft_ms=5000, tpot_ms=1000)
KNOBS = Knobs(16, 0, 128, 128)


def measure(engine: Engine, slo: SLO = EASY, workload: str = WORKLOAD, **options: Any) -> Score:
    given = {"vocab_size": 256, "seed": 0, "duration": 0.6, "warmup": 0.2}
    return evaluate(engine, KNOBS, parse_workload(workload), slo, **(given | options))


def test_an_easy_slo_is_met_and_counted_over_the_window_only() -> None:
    with paced() as engine:
        found = measure(engine)
        expected = [a for a in parse_workload(WORKLOAD).arrivals(0, duration=0.8) if a.time >= 0.2]
        assert found.offered == found.met == len(expected)
        assert found.attainment == 1.0 and found.attainment_low < 1.0
        assert found.goodput == found.completed_rate == found.offered_rate == pytest.approx(len(expected) / 0.6)
        assert sum(offered for offered, _ in found.blocks) == found.offered
        assert found.setting == KNOBS.as_dict() and engine.knobs == KNOBS
        assert found.epoch == engine.epoch
        assert found.ttft_ms.p50 is not None and found.ttft_ms.p50 > 2
        assert found.steps.steps > 10 and found.steps.mean_ms >= 2
        assert found.unfinished == 0 and found.violations == {}


def test_throughput_counts_tokens_that_came_in_the_window() -> None:
    load = parse_workload("fixed:rate=50,prompt=8,output=4")
    engine = SimulatedEngine(Steady(), kv_tokens=10_000_000)
    found = evaluate(engine, ROOMY, load, EASY, vocab_size=256, seed=0, duration=10.0, warmup=2.0)
    assert found.throughput == pytest.approx(200, rel=0.02)


def test_what_cannot_be_met_is_a_miss_not_an_error() -> None:
    with paced(base=0.03) as engine:  # four tokens take 0.12 s
        found = measure(engine, SLO(tpot_ms=1, e2e_ms=60))
        assert found.met == 0 and found.offered > 0 and found.goodput == 0
        assert found.unfinished + sum(found.violations.values()) >= found.offered
        assert engine.view().running == engine.view().waiting == 0


def test_the_drain_ends_with_the_last_deadline() -> None:
    with paced(base=0.2) as engine:  # hopeless: 40 requests/s where two tokens take 0.4 s
        found = measure(engine, SLO(e2e_ms=300))
        assert found.unfinished > 0  # a drain without end would have finished them
        assert engine.view().running == engine.view().waiting == 0


def test_who_listens_to_an_engine_hears_of_the_misses_that_the_score_counts() -> None:
    heard = Records()
    with paced(base=0.2) as engine:
        engine.subscribe(heard)
        found = measure(engine, SLO(e2e_ms=300), warmup=0.0)
    assert 0 < found.unfinished <= sum(r.reason is FinishReason.TIMEOUT for r in heard.requests)
    assert found.offered == sum(r.offered for r in heard.requests)


@pytest.mark.parametrize("steps", [3, 10_000], ids=["for a while", "for good"])
def test_a_run_in_which_memory_ran_out_is_an_error_and_no_score(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.shared.ceilings._PATIENCE", steps)
    with paced() as engine:
        execute, ran_out = engine.executor.execute, threading.Event()

        def short_once(plan: StepPlan, now: float, until: float) -> StepResult:
            result = execute(plan, now, until)
            if ran_out.is_set():
                return result
            ran_out.set()
            return result._replace(oom=[StepLoad(2, 150, 75)], fitted=[StepLoad(2, 75, 75)] * 2)

        monkeypatch.setattr(engine.executor, "execute", short_once)
        with pytest.raises(EvaluationError, match=r"out of memory: the engine's limits fell to .*'token_budget': 75"):
            measure(engine, workload="fixed:rate=50,prompt=60,output=1")
        assert (engine.knobs == KNOBS) == (steps == 3), "and rose again, in the one case"


@pytest.mark.slow
def test_equal_seeds_offer_equal_loads_and_other_tokens_when_asked() -> None:
    prompts: list[list[list[int]]] = []
    with paced() as engine:
        submit = engine.submit
        for prompt_seed in (1, 1, 2):
            seen: list[list[int]] = []

            def spy(prompt: Any, *args: Any, _seen: list[list[int]] = seen, **options: Any) -> Any:
                _seen.append(prompt)
                return submit(prompt, *args, **options)

            engine.submit = spy  # type: ignore[method-assign]
            measure(engine, prompt_seed=prompt_seed)
            prompts.append(seen)
    assert prompts[0] == prompts[1]
    assert prompts[0] != prompts[2]
    assert [len(p) for p in prompts[0]] == [len(p) for p in prompts[2]]


def test_a_request_that_fails_fails_the_measurement_with_its_cause() -> None:
    def sample(sequence: Sequence) -> int:
        if len(sequence.output) == 2:
            raise ArithmeticError("the weights melted")
        return count_up(sequence)

    with paced(sample=sample) as engine, pytest.raises(EvaluationError, match="the weights melted"):
        measure(engine)


def test_no_full_garbage_collection_falls_into_a_measurement() -> None:
    frozen: list[int] = []
    sampled = itertools.count()

    def sample(sequence: Sequence) -> int:
        if next(sampled) % 50 == 0:  # counting walks the heap
            frozen.append(gc.get_freeze_count())
        return count_up(sequence)

    assert gc.get_freeze_count() == 0
    with paced(sample=sample) as engine:
        measure(engine)
        assert min(frozen) > 10_000 and gc.get_freeze_count() == 0
        gc.freeze()  # somebody else's stays
        try:
            measure(engine)
            assert gc.get_freeze_count() > 10_000
        finally:
            gc.unfreeze()


def test_the_heap_thaws_behind_the_last_who_froze_it() -> None:
    first, second = frozen_heap(), frozen_heap()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_freeze_count() > 10_000
    second.__exit__(None, None, None)
    assert gc.get_freeze_count() == 0


def test_stop_ends_it_at_once_and_leaves_the_engine_idle() -> None:
    with paced() as engine:
        stop = threading.Event()
        timer = threading.Timer(0.3, stop.set)
        timer.start()
        with pytest.raises(Interrupted):
            measure(engine, duration=30.0, stop=stop.is_set)
        timer.join()
        assert engine.view().running == engine.view().waiting == 0
        assert measure(engine).offered > 0


def test_a_reject_is_a_miss() -> None:
    with paced(base=0.05) as engine:
        engine._loop._max_queue = 1  # type: ignore[attr-defined]
        found = measure(engine, SLO(e2e_ms=2000), workload="fixed:rate=100,prompt=8,output=4")
    assert 0 < found.met < found.offered
    assert found.violations["completion"] == found.offered - found.met


def test_no_setting_leaves_the_knobs() -> None:
    with paced() as engine:
        engine.set_knobs(Knobs(3, 0, 33, 33))
        found = evaluate(engine, None, parse_workload(WORKLOAD), EASY, vocab_size=256, seed=0, duration=0.3)
        assert found.setting == Knobs(3, 0, 33, 33).as_dict()


@pytest.mark.parametrize(
    ("slo", "tokens", "seconds"),
    [
        (SLO(ttft_ms=500, tpot_ms=50), 1, 0.5),
        (SLO(ttft_ms=500, tpot_ms=50), 11, 1.0),
        (SLO(ttft_ms=500, tpot_ms=50, e2e_ms=800), 11, 0.8),
        (SLO(ttft_ms=500, itl_ms=20), 11, 0.7),
        (SLO(e2e_ms=200), 1000, 0.2),
        (SLO(ttft_ms=500, itl_ms=20), 100, 2.48),
        (SLO(ttft_ms=500, itl_ms=20), 101, math.inf),  # one of its hundred gaps may be as long as it likes
        (SLO(ttft_ms=500), 1, 0.5),
        (SLO(ttft_ms=500), 2, math.inf),
        (SLO(tpot_ms=50), 2, math.inf),
    ],
)
def test_deadlines(slo: SLO, tokens: int, seconds: float) -> None:
    assert deadline(slo, tokens) == pytest.approx(seconds)


@pytest.mark.parametrize("duration", [0.4, 1.0, 4.2, 8.19, 8.6])
def test_blocks_of_a_score_are_equally_long(duration: float) -> None:
    """Else a stub at the end would count as a block in which hardly any request came."""
    records = [request_record([t + 0.1, t + 0.2], arrival=t) for t in (duration * (i + 0.5) / 840 for i in range(840))]
    found = score(
        records, SLO(ttft_ms=500), setting=KNOBS, epoch=3, seed=5, rate=2.0, start=0.0, duration=duration, tokens=5,
        steps=[], report=ReplayReport(840, 0.0, duration, 0.0, 0.0, 0.0, 0.0, False), wall_s=4.0,
    )  # fmt: skip
    assert len(found.blocks) == max(1, round(duration))
    assert max(offered for offered, _ in found.blocks) - min(offered for offered, _ in found.blocks) <= 1


def test_score_from_records() -> None:
    records = [
        request_record([100.1, 100.2], arrival=100.0),
        request_record([100.9, 101.0], arrival=100.3),  # TTFT 600 ms
        request_record([101.6], arrival=101.5),
        request_record((), arrival=101.9, reason=FinishReason.TIMEOUT),
    ]
    found = score(
        records, SLO(ttft_ms=500, tpot_ms=200), setting=KNOBS, epoch=3, seed=5, rate=2.0, start=100.0, duration=2.0,
        tokens=5, steps=[], report=ReplayReport(4, 99.0, 102.0, 0.001, 0.002, 0.003, 0.3, False), wall_s=4.0,
    )  # fmt: skip
    assert (found.offered, found.met, found.attainment) == (4, 2, 0.5)
    assert found.goodput == 1.0 and found.completed_rate == 1.5 and found.throughput == 2.5
    assert found.blocks == [(2, 1), (2, 1)]
    assert found.violations == {"ttft": 1, "completion": 1}
    assert found.unfinished == 1
    assert found.ttft_ms.p50 == pytest.approx(100) and found.ttft_ms.p99 == pytest.approx(600)
    assert found.tpot_ms.p99 == pytest.approx(100)
    assert found.lateness_p99_ms == 2.0 and found.sender_busy == pytest.approx(0.1)
    assert Score.model_validate_json(found.model_dump_json()) == found


def test_step_statistics() -> None:
    def step(duration: float, running: int, bound: LimitedBy) -> StepRecord:
        return StepRecord(
            0.0, duration, 1, running, 0, 0, 0, 0, 0, 0, running, 0, 0, 0, 1, 0, 0, bound
        )  # fmt: skip

    found = step_stats([step(0.01, 2, LimitedBy.DEMAND), step(0.03, 4, LimitedBy.SLOTS)])
    assert (found.steps, found.max_running, found.preemptions) == (2, 4, 2)
    assert found.mean_ms == pytest.approx(20) and found.mean_running == 3 and found.mean_tokens == 3
    assert found.limited_by == {"demand": 0.5, "slots": 0.5}
    assert step_stats([]).steps == 0


def test_answers_that_are_kept_for_a_minute_count_however_short_the_window() -> None:
    """400 tokens at 90 ms take 36 s and have a target of 41: the drain lasts as long as the SLO."""
    engine = SimulatedEngine(Steady(), kv_tokens=10_000_000)
    load = parse_workload("poisson:rate=5,prompt=10,output=400")
    found = evaluate(engine, ROOMY, load, SLO.parse("ttft=1s,tpot=100ms"), vocab_size=10, seed=0, duration=4.0)
    assert found.met == found.offered > 10 and not found.unfinished


def test_without_a_deadline_the_drain_is_cut_short() -> None:
    engine = SimulatedEngine(Steady(), kv_tokens=10_000_000)
    load = parse_workload("poisson:rate=5,prompt=10,output=400")
    one_at_a_time = Knobs(1, 0, 8192, 8192)  # 36 s each
    found = evaluate(engine, one_at_a_time, load, SLO.parse("ttft=1s"), vocab_size=10, seed=0, duration=4.0)
    assert 0 < found.unfinished < found.offered and engine.clock.now() < 4.0 + QUEUED_S + 400 * TOKEN_S + 0.1


@pytest.mark.parametrize("slo", ["ttft=1s", "tpot=100ms", "tpot=100ms,e2e=1000s"])
def test_without_a_deadline_a_long_answer_has_time(slo: str) -> None:
    """400 tokens at 90 ms take 36 s."""
    engine = SimulatedEngine(Steady(), kv_tokens=10_000_000)
    load = parse_workload("poisson:rate=5,prompt=10,output=400")
    found = evaluate(engine, ROOMY, load, SLO.parse(slo), vocab_size=10, seed=0, duration=4.0)
    assert found.met == found.offered > 10


@pytest.mark.parametrize(
    ("slo", "seconds"),
    [
        ("ttft=1s", 2 + 30 + 10 * 0.1),
        ("ttft=40s", 2 + 40 + 10 * 0.1),
        ("tpot=300ms", 2 + 30 + 10 * 0.3),
        ("ttft=1s,tpot=300ms", 2 + 1 + 10 * 0.3),
        ("itl=300ms", 2 + 30 + 10 * 0.3),
        ("tpot=200ms,itl=300ms", 2 + 30 + 10 * 0.3),
    ],
)
def test_what_has_no_deadline_has_its_targets_or_more(slo: str, seconds: float) -> None:
    assert last_deadline([Arrival(2.0, 5, 11, ((0, 5),))], SLO.parse(slo)) == pytest.approx(seconds)


def test_a_class_without_a_deadline_takes_none_from_the_others() -> None:
    """Two of 40 answers of 9 s at once: the last is there after three minutes, which batch's E2E allows."""
    load = parse_workload("chat=fixed:prompt=10,output=100@0.5+batch=fixed:prompt=10,output=100@0.5").at_rate(5)
    slos = {"chat": SLO(ttft_ms=90_000), "batch": SLO(e2e_ms=400_000)}
    engine = SimulatedEngine(Steady(), kv_tokens=10_000_000)
    found = evaluate(engine, Knobs(2, 0, 64, 64), load, slos, vocab_size=10, seed=0, duration=8.0)
    assert found.classes["batch"].met == found.classes["batch"].offered > 10


def test_a_class_without_an_slo_is_named_before_anything_is_sent() -> None:
    engine = SimulatedEngine(Steady(), kv_tokens=10_000_000)
    with pytest.raises(ValueError, match="no SLO for class"):
        evaluate(engine, ROOMY, TwoClasses(), {"chat": SLO(ttft_ms=200)}, vocab_size=10, seed=0, duration=4.0)  # type: ignore[arg-type]
    assert engine.clock.now() == 0 and engine.view().running == engine.view().waiting == 0


def test_a_request_that_is_refused_ends_the_measurement_and_leaves_nothing_running() -> None:
    with paced() as engine:
        with pytest.raises(EvaluationError, match=r"request \d+ of the workload is refused: prompt \(\d+ tokens\)"):
            measure(engine, workload="poisson:rate=50,prompt=900~2,output=40", duration=3.0)
        assert engine.view().running == engine.view().waiting == 0


class Steady:
    """Every step takes 90 ms."""

    def predict(self, step: StepFeatures) -> float:
        return 0.09


ROOMY = Knobs(512, 0, 8192, 8192)


@pytest.mark.parametrize("stopped", [False, True])
def test_who_listens_to_a_simulation_hears_of_the_misses_that_the_score_counts(stopped: bool) -> None:
    """Half of the requests are unfinished at the last deadline; where the measurement was ended early, nobody missed any."""
    engine, heard, asked = SimulatedEngine(Steady(), kv_tokens=10_000_000, knobs=Knobs(2, 0, 8192, 8192)), Records(), []
    engine.subscribe(heard)

    def stop() -> bool:
        asked.append(True)
        return stopped and len(asked) > 5

    load, how = parse_workload("fixed:rate=10,prompt=8,output=4"), {"vocab_size": 2, "seed": 0, "duration": 5.0}
    with pytest.raises(Interrupted) if stopped else nullcontext():
        found = evaluate(engine, None, load, SLO(e2e_ms=400), stop=stop, **how)
        assert found.unfinished > 20
        assert found.unfinished == sum(not r.completed for r in heard.requests)
        assert found.offered == sum(r.offered for r in heard.requests)
    causes = {(r.reason, r.cause) for r in heard.requests if not r.completed}
    late = (FinishReason.TIMEOUT, "unfinished when the last deadline had passed")
    assert causes == {(FinishReason.CANCELLED, "by the client") if stopped else late}


class TwoClasses:
    """Short chat answers and long batch answers by turns, ten of each a second."""

    rate = 20.0
    description = "two classes"

    def arrivals(self, seed: int, *, duration: float) -> Iterator[Arrival]:
        for number in range(int(20 * duration)):
            name, output = ("chat", 2) if number % 2 else ("batch", 20)
            yield Arrival(number / 20, 10, output, ((number, 10),), name)


def test_each_request_is_judged_by_the_slo_of_its_class() -> None:
    """Steps of 90 ms: chat gets its TTFT, batch would never; by its own SLO it is in time, whatever chat asks for."""
    slos = {"default": SLO(ttft_ms=1), "chat": SLO(ttft_ms=200), "batch": SLO(e2e_ms=4000)}
    workload: Any = TwoClasses()

    def found(slo: SLO | dict[str, SLO]) -> Score:
        engine = SimulatedEngine(Steady(), kv_tokens=10_000_000)
        return evaluate(engine, ROOMY, workload, slo, vocab_size=10, seed=0, duration=4.0)

    score = found(slos)
    assert score.attainment == 1 and score.met == score.offered == 80 and not score.violations
    assert {name: (c.offered, c.met) for name, c in score.classes.items()} == {
        "chat": (40, 40), "batch": (40, 40),
    }, "nobody goes by default"  # fmt: skip
    assert score.classes["batch"].slo == "e2e=4000ms@99%" and score.classes["chat"].goodput == 10
    tight = found(slos | {"batch": SLO(e2e_ms=400)})
    assert (tight.attainment, tight.met, tight.violations) == (0.5, 40, {"e2e": 40})
    assert tight.classes["batch"].violations == {"e2e": 40} and tight.classes["chat"].attainment == 1
    assert sum(met for _, met in tight.blocks) == 40
    alone = found(SLO(e2e_ms=4000))
    assert alone.attainment == 1 and not alone.classes, "one SLO for all has no classes"
    assert found({"default": SLO(e2e_ms=4000)}) == alone.model_copy(update={"wall_s": found(SLO(e2e_ms=4000)).wall_s})
    with pytest.raises(ValueError, match="no SLO for class batch, and no default"):
        found({"chat": SLO(ttft_ms=200)})


def test_goodput_weighs_each_request_by_its_class() -> None:
    """Ten of each a second; batch is worth a quarter and takes 1.8 s."""
    workload: Any = TwoClasses()
    chat = RequestClass("chat", SLO(ttft_ms=200))

    def found(*classes: RequestClass, default: SLO = SLO(e2e_ms=4000)) -> Score:  # noqa: B008  # frozen
        engine = SimulatedEngine(Steady(), kv_tokens=10_000_000)
        return evaluate(
            engine, ROOMY, workload, default, vocab_size=10, seed=0, duration=4.0, classes=classes
        )  # fmt: skip

    both = found(chat, RequestClass("batch", SLO(e2e_ms=4000), 0.25))
    assert both.goodput == pytest.approx(12.5) and (both.met, both.offered) == (80, 80)
    assert both.weighted_attainment == 1 and sum(met for _, met in both.blocks) == pytest.approx(50)
    late = found(chat, RequestClass("batch", SLO(e2e_ms=400), 0.25))
    assert (
        late.goodput == pytest.approx(10) and late.attainment == 0.5 and late.weighted_attainment == pytest.approx(0.8)
    )
    assert [late.classes[name].weight for name in ("chat", "batch")] == [1.0, 0.25]
    assert late.classes["batch"].throughput + late.classes["chat"].throughput == pytest.approx(late.throughput)
    assert late.classes["chat"].throughput == pytest.approx(20, rel=0.1), "ten answers of two tokens a second"
    rest = found(chat)
    assert rest.classes["default"].offered == 40 and rest.classes["default"].weight == 1
    assert rest.goodput == 20 == found().goodput
    assert Score.model_validate_json(late.model_dump_json()) == late


def test_scores_tell_what_was_rejected_and_relegated_by_class() -> None:
    """Two slots, and 90 ms a step: chat alone would nearly fill them."""
    workload: Any = TwoClasses()
    classes = [RequestClass("chat", SLO(ttft_ms=500)), RequestClass("batch", SLO(ttft_ms=2000), 0.2)]
    engine = SimulatedEngine(
        Steady(), kv_tokens=10_000_000, slo=SLO(ttft_ms=500), classes=classes, admission=True,
        knobs=Knobs(512, 0, 64, 10),
    )  # fmt: skip
    found = evaluate(
        engine, Knobs(2, 0, 16, 10), workload, SLO(ttft_ms=500), vocab_size=10, seed=0, duration=10.0, classes=classes
    )
    chat, batch = found.classes["chat"], found.classes["batch"]
    assert chat.rejections.keys() <= {"slo", "queue_timeout"} and sum(chat.rejections.values()) > 10
    assert batch.relegated > 10 and not chat.relegated and not batch.rejections
    assert found.e2e_mean_ms is not None and found.e2e_mean_ms > 90


def test_a_short_load_is_drawn_once_and_is_that_of_its_rate_seed_and_seconds() -> None:
    load = parse_workload(WORKLOAD)
    for of, seed, seconds in ((load, 0, 5.0), (load, 1, 5.0), (load, 0, 4.0), (load.at_rate(2 * load.rate), 0, 5.0)):
        found = offered(of, seed, seconds)
        assert list(found) == list(of.arrivals(seed, duration=seconds))
        assert offered(replace(of), seed, seconds) is found, "of an equal workload"
    few = replace(load, limit=3)
    assert len(offered(few, 0, 5.0)) == 3 and offered(few, 0, 5.0) is not offered(few, 0, 5.0)
    assert offered(load, 0, 1e4 / load.rate) is not offered(load, 0, 1e4 / load.rate), "a long one takes memory"


def test_a_source_without_a_hash_is_served() -> None:
    @dataclass
    class Own:
        rate: float = 10.0
        finite: bool = False

        def at_rate(self, rate: float) -> Own:
            return Own(rate)

        def generate(self, seed: tuple[int, ...]) -> Iterator[Arrival]:
            return (Arrival(n / self.rate, 4, 2, ((n, 4),)) for n in range(10**9))

    assert len(offered(replace(parse_workload(WORKLOAD), source=Own(), limit=None), 0, 2.0)) == 20


def test_a_setting_above_ceilings_that_memory_has_lowered_is_not_measured_as_another() -> None:
    with paced() as engine:
        lowered = replace(engine.limits, token_budget=64, chunk_size=64)
        engine._settings.limit(lowered)  # type: ignore[attr-defined]
        with pytest.raises(EvaluationError, match=r"out of memory: the engine's limits fell to .*'token_budget': 64"):
            measure(engine)


def test_an_engine_that_closes_is_no_score_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with paced() as engine:
        execute, steps = engine.executor.execute, itertools.count()

        def dies(plan: StepPlan, now: float, until: float) -> StepResult:
            if next(steps) == 3:  # while it warms up
                raise DeviceError("cuda:0 is lost")
            return execute(plan, now, until)

        monkeypatch.setattr(engine.executor, "execute", dies)
        with pytest.raises(EngineClosedError, match="the engine closed while it was measured"):
            measure(engine, warmup=0.3, duration=0.6)


def test_a_request_that_fails_while_the_engine_warms_up_fails_the_measurement_too() -> None:
    def sample(sequence: Sequence) -> int:
        if str(sequence.request.id).endswith("-0"):
            raise ArithmeticError("the weights melted")
        return count_up(sequence)

    with paced(sample=sample) as engine, pytest.raises(EvaluationError, match="the weights melted"):
        measure(engine)
