"""The benchmark of two classes: its loads, turns and figures, and its live half in simulation."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from autotune.bench import Estimate, Outcome, Result, Turn, fixed
from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.measure.score import ClassScore, Score
from autotune.profile import find_profile, load_profile
from autotune.profile.serving import serving_cost
from autotune.workload import parse_workload
from benchmarks.classes import __main__ as command
from benchmarks.classes import contenders, live
from benchmarks.classes.contenders import KNOBS, serve
from benchmarks.classes.live import QUICK, STARTED_WITH, Load, Rounds, Served, kept_full, load_of, rows
from benchmarks.classes.loads import BATCH, BATCH_LOAD, BEYOND, CHAT, Most, at_once, mean_output, offered
from benchmarks.classes.summary import LEAST, LOSS, Measured, Row, line, summary
from benchmarks.classes.virtual import CLASSES, full
from benchmarks.controller_live.machine import simulated
from benchmarks.live.machine import Machine
from runtime.knobs import Knobs
from tests.unit.paced import FACTS
from tests.unit.profiles import score

MODEL = FACTS.model_copy(update={"max_model_len": 4096})
COST = serving_cost(load_profile(find_profile("cpu-2core-tiny")))
PLAN = QUICK._replace(rounds=2, shares=(0.3,), window=4.0, warmup=1.0, filled=1.0, counted=2.0)
SETTINGS = (Knobs(64, 0, 256, 256), Knobs(8, 0, 256, 256))
BOTH = ("default", "defaults")


def scaled(load: Any) -> Any:
    return load.scaled(length=1 / 16)


def machine_of(seed: int = 0) -> Machine:
    return simulated(COST, MODEL, 1.5, seed, classes=STARTED_WITH, admission=False)


@pytest.fixture
def machine() -> Machine:
    return machine_of()


@pytest.fixture
def load() -> Load:
    most = Most(80.0, 900.0)
    batch = scaled(parse_workload(BATCH_LOAD))
    return Load("said", CLASSES, most, batch, SETTINGS[0], {0.3: offered(0.3, most, 0, scaled)})


def no() -> bool:
    return False


def test_chat_is_the_same_alone_and_beside_batch_that_asks_for_more_than_is_left() -> None:
    made = offered(0.6, Most(20.0, 1000.0), 3, scaled)
    assert made.left == pytest.approx(400.0)
    alone, beside = (list(w.arrivals(5, duration=200.0)) for w in (made.alone, made.beside))
    chats = [a for a in beside if a.request_class == CHAT]
    assert {a.request_class for a in alone} == {CHAT} and len(chats) == len(alone) > 1500
    for one, other in zip(alone, chats, strict=True):
        assert one.time == pytest.approx(other.time, abs=1e-3)
        assert (one.prompt_tokens, one.output_tokens) == (other.prompt_tokens, other.output_tokens)
    batch = sum(a.output_tokens for a in beside if a.request_class == BATCH) / 200.0
    assert batch == pytest.approx(BEYOND * made.left, rel=0.05), "in tokens of the scaled lengths"


def test_full_is_what_a_queue_that_never_empties_gives(machine: Machine) -> None:
    requests = scaled(parse_workload(BATCH_LOAD))
    waiting, few = at_once(requests, 1500), at_once(requests, 200)
    expected = full(COST, 131_072, waiting, SETTINGS[0], 1.0, 4.0)
    assert full(COST, 131_072, few, SETTINGS[0], 1.0, 4.0) == 0.0
    assert full(COST, 131_072, waiting, SETTINGS[1], 1.0, 4.0) < expected, "eight at a time are fewer"
    plan = PLAN._replace(counted=4.0)
    found = kept_full(machine, requests, SETTINGS[0], expected, plan, 0, no)
    assert found == pytest.approx(expected, rel=0.05), "measured as in virtual time"
    assert not machine.engine.view().waiting and not machine.engine.view().running
    with pytest.raises(EvaluationError, match="are served in 5 s"):
        kept_full(machine, requests, SETTINGS[0], 1.0, plan, 0, no)
    with pytest.raises(Interrupted):
        kept_full(machine, requests, SETTINGS[0], expected, plan, 0, lambda: True)
    assert not machine.engine.view().waiting


def test_the_loads_follow_from_the_machine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "calibrate", lambda *given: COST)
    monkeypatch.setattr(live, "_SETTINGS", SETTINGS)
    found = load_of(machine, PLAN._replace(tried=2), 0, no)
    chat, batch = found.classes
    assert [one.slo for one in (chat, batch)] == [one.slo for one in CLASSES] and batch.weight == 0.2
    assert found.best == SETTINGS[0], "the one that serves more of the two"
    made = found.offered[0.3]
    assert made.alone.rate == pytest.approx(0.3 * found.most.chat) and made.left == pytest.approx(
        0.7 * found.most.batch
    )
    assert mean_output(found.batch, 0) < 20, "lengths × 1/16"
    monkeypatch.setattr(live, "_BACKLOG", 20)
    with pytest.raises(EvaluationError, match="keep no setting full"):
        load_of(machine, PLAN, 0, no)


def test_turns_alternate_and_share_their_chats(
    machine: Machine, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Rounds(machine, load, BOTH, PLAN, 0, no).run()
    assert served.failures == 0 and sorted(served.most) == [0, 1]
    order = [(r.turn.round, r.turn.contender.name) for r in served.results[0.3]]
    assert order == [
        (0, "default alone"), (0, "default beside"), (0, "defaults beside"), (0, "defaults alone"),
        (1, "defaults beside"), (1, "defaults alone"), (1, "default alone"), (1, "default beside"),
    ]  # fmt: skip
    for number in (0, 1):
        dues = {tuple(round(o.due, 3) for o in r.outcomes) for r in served.results[0.3] if r.turn.round == number}
        assert len(dues) == 1 and all(0 <= due <= PLAN.window for due in dues.pop())
    assert len({r.turn.prompts for r in served.results[0.3]}) == 8
    assert "batch tokens/s" in capsys.readouterr().err
    ours, theirs = rows(served, BOTH, PLAN)
    assert (ours.machine, ours.share, ours.name, len(ours.runs)) == ("tiny", 0.3, "default", 2)
    assert ours.difference.low <= ours.difference.value <= ours.difference.high
    assert theirs.difference.value < ours.difference.value, "first come, first served, chat waits behind batch"


def test_an_interrupted_round_is_left_out_and_a_failed_turn_is_named(
    machine: Machine, load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = list[str]()

    def fails_now_and_then(name: str, *args: Any, **options: Any) -> Score:
        turns.append(name)
        if len(turns) == 3:
            raise EvaluationError("out of memory")
        if len(turns) == 6:
            raise Interrupted("interrupted")
        return serve(name, *args, **options)

    monkeypatch.setattr(live, "serve", fails_now_and_then)
    served = Rounds(machine, load, BOTH, PLAN, 0, no).run()
    assert [r.turn.round for r in served.results[0.3]] == [0, 0, 0] and served.failures == 1
    assert "round 0 chat 30% defaults beside: left out: out of memory" in capsys.readouterr().err
    (only,) = rows(served, BOTH, PLAN)
    assert only.name == "default", "the other was not served both ways in any round"


def result(name: str, number: int, met: int, offered: int, batch: float) -> Result:
    def of(slo: str, met: int, offered: int, throughput: float) -> ClassScore:
        return ClassScore(
            slo=slo,
            offered=offered,
            met=met,
            attainment=met / offered,
            goodput=1.0,
            violations={},
            throughput=throughput,
        )

    classes = {CHAT: of("ttft=500ms", met, offered, 50.0), BATCH: of("e2e=60000ms", 1, 1, batch)}
    outcomes = tuple(Outcome(12.0 * i / offered, i < met, None, None, None, CHAT) for i in range(offered))
    return Result(Turn(fixed(KNOBS, name), number, number, number), score(classes=classes), outcomes, ())


def test_figures_of_known_turns() -> None:
    found = [
        result("default alone", 0, 40, 40, 0.0), result("default beside", 0, 40, 40, 450.0),
        result("default alone", 1, 60, 60, 0.0), result("default beside", 1, 57, 60, 550.0),
        result("default alone", 2, 60, 60, 0.0),
    ]  # fmt: skip
    (row,) = rows(Served({0.6: found, 0.3: []}, {0: 1000.0, 1: 1500.0, 2: 9.0}, 0), ["default"], live.FULL)
    assert row.share == 0.6 and [r.batch_share for r in row.runs] == pytest.approx([450 / 400, 550 / 600])
    assert row.difference.value == pytest.approx(-0.03), "of all requests: the rounds have 40 and 60"
    assert row.batch_share.value == pytest.approx(1000 / 1000), (
        "tokens over what was left, 40% of the most of each round"
    )
    assert row.batch_share[1:] == pytest.approx((550 / 600, 450 / 400), abs=0.01)


def row(difference: float, batch: float, share: float = 0.3, low: float = math.nan, machine: str = "H200") -> Row:
    runs = (Measured(0.99, 0.99 + difference, batch, 2.0), Measured(0.97, 0.97 + difference - 0.02, batch + 0.2, 4.0))
    found = (Estimate(v, low, math.nan if math.isnan(low) else v) for v in (difference, batch))
    return Row(machine, share, "default", runs, *found)


@pytest.mark.parametrize(
    ("difference", "batch", "met"),
    [(-LOSS, LEAST, True), (-0.0101, 2.0, False), (0.0, 0.849, False), (0.02, 1.0, True), (math.nan, 1.0, False)],
)
def test_both_aims_must_be_met(difference: float, batch: float, met: bool) -> None:
    assert row(difference, batch).met is met


def test_the_json_has_each_machine_and_load() -> None:
    made = summary([row(-0.005, 1.0), row(-0.02, 0.9, 0.6), row(0.0, 0.9, 0.6, -0.01, "A100")])
    assert made["machines"] == ["H200", "A100"]
    found = made["contenders"]["default"]
    assert found["interactive_difference_min"] == pytest.approx(-0.04)
    assert found["interactive_difference_mean"] == pytest.approx(-0.025 / 3 - 0.01, abs=1e-4)
    assert (found["batch_share_of_left_min"], found["batch_share_of_left_mean"]) == (
        0.9,
        pytest.approx(1.0333, abs=1e-3),
    )
    loads = found["loads"]
    assert {m: {s: one["met"] for s, one in of.items()} for m, of in loads.items()} == {
        "H200": {"30%": True, "60%": False}, "A100": {"60%": True},
    }  # fmt: skip
    assert loads["H200"]["30%"]["interactive_difference_interval"] == [None, None], "virtual time has none"
    assert loads["A100"]["60%"]["interactive_difference_interval"] == [-0.01, 0.0]
    assert json.loads(json.dumps(made)) == made


def test_intervals_are_shown_where_there_are_any() -> None:
    assert line(row(-0.005, 1.0)).split() == ["H200", "30%", "default", "98.00%", "96.50%", "-0.50%", "100.0%", "3.00"]
    shown = row(-0.005, 1.0, low=-0.01)
    assert line(shown).endswith("3.00  [-1.00% to -0.50%] [-1.0%–100.0%]")
    single = shown._replace(batch_share=Estimate(1.0, math.nan, math.nan))
    assert line(single).endswith("3.00  [-1.00% to -0.50%]"), "one round has blocks, and no other round"


@pytest.fixture
def in_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live half, on a simulated machine."""

    @contextmanager
    def simulation(**options: Any) -> Iterator[Machine]:
        assert options["classes"] == STARTED_WITH and options["admission"] is False
        yield machine_of()

    monkeypatch.setattr("benchmarks.controller_live.machine.live", simulation)
    monkeypatch.setattr(live, "calibrate", lambda *given: COST)
    monkeypatch.setattr(live, "QUICK", PLAN)
    monkeypatch.setattr(live, "_SETTINGS", SETTINGS)


@pytest.mark.usefixtures("in_simulation")
def test_a_stderr_that_nobody_reads_costs_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        assert command.main(["--live", "--quick", "--contender", "default"]) == 0
        monkeypatch.undo()
    out = capsys.readouterr().out
    said = json.loads(out.splitlines()[-1])
    assert said["live"] and not said["stopped"] and (said["rounds"], said["seeds"], said["failed"]) == (2, 2, 0)
    assert said["slos"][CHAT] == "ttft=500ms,tpot=50ms@95%" and said["machines"] == ["tiny"]
    assert said["contenders"]["default"]["loads"]["tiny"]["30%"]["runs"] == 2
    assert "95% intervals" in out


@pytest.mark.usefixtures("in_simulation")
def test_ctrl_c_leaves_the_rounds_that_are_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = list[str]()

    def interrupts(text: str) -> None:
        said.append(text)
        if sum("round 1 chat" in text for text in said) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(live, "say", interrupts)
    assert command.main(["--live", "--quick", "--contender", "default"]) == 130
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["stopped"] and found["rounds"] == 1
    assert sum("round 1 chat" in text for text in said) == 1, "no turn was served after it"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--rounds", "3"), "--rounds goes with --live"),
        (("--undisturbed",), "--undisturbed goes with --live"),
        (("--live", "--seeds", "2"), "--seeds goes without --live"),
        (("--live", "--rounds", "0"), "argument --rounds: 0; it must be a whole number from 1 to 100"),
        (("--live", "--seconds", "1"), "argument --seconds: 1 s; it must be 4 to 3600"),
        *(
            (
                ("--contender", name),
                f"{name}; it must be one of default, reject, knobs, defaults, or fixed-1 to fixed-8192",
            )
            for name in ("ours", "512", "fixed-", "fixed-0", "fixed-8193", "fixed-½")
        ),
    ],
)
def test_bad_input_is_named(args: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        command.main(args)
    assert raised.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_virtual_time_ends_with_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--quick", "--contender", "default"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not said["live"] and (said["seeds"], said["machines"]) == (1, ["H200", "CPU"])
    loads = said["contenders"]["default"]["loads"]
    assert {load: one["met"] for load, one in loads["H200"].items()} == {"30%": True, "60%": True}
    for one in loads["CPU"].values():  # without what others leave of a step, batch at 60% would have .6
        assert one["interactive_difference"] >= -LOSS and one["batch_share_of_left"] > 0.7


@pytest.mark.slow
def test_it_runs_on_the_live_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--live", "--quick", "--rounds", "1", "--seconds", "4", "--contender", "default"]) == 0
    out = capsys.readouterr().out
    said = json.loads(out.splitlines()[-1])
    assert said["live"] and said["rounds"] == 1 and "tiny on one CPU thread" in out
    assert said["contenders"]["default"]["loads"]["tiny"]["60%"]["batch_share_of_left"] > 0


def test_a_fixed_setting_has_the_same_admission_and_keeps_its_budget(
    machine: Machine, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: set[int] = set()
    engine = machine.engine
    decided = contenders.control

    def control(engine: Any, **options: Any) -> Any:
        assert options["controller"] == "static" and options["admission"] is True
        budgets.add(engine.knobs.token_budget)
        return decided(engine, **options)

    monkeypatch.setattr(contenders, "control", control)
    found = serve("fixed-512", engine, load.offered[0.3].beside, CLASSES, seed=1, window=4.0, warmup=1.0)
    assert budgets == {512} == {engine.knobs.token_budget}
    assert found.classes[CHAT].attainment > 0.9
