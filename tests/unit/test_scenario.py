"""Scenarios from a profile, what they measure in virtual time, and the capacity they have."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from autotune.cost.model import CostModel
from autotune.measure.evaluate import Interrupted, evaluate
from autotune.profile import KvPool
from autotune.profiling.points import Run, point
from autotune.simulate import SimulatedEngine
from autotune.simulate.capacity import SEARCHED, Search
from autotune.simulate.scenario import Scenario, parse_speeds
from autotune.workload import parse_workload
from benchmarks.controller.hardware import h200
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord
from runtime.slo import SLO
from runtime.step_model import StepFeatures
from tests.unit.jitter_cases import STALLS
from tests.unit.simulated_profile import EVEN, TARGET, profiled, scenario


def test_evaluate_in_virtual_time_counts_the_window_alone() -> None:
    engine = SimulatedEngine(h200(), kv_tokens=760_000, slo=TARGET)
    load = parse_workload(EVEN).at_rate(10.0)
    records: list[RequestRecord] = []
    found = evaluate(
        engine, Knobs(64, 0, 512, 512), load, TARGET, vocab_size=2, seed=3, duration=20.0, warmup=5.0, keep=records.extend
    )  # fmt: skip
    due = [a.time for a in load.arrivals(3, duration=25.0) if a.time >= 5]
    assert found.offered == len(due) == len(records) and found.attainment == 1.0
    assert [r.arrival for r in records] == pytest.approx(due)
    assert found.lateness_p99_ms == found.sender_busy == 0
    assert found.wall_s == engine.clock.now() and 25 < found.wall_s < 25 + 2  # seconds that passed there
    assert found.throughput == pytest.approx(600, rel=0.25)
    assert engine.view().running == engine.view().waiting == 0
    assert 0 < found.steps.mean_ms < found.steps.p99_ms < 30


@pytest.mark.parametrize("rate", [3.0, 30.0, 80.0])
def test_fast_forward_does_not_change_a_score(rate: float) -> None:
    """Nor anything in it, below and above capacity."""
    scores = []
    for fast_forward in (True, False):
        engine = SimulatedEngine(h200(), kv_tokens=40_000, slo=TARGET, noise=0.03, fast_forward=fast_forward)
        load = parse_workload(EVEN).at_rate(rate)
        options = {"vocab_size": 2, "seed": 1, "duration": 8.0, "warmup": 1.0}
        scores.append(evaluate(engine, Knobs(256, 0, 1024, 512), load, TARGET, **options))  # type: ignore[arg-type]
    assert scores[0] == scores[1]
    assert (scores[0].attainment == 1.0) == (rate < 50)


def test_what_is_unfinished_at_the_last_deadline_is_a_miss() -> None:
    engine = SimulatedEngine(h200(), kv_tokens=760_000)
    found = evaluate(
        engine, None, parse_workload(EVEN).at_rate(400.0), SLO(e2e_ms=800), vocab_size=2, seed=0, duration=3.0
    )
    assert found.unfinished > 100 and found.violations["completion"] == found.unfinished
    assert found.wall_s == pytest.approx(3.8, abs=0.2)
    assert engine.view().running == engine.view().waiting == 0


def test_stopping_leaves_the_engine_idle() -> None:
    engine = SimulatedEngine(h200(), kv_tokens=760_000)
    polls = itertools.count()
    with pytest.raises(Interrupted):
        evaluate(
            engine, None, parse_workload(EVEN).at_rate(20.0), TARGET,
            vocab_size=2, seed=0, duration=100.0, stop=lambda: next(polls) > 20,
        )  # fmt: skip
    assert engine.view().running == engine.view().waiting == 0


# -- scenarios --------------------------------------------------------------------------------------------------------


def test_the_profile_says_how_long_requests_are() -> None:
    facts = profiled().workload.model_copy(update={"length_scale": 0.5, "cap_prompt": 200, "cap_output": 20})
    small = Scenario.of(profiled(workload=facts), workload=EVEN)
    lengths = {(a.prompt_tokens, a.output_tokens) for a in small.workload.arrivals(0, limit=50)}
    assert lengths == {(200, 20)}  # 350 and 30 tokens, cut
    own = Scenario.of(profiled(workload=facts), workload="poisson:prompt=700,output=60,length=0.1")
    assert {(a.prompt_tokens, a.output_tokens) for a in own.workload.arrivals(0, limit=50)} == {(70, 6)}


def test_the_same_requests_at_every_rate_and_as_many_as_asked() -> None:
    world = scenario()
    for rate in (1.0, 12.5):
        warmup, window = world.window(rate, seed=4, requests=200)
        times = [a.time for a in world.workload.at_rate(rate).arrivals(4, duration=warmup + window)]
        assert sum(t >= warmup for t in times) == 200 and len(times) == 220
    slow, fast = (world.measure(Knobs(), rate, 4, requests=200) for rate in (2.0, 20.0))
    assert slow.offered == fast.offered == 200
    assert fast.offered_rate == pytest.approx(10 * slow.offered_rate)


def test_a_finite_workload_gives_what_it_has() -> None:
    found = scenario(workload=EVEN + ",limit=100").measure(Knobs(), 5.0, 0, requests=5000)
    assert found.offered == pytest.approx(90, abs=2)


@pytest.mark.parametrize(
    ("times", "requests", "edges"),
    [
        (
            (0.0, *[10.0] * 100),
            20,
            (5.0, 5.05),
        ),  # those before the second request are the warm-up; no edge inside the tie
        ((0.0, *[10.0] * 100), 2000, (5.0, 5.05)),
        ((*[0.0] * 100, 10.0), 20, (0.0, 5.0)),
        ((*[0.0] * 100, 10.0), 2000, (0.0, 10.05)),
        ((*[0.0] * 4, *[1.0] * 10, 2.0), 10, (0.0, 1.5)),
    ],
)
def test_a_window_begins_and_ends_between_different_times(
    tmp_path: Path, times: tuple[float, ...], requests: int, edges: tuple[float, float]
) -> None:
    (tmp_path / "ties.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{time},5,2\n" for time in times)
    )
    world = scenario(workload=f"{tmp_path / 'ties.csv'},bin=0")
    rate = parse_workload(world.workload.name).rate
    begin, length = world.window(rate, 0, requests)
    assert (begin, length) == pytest.approx(edges)
    found = world.measure(Knobs(), rate, 0, requests=requests)
    assert found.offered == sum(begin <= time < begin + length for time in times) >= min(requests, 10)


def test_a_trace_of_one_time_has_no_window(tmp_path: Path) -> None:
    (tmp_path / "ties.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "7,5,2\n" * 30)
    with pytest.raises(InputError, match=r"all requests have one time; .*bin=1 spreads them over a second"):
        scenario(workload=f"{tmp_path / 'ties.csv'}").window(5.0, 0, 20)
    assert scenario(workload=f"{tmp_path / 'ties.csv'},bin=1").measure(Knobs(), 5.0, 0, requests=20).offered == 20


def test_requests_that_come_at_once_are_too_few() -> None:
    with pytest.raises(InputError, match=r"cv=100: 1[01] requests come within \S+ s; give it more --requests"):
        scenario(workload="gamma:cv=100").measure(Knobs(), 5.0, 0, requests=10)


def trace(path: Path, requests: int = 20) -> str:
    rows = "".join(f"{0.4 * n},{300 + 7 * n},{20 + n}\n" for n in range(requests))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    return str(path)


def test_requests_that_are_the_same_under_every_seed_count_once(tmp_path: Path) -> None:
    """Under as many draws of the step-time noise as there are seeds; without noise there is one simulation."""
    facts = h200().facts.model_copy(update={"jitter": STALLS})
    replayed = trace(tmp_path / "t.csv")
    noisy, smooth = Scenario.of(profiled(cost_model=facts), workload=replayed), scenario(workload=replayed)
    seeds = noisy.distinct(range(5, 10), 1000)
    assert seeds == (5, 6, 7, 8, 9) and smooth.distinct(range(5, 10), 1000) == (5,)
    scores = [noisy.measure(Knobs(), 2.0, seed, requests=1000) for seed in seeds]
    assert len({score.steps.mean_ms for score in scores}) == 5
    found = point([Run(stage="simulation", label="it", trial=-1, score=score) for score in scores], once=True)
    assert found.offered == scores[0].offered == 18 and found.seeds == seeds
    assert found.offered_rate == pytest.approx(scores[0].offered_rate, abs=1e-3)


@pytest.mark.parametrize("mixed", [False, True])
def test_places_inside_bins_make_no_other_requests(tmp_path: Path, mixed: bool) -> None:
    """They vary with the seed, as what else is in a mix does, and the requests count once."""
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{2 * (n // 5)},{300 + n},20\n" for n in range(100))
    )
    load = f"a={tmp_path / 't.csv'}@0.5+b=poisson:prompt=300,output=20@0.5" if mixed else str(tmp_path / "t.csv")
    world = scenario(workload=load)
    assert world.distinct(range(3), 80) == (0, 1, 2)
    scores = [world.measure(Knobs(), 2.0, seed, requests=80) for seed in range(3)]
    assert len({score.e2e_mean_ms for score in scores}) == 3
    found = point([Run(stage="simulation", label="it", trial=-1, score=score) for score in scores], once=True)
    assert found.offered == pytest.approx(80, abs=2) and found.attainment_low < 0.97
    assert len({len(score.blocks) for score in scores}) > 1, "windows are as long as it takes the requests to come"
    assert found.attainment == 1 and found.seeds == (0, 1, 2)
    assert found.goodput.mean == found.offered_rate == pytest.approx(2, rel=0.3)


def test_the_mean_answer_is_that_of_the_requests_that_count(tmp_path: Path) -> None:
    """Answers of 20 tokens and more, each one longer than the one before; two of the 20 requests are the warm-up."""
    replayed = scenario(workload=trace(tmp_path / "t.csv"))
    assert [replayed.mean_answer(2.0, seed, 1000) for seed in (0, 5)] == [20 + (2 + 19) / 2] * 2
    talk = scenario(workload="shared-prefix")
    few, many = (talk.mean_answer(rate, 1, 100) for rate in (0.1, 20.0))
    assert few != many  # other turns of the conversations come then


def test_whose_requests_depend_on_the_seed(tmp_path: Path) -> None:
    replayed = trace(tmp_path / "t.csv")
    for workload in (replayed, f"{replayed},limit=5", f"a={replayed}@1", "fixed:prompt=9,output=9"):
        assert scenario(workload=workload).repeated(100) == 1, workload
    assert scenario(workload=f"{replayed},bin=1").repeated(100) == 1, "only places inside bins do"
    assert scenario(workload=f"a={replayed}@0.4+b=poisson@0.6").repeated(100) == pytest.approx(0.4)
    for workload in (EVEN, f"{EVEN},limit=20", "fixed:prompt=9-99"):
        assert not scenario(workload=workload).repeated(100), workload


def test_one_request_is_too_few() -> None:
    with pytest.raises(InputError, match="limit=1 holds 1 requests; a simulation needs at least 2"):
        scenario(workload=EVEN + ",limit=1").window(5.0, seed=4, requests=200)


def test_another_machine_is_slower_by_what_is_said() -> None:
    knobs = Knobs(256, 0, 2048, 2048)
    here = scenario().measure(knobs, 1.0, 0, requests=50)
    half = scenario(speeds={"compute": 0.5}).measure(knobs, 1.0, 0, requests=50)
    narrow = scenario(speeds={"bandwidth": 0.25}).measure(knobs, 1.0, 0, requests=50)
    assert here.ttft_ms.p50 and half.ttft_ms.p50 and here.tpot_ms.p50 and narrow.tpot_ms.p50 and half.tpot_ms.p50
    assert half.ttft_ms.p50 == pytest.approx(2 * here.ttft_ms.p50, rel=0.1)  # prompts compute
    assert half.tpot_ms.p50 == pytest.approx(here.tpot_ms.p50, rel=0.1)  # answers read
    assert narrow.tpot_ms.p50 == pytest.approx(4 * here.tpot_ms.p50, rel=0.2)


def test_a_smaller_pool_preempts() -> None:
    knobs, long = Knobs(256, 0, 2048, 2048), "poisson:prompt=100,output=400"
    small, large = (scenario(kv_tokens=n, workload=long).measure(knobs, 10.0, 0, requests=100) for n in (3000, 30_000))
    assert small.steps.preemptions > 0 == large.steps.preemptions
    assert small.completed_rate < large.completed_rate


def test_blocks_kept_for_decodes_are_those_of_the_profile_s_engine() -> None:
    preempted = {}
    for kept in (0, 1, 4):
        profile = profiled(engine={"growth_reserve": kept, "kv_pool": KvPool(block_size=128, blocks=40)})
        machine = Scenario.of(profile, workload="poisson:prompt=100,output=400")
        assert machine.start().facts.growth_reserve == kept and machine.start().facts.block_size == 128
        preempted[kept] = machine.measure(Knobs(64, 0, 2048, 2048), 10.0, 0, requests=200).steps.preemptions
    assert preempted[0] > 2 * preempted[1] > preempted[4] > 0
    with pytest.raises(ValueError, match="growth_reserve is -1; it must be a whole number of at least 0"):
        SimulatedEngine(h200(), kv_tokens=1000, growth_reserve=-1)


def test_blocks_are_handed_out_as_by_the_profile_s_engine() -> None:
    """Chunk by chunk, decodes grow into what prompts in progress will need."""
    preempted = {}
    for allocation in ("whole", "chunk"):
        profile = profiled(engine={"kv_allocation": allocation, "kv_pool": KvPool(block_size=16, blocks=320)})
        machine = Scenario.of(profile, workload="poisson:prompt=500,output=400")
        assert machine.start().facts.kv_allocation == allocation
        preempted[allocation] = machine.measure(Knobs(64, 0, 2048, 16), 10.0, 0, requests=200).steps.preemptions
    assert preempted["chunk"] != preempted["whole"] > 0
    with pytest.raises(ValueError, match="kv_allocation is 'half'; it must be one of whole, chunk"):
        SimulatedEngine(h200(), kv_tokens=1000, kv_allocation="half")  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [16, 20, 31, 40])
def test_no_request_is_larger_than_the_blocks_of_a_small_pool(tokens: int) -> None:
    world = scenario(kv_tokens=tokens)
    assert world.kv_tokens == tokens // 16 * 16
    found = world.measure(Knobs(), 5.0, 0, requests=20)
    assert found.offered == 20 and found.completed_rate > 0


def stalling() -> Scenario:
    """A machine whose served steps take longer than the fit and scatter."""
    facts = h200().facts.model_copy(update={"serving_overhead_s": 2e-3, "jitter": STALLS})
    return Scenario.of(profiled(cost_model=facts), workload=EVEN)


def test_what_serving_adds_is_in_every_step_once() -> None:
    step, facts = (
        StepFeatures(8, 9000, 300, 500, 60_000, 2),
        h200().facts.model_copy(update={"serving_overhead_s": 2e-3}),
    )
    plain = h200().predict(step)
    assert stalling().cost.predict(step) == pytest.approx(plain + 2e-3)
    assert stalling().cost.serving().predict(step) == pytest.approx(plain + 2e-3)
    half = Scenario.of(profiled(cost_model=facts), speeds={"overhead": 0.5}).cost.predict(step)
    assert half == pytest.approx(CostModel(h200().facts).scaled(overhead=0.5).predict(step) + 4e-3)


# -- capacity ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_capacity_is_where_the_share_crosses_the_target() -> None:
    world, knobs = scenario(), Knobs(256, 0, 1024, 1024)
    told: list[tuple[float, bool]] = []
    search = Search.of(world, seeds=(0, 1, 2), requests=400)
    found = search.capacity("it", knobs, 7.0, lambda rate, held: told.append((rate, held)))
    for seed in found.seeds:
        assert world.measure(knobs, seed.rate, seed.seed, requests=400).attainment >= 0.99
        assert world.measure(knobs, seed.failed, seed.seed, requests=400).attainment < 0.99
        assert seed.failed / seed.rate <= 1.01
    low, high = found.interval
    assert 20 < low < found.rate < high < 60
    assert found.rate == pytest.approx(sum(s.offered for s in found.seeds) / 3)
    assert len(told) == sum(s.tried for s in found.seeds) < 40


@pytest.mark.slow
@pytest.mark.parametrize("start", (0.01, 17.0, 41.3, 1e4))
def test_where_the_search_begins_does_not_matter(start: float) -> None:
    knobs = Knobs(256, 0, 1024, 1024)
    found, usual = (Search.of(scenario(), (0, 1), 300).capacity("it", knobs, s) for s in (start, 30.0))
    assert found.rates == usual.rates and [s.failed for s in found.seeds] == [s.failed for s in usual.seeds]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_where_it_begins_does_not_matter_on_a_machine_with_stalls_either(seed: int) -> None:
    world, knobs = stalling(), Knobs(256, 0, 1024, 1024)
    found = [Search.of(world, (seed,), 300).capacity("it", knobs, start).seeds[0] for start in (0.7, 17.0, 300.0)]
    assert len({(one.rate, one.failed) for one in found}) == 1 and found[0].rate > 0
    assert found[0].rate != Search.of(world.even(), (seed,), 300).capacity("it", knobs, 17.0).seeds[0].rate


def test_what_one_request_alone_misses_no_rate_holds() -> None:
    found = Search.of(scenario(slo=SLO(tpot_ms=2)), (0, 1), 50).capacity("it", Knobs(), 10.0)
    assert found.rate == 0 and found.interval == (0, 0) and found.throughput == 0


def test_lower_rates_are_tried_where_the_knobs_allow_one_sequence_in_a_step() -> None:
    """Steps of one say nothing there of whether requests meet: they wait for one another."""
    one_at_a_time = Knobs(1, 0, 1024, 1024)
    found = Search.of(scenario(), (0,), 50).capacity("it", one_at_a_time, 30.0)
    assert 0.5 < found.rate < 5 and found.seeds[0].failed / found.seeds[0].rate <= 1.01


@pytest.mark.parametrize("slots", [1, 256])
def test_no_lower_rate_is_tried_where_requests_hardly_meet(slots: int) -> None:
    missed = Search.of(scenario(slo=SLO(tpot_ms=2)), (0,), 50)
    assert missed.capacity("it", Knobs(slots, 0, 1024, 1024), 0.001).seeds[0].tried == 1
    assert 1 < missed.capacity("it", Knobs(slots, 0, 1024, 1024), 10.0).seeds[0].tried < 10


def test_an_slo_that_no_number_of_requests_violates_has_no_bound() -> None:
    search = Search.of(scenario(slo=SLO(e2e_ms=1e9)), (0,), 30)
    found = search.capacity("it", Knobs(), 10.0)
    assert found.unbounded and found.rate > 1e6 and found.interval == (found.rate, math.inf)
    assert search.best({"it": found}, {"other": Knobs(8, 0, 64, 64)}).setting is found


@pytest.mark.slow
def test_the_best_of_many_settings_is_found_without_measuring_all_closely() -> None:
    search = Search.of(scenario(), (0, 1), 100)
    first = search.capacity("first", Knobs(4, 0, 64, 64), 5.0)
    others = {f"{n} slots": Knobs(n, 0, 1024, 512) for n in (2, 8, 64)}
    told: list[float] = []
    best, tried, _ = search.best({"first": first}, others, lambda rate, held: told.append(rate))
    assert tried == 4
    capacities = {label: search.capacity(label, knobs, 5.0).rate for label, knobs in others.items()}
    assert best.rate >= 0.98 * max(capacities.values()) > first.rate
    assert search.best({best.label: best}, {"again": best.knobs}) == (best, 1, True)


@pytest.mark.slow
def test_a_search_that_is_stopped_has_the_best_so_far() -> None:
    knobs = {"first": Knobs(2, 0, 1024, 512), "better": Knobs(8, 0, 1024, 512), "best": Knobs(64, 0, 1024, 512)}
    plain = Search.of(scenario(), (0,), 100)
    first = plain.capacity("first", knobs.pop("first"), 5.0)
    better = plain.best({"first": first}, {"better": knobs["better"]}).setting
    whole = plain.best({"first": first}, knobs)
    assert whole.whole and whole.tried == 3 and whole.setting.rate > better.rate > first.rate
    for reached, answer in ((first, (first, 1, False)), (better, (better, 2, False))):
        heard: list[float] = []  # rates that held; stopped at the first that is beyond what ``reached`` holds

        def told(rate: float, held: bool, heard: list[float] = heard) -> None:
            heard += [rate] if held else []

        def stop(heard: list[float] = heard, bar: float = reached.seeds[0].rate) -> bool:
            return max(heard, default=0.0) > bar * 1.005

        stopped = Search.of(scenario(), (0,), 100, stop=stop).best({"first": first}, knobs, told)
        assert stopped == answer  # what was being looked at closely is not in it


@pytest.mark.slow
def test_what_lies_around_the_best_setting_is_tried_as_long_as_it_is_better() -> None:
    search = Search.of(scenario(), (0, 1), 100)
    first = search.capacity("first", Knobs(2, 0, 1024, 512), 5.0)

    def twice(knobs: Knobs) -> list[Knobs]:
        return [knobs.with_(max_batch_size=2 * knobs.max_batch_size), knobs.with_(token_budget=16, chunk_size=16)]

    best, tried, _ = search.best({"first": first}, {}, around=twice)
    assert best.knobs.max_batch_size >= 8 and best.knobs.token_budget == 1024 and best.label == SEARCHED
    assert best.rate > 1.5 * first.rate and tried >= 4


def test_speeds_are_numbers_above_0() -> None:
    assert parse_speeds("compute=0.5, bandwidth=2,overhead=1e0") == {"compute": 0.5, "bandwidth": 2, "overhead": 1}
    wrong = ("inf", "nan", "x", "1_0", "1e-9", "1e4")
    for text in (*(f"overhead={one}" for one in wrong), "speed=1", ""):
        with pytest.raises(InputError):
            parse_speeds(text)


def test_ceilings_are_raised_for_what_is_asked() -> None:
    assert scenario().with_ceilings_for(Knobs(token_budget=1_000_000)).limits.token_budget == 1048576
    low = Scenario.of(profiled(engine={"limits": KnobLimits()}), workload=EVEN)
    assert low.with_ceilings_for(Knobs(token_budget=10_000)).limits == KnobLimits(token_budget=10_000)


def test_a_simulation_from_a_profile_has_steps_that_scatter_as_they_were_measured() -> None:
    """Tokens take as long as ever on average, a few answers much longer; another seed, another draw, the same one twice."""
    facts = profiled().cost_model
    assert facts is not None
    smooth, uneven = (
        scenario(),
        Scenario.of(profiled(cost_model=facts.model_copy(update={"jitter": STALLS})), workload=EVEN),
    )
    knobs = Knobs(256, 0, 1024, 512)
    one, other = (each.measure(knobs, 20.0, 1, requests=400) for each in (smooth, uneven))
    assert one.tpot_ms.p50 and one.tpot_ms.p99 and other.tpot_ms.p50 and other.tpot_ms.p99
    assert other.steps.mean_ms == pytest.approx(one.steps.mean_ms, rel=0.03)
    assert other.tpot_ms.p99 / other.tpot_ms.p50 > 1.05 * one.tpot_ms.p99 / one.tpot_ms.p50
    assert uneven.measure(knobs, 20.0, 1, requests=400) == other
    assert uneven.measure(knobs, 20.0, 2, requests=400).steps != other.steps
