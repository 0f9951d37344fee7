"""Turns on a real engine with known step times, and what becomes of their results."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.graph_objects import Figure
from rich.console import Console

from autotune.bench import (
    Contender,
    Failure,
    Outcome,
    PairedComparison,
    Result,
    Turn,
    controlled,
    defaults,
    fixed,
    measure,
    parse_fixed,
    plotting,
    turns,
)
from autotune.bench.loads import SHARE, BenchLoad, calibrated, check_lasts, of_profile
from autotune.bench.table import show
from autotune.profile import load_profile
from autotune.profiling.calibrate import Alone
from autotune.workload import parse_workload
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.engine import Engine
from runtime.request import Sequence
from runtime.slo import SLO, RequestClass
from runtime.step_model import StepFeatures
from tests.unit.paced import FACTS, WORKLOAD, paced
from tests.unit.profiles import score
from tests.unit.report.reporting import Page

ROOT = Path(__file__).parents[2]
EASY = SLO(ttft_ms=5000, tpot_ms=1000)
ONE, TWO = fixed(Knobs(16, 0, 128, 128)), fixed(Knobs(4, 0, 32, 32))


def run(
    engine: Engine, contenders: list[Contender], rounds: int = 1, slo: SLO = EASY, **options: Any
) -> list[Result | Failure]:
    given = {"vocab_size": FACTS.vocab_size, "duration": 0.5, **options}
    return list(measure(engine, turns(contenders, rounds, 7), parse_workload(WORKLOAD), slo, **given))


def test_rounds_rotate_and_share_their_arrivals_but_no_prompt() -> None:
    planned = turns([ONE, TWO, defaults(KnobLimits())], 3, seed=5)
    assert [t.contender.name for t in planned] == [
        "16/128", "4/32", "defaults", "4/32", "defaults", "16/128", "defaults", "16/128", "4/32",
    ]  # fmt: skip
    assert [t.seed for t in planned] == [5, 5, 5, 6, 6, 6, 7, 7, 7]
    assert len({t.prompts for t in planned}) == 9


def test_every_contender_meets_the_same_requests_at_its_own_setting() -> None:
    with paced() as engine:
        vllm, control = defaults(engine.limits), controlled(engine.limits)
        found = run(engine, [vllm, control, TWO], rounds=2)
        assert engine.view().running == engine.view().waiting == 0
    assert all(isinstance(r, Result) for r in found) and len(found) == 6
    for number in (0, 1):
        same = [r for r in found if isinstance(r, Result) and r.turn.round == number]
        assert len({tuple(round(o.due, 6) for o in r.outcomes) for r in same}) == 1
        assert {r.turn.contender: r.score.setting for r in same} == {
            vllm: vllm.knobs.as_dict(), control: vllm.knobs.as_dict(), TWO: TWO.knobs.as_dict(),
        }  # fmt: skip
    for r in found:
        assert isinstance(r, Result)
        assert sum(o.met for o in r.outcomes) == r.score.met and len(r.outcomes) == r.score.offered
        assert bool(r.decisions) == r.turn.contender.control
        assert all(0 <= d.at < 5 for d in r.decisions)


def test_a_failed_turn_is_a_failure_and_the_others_go_on() -> None:
    def sample(sequence: Sequence) -> int:
        if str(sequence.request.id).startswith(f"bench-{broken}-"):
            raise RuntimeError("broken")
        return 1

    broken = turns([ONE, TWO], 1, 7)[0].prompts
    with paced(sample=sample) as engine:
        found = run(engine, [ONE, TWO])
    assert isinstance(found[0], Failure) and "broken" in found[0].cause
    assert isinstance(found[1], Result) and found[1].turn.contender == TWO


def test_an_engine_that_dies_ends_the_turns_and_keeps_those_before() -> None:
    found: list[Result | Failure] = []
    with paced() as engine:
        given = {"vocab_size": 256, "duration": 0.3}
        for one in measure(engine, turns([ONE, TWO], 2, 0), parse_workload(WORKLOAD), EASY, **given):  # type: ignore[arg-type]
            found.append(one)
            if len(found) == 2:
                engine.close()
    assert [type(one) for one in found] == [Result, Result, Failure]


def test_an_engine_that_dies_while_late_requests_are_rejected_is_said_to_have_died() -> None:
    with paced() as engine, pytest.raises(ArithmeticError, match="why it died"), ONE.rejecting().at_work(engine, EASY):
        engine.close()
        raise ArithmeticError("why it died")


def test_stopped_in_the_middle_of_a_turn_keeps_the_whole_ones() -> None:
    with paced() as engine:
        seen: list[Result | Failure] = []
        given = {"vocab_size": 256, "duration": 0.3, "stop": lambda: bool(seen)}
        for found in measure(engine, turns([ONE, TWO], 2, 0), parse_workload(WORKLOAD), EASY, **given):  # type: ignore[arg-type]
            seen.append(found)
        assert len(seen) == 1
        assert engine.view().running == engine.view().waiting == 0


def result(contender: Contender, number: int, met: list[bool], duration: float = 40.0) -> Result:
    outcomes = tuple(
        Outcome(duration * i / len(met), ok, 100.0 + i, None if i == 0 else 10.0 + i, 500.0) for i, ok in enumerate(met)
    )
    return Result(Turn(contender, number, number, number), score(), outcomes, ())


def world() -> PairedComparison:
    """Two rounds of 40 requests: ONE keeps all but every tenth, TWO all but every second."""
    results = [result(ONE, r, [i % 10 != 9 for i in range(40)]) for r in (0, 1)]
    results += [result(TWO, r, [i % 2 == 0 for i in range(40)]) for r in (0, 1)]
    return PairedComparison(results, 40.0)


def test_shares_and_percentiles_are_of_all_requests() -> None:
    found = world().summary(ONE)
    assert (found.rounds, found.offered) == (2, 80)
    assert found.attainment.value == pytest.approx(0.9) and found.goodput.value == pytest.approx(0.9)
    assert found.attainment.low <= 0.9 <= found.attainment.high
    p50, p99 = found.latencies["ttft_ms"]
    assert (p50.value, p99.value) == (119.0, 139.0)  # the 40th and the 80th of 80, by nearest rank
    assert p50.low <= 119 <= p50.high and p99.low <= p99.value == p99.high
    assert found.latencies["tpot_ms"][0].value == 30.0  # the 39th of the 78 that have one


def test_a_paired_difference_is_exact_when_every_block_says_the_same() -> None:
    found = world().difference(ONE, TWO)
    assert found is not None and found.rounds == 2
    assert found.difference.value == pytest.approx(0.4) and found.ratio.value == pytest.approx(1.8)
    assert found.difference.low > 0.3 and found.difference.high < 0.55
    equal = world().difference(ONE, ONE)
    assert equal is not None and equal.difference == (0.0, 0.0, 0.0) and equal.ratio == (1.0, 1.0, 1.0)


def test_a_difference_takes_only_rounds_that_both_have() -> None:
    good, bad = [True] * 40, [False] * 40
    comparison = PairedComparison([result(ONE, 0, good), result(TWO, 0, good), result(ONE, 1, bad)], 40.0)
    found = comparison.difference(ONE, TWO)
    assert found is not None and (found.rounds, found.difference.value) == (1, 0.0)
    assert comparison.summary(ONE).attainment.value == 0.5
    assert PairedComparison([result(ONE, 0, good), result(TWO, 1, good)], 40.0).difference(ONE, TWO) is None


def test_intervals_follow_the_spread_between_rounds() -> None:
    steady = [result(ONE, r, [i % 2 == 0 for i in range(40)]) for r in range(4)]
    moody = [result(TWO, r, [r % 2 == 0] * 40) for r in range(4)]
    comparison = PairedComparison([*steady, *moody], 40.0)
    one, two = (comparison.summary(c).attainment for c in (ONE, TWO))
    assert one.value == two.value == 0.5
    assert one.high - one.low < 0.2 < 0.6 < two.high - two.low


def test_a_request_that_every_round_repeats_counts_once() -> None:
    """Blocks of 0 and 1 by turns: thirty rounds of them say no more than one, and thirty rounds of others do."""
    met = [i // 4 % 2 == 0 for i in range(40)]

    def width(rounds: int, *, repeated: bool) -> tuple[float, float]:
        results = [result(ONE, r, met) for r in range(rounds)] + [result(TWO, r, [True] * 40) for r in range(rounds)]
        compared = PairedComparison(results, 40.0, repeated=repeated)
        found, difference = compared.summary(ONE).attainment, compared.difference(ONE, TWO)
        assert difference is not None
        return found.high - found.low, difference.difference.high - difference.difference.low

    once = width(1, repeated=True)
    assert once == width(1, repeated=False) and min(once) > 0.5
    assert width(30, repeated=True) == pytest.approx(once, abs=0.05)
    assert max(width(30, repeated=False)) < 0.15


@pytest.mark.parametrize(
    ("repeated", "rounds", "duration", "said"),
    [
        (True, 2, 40.0, "the 95% interval over 2 rounds, and requests that every round repeats count once; "),
        (False, 2, 40.0, "the 95% interval over 2 rounds; "),
        (True, 2, 4.0, "Rounds of 4 s of the same requests have no intervals: a longer --duration has; "),
        (True, 1, 4.0, "One round of 4 s has no intervals: a longer --duration has; "),
    ],
)
def test_the_table_says_whether_rounds_repeat_requests(repeated: bool, rounds: int, duration: float, said: str) -> None:
    results = [result(ONE, r, [i % 2 == 0 for i in range(40)], duration) for r in range(rounds)]
    console = Console(width=250, file=io.StringIO())
    made = PairedComparison(results, duration, repeated=repeated)
    show(made, EASY, console, baseline=ONE, notes=["requests come in bursts"])
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert said in text and "latencies in ms. Requests come in bursts." in text
    assert (" [" in text.splitlines()[1]) is made.has_intervals is (duration == 40.0)


def test_a_ratio_to_what_met_nothing_is_infinite() -> None:
    """In a third of the resamples, too: the baseline met requests in one block of eight, which they leave out."""
    rare, half = [i < 5 for i in range(40)], [i % 2 == 0 for i in range(40)]
    found = PairedComparison([result(ONE, 0, half, 32.0), result(TWO, 0, rare, 32.0)], 32.0).difference(ONE, TWO)
    assert found is not None and found.ratio.value == pytest.approx(4.0)
    assert found.ratio.high == math.inf and 0.5 < found.ratio.low < 4
    assert found.as_dict()["ratio"]["high"] is None
    never = PairedComparison([result(ONE, 0, half), result(TWO, 0, [False] * 40)], 40.0).difference(ONE, TWO)
    assert never is not None and never.ratio == (math.inf, math.inf, math.inf)
    neither = PairedComparison([result(ONE, 0, [False] * 40), result(TWO, 0, [False] * 40)], 40.0).difference(ONE, TWO)
    assert neither is not None and all(math.isnan(value) for value in neither.ratio)


def test_values_alone_are_those_that_have_intervals_else() -> None:
    alone = PairedComparison(world().results, 40.0, intervals=False)
    assert not alone.has_intervals
    for contender in (ONE, TWO):
        here, there = alone.summary(contender), world().summary(contender)
        for one, other in (
            (here.attainment, there.attainment),
            (here.goodput, there.goodput),
            *zip(here.latencies["ttft_ms"], there.latencies["ttft_ms"], strict=True),
        ):
            assert one.value == other.value and math.isnan(one.low) and math.isnan(one.high)
    found = alone.difference(ONE, TWO)
    assert found is not None and found.difference.value == pytest.approx(0.4) and math.isnan(found.difference.low)
    console = Console(width=250, file=io.StringIO())
    show(alone, EASY, console, baseline=TWO)
    assert isinstance(console.file, io.StringIO)
    assert "Intervals are left out, as the comparison was stopped" in console.file.getvalue()


def test_percentiles_of_resamples_are_those_of_the_values_they_drew() -> None:
    rng = np.random.default_rng(3)
    outcomes = [
        tuple(Outcome(due, True, float(rng.integers(30)), None, None) for due in rng.uniform(0, 12, size=25))
        for _ in range(2)
    ]
    results = [Result(Turn(ONE, r, r, r), score(), outcomes[r], ()) for r in (0, 1)]
    made = PairedComparison(results, 12.0)
    found = sorted((o.ttft_ms or 0.0, 3 * r + min(2, int(o.due / 4))) for r, each in enumerate(outcomes) for o in each)
    values, cells = np.array([value for value, _ in found]), np.array([cell for _, cell in found])
    rounds, blocks = made._draws(2)
    for resample, quantiles in enumerate(made._quantiles(2, values, cells).T[:300]):
        drawn = (3 * rounds[resample] + blocks[resample]).ravel()
        expected = sorted(value for cell in drawn for value in values[cells == cell])
        assert list(quantiles) == [expected[max(0, math.ceil(q * len(expected)) - 1)] for q in (0.5, 0.99)]


def test_nothing_measured_is_refused_and_nothing_finished_is_not_a_number() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        PairedComparison([], 10.0)
    none = Result(Turn(ONE, 0, 0, 0), score(), (Outcome(1.0, False, None, None, None),), ())
    found = PairedComparison([none], 10.0).summary(ONE)
    assert found.attainment.value == 0 and math.isnan(found.latencies["e2e_ms"][0].value)
    assert found.as_dict()["e2e_ms"]["p50"] == {"value": None, "low": None, "high": None}


def test_the_table_says_what_each_met_and_how_it_differs() -> None:
    console = Console(width=250, file=io.StringIO())
    show(world(), EASY, console, baseline=TWO)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[1].startswith("16/128") and "90.0% [" in lines[1] and "+40.0 [" in lines[1]
    assert lines[2].startswith("4/32") and "50.0% [" in lines[2]
    assert "− 4/32" in lines[0] and f"SLO {EASY}" in lines[3]


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_the_table_leaves_out_what_finds_no_room_and_cuts_nothing(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    show(world(), EASY, console, baseline=TWO)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "…" not in "".join(lines) and all(len(line.rstrip()) <= width for line in lines[:3])
    assert "90.0% [" in lines[1] and "+40.0 [" in lines[1] and "TTFT p99" in lines[0] and "TPOT p99" in lines[0]
    assert ("TTFT p50" in lines[0]) == (width >= 120) and ("E2E p99" in lines[0]) == (width >= 100)


def test_the_table_is_told_without_a_baseline_that_could_not_be_measured() -> None:
    console = Console(width=250, file=io.StringIO())
    show(PairedComparison([result(ONE, 0, [True, False] * 20)], 40.0), EASY, console, baseline=TWO)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "−" not in lines[0] and lines[1].startswith("16/128") and "50.0% [" in lines[1]


def test_percentiles_do_not_depend_on_how_many_resamples_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together = world().summary(ONE)
    monkeypatch.setattr("autotune.bench.comparing._AT_ONCE", 500)
    assert world().summary(ONE).latencies == together.latencies


MODEL = FACTS.model_copy(update={"max_model_len": 8192})


@pytest.mark.parametrize(
    ("spec", "rate", "prompt", "offered", "chosen_by"),
    [
        ("fixed:prompt=512,output=64", None, 128, None, "the profile's"),
        ("fixed:prompt=512,output=64,length=1", None, 512, None, "the profile's"),
        ("fixed:prompt=512,output=64,rate=3", None, 128, 3.0, "given"),
        ("fixed:prompt=512,output=64,rate=3", 5.0, 128, 5.0, "given"),
        ("fixed:prompt=100000,output=10,length=1", None, 150, None, "the profile's"),
    ],
)
def test_a_profile_lends_what_the_workload_does_not_say(
    spec: str, rate: float | None, prompt: int, offered: float | None, chosen_by: str
) -> None:
    profile = load_profile(ROOT / "profiles" / "cpu-2core-tiny.yaml")
    assert profile.workload.length_scale == 1 / 4
    with paced() as engine:
        pool = engine.facts.kv_tokens
        load = of_profile(engine, MODEL, profile, spec, None, rate)
    first = next(load.workload.arrivals(0, limit=1))
    longest = min(pool, 8192) - min(pool, 8192) // 4
    assert first.prompt_tokens == (min(prompt, longest) if prompt != 150 else longest)
    assert load.workload.rate == pytest.approx(offered or profile.workload.rate) and load.rate_from == chosen_by


@pytest.mark.parametrize(
    ("spec", "cuts"),
    [
        ("fixed:prompt=512,output=64", ""),
        ("fixed:prompt=100000,output=10,length=1", "100.0% of the prompts are cut to {longest} tokens"),
        ("fixed:prompt=100000,output=10,length=1,cap_prompt=99", ""),
        (None, ""),
    ],
)
def test_requests_that_are_cut_to_what_there_is_room_for_are_said(spec: str | None, cuts: str) -> None:
    profile = load_profile(ROOT / "profiles" / "cpu-2core-tiny.yaml")
    facts = profile.workload.model_copy(update={"cap_prompt": 40, "cap_output": 20})
    with paced() as engine:
        wide = profile.workload.model_copy(update={"cap_prompt": None, "cap_output": None})
        load = of_profile(
            engine, MODEL, profile.model_copy(update={"workload": facts if spec is None else wide}), spec, None, None
        )
        longest = engine.facts.kv_tokens - engine.facts.kv_tokens // 4
    if cuts:
        cuts = cuts.format(longest=longest) + ", the most that the profile and this engine leave room for"
    assert load.cuts == cuts and load.notes == ((cuts,) if cuts else ())


def test_a_calibrated_load_that_is_cut_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    load = on_the_spot(monkeypatch, "fixed:prompt=100000,output=10,length=1", 10.0)
    most = FACTS.max_model_len - FACTS.max_model_len // 4
    assert load.cuts == f"100.0% of the prompts are cut to {most} tokens, the most that this engine leaves room for"


def test_turns_that_begin_in_a_burst_say_what_they_offer() -> None:
    def planned(spec: str) -> BenchLoad:
        return BenchLoad(spec, parse_workload(spec), EASY, "given", "given").planned(0, 2, 20.0)

    load = planned("azure-code:rate=2")
    sent = sum(len(list(load.workload.arrivals(seed, duration=20.0))) for seed in (0, 1))
    assert load.offered_rate == sent / 40 > 2.2
    assert load.at(" (given)") == f"2 req/s (given) in the long run, {sent / 40:.3g} in these turns"
    assert load.notes == (f"requests come at 2 req/s in the long run, {sent / 40:.3g} in these turns",)
    even = planned("fixed:rate=2")
    assert even.at() == "2 req/s" and even.notes == () and even.offered_rate == pytest.approx(2, rel=0.1)
    assert even.repeated and not load.repeated


def test_a_trace_that_ends_before_the_turn_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{i * 0.05:.2f},10,5\n" for i in range(100))
    )
    load = parse_workload(f"{trace},bin=0")
    check_lasts(load, 0, 3, 5.0)
    with pytest.raises(
        InputError, match=r"12 s, but .* lasts for 4\.99. s at 20.* requests/s; .*--rate of at most 8\."
    ):
        check_lasts(load, 0, 3, 12.0)
    check_lasts(load.at_rate(8.3), 0, 3, 12.0)
    some = parse_workload("poisson:rate=20,prompt=10,output=5,limit=100")  # of which each seed has other times
    short, _, long = sorted(list(some.arrivals(seed))[-1].time for seed in range(3))
    with pytest.raises(InputError, match="lasts for"):
        check_lasts(some, 0, 3, (short + long) / 2)
    check_lasts(parse_workload("azure-conv"), 0, 3, 1e6)


@pytest.mark.parametrize(("duration", "prompt"), [(2.0, 32), (20.0, 192)])
def test_a_calibrated_load_suits_the_length_of_a_turn(
    monkeypatch: pytest.MonkeyPatch, duration: float, prompt: int
) -> None:
    """200 requests in a turn at the most: in longer turns lengths may be longer."""
    load = on_the_spot(monkeypatch, "fixed:prompt=256,output=64", duration)
    assert next(load.workload.arrivals(0, limit=1)).prompt_tokens == prompt
    assert load.rate_from == f"{SHARE:.0%} of what fills the engine"


@pytest.mark.parametrize(
    ("spec", "most"), [("fixed:prompt=1,output=1", 300), ("poisson:prompt=1,output=1,limit=100", 10)]
)
def test_no_more_is_offered_than_can_be_sent_or_than_the_workload_lasts_for(
    monkeypatch: pytest.MonkeyPatch, spec: str, most: float
) -> None:
    load = on_the_spot(monkeypatch, spec, 10.0)
    assert 0.7 * most < load.workload.rate <= most
    assert load.rate_from.startswith("the most that can be offered; ")
    check_lasts(load.workload, 0, 3, 10.0)
    assert on_the_spot(monkeypatch, spec, 10.0, rate=400.0).workload.rate == 400.0


def on_the_spot(monkeypatch: pytest.MonkeyPatch, spec: str, duration: float, rate: float | None = None) -> BenchLoad:
    monkeypatch.setattr("autotune.bench.loads.measure_steps", lambda *of, **by: Known())
    monkeypatch.setattr("autotune.bench.loads.request_alone", lambda *of, **by: Alone(0.128, 0.004, 128))
    with paced() as engine:
        return calibrated(engine, FACTS, spec, None, rate, 0, duration=duration, rounds=3)


class Known:
    """What the calibration of a machine whose steps take 1 ms, and 0.1 ms for each token, would find."""

    seconds = 1.0

    def cost(self, seconds: float) -> Known:
        return self

    def serving(self) -> Known:
        return self

    def predict(self, step: StepFeatures) -> float:
        return 0.001 + 0.0001 * (step.decodes + step.prefill_tokens)


@pytest.mark.parametrize(
    ("late", "slo", "said"),
    [
        (40.0, "ttft=500ms", False),
        (80.0, "ttft=500ms", True),
        (80.0, "e2e=500ms", True),
        (80.0, "ttft=500ms,e2e=2s", True),
        (80.0, "e2e=2s", False),
        (80.0, "tpot=20ms", False),
    ],
)
@pytest.mark.parametrize("of_a_class", [False, True])
def test_that_requests_were_sent_late_is_said_if_it_matters(
    late: float, slo: str, said: bool, of_a_class: bool
) -> None:
    turn = result(ONE, 0, [True] * 8)
    sent = turn._replace(score=turn.score.model_copy(update={"lateness_p99_ms": late}))
    console = Console(file=io.StringIO(), width=200)
    target = SLO.parse(slo)
    judged: dict[str, Any] = {"classes": [RequestClass("chat", target)]} if of_a_class else {}
    show(
        PairedComparison([turn, sent], 40.0), SLO(tpot_ms=9) if of_a_class else target, console, baseline=ONE, **judged
    )
    words = "in one run, 1 in 100 was sent more than 80 ms late"
    assert (words in console.file.getvalue()) is said  # type: ignore[attr-defined]


def test_a_single_block_has_no_interval() -> None:
    """Every resample of one block is that block: its interval would have no width, and be taken for certainty."""
    made = PairedComparison(
        [result(ONE, 0, [True, False, True, True], 3.0), result(TWO, 0, [True, False, False, True], 3.0)], 3.0
    )
    for contender in (ONE, TWO):
        summary = made.summary(contender)
        pairs = [one for pair in summary.latencies.values() for one in pair]
        for estimate in (summary.attainment, summary.goodput, *pairs):
            assert math.isfinite(estimate.value) and math.isnan(estimate.low) and math.isnan(estimate.high)
    console = Console(width=120, file=io.StringIO())
    show(made, EASY, console, baseline=TWO)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "75.0%" in text and "+25.0" in text and "[" not in text and "One round of 3 s has no intervals" in text
    assert PairedComparison(list(made.results), 8.0).has_intervals


def test_control_is_by_the_controller_that_is_named() -> None:
    with paced() as engine:
        named = controlled(engine.limits, controller="static")
        (found,) = run(engine, [named])
        with pytest.raises(InputError, match="--controller: controller is 'nobody'; it must be one of"):
            run(engine, [controlled(engine.limits, controller="nobody")])
        assert run(engine, [ONE])  # the lease was given back
    assert isinstance(found, Result) and named.name == "control"
    assert found.decisions[0].cause.startswith("static controller")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    with paced() as engine:
        found = run(engine, [controlled(engine.limits), ONE])
    comparison = PairedComparison([r for r in found if isinstance(r, Result)], 0.5)
    made = plotting.render(comparison, EASY, "a <title> & more")
    page = Page(made.decode())
    words = " ".join(page.words)
    assert "a <title> & more" in words and "control" in words and "16/128" in words and page.all("src") == []
    plots = json.loads(page.scripts[0])
    assert [*plots] == ["attainment", "knobs", "ttft", "tpot"]
    names = {trace["name"] for trace in plots["ttft"]["views"][0]["data"]}
    assert names == {c.name for c in comparison.contenders}
    assert plots["ttft"]["views"][0]["layout"]["annotations"][0]["text"] == "5000 ms"
    for plot in plots.values():
        for view in plot["views"]:
            known = json.loads(re.sub(r'"@[\w-]+"', '"#123456"', json.dumps(view).replace('"@font"', '"Arial"')))
            figure = Figure(data=known["data"], layout=known["layout"])  # raises for what plotly does not know
            assert figure.data and all(len(trace.x) > 1 for trace in figure.data)
    assert made == plotting.render(comparison, EASY, "a <title> & more")


def test_a_target_on_gaps_is_not_drawn_as_one_on_their_mean() -> None:
    def targets(slo: str) -> dict[str, list[str]]:
        made = plotting.render(world(), SLO.parse(slo), "a title")
        layouts = {key: plot["views"][0]["layout"] for key, plot in json.loads(Page(made.decode()).scripts[0]).items()}
        return {key: [words["text"] for words in layouts[key].get("annotations", [])] for key in ("ttft", "tpot")}

    assert targets("ttft=500ms,itl=60ms") == {"ttft": ["500 ms"], "tpot": []}
    assert targets("tpot=40ms,itl=60ms") == {"ttft": [], "tpot": ["40 ms"]}


def test_no_target_is_drawn_over_requests_that_others_judge() -> None:
    chat = RequestClass("chat", SLO.parse("ttft=200ms"), 2.0)
    made = plotting.render(world(), SLO.parse("ttft=500ms"), "a title", classes=[chat], notes=["Bursts."])
    page = Page(made.decode())
    assert "annotations" not in json.loads(page.scripts[0])["ttft"]["views"][0]["layout"]
    words = " ".join(page.words)
    assert (
        f"Each request is judged by the SLO of its class, so no target is drawn: {chat}; any other: ttft=500ms" in words
    )
    assert "Bursts." in words


def test_a_plot_goes_where_it_can(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--out: x.gif must end in .html"):
        plotting.check(Path("x.gif"))
    with pytest.raises(InputError, match="there is no directory"):
        plotting.check(tmp_path / "none" / "x.html")
    assert plotting.check(tmp_path / "x.html") == tmp_path / "x.html"


def test_fixed_settings_as_typed() -> None:
    limits = KnobLimits(max_batch_size=128)
    found = parse_fixed("max_batch_size=64, token_budget=512", limits)
    assert found == Contender("64/512", Knobs(64, 0, 512, 512))
    assert parse_fixed("chunk_size=32,max_wait_ms=2.5", limits).name == "128/8192 chunk 32 wait 2.5 ms"
    whole, chunked = Knobs(256, 0, 2048, 2048), Knobs(256, 0, 2048, 512)
    assert parse_fixed("token_budget=8192", KnobLimits(), whole).knobs.chunk_size == 8192
    assert parse_fixed("token_budget=8192", KnobLimits(), chunked).knobs.chunk_size == 512
    assert parse_fixed("token_budget=256", KnobLimits(), chunked).knobs.chunk_size == 256
    for text, said in (
        ("budget=5", '"budget=5" sets no knob; the knobs are max_batch_size, '),
        ("token_budget", "token_budget is ''; it must be a whole number"),
        ("token_budget=x", "token_budget is 'x'; it must be a whole number"),
        ("token_budget=1_000", "token_budget is '1_000'; it must be a whole number"),
        ("token_budget=8,token_budget=9", "token_budget is given twice"),
        ("max_batch_size=129", "max_batch_size is 129; it must be a whole number between 1 and 128 sequences"),
    ):
        with pytest.raises(InputError) as error:
            parse_fixed(text, limits)
        assert str(error.value).startswith(said)


def test_defaults_are_clamped_and_control_starts_from_them() -> None:
    limits = KnobLimits(max_batch_size=64, token_budget=512, chunk_size=256)
    assert defaults(limits).knobs == controlled(limits).knobs == Knobs(64, 0, 512, 256)
    assert not defaults(limits).control and controlled(limits).control
    assert controlled(limits, Knobs(128, 0, 64, 64)) == Contender("control from profile", Knobs(64, 0, 64, 64), True)


def test_control_from_a_profile_knows_its_step_times() -> None:
    """And as nothing does that starts cold, predicts from the first decision on."""
    given = load_profile(ROOT / "profiles" / "cpu-2core-tiny.yaml")
    with paced() as engine:
        warm = controlled(engine.limits, ONE.knobs, profile=given)
        cold = controlled(engine.limits, ONE.knobs)
        assert {warm: 1}[controlled(engine.limits, ONE.knobs, profile=given)] == 1, "results are kept by contender"
        with warm.at_work(engine, EASY) as attached:
            assert attached is not None and attached.controller.model.ready
        with cold.at_work(engine, EASY) as attached:
            assert attached is not None and not attached.controller.model.ready


@pytest.mark.parametrize("control", [True, False])
def test_late_requests_are_rejected_in_the_turns_that_say_so(control: bool) -> None:
    """More come than can be served in time; without it none is rejected."""
    slo = SLO(ttft_ms=1, tpot_ms=5000)
    with paced() as engine:
        plain = controlled(engine.limits) if control else ONE
        results = run(engine, [plain, plain.rejecting()], slo=slo)
        engine.view()
        assert engine.admission is None, "what a turn has set ends with it"
    kept, rejecting = (result for result in results if isinstance(result, Result))
    assert rejecting.turn.contender.name == f"{plain.name}, late rejected"
    assert all(outcome.ttft_ms is not None for outcome in kept.outcomes)
    assert any(outcome.ttft_ms is None for outcome in rejecting.outcomes)
