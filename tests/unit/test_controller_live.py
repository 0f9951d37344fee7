"""The live benchmark of the controller, all but the machine: its loads, rounds, ratios and pictures, in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from autotune.bench import Contender, Result, defaults, fixed
from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profile import find_profile, load_profile
from autotune.profile.serving import serving_cost
from autotune.profiling.setup import LOAD, typical_step
from benchmarks.controller.constants import constants_of
from benchmarks.controller.contenders import LAYERS, OURS, RIVALS
from benchmarks.controller_live import figures
from benchmarks.controller_live.__main__ import Plan as Rounds
from benchmarks.controller_live.__main__ import main, prepare
from benchmarks.controller_live.cases import CORE, PROMPTS, SHIFTS, STEADY, cases, steady_cases
from benchmarks.controller_live.machine import simulated
from benchmarks.controller_live.summary import compared, layer_ratios, panels, report, summary
from benchmarks.live import contenders as live_contenders
from benchmarks.live.contenders import admitted, base_and_layer, layers, ours, ours_knobs_only
from benchmarks.live.learning import served
from benchmarks.live.loads import Case, slo_for
from benchmarks.live.machine import Machine
from benchmarks.live.screening import GRID, screen
from benchmarks.live.serving import Contest, turn
from runtime.knobs import KnobLimits, Knobs
from tests.unit.paced import FACTS

MODEL = FACTS.model_copy(update={"max_model_len": 4096})
COST = serving_cost(load_profile(find_profile("cpu-2core-tiny")))
SLOWER = 1.5
SECONDS = 6.0
SIMULATION = partial(simulated, COST, MODEL, SLOWER)
SMALL, LARGE = fixed(Knobs(64, 0, 96, 96)), fixed(Knobs(8, 0, 1024, 1024))


@pytest.fixture
def machine() -> Machine:
    return SIMULATION(0)


@pytest.fixture
def loads(machine: Machine) -> dict[str, Case]:
    return {case.name: case for case in cases(machine, COST, SLOWER, SECONDS)}


def contest(machine: Machine, cases: Sequence[Case], everywhere: Sequence[Contender], **options: Any) -> Contest:
    given: dict[str, Any] = {
        "statics": {case.name: [SMALL, LARGE] for case in cases}, "plan": (2, 1), "seed": 0, "duration": SECONDS,
        "stop": lambda: False, "tell": lambda case, result: None, "fail": lambda case, contender, cause: None,
    }  # fmt: skip
    return Contest(machine, cases, everywhere, **given | options)


def test_all_loads_follow_from_the_machine_by_the_same_rules(machine: Machine, loads: dict[str, Case]) -> None:
    assert tuple(loads) == (*STEADY, *SHIFTS)
    for name, case in loads.items():
        assert case.shifts == (name in SHIFTS) and case.taken == (name == CORE)
        assert case.slo.ttft_ms == pytest.approx(20 * (case.slo.tpot_ms or 0))
    twice_as_fast = COST.scaled(compute=2, bandwidth=2, overhead=2)
    assert slo_for(twice_as_fast, 100).tpot_ms == pytest.approx((slo_for(COST, 100).tpot_ms or 0) / 2, rel=0.03)
    assert loads[CORE].workload.rate == pytest.approx(loads["conversation"].workload.rate * (1 + 1 / SLOWER) / 2)
    assert f"{LOAD:.0%} of" in loads["code"].said
    assert loads[PROMPTS].slo == loads[CORE].slo == loads["conversation"].slo
    lighter = cases(machine, COST, SLOWER, SECONDS, 0.5 * LOAD)
    assert [c.workload.rate / loads[c.name].workload.rate for c in lighter] == pytest.approx([0.5] * 5)


def test_long_prompts_join_in_the_middle(loads: dict[str, Case]) -> None:
    arrivals = list(loads[PROMPTS].workload.arrivals(3, duration=200.0))
    assert all(a.time <= b.time for a, b in pairwise(arrivals))
    before, after = ([a for a in arrivals if (a.time < SECONDS / 2) is first] for first in (True, False))
    alone = list(loads["conversation"].workload.arrivals(3, duration=SECONDS / 2))
    assert [a.prompt_tokens for a in before] == [a.prompt_tokens for a in alone]
    joint = (loads["conversation"].workload.rate + loads["code"].workload.rate) / 2
    assert len(after) / (200.0 - SECONDS / 2) == pytest.approx(joint, rel=0.1)
    doubled = loads[PROMPTS].workload.at_rate(2 * loads[PROMPTS].workload.rate)
    assert doubled.rate == pytest.approx(2 * loads[PROMPTS].workload.rate)


def test_the_pace_is_that_of_serving_not_of_a_slow_moment(machine: Machine) -> None:
    slow = COST.scaled(compute=0.5, bandwidth=0.5, overhead=0.5)
    step = typical_step(8, 64, 128)
    found = served(machine, slow, steady_cases(machine, slow), SECONDS, lambda: False)
    assert found.predict(step) == pytest.approx(COST.predict(step), rel=0.03)
    with pytest.raises(Interrupted):
        served(machine, slow, steady_cases(machine, slow), SECONDS, lambda: True)


class Taken:
    """A core, and when it was taken and given back."""

    def __init__(self, clock: Any) -> None:
        self.clock, self.times = clock, list[tuple[str, float]]()

    def start(self) -> None:
        self.times.append(("start", self.clock.now()))

    def stop(self) -> None:
        self.times.append(("stop", self.clock.now()))


def test_the_core_is_taken_in_the_middle_and_given_back(machine: Machine, loads: dict[str, Case]) -> None:
    core = Taken(machine.clock)
    machine = replace(machine, core=core)
    for _ in range(2):
        core.times.clear()
        begun = machine.clock.now()
        turn(machine, loads[CORE], SMALL, 0, 5, 5, SECONDS)
        (first, at), (last, end) = core.times
        assert (first, last) == ("start", "stop")
        assert SECONDS / 2 <= at - begun < SECONDS / 2 + 1.0 and end - begun >= SECONDS - 1.0
    core.times.clear()
    turn(machine, loads["chat"], SMALL, 0, 5, 5, SECONDS)
    assert core.times == []
    handle = machine.engine.submit([1, 2], None)  # so it is not idle
    with pytest.raises(EvaluationError):
        turn(machine, loads[CORE], SMALL, 0, 5, 5, SECONDS, stop=lambda: True)
    handle.cancel()
    assert core.times[-1][0] == "stop"


def test_a_taken_core_costs_time(machine: Machine, loads: dict[str, Case]) -> None:
    taken = turn(machine, loads[CORE], LARGE, 0, 5, 5, SECONDS)
    kept = turn(machine, loads[CORE]._replace(taken=False), LARGE, 0, 5, 5, SECONDS)
    assert taken.score.steps.mean_ms > 1.1 * kept.score.steps.mean_ms
    after = turn(machine, loads[CORE]._replace(taken=False), LARGE, 0, 5, 5, SECONDS)
    assert after.score.steps.mean_ms == pytest.approx(kept.score.steps.mean_ms, rel=0.05)


def test_screening_ranks_settings_and_takes_alike_ones_once(loads: dict[str, Case]) -> None:
    grid = [Knobs(64, 0, 32, 32), Knobs(64, 0, 1024, 1024), Knobs(63, 0, 1024, 1024), Knobs(1, 0, 32, 32)]
    found = screen(SIMULATION, loads["conversation"], SECONDS, grid)
    assert [s.contender.name for s in found] == ["64/1024", "64/32", "1/32"], "63 sequences are as good as 64"
    assert found[0].share > found[1].share > found[2].share


def test_rounds_share_their_arrivals_and_keep_the_better_half(machine: Machine, loads: dict[str, Case]) -> None:
    vllm, control = defaults(machine.engine.limits), ours(machine.engine.limits)
    told: list[tuple[str, str, int]] = []

    def tell(case: Case, result: Result) -> None:
        told.append((case.name, result.turn.contender.name, result.turn.round))

    chosen = [loads["code"], loads["chat"]]
    made = contest(machine, chosen, [vllm, control], tell=tell)
    made.run()
    assert [name for name, _, _ in told] == ["code"] * 4 + ["chat"] * 4 + ["code"] * 3 + ["chat"] * 3
    for case in chosen:
        results = made.results(case)
        for number in (0, 1):
            dues = {tuple(round(o.due, 6) for o in r.outcomes) for r in results if r.turn.round == number}
            assert len(dues) == 1
        best, *others = made.leading(case)
        assert not others and len([r for r in results if r.turn.contender == best]) == 2
        met = {r.turn.contender: r.score.met for r in results if r.turn.round == 0}
        assert met[best] == max(met[SMALL], met[LARGE])
    assert len({r.turn.prompts for case in chosen for r in made.results(case)}) == 14


@pytest.mark.slow
def test_a_round_that_was_cut_short_is_left_out_and_failures_are_named(
    machine: Machine, loads: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = defaults(machine.engine.limits)
    served: list[Result] = []
    failed: list[str] = []
    made = contest(
        machine, [loads["chat"]], [vllm], stop=lambda: len(served) >= 5, tell=lambda case, result: served.append(result)
    )
    made.run()
    assert len(served) == 5 and len(made.results(loads["chat"])) == 3 + 2
    made = contest(
        machine, [loads["chat"]], [vllm], plan=(2, 2), stop=lambda: len(served) >= 9, tell=lambda c, r: served.append(r)
    )
    made.run()
    assert len(made.results(loads["chat"])) == 3, "the fourth was of a round that did not come to its end"
    assert set(made.leading(loads["chat"])) == {SMALL, LARGE}

    def broken(*args: Any) -> Result:
        if args[2] == SMALL:
            raise EvaluationError("out of memory")
        return turn(*args)

    monkeypatch.setattr("benchmarks.live.serving.turn", broken)
    made = contest(
        machine, [loads["chat"]], [vllm], fail=lambda case, who, cause: failed.append(f"{who.name}: {cause}")
    )
    made.run()
    assert failed == ["64/96: out of memory"] and made.failures == 1
    assert made.leading(loads["chat"]) == [LARGE]


@pytest.mark.slow
def test_from_the_loads_to_the_json_line(machine: Machine) -> None:
    vllm, control = defaults(machine.engine.limits), ours(machine.engine.limits)
    plan = Rounds((2, 1), SECONDS, 1.0)
    made = prepare(machine, SIMULATION, COST, SLOWER, plan, [vllm, control], None, grid=GRID[::14])
    statics = {name: [s.contender for s in found] for name, found in made.screened.items()}
    assert all(len(found) == 2 for found in statics.values())
    run = contest(machine, made.cases, [vllm, control], statics=statics, plan=plan.keep)
    run.run()
    found = compared(run, made.cases, control, vllm, SECONDS)
    shape = summary(found, control, vllm)
    assert list(shape)[:3] == ["steady_vs_best_static", "vs_defaults", "shift_vs_best_static"]
    for name in list(shape)[:3]:
        low, high = shape[f"{name}_interval"]
        assert 0 < low <= shape[name] <= high
    for case in made.cases:
        of_case = shape["cases"][case.name]
        assert of_case["control"]["offered"] == of_case["defaults"]["offered"] == of_case["best"]["offered"]
        assert of_case["vs_defaults"] == pytest.approx(
            of_case["control"]["goodput"] / of_case["defaults"]["goodput"], rel=0.01
        )
        assert of_case["best_static"] in {c.name for c in statics[case.name]}
    assert shape["vs_defaults"] > 1.1, "long prompts computed in one step hold back all that decodes"
    drawn = [figures.render(panels(found, control, vllm), SECONDS, "a < b") for _ in range(2)]
    assert drawn[0] == drawn[1]
    text = drawn[0].decode()
    assert all(f'id="plot-{case.name}-latencies"' in text for case in made.cases) and "<h1>a &lt; b</h1>" in text


@pytest.mark.slow
def test_layers_are_compared_with_the_best_fixed_setting_that_has_the_same_admission(
    machine: Machine, loads: dict[str, Case]
) -> None:
    limits = machine.engine.limits
    vllm, control = defaults(limits), ours(limits)
    others = layers(limits)
    names = [c.name for c in others]
    assert names[:3] == ["knobs only", "predictive + step budgets", "predictive + deadline order"]
    assert names[3:] == [
        "aimd knobs", "aimd + early rejection", "bisection knobs", "bisection + early rejection", "gradient + early rejection",
        "length_table + early rejection", "p-pas + early rejection", "niyama + early rejection", "niyama or relegation",
        "defaults with admission",
    ]  # fmt: skip
    assert [base_and_layer(name) for name in ("control", *names[:3])] == [
        (OURS, x) for x in ("full", "knobs", "budget", "order")
    ]
    assert base_and_layer("niyama or relegation") == ("niyama", "relegate")
    assert [base_and_layer(name) for name in (vllm.name, names[-1])] == [("defaults", "knobs"), ("defaults", "full")]
    plan, case = Rounds((1,), SECONDS, 1.0), "conversation"
    everywhere = [vllm, control, *others]
    made = prepare(machine, SIMULATION, COST, SLOWER, plan, everywhere, [case], 1.5, GRID[::14], (fixed, admitted))
    statics = {case: [s.contender for s in made.screened[case]]}
    assert [c.control for c in statics[case]] == [False, True]
    run = contest(machine, made.cases, everywhere, statics=statics, plan=plan.keep)
    run.run()
    (found,) = compared(run, made.cases, control, vllm, SECONDS, others)
    assert (found.best, found.admitted) == tuple(statics[case])
    met = {r.turn.contender.name: r.score.met for r in run.results(made.cases[0])}
    baseline = met[statics[case][1].name]
    assert {name: r.value for name, r in found.layers.items()} == pytest.approx(
        {c.name: met[c.name] / baseline for c in everywhere} | {"best fixed": met[statics[case][0].name] / baseline}
    )
    shape = summary([found], control, vllm)
    assert shape["full_vs_best_static_with_admission_min"] == pytest.approx(met["control"] / baseline, abs=1e-4)
    assert set(shape["layers"]) == set(found.layers)
    over = {name: met[name] / met[vllm.name] for name in names}
    assert {name: one["min"] for name, one in shape["others_vs_defaults"].items()} == pytest.approx(over, abs=1e-4)
    assert shape["cases"][case]["ratios"]["knobs only ÷ defaults"][0] == pytest.approx(over["knobs only"], abs=1e-4)
    said: list[str] = []
    report([found], vllm, said.append)
    assert any(line.startswith("aimd + early rejection") for line in said)
    drawn = ElementTree.fromstring(figures.layers_picture(layer_ratios([found]), "a < b"))
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"niyama", "best fixed", case, "geometric mean", *LAYERS.values()} <= set(texts) and "control" not in texts
    dots = [dot for dot in drawn.iter("{http://www.w3.org/2000/svg}circle")]
    assert len(dots) == len(LAYERS) + 2 * len(found.layers), "a legend, and everybody with the load and with the mean"
    assert "layers" not in summary([found._replace(layers={})], control, vllm)


def test_knobs_only_gives_no_step_a_budget_of_its_own(machine: Machine, loads: dict[str, Case]) -> None:
    full, knobs = ours(machine.engine.limits), ours_knobs_only(machine.engine.limits)
    budgets: dict[str, set[bool]] = {}
    for contender in (full, knobs):
        seen: set[bool] = set()

        class Watch:
            def on_step(self, record: Any, seen: set[bool] = seen) -> None:
                seen.add(record.budget_used < machine.engine.knobs.token_budget)

            def on_request(self, record: Any) -> None: ...

        unsubscribe = machine.engine.subscribe(Watch())
        result = turn(machine, loads["code"], contender, 0, 5, 5, SECONDS)
        unsubscribe()
        assert result.decisions and result.turn.contender.control
        budgets[contender.name] = seen
    assert budgets == {"control": {True, False}, "knobs only": {False}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--case", "chats"], "choose from"),
        (["--duration", "0"], "0 s; it must be 1 to 3600"),
        (["--keep", "8,x"], "8,x; each round must have 1 to"),
    ],
)
def test_nonsense_is_said_before_anything_is_loaded(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plot", "picture.svg"]) == 2
    assert "picture.svg must end in .html" in capsys.readouterr().err
    assert main(["--layers", "--plot", "picture.pdf"]) == 2
    assert "picture.pdf must end in .html or .svg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contender", "knobs only"], "--contender is given without --layers"),
        (
            ["--layers", "--contender", "nobody"],
            "--contender is 'nobody'; it must be one of knobs only, predictive + step",
        ),
    ],
)
def test_says_which_contenders_there_are(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_constants_that_are_tokens_fit_lengths_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(
        live_contenders, "attach", lambda algorithm, constants, *rest: found.update({algorithm.about: constants})
    )
    for rival in RIVALS:
        live_contenders.layer_of(rival, "full", KnobLimits()).attach(None, None)  # type: ignore[misc, arg-type]
    by_name = {rival: found[RIVALS[rival].about] for rival in RIVALS}
    assert by_name["niyama"]["least"] == 16 and by_name["niyama"]["margin"] == constants_of("niyama", "full")["margin"]
    for rival, name in (("aimd", "floor"), ("gradient", "queue"), ("p-pas", "cap")):
        assert by_name[rival][name] == round(constants_of(rival, "full")[name] / 8) <= 96
    assert by_name["bisection"] == constants_of("bisection", "full")
