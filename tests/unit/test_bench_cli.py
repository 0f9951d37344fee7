"""``autotune bench`` as typed: what is refused before anything is loaded, and what help says."""

from __future__ import annotations

import io
import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from autotune.bench import Contender, ContenderSummary, Outcome, PairedComparison, Result, Turn
from autotune.bench.loads import BenchLoad
from autotune.bench.plotting import page as page_of
from autotune.cli import bench
from autotune.cli.exits import DONE, FELL_SHORT, INTERRUPTED
from autotune.cli.main import run
from autotune.measure.evaluate import EvaluationError
from autotune.measure.score import ClassScore
from autotune.profile import save_profile
from autotune.profile.fingerprint import OtherWork, machine
from autotune.workload import at_length_scale, parse_workload
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO, RequestClass
from runtime.tunable import ModelInfo
from tests.sample_profile import sample_model, sample_profile
from tests.unit.paced import FACTS, WORKLOAD, paced
from tests.unit.profiles import score

PAGE = page_of("Mine", []).decode()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--slo", "tpot=50"], '--slo: "tpot=50" has no unit; write tpot=50ms or tpot=0.05s'),
        (["--workload", "nope"], '--workload: workload "nope": '),
        (
            ["--cpu", "--model", "./no-such-model", "--workload", "poisson:rate=1e9"],
            "--workload: rate is 1e+09; it must be a number from 1e-06 to 1e+06 requests/s",
        ),
        (["--rate", "0"], "--rate is 0; it must be a number from 1e-06 to 1e+06 requests/s"),
        (["--duration", "30"], '--duration: "30" is not a time; write 30s or 30m'),
        (["--duration", ""], "--duration is empty; give it a value, or leave it out"),
        (["--engine", ""], "--engine is empty; give it a value, or leave it out"),
        (["--model", ""], "--model is empty; give it a value, or leave it out"),
        (["--duration", "0.5s"], "--duration is 0.5s; it must be at least 1s"),
        (["--rounds", "0"], "--rounds is 0; it must be a whole number from 1 to 1000"),
        (
            ["--slo", "tpot=50ms", "--reject-late"],
            "--reject-late needs to know what is late: add a TTFT, as in --slo ttft=",
        ),
        (["--fixed", "budget=5"], '--fixed: "budget=5" sets no knob; the knobs are max_batch_size, '),
        (
            ["--fixed", "token_budget=9000"],
            "--fixed: token_budget is 9000; it must be a whole number between 1 and 8192",
        ),
        (["--fixed", "token_budget=64", "--fixed", "token_budget=64"], "--fixed: 1024/64 is compared already"),
        (["--controller", "nobody"], "--controller is 'nobody'; it must be one of aimd, bisection, "),
        (
            ["--controller", "no_such_module:Mine"],
            "--controller is no_such_module:Mine; it cannot be imported",
        ),
        (["--out", "plot.pdf"], "--out: plot.pdf must end in .html"),
        (["--out", "nowhere/plot.html"], "--out: nowhere/plot.html cannot be written: there is no directory nowhere"),
        (["--profile", "none.yaml"], "none.yaml: cannot be read (No such file or directory), and is no shipped "),
        (["--cpu", "--dtype", "int8"], "--dtype is int8; it must be one of auto, float32, bfloat16, float16"),
        (["--cpu", "--gpu"], "--cpu and --gpu are both given"),
        (["--cpu", "--model", "./no-such-model"], "model ./no-such-model: "),
    ],
)
def test_wrong_options(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert "\n" not in captured.out.rstrip() and captured.err.count("\n") == 1
    assert captured.err.startswith(f"error: {text}")
    assert list(tmp_path.iterdir()) == []


def test_a_calibration_that_measures_nothing_is_one_line_and_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: Any, **named: Any) -> BenchLoad:
        raise EvaluationError("request 3 of the workload is refused:\nprompt is empty")

    monkeypatch.setattr("autotune.bench.loads.calibrated", fails)
    with paced() as engine:
        source = SimpleNamespace(
            model=ModelInfo("nano", 1000, 8192, "qwen3", 7, "float32", "cpu"), introduction=(), limits=engine.limits,
            stock=Knobs(), default_kv_tokens=lambda: None, start=lambda limits, seed: engine,
        )  # fmt: skip
        monkeypatch.setattr(bench, "load", lambda *given, **named: source)
        assert run(["bench", "--cpu", "--model", "nano"]) == 1
    said = "error: nothing could be measured: request 3 of the workload is refused: prompt is empty\n"
    assert capsys.readouterr().err == said


def test_a_profile_made_without_an_slo_gives_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_profile(sample_profile(objective="mean-e2e"), tmp_path / "p.yaml")
    assert run(["bench", "--cpu", "--profile", "p.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: --slo: p.yaml was made without an SLO (objective mean-e2e); add one, as ttft=500ms,tpot=50ms\n"
    )


@pytest.mark.parametrize("ours", [False, True])
def test_a_profile_of_another_machine_or_model_is_named(
    ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_this: dict[str, Any] = {"machine": machine(), "model": sample_model(name="nano")} if ours else {}
    save_profile(sample_profile(**of_this), tmp_path / "p.yaml")

    def stopped(**named: Any) -> None:
        raise InputError("here")

    source = SimpleNamespace(
        model=ModelInfo("nano", 1000, 8192, device="cpu"), name="autotune-runtime", version="0.1.0", introduction=(),
        limits=KnobLimits(), stock=Knobs(), default_kv_tokens=lambda: None, start=stopped,
    )  # fmt: skip
    monkeypatch.setattr(bench, "load", lambda *given, **named: source)
    assert run(["bench", "--cpu", "--model", "nano", "--profile", str(tmp_path / "p.yaml")]) == 2
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes == ([] if ours else [
        "note: profile was measured on NVIDIA H200, but this run uses the CPU",
        "note: profile was measured with llama-3.1-8b, not nano",
    ])  # fmt: skip


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("autotune bench") >= 4 and "vLLM's defaults" in text


@pytest.mark.parametrize(
    ("spec", "scaled", "one", "each"),
    [
        ("fixed", ", lengths × 1/8", 1 / 8, {}),
        ("fixed:length=1", "", 1, {}),
        ("chat=fixed:length=1/4@0.5+code=fixed@0.5", ", lengths of code × 1/8", None, {"chat": 1 / 4, "code": 1 / 8}),
    ],
)
def test_header_and_json_say_which_lengths_are_scaled(
    spec: str, scaled: str, one: float | None, each: dict[str, float]
) -> None:
    workload = at_length_scale(parse_workload(spec), 1 / 8)
    engine: Any = None
    made = bench._Run(engine, sample_model(), [], 1.0, 1, 0, engine, None)
    load = BenchLoad(spec, workload, SLO(ttft_ms=500), "given", "given")
    nobody: Any = SimpleNamespace(contenders=[])
    assert f"workload {spec}{scaled} · " in made._head(load)
    shape = bench._shape(made, load, nobody, Contender("defaults", Knobs()), False)
    assert (shape["length_scale"], shape["length_scales"]) == (one, each)


def test_figures_are_printed_ahead_of_a_page_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_shape", lambda *of: {"status": "complete"})
    monkeypatch.setattr("autotune.bench.table.show", lambda *of, **by: None)
    monkeypatch.setattr(bench._Run, "compare", lambda *of: (None, False))
    monkeypatch.setattr("autotune.bench.plotting.render", lambda *of, **by: "a page")
    engine: Any = None
    console = Console(file=io.StringIO())
    made = bench._Run(engine, sample_model(), [Contender("defaults", Knobs())], 1.0, 1, 0, console, threading.Event())
    made.results.append(engine)
    load = BenchLoad("fixed", parse_workload("fixed"), SLO(ttft_ms=500), "given", "given")
    with pytest.raises(InputError, match="cannot be written"):
        bench._finish(made, load, tmp_path / "gone" / "page.html", True)
    assert json.loads(capsys.readouterr().out) == {"status": "complete"}


@pytest.mark.parametrize("hurried", [False, True])
def test_ctrl_c_while_turns_are_compared_leaves_out_their_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hurried: bool
) -> None:
    found = PairedComparison.summary

    def summary(self: PairedComparison, contender: Contender) -> ContenderSummary:
        if hurried and self.intervals:
            signal.raise_signal(signal.SIGINT)
        return found(self, contender)

    monkeypatch.setattr(PairedComparison, "summary", summary)
    engine: Any = None
    console, contenders = Console(file=io.StringIO(), width=200), [Contender("defaults", Knobs())]
    made = bench._Run(engine, sample_model(), contenders, 20.0, 1, 0, console, threading.Event())
    outcomes = tuple(Outcome(i / 2, i % 3 > 0, 100.0 + i, 10.0, 500.0) for i in range(40))
    made.results.append(Result(Turn(contenders[0], 0, 0, 0), score(), outcomes, ()))
    load = BenchLoad("azure-code", parse_workload("azure-code"), SLO(ttft_ms=500), "given", "given", offered_rate=12.0)
    assert bench._finish(made, load, tmp_path / "page.html", True) == (INTERRUPTED if hurried else DONE)
    told = json.loads(capsys.readouterr().out)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert told["status"] == ("stopped" if hurried else "complete") and told["offered_rate"] == 12.0
    assert (told["contenders"][0]["attainment"]["low"] is None) is hurried
    assert told["contenders"][0]["attainment"]["value"] == 0.65
    assert "comparing" in said and ("Intervals are left out" in said) is hurried
    assert "Requests come at 2.57 req/s in the long run, 12 in these turns." in said
    page = (tmp_path / "page.html").read_text()
    assert page.count("2.57 req/s in the long run, 12 in these turns") >= 2, "in the title and below"


def test_head_and_json_say_what_was_cut_and_the_page_who_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = None
    console, contender = Console(file=io.StringIO(), width=200), Contender("defaults", Knobs())
    made = bench._Run(engine, sample_model(), [contender], 20.0, 1, 0, console, threading.Event())
    made.results.append(Result(Turn(contender, 0, 0, 0), score(), (Outcome(1.0, True, 1.0, 1.0, 1.0),), ()))
    cuts = "3.0% of the prompts are cut to 96 tokens, the most that this engine leaves room for"
    workload = parse_workload("fixed").scaled(cap_prompt=96)
    chat = RequestClass("chat", SLO(ttft_ms=200))
    load = BenchLoad("fixed", workload, SLO(ttft_ms=500), "given", "given", classes=(chat,), cuts=cuts)
    assert made._head(load).endswith(f"\nwarning: {cuts}")
    nobody: Any = SimpleNamespace(contenders=[])
    shape = bench._shape(made, load, nobody, contender, False)
    assert (shape["cap_prompt"], shape["cap_output"], shape["warnings"]) == (96, None, [cuts])
    assert shape["repeated"] is True
    assert bench._finish(made, load, tmp_path / "page.html", False) == DONE
    page = (tmp_path / "page.html").read_text()
    assert "at 1 req/s, the SLO of each class" in page and f"{cuts}." in page


def test_weighted_attainment_has_a_name_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 30 chats 10 met their SLO, of 30 batch requests of a fifth of the weight all: 66.7% of them, 44.4% of the weight."""
    chat, batch = RequestClass("chat", SLO(ttft_ms=200)), RequestClass("batch", SLO(e2e_ms=9000), 0.2)
    contender = Contender("defaults", Knobs())
    fared = {
        one.name: ClassScore(
            slo=str(one.slo),
            weight=one.weight,
            offered=30,
            met=met,
            attainment=met / 30,
            goodput=met / 4,
            violations={},
        )
        for one, met in ((chat, 10), (batch, 30))
    }
    outcomes = tuple(
        Outcome(i / 3, name == "batch" or i < 10, 100.0, 10.0, 500.0, name, weight)
        for i in range(30)
        for name, weight in (("chat", 1.0), ("batch", 0.2))
    )
    result = Result(Turn(contender, 0, 0, 0), score(met=40, offered=60, classes=fared), outcomes, ())
    monkeypatch.setattr("autotune.bench.measure", lambda *of, **by: iter([result]))
    notes: list[str] = []
    monkeypatch.setattr(
        "autotune.cli.display.Display.progress", lambda self, share, count, note, left: notes.append(note)
    )
    engine: Any = None
    console = Console(file=io.StringIO(), width=200)
    made = bench._Run(engine, sample_model(), [contender], 10.0, 1, 0, console, threading.Event())
    load = BenchLoad("fixed", parse_workload("fixed"), SLO(ttft_ms=500), "given", "given", classes=(chat, batch))
    made.measure(load)
    assert notes[1] == "round 1 defaults: 44% weighted attainment"
    assert bench._finish(made, load, None, True) == DONE
    told = json.loads(capsys.readouterr().out)
    (turn,), (found,) = told["turns"], told["contenders"]
    assert (turn["score"]["attainment"], turn["weighted_attainment"]) == pytest.approx((2 / 3, 4 / 9))
    assert (found["attainment"]["value"], found["weighted_attainment"]["value"]) == pytest.approx(
        (2 / 3, 4 / 9), abs=1e-4
    )
    assert found["attainment"]["low"] > found["weighted_attainment"]["low"]


def test_a_bench_whose_engine_died_fell_short(capsys: pytest.CaptureFixture[str]) -> None:
    with paced() as engine:
        contenders = [Contender("16/128", Knobs(16, 0, 128, 128)), Contender("4/32", Knobs(4, 0, 32, 32))]
        made = bench._Run(
            engine, FACTS, contenders, 0.3, 2, 0, Console(file=io.StringIO(), width=200), threading.Event()
        )
        load = BenchLoad(WORKLOAD, parse_workload(WORKLOAD), SLO(ttft_ms=5000), "given", "given")
        made.results = Then(engine.close)
        made.measure(load)
    assert bench._finish(made, load, None, True) == FELL_SHORT
    assert "1 of 4 turns were measured\n" in made.console.file.getvalue()  # type: ignore[attr-defined]
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["planned"], len(found["turns"])) == ("stopped", 4, 1)
    assert [(one["contender"], one["round"]) for one in found["failures"]] == [("4/32", 0)]
    assert found["failures"][0]["cause"]


def test_a_bench_beside_other_programs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OtherWork, "cores", lambda self: 3.0)
    monkeypatch.setattr("autotune.profiling.warnings.affine_cpus", lambda: (0, 1))
    console = Console(file=io.StringIO(), width=200)
    with paced() as engine:
        made = bench._Run(
            engine, FACTS, [Contender("16/128", Knobs(16, 0, 128, 128))], 0.3, 1, 0, console, threading.Event()
        )
        load = BenchLoad(WORKLOAD, parse_workload(WORKLOAD), SLO(ttft_ms=5000), "given", "given")
        assert made.warnings == []
        made.measure(load)
    assert bench._finish(made, load, tmp_path / "page.html", True) == DONE
    crowded = "other programs used 3.0 cores while it was measured"
    assert f"warning: {crowded}\n" in console.file.getvalue()  # type: ignore[attr-defined]
    assert json.loads(capsys.readouterr().out)["warnings"] == [crowded]
    assert f"{crowded[0].upper()}{crowded[1:]}." in (tmp_path / "page.html").read_text()


class Then(list[Any]):
    """A list that does something after each that it takes."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__()
        self.do = do

    def append(self, value: Any) -> None:
        super().append(value)
        self.do()


@pytest.mark.parametrize(("content", "refused"), [("<html>mine</html>", True), (PAGE, False), ("", False)])
def test_out_replaces_no_file_but_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, refused: bool
) -> None:
    page = tmp_path / "page.html"
    page.write_text(content)
    assert run(["bench", "--cpu", "--model", "./no-such-model", "--out", str(page)]) == 2
    said = f"error: --out: {page} exists and is no page of autotune's; name another file\n"
    assert (capsys.readouterr().err == said) is refused
    assert page.read_text() == content
