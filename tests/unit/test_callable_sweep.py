"""Profiling a callable: what is learned of it, what is chosen; in virtual time, and once for real."""

from __future__ import annotations

import random
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autotune
from autotune.cli.main import run
from autotune.measure.evaluate import EvaluationError
from autotune.profile.callable import BatcherSetting, CallablePoint, load_callable_profile, save_callable_profile
from autotune.profiling.batcher_space import AS_IT_COMES, ONE_AT_A_TIME, OPEN, STRATEGIES, BatcherSpace, choose, grid
from autotune.profiling.callable import (
    ITEMS,
    CallableSession,
    CallableSetup,
    CallableTarget,
    CallSimulator,
    measured_seeds,
    offered_to,
    ranked,
)
from autotune.profiling.calls import measure_calls
from autotune.profiling.objective import Objective
from autotune.profiling.points import Run, callable_point
from autotune.profiling.reporting import Silent
from autotune.profiling.setup import in_window
from autotune.profiling.target import Measurement, OfferedLoad
from autotune.profiling.timing import Schedule
from autotune.simulate.batcher import SimulatedBatcher
from autotune.workload import parse_workload, prompt_ids
from runtime import SLO, Batcher, InputError
from runtime.clock import VirtualClock
from runtime.knobs import KNOBS, Knobs
from runtime.records import FinishReason
from tests.fakes import Records
from tests.unit.callable_world import (
    Ticking,
    calibrated,
    findings,
    interrupt_when_measured,
    new_study,
    question,
    simulated,
    subject,
)

SLOW_START = SLO(e2e_ms=400)  # with 20 + 2·n ms a call


def test_the_price_of_a_call_is_found_from_its_times() -> None:
    ticking = Ticking(0.020, 0.002, 0.0001)
    found = calibrated(ticking, subject(ticking, range(10, 200, 7), by_length=True))
    assert found.price == pytest.approx((0.020, 0.002, 0.0001), rel=0.05)  # items and cost go together, mostly
    assert found.error < 0.01 and found.largest == max(ticking.sizes) == 32
    assert max(found.ratios) == pytest.approx(1.0, abs=0.05)


def test_what_it_can_do_inside_a_latency() -> None:
    ticking = Ticking(0.020, 0.002)
    found = calibrated(ticking, subject(ticking))
    assert found.capacity(1, within_s=1.0) == pytest.approx((32 / 0.084, 32), rel=0.02)
    assert found.capacity(1, within_s=0.0405)[1] == 10
    assert found.capacity(1, within_s=0.001)[1] == 1


def test_calls_that_cannot_meet_the_slo_are_not_tried_larger() -> None:
    ticking = Ticking(0.020, 0.002)
    found = calibrated(ticking, subject(ticking), most=256, longest_s=0.1)
    assert found.largest == 64 and "takes" in found.ended  # 148 ms is the first beyond


def test_a_few_dear_inputs_do_not_end_the_doubling() -> None:
    ticking = Ticking(0.010, 0.0, 0.00005)
    lengths = [50] * 85 + [2000] * 15  # a call of two of the dear ones takes 210 ms, of an average item 27 ms
    found = calibrated(ticking, subject(ticking, lengths, by_length=True), longest_s=0.1)
    assert found.largest == 8 and "8 takes" in found.ended and "on average" in found.ended


def test_a_machine_of_another_speed_takes_the_inverse_of_it_for_every_part_of_a_call() -> None:
    ticking = Ticking(0.020, 0.002, 0.0001)
    found = calibrated(ticking, subject(ticking, range(10, 200, 7), by_length=True))
    slower = found.at_speed(0.5)
    assert slower.price == pytest.approx([2 * seconds for seconds in found.price])
    assert (
        slower.capacity(50, 10.0)[0] == pytest.approx(found.capacity(50, 10.0)[0] / 2) and found.at_speed(1.0) == found
    )


def test_memory_ends_the_doubling() -> None:
    ticking = Ticking(0.020, 0.002)

    def scarce(items: list[str]) -> list[str]:
        if len(items) > 8:
            raise MemoryError
        return ticking(items)

    found = calibrated(ticking, subject(scarce))
    assert found.largest == 8 and found.ended == "16 items run out of memory"


def test_a_function_that_fails_is_named_with_what_it_said() -> None:
    def broken(items: list[str]) -> list[object]:
        return [ValueError("bad text") for _ in items]

    with pytest.raises(InputError, match=r"m:f failed on input 1 of inputs\.jsonl: ValueError: bad text"):
        calibrated(Ticking(1, 1), subject(broken))
    with pytest.raises(InputError, match=r"m:f failed with 1 of the inputs: StepFailedError: .* 0 results for 1 items"):
        calibrated(Ticking(1, 1), subject(lambda items: []))


def test_settings_to_try_hold_every_knob_within_its_bounds() -> None:
    settings = grid(STRATEGIES, largest=24, slack_ms=380, mean_cost=50, seed=1)
    assert len(set(settings)) == len(settings) > 50
    assert {s.knobs.max_batch_size for s in settings} == {1, 2, 4, 8, 16, 24}
    assert {s.knobs.max_wait_ms for s in settings if s.strategy == "adaptive"} == {0}
    assert max(s.knobs.max_wait_ms for s in settings) == 150  # 0.4 of the slack, to two digits
    for spec in KNOBS:
        assert all(spec.low <= getattr(s.knobs, spec.name) <= spec.high for s in settings)
    assert {s.strategy for s in grid(("dynamic",), largest=4, slack_ms=1, mean_cost=None, seed=0)} == {"dynamic"}


def test_simulating_tells_settings_apart() -> None:
    ticking = Ticking(0.020, 0.002)
    cost = calibrated(ticking, subject(ticking))
    load = OfferedLoad(300.0, 7, 10.0, 1.0)

    def tried(setting: BatcherSetting) -> CallablePoint:
        return callable_point([simulated(setting, cost, [1], load, SLOW_START)])

    free, single = tried(AS_IT_COMES), tried(ONE_AT_A_TIME)
    late = tried(BatcherSetting("dynamic", OPEN.with_(max_batch_size=64, max_wait_ms=390)))
    assert free.attainment > 0.99 > 0.5 > single.attainment and free.items_per_call > 4
    assert (late.e2e_p50_ms or 0) > 1.5 * (free.e2e_p50_ms or 0)
    assert Objective(SLOW_START).ranked([single, late, free])[0] is free
    assert tried(AS_IT_COMES) == free


def test_runs_of_one_setting_make_one_point() -> None:
    ticking = Ticking(0.020, 0.002)
    cost, slo = calibrated(ticking, subject(ticking)), SLO(e2e_ms=60)
    scores = [simulated(AS_IT_COMES, cost, [1], OfferedLoad(200.0, seed, 4.0, 1.0), slo).score for seed in (7, 8)]
    first, second = scores
    both = callable_point([Run.of(AS_IT_COMES, "validation", "", score) for score in scores])
    assert (both.source, both.setting, both.seeds) == ("measured", AS_IT_COMES, (7, 8))
    assert (both.offered, both.met) == (first.offered + second.offered, first.met + second.met)
    assert 0 < both.attainment < 1 and both.attainment == pytest.approx(both.met / both.offered, abs=1e-4)
    assert both.goodput == pytest.approx(both.met / 8.0)
    assert both.attainment_low < both.attainment < both.attainment_high
    assert both.e2e_p99_ms == pytest.approx(((first.e2e_ms.p99 or 0) + (second.e2e_ms.p99 or 0)) / 2, abs=1e-3)
    calls = first.steps.steps + second.steps.steps
    assert both.calls_per_s == pytest.approx(calls / 8.0, abs=1e-4)
    assert both.items_per_call == pytest.approx(both.met / calls, rel=0.05), "what cannot meet the SLO is not called"
    twice = callable_point([Run.of(AS_IT_COMES, "validation", "", first)] * 2)
    once = callable_point([Run.of(AS_IT_COMES, "validation", "", first)])
    assert twice == once.model_copy(update={"seeds": (7, 7)}), "runs of one seed met the same items"


def test_a_simulation_serves_the_very_requests_that_are_measured() -> None:
    """The live batcher, and the simulated one: by the same arrivals the same inputs come."""
    load, costs = OfferedLoad(50.0, 3, 4.0, 1.0), [10, 20, 30]
    sent = list(parse_workload("poisson:rate=50,prompt=1,output=1").arrivals(3, duration=5.0))
    batcher, heard = SimulatedBatcher(lambda call: 0.001, costs, slo=SLO(e2e_ms=1000)), Records()
    batcher.subscribe(heard)
    assert offered_to(batcher, 3, load, SLO(e2e_ms=1000)).offered == sum(a.time >= 1.0 for a in sent)
    found = [heard.of[f"run-{number}"] for number in range(len(sent))]
    assert [r.arrival for r in found] == [a.time for a in sent]
    assert [r.prompt_tokens for r in found] == [costs[prompt_ids(a, 3, 3)[0]] for a in sent]
    assert {r.prompt_tokens for r in found} == {10, 20, 30}


def test_what_the_closing_of_a_simulated_batcher_cuts_is_a_miss() -> None:
    """As that of a live one."""
    batcher, heard = SimulatedBatcher(lambda call: 1.0, [1], knobs=Knobs(max_batch_size=1)), Records()
    batcher.subscribe(heard)
    for _ in range(3):
        batcher.submit([0])
    batcher.close(drain=False)
    cut = [(r.reason, r.cause) for r in heard.requests if not r.completed]
    assert cut and set(cut) == {(FinishReason.ERROR, "the batcher was closed")}


def test_calls_end_however_late_it_is() -> None:
    """From 16,384 s on, what is left of a call may be less than what a float adds to the time."""
    dice = random.Random(1)
    batcher = SimulatedBatcher(lambda call: dice.uniform(1, 3), [1], slo=SLO(e2e_ms=10_000))
    load = OfferedLoad(0.05, 3, 40_000.0, 1.0)
    began = time.monotonic()
    found = offered_to(batcher, 1, load, SLO(e2e_ms=10_000), stop=lambda: time.monotonic() > began + 20)
    assert found.met == found.offered > 1500


def _point(setting: BatcherSetting, met: int, p99: float) -> CallablePoint:
    return CallablePoint(
        source="simulated", strategy=setting.strategy, knobs=setting.knobs, offered=1000, met=met, attainment=met / 1000,
        attainment_low=0, attainment_high=1, goodput=met / 10, e2e_p50_ms=p99, e2e_p99_ms=p99, items_per_call=1,
        calls_per_s=1, lateness_p99_ms=0, seeds=(0,),
    )  # fmt: skip


def test_of_equals_the_faster_and_of_those_the_first() -> None:
    small, large = (BatcherSetting("dynamic", OPEN.with_(max_batch_size=n, max_wait_ms=0)) for n in (4, 32))
    a, b, c = _point(small, 998, 50), _point(large, 999, 30), _point(AS_IT_COMES, 999, 31)
    ranked = Objective(SLOW_START).ranked
    assert ranked([a, b, c]) == [b, c, a] and ranked([c, b, a]) == [c, b, a]
    assert ranked([_point(small, 900, 10), b])[0] is b
    assert choose([large, AS_IT_COMES, small], 2) == [large, AS_IT_COMES]
    assert choose([ONE_AT_A_TIME, large, AS_IT_COMES, small], 3) == [large, AS_IT_COMES, small]
    assert choose([ONE_AT_A_TIME], 3) == [ONE_AT_A_TIME], "there was time to simulate nothing else"


@pytest.mark.parametrize("most", [8, None])
def test_a_bound_holds_for_the_batcher_as_it_comes_too(most: int | None) -> None:
    ticking, slo = Ticking(0.020, 0.002), SLO(e2e_ms=400)
    of, requested = subject(ticking), question(slo, 100.0, 5.0, most=most)
    cost = calibrated(ticking, of, most=most or 32)
    setup = findings(cost, slo, 100.0, [], capacity=380.0, capacity_size=8).setup
    assert setup is not None
    starting = CallableTarget(of).proposals(requested, setup, cost).starting
    free = BatcherSetting("adaptive", OPEN.with_(max_batch_size=most or OPEN.max_batch_size))
    assert starting[0] == ("as it comes", free)
    settings = [setting for _, setting in starting]
    assert all(requested.space.allows(setting) for setting in settings) and len(set(settings)) == len(settings)
    twins = [s for s in settings if s.strategy == "adaptive" and s.knobs.max_batch_size == free.knobs.max_batch_size]
    assert twins == [free], "with one worker no window makes a difference"
    assert requested.space.allows(AS_IT_COMES) == (most is None)


def test_stopped_at_once_nothing_was_tried() -> None:
    ticking = Ticking(0, 0)
    requested, target = question(SLO(e2e_ms=100), 100.0, 5.0), CallableTarget(subject(ticking))
    found = CallableSession(target, requested, new_study(), Silent(), stop=lambda: True).run()
    assert found.stopped and not found.simulated and not found.runs


@pytest.fixture
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few in a simulation to find the best setting by, enough for all that happens on the way."""
    monkeypatch.setattr("autotune.profiling.callable._SIMULATED_ITEMS", 100)


class Notes(Silent):
    def __init__(self) -> None:
        self.told: list[str] = []
        self.begun: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)

    def stage(self, name: str) -> None:
        self.begun.append(name)

    def progress(self, share: float, count: str, note: str, left_s: float | None) -> None:
        assert self.begun, "progress belongs to a stage"


class Tireless(CallableTarget):
    """Measures in no time, by its simulation, and notes what it measured."""

    def __init__(self, ticking: Ticking) -> None:
        super().__init__(subject(ticking), clock=SimpleNamespace(now=ticking.clock))
        self.ticking = ticking
        self.cost = calibrated(ticking, self.subject)
        self.tried: list[tuple[str, BatcherSetting]] = []

    def measure(self, setting: BatcherSetting, load: OfferedLoad, setup: CallableSetup, **options: Any) -> Measurement:
        self.tried.append((options["label"].rpartition("-")[0], setting))
        return Measurement(CallSimulator(self.cost, self.subject.costs, setup.slo).served(setting, load))


@pytest.mark.usefixtures("few_items")
def test_a_study_is_gone_on_with_and_nothing_is_measured_twice() -> None:
    ticking, study, requested = Ticking(0.001, 0.0), new_study(), question(SLO(e2e_ms=100), 100.0, 10.0, most=2)
    target, notes, still = Tireless(ticking), Notes(), VirtualClock()
    first = CallableSession(target, requested, study, notes, host=still).run()
    assert notes.begun == ["calibrating", "simulating", "measuring"]
    assert [what for what, _ in target.tried] == ["warm-up"] + ["validation"] * 5
    target.tried.clear()
    ticking.sizes.clear()
    again = Notes()
    second = CallableSession(target, requested, study, again, host=still).run()
    assert again.begun == ["simulating", "measuring"] and "resuming the study of an earlier run" in again.told[0]
    assert target.tried == [] and ticking.sizes == []
    assert (second.setup, second.simulated, second.runs) == (first.setup, first.simulated, first.runs)
    assert ranked(second) == ranked(first)


@pytest.mark.parametrize("rate", [5.0, 12.0, 60.0])
def test_windows_that_are_measured_offer_the_rate(rate: float) -> None:
    """Those that hold an item by luck alone offer more."""
    seldom = Schedule(3.0, window_s=0.5, warmup_s=0.1, calibrate_s=0.4)
    seeds = measured_seeds(7, rate, seldom)
    offered = [len(in_window(ITEMS.at_rate(rate), seed, 0.1, 0.5)) for seed in seeds]
    assert len(set(seeds)) == 6 and all(abs(n - rate / 2) <= 1 for n in offered)
    assert measured_seeds(7, 200.0, seldom) == tuple(range(2_000_010, 2_000_016))


def test_a_window_in_which_hardly_an_item_falls_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        measured_seeds(7, 2.0, Schedule(3.0, window_s=0.5, warmup_s=0.1, calibrate_s=0.4))
    told = "at 2 items/s a window of 0.5 s brings 1 on average; it takes 2: give "
    assert str(caught.value) == told + "a longer --budget or a higher --rate"
    with pytest.raises(InputError, match=r"brings 0\.6 on average; it takes 2: give a higher --rate"):
        measured_seeds(7, 0.01, Schedule(3000.0, window_s=60.0, warmup_s=2.0, calibrate_s=0.4))


@pytest.mark.usefixtures("few_items")
def test_at_a_rate_that_brings_nothing_no_slo_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    still, target = VirtualClock(), Tireless(Ticking(0.001, 0.0))
    target.ticking.sizes.clear()
    with pytest.raises(InputError, match=r"a window of 0\.5 s brings 5e-07 on average"):
        CallableSession(target, question(SLO(e2e_ms=100), 1e-6, 3.0, most=2), new_study(), Silent(), host=still).run()
    assert not target.ticking.sizes, "nothing is called for it"

    requested = question(SLO(e2e_ms=100), 5.0, 3.0, most=2)
    found = CallableSession(target, requested, new_study(), Silent(), host=still).run()
    assert found.runs and all(run.score.offered for run in found.runs) and found.confidence is not None
    assert found.setup is not None
    window = found.setup.warmup_s, found.setup.window_s
    empty = next(seed for seed in range(99) if not in_window(ITEMS.at_rate(5.0), seed, *window))
    monkeypatch.setattr("autotune.profiling.callable.measured_seeds", lambda *given: (empty,))
    found = CallableSession(target, requested, new_study(), Silent(), host=still).run()
    assert found.runs and not any(run.score.offered for run in found.runs)
    assert found.confidence is None, "nobody has seen anything"


@pytest.mark.usefixtures("few_items")
@pytest.mark.slow
def test_what_is_found_in_the_study_tells_nothing_of_how_long_a_measurement_takes() -> None:
    class Lasting(Tireless):
        def measure(self, *rest: Any, **options: Any) -> Measurement:
            self.ticking.now += 2.0
            return super().measure(*rest, **options)

    ticking, study = Ticking(0.001, 0.0), new_study()
    requested, target = replace(question(SLO(e2e_ms=100), 100.0, 20.0, most=2), trials=2), Lasting(ticking)
    typical = []
    for _ in range(2):
        session = CallableSession(target, requested, study, Silent(), host=VirtualClock())
        assert len(session.run().runs) == 5
        typical.append(session._context.meter.typical(9.0))
    assert typical == [pytest.approx((4 + 2 + 2 + 2 + 2) / 5), 9.0], "the first has the warm-up in it"


def test_a_run_says_its_strategy_and_that_of_an_engine_has_none() -> None:
    ticking, load = Ticking(0.020, 0.002), OfferedLoad(50.0, 3, 4.0, 1.0)
    run = simulated(AS_IT_COMES, calibrated(ticking, subject(ticking)), [1], load, SLOW_START)
    kept = run.model_dump(mode="json")
    assert kept["strategy"] == "adaptive" and Run.model_validate(kept).batcher_setting == AS_IT_COMES
    of_engine = Run.of(AS_IT_COMES.knobs, "validation", "vLLM defaults", run.score)
    assert (run.setting, of_engine.setting) == (AS_IT_COMES, AS_IT_COMES.knobs)
    assert "strategy" not in of_engine.model_dump_json()
    with pytest.raises(ValueError, match="vLLM defaults: is no run of a batcher"):
        of_engine.batcher_setting  # noqa: B018


def test_a_paired_simulation_serves_the_items_of_its_run() -> None:
    ticking, load = Ticking(0.020, 0.002), OfferedLoad(50.0, 3, 4.0, 1.0)
    cost = calibrated(ticking, subject(ticking))
    run = Run.of(ONE_AT_A_TIME, "validation", "", simulated(ONE_AT_A_TIME, cost, [1], load, SLOW_START).score)
    paired = CallSimulator(cost, [1], SLOW_START, warmup_s=1.0).paired(run)
    assert (paired.stage, paired.batcher_setting, paired.score) == ("simulation", ONE_AT_A_TIME, run.score)


@pytest.mark.slow
@pytest.mark.usefixtures("few_items")
def test_what_serves_less_than_its_simulation_is_not_recommended_and_its_profile_says_how_sure_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autotune.profiling.batcher_space._CALIBRATED_TO", 4)

    class Misjudged(Tireless):
        """The simulation's favourite takes three times as long as calibrated."""

        def measure(
            self, setting: BatcherSetting, load: OfferedLoad, setup: CallableSetup, **options: Any
        ) -> Measurement:
            super().measure(setting, load, setup, **options)
            cost = self.cost.at_speed(0.3) if setting == free else self.cost
            return Measurement(CallSimulator(cost, self.subject.costs, setup.slo).served(setting, load))

    requested, free = question(SLO(e2e_ms=100), 100.0, 10.0), AS_IT_COMES
    target = Misjudged(Ticking(0.020, 0.002))
    found = CallableSession(target, requested, new_study(), Silent(), host=VirtualClock()).run()
    tried = [setting for what, setting in target.tried if what == "validation"]
    assert tried[:2] == [free] * 2, "the best by simulation, and a repeat for the noise"
    best, *others = ranked(found)
    assert best.setting != free and best.attainment > 0.9 and free in [p.setting for p in others]
    assert len(set(best.seeds)) >= 2, "what is recommended has met more than one sample of arrivals"
    assert found.confidence is not None and found.confidence.best > 0.9
    assert found.baseline == free and set(found.expected) == set(tried)
    keys = list(found.measured)
    assert len(keys) == len(set(keys)) == len(tried) <= 16


@pytest.mark.slow
@pytest.mark.usefixtures("few_items")
def test_a_setting_that_fails_is_left_out() -> None:
    class Failing(Tireless):
        def measure(self, setting: BatcherSetting, *rest: Any, **options: Any) -> Measurement:
            found = super().measure(setting, *rest, **options)
            if setting in failing:
                raise EvaluationError("request run-3 failed: no memory")
            return found

    def profiled(reporter: Silent) -> list[CallablePoint]:
        requested = question(SLO(e2e_ms=100), 100.0, 10.0, most=2)
        return ranked(CallableSession(target, requested, new_study(), reporter, host=VirtualClock()).run())

    target, notes = Failing(Ticking(0.001, 0.0)), Notes()

    free = BatcherSpace(most=2).as_it_comes
    failing = [free]
    (left,) = profiled(notes)
    assert left.source == "measured" and left.setting != free and len(left.seeds) == 2
    tried = target.tried
    assert tried.count(("validation", free)) == 1, "not in the next round"
    assert tried[0] == ("warm-up", tried[1][1]) and [what for what, _ in tried].count("warm-up") == 1
    assert [text for text in notes.told if "failed" in text] == [
        f"validation of {free} failed: request run-3 failed: no memory"
    ]
    failing.append(left.setting)
    with pytest.raises(EvaluationError, match="request run-3 failed: no memory"):
        profiled(Silent())


FUNCTION = """
import time
def embed(texts):
    time.sleep(0.002 + 0.0002 * len(texts))
    return [len(t) for t in texts]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(f'"{"a" * n}"\n' for n in range(1, 30)))
    return tmp_path


@pytest.mark.slow
def test_from_a_function_to_a_batcher_with_its_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "profiled_here.py").write_text(FUNCTION)
    code = run(
        ["profile", "--callable", "profiled_here:embed", "--inputs", "data.jsonl", "--cost", "len", "--budget", "4s",
         "--slo", "e2e=300ms@90%", "--rate", "60", "--most", "16"]
    )  # fmt: skip
    told = capsys.readouterr()
    assert told.err == ""
    made = load_callable_profile("embed.yaml")
    assert code == (0 if made.slo_met else 1)
    assert made.status == "complete" and made.function == "profiled_here:embed" and made.inputs.items == 29
    assert made.points[0].source == "measured" and made.points[0].offered > 5
    assert {p.source for p in made.points} == {"measured", "simulated"}
    assert made.service.groups[0].ms >= 2.2 and made.service.largest > 1
    for word in (
        "recommended",
        "Batcher(fn, slo=…, max_batch_size=16)",
        "no batching",
        "attainment",
        "profile  embed.yaml",
    ):
        assert word in told.out

    from profiled_here import embed  # type: ignore[import-not-found]

    with Batcher(embed, cost=len, **made.options) as batcher:
        assert batcher.knobs.with_(chunk_size=1) == made.knobs.with_(chunk_size=1)
        assert batcher.strategy.name == made.strategy and batcher.slos["default"] == made.slo
        with autotune.control(batcher, profile="embed.yaml"):
            assert batcher("abc") == 3
    assert run(["show", "embed.yaml"]) == 0
    assert made.verdict in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.slow
def test_ctrl_c_while_measuring_keeps_the_best_so_far(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "profiled_until_stopped.py").write_text(FUNCTION + "    ")
    import profiled_until_stopped as module  # type: ignore[import-not-found]

    interrupt_when_measured(module)
    arguments = ["profile", "--callable", "profiled_until_stopped:embed", "--inputs", "data.jsonl", "--budget", "60s"]
    assert run([*arguments, "--rate", "50", "--slo", "e2e=1s", "--most", "4", "--out", "kept.yaml"]) == 130
    made = load_callable_profile("kept.yaml")
    assert made.status == "stopped" and {p.source for p in made.points} == {"simulated"}
    assert "best so far written to kept.yaml" in capsys.readouterr().out
    first, *others = made.points
    measured = made.model_copy(update={"points": (first.model_copy(update={"source": "measured"}), *others)})
    save_callable_profile(measured, Path("kept.yaml"))
    interrupt_when_measured(module)
    assert run([*arguments, "--rate", "50", "--slo", "e2e=1s", "--most", "4", "--out", "kept.yaml"]) == 130
    assert load_callable_profile("kept.yaml") == measured
    assert "kept.yaml stays as it was. Run the same command to go on." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_several_workers_are_profiled_with_what_they_do_to_one_another(shared: bool) -> None:
    """Ratios of sleeps: a busy machine lengthens both alike."""
    device = threading.Lock() if shared else nullcontext()

    def call(texts: list[str]) -> list[str]:
        with device:
            time.sleep(0.01 + 0.001 * len(texts))
        return texts

    of = subject(call)
    found = measure_calls(of, new_study(), seed=0, budget_s=60, most=4, workers=2)
    assert found.slowdown(1) == 1.0 and found.slowdown(2) == found.beside
    assert (1.5 < found.beside < 4) if shared else found.beside < 1.4
    one = measure_calls(of, new_study(), seed=0, budget_s=60, most=4).capacity(1, 0.1)[0]
    assert found.capacity(1, 0.1)[0] == pytest.approx(one * 2 / found.beside, rel=0.2)
    load, setting = OfferedLoad(1.4 * one, 7, 5.0, 1.0), BatcherSetting("adaptive", OPEN.with_(max_batch_size=4))
    many, single = (
        simulated(setting, replace(found, workers=n), [1], load, SLO(e2e_ms=100)).score.attainment for n in (2, 1)
    )
    assert single < 0.8 and (many < 0.8 if shared else many > 0.95)


@pytest.mark.slow
def test_a_profile_of_several_workers_makes_a_batcher_of_as_many(folder: Path) -> None:
    (folder / "profiled_by_two.py").write_text(FUNCTION)
    code = run(
        ["profile", "--callable", "profiled_by_two:embed", "--inputs", "data.jsonl", "--budget", "3s",
         "--slo", "e2e=300ms@90%", "--rate", "60", "--most", "8", "--replicas", "2"]
    )  # fmt: skip
    made = load_callable_profile("embed.yaml")
    assert code == (0 if made.slo_met else 1)
    assert made.replicas == 2 and made.service.beside >= 1
    with Batcher(list, **made.options) as batcher:
        assert batcher.workers == 2
    older = Path("embed.yaml").read_text().replace("replicas: 2\n", "")
    Path("embed.yaml").write_text(older)
    assert load_callable_profile("embed.yaml").replicas == 1
