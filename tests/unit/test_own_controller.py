"""A controller of one's own in one file: the one that docs/how-to/control.md shows, by name and as an object."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from autotune import control, save_profile
from autotune.cli.main import run
from autotune.control.controllers.protocol import Proposal
from autotune.control.controllers.registry import CONTROLLERS, OF_BATCHERS, find, register
from autotune.control.controllers.static import StaticController
from autotune.control.decision_log import read_decisions
from autotune.control.explain import summarize
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.records import RequestRecord, StepRecord
from runtime.slo import SLO
from runtime.tunable import SchedulerView
from tests.unit.control_world import VLLM, SimulatedEngine, poisson, slow_cpu
from tests.unit.simulated_profile import profiled

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "control.md"
CHAT = SLO(ttft_ms=3000, tpot_ms=60)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with the page's file in it."""
    found = re.search(r"`my_controller.py`:\n\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    (tmp_path / "my_controller.py").write_text(found[1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_controller", None)


def test_it_turns_the_knobs_of_an_engine(folder: Path) -> None:
    engine = SimulatedEngine(slow_cpu, knobs=VLLM)
    with control(engine, slo=CHAT, controller="my_controller:Halving", log=folder / "run.jsonl") as attached:
        engine.play(poisson(8, 20, 400, 40, seed=1))
        assert not attached.status().ended and attached.controller.name == "halving"
    decisions = [d for d in read_decisions(folder / "run.jsonl") if d.action == "set"]
    assert min(d.new["token_budget"] for d in decisions) < 1024 and {d.regime for d in decisions} == {"slow", "fast"}
    assert all(d.cause.startswith("steps take") for d in decisions)
    assert run(["explain", str(folder / "run.jsonl")]) == 0


def test_it_is_simulated_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(profiled(), folder / "mine.yaml")
    words = ["simulate", "mine.yaml", "--seeds", "1", "--requests", "60", "--controller"]
    assert run([*words, "my_controller:Halving"]) in (0, 1)
    capsys.readouterr()
    assert run([*words, "my_controller:Nobody"]) == 2
    assert "--controller is my_controller:Nobody; it cannot be imported: AttributeError" in capsys.readouterr().err


class Idle:
    """Has a part of what a controller has."""

    name = "idle"

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Knobs:
        return knobs


class Wrong(StaticController):
    """Raises as soon as it is asked."""

    name = "wrong"

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        raise LookupError("no idea")


class Beyond(StaticController):
    """Sets what no knob can be at; the error is raised far below its own code."""

    name = "beyond"

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        return super().decide(now, knobs.with_(token_budget=10**9), limits)


class Broken(StaticController):
    name = "broken"

    def __init__(self, start: Knobs) -> None:
        raise RuntimeError("no model")


class Silent(StaticController):
    name = "silent"

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        return None  # type: ignore[return-value]


class Endless(StaticController):
    """Its evidence is nothing that a log can hold."""

    name = "endless"

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        return super().decide(now, knobs, limits)._replace(evidence={"left": math.inf})


class Mixed(StaticController):
    """Its evidence has names that cannot be put in order."""

    name = "mixed"

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        return super().decide(now, knobs, limits)._replace(evidence={1: 2, "a": 3})  # type: ignore[dict-item]


class Wordless(StaticController):
    name = "wordless"

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        return super().decide(now, knobs, limits)._replace(cause=None)  # type: ignore[arg-type]


class Leaving(StaticController):
    """Ends the process, if it may."""

    name = "leaving"

    def observe_step(self, record: StepRecord) -> None:
        raise SystemExit("had enough")


class LeavingLater(StaticController):
    name = "leaving-later"

    def observe_request(self, record: RequestRecord) -> None:
        raise SystemExit(0)


class LeavingAtOnce(StaticController):
    name = "leaving-at-once"

    def __init__(self, start: Knobs) -> None:
        raise SystemExit(0)


class LeavingAStep(StaticController):
    name = "leaving-a-step"

    def budget(self, view: SchedulerView) -> int:
        raise SystemExit(0)


class Unsaid(StaticController):
    name = "unsaid"

    def budget(self, view: SchedulerView) -> int:
        return None  # type: ignore[return-value]


class Deaf(StaticController):
    name = "deaf"

    def set_slos(self, slos: Mapping[str, SLO]) -> None:
        raise KeyError("chat")


class Nameless(StaticController):
    name = None  # type: ignore[assignment]


class Plain(StaticController):
    """Says of no regime."""

    name = "plain"

    def decide(self, now: float, knobs: Knobs, limits: KnobLimits) -> Proposal:
        return super().decide(now, knobs, limits)._replace(regime="")


def test_time_under_a_controller_that_names_no_regime_is_its_own(tmp_path: Path) -> None:
    """It is not `learning` for ever, neither in the status nor in what `explain` adds up."""
    engine = SimulatedEngine(slow_cpu, knobs=VLLM)
    with control(engine, slo=CHAT, controller=Plain(VLLM), log=tmp_path / "run.jsonl") as attached:
        assert attached.status().regime == "learning"  # nothing was decided
        engine.play(poisson(8, 20, 400, 40, seed=1))
        assert attached.status().regime == attached.regime == "plain"
    log = [d._replace(wall=None) for d in read_decisions(tmp_path / "run.jsonl")]  # by the engine's clock
    seconds = summarize(log).seconds
    assert seconds["plain"] > 10 * seconds.get("learning", 0.0)


def test_a_controller_that_cannot_be_attached_leaves_the_engine_free() -> None:
    engine = SimulatedEngine(slow_cpu, knobs=VLLM)
    with pytest.raises(InputError, match=r"Deaf\.set_slos raised KeyError"):
        control(engine, slo=CHAT, controller=Deaf(VLLM))
    assert not engine.slos and not engine.listeners
    with control(engine, slo=CHAT, controller=Plain(VLLM)) as attached:
        assert not attached.status().ended


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("my_controller.py", "(my_controller:Halving)"),
        ("my_controller", "(my_controller:Halving)"),
        ("my_controller.Halving", "(my_controller:Halving)"),
        ("my_controller.py:Halving", "(my_controller:Halving)"),
        ("away/other.py", "(other:MyController, in the folder away)"),
        ("Halving", "(mine:MyController for the class MyController in mine.py)"),
        (":", "(mine:MyController for the class MyController in mine.py)"),
        ("x" * 5000, "(mine:MyController for the class MyController in mine.py)"),
    ],
)
def test_a_file_is_answered_with_how_its_class_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], given: str, meant: str
) -> None:
    (folder / "away").mkdir()
    (folder / "away" / "other.py").write_text("this is no Python", encoding="utf-8")
    for verb in (["simulate", "cpu-2core-tiny"], ["serve", "nano", "--slo", "ttft=1s"]):
        assert run([*verb, "--controller", given]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"static, module:Class {meant}\n" in error


WRONG = {
    "Idle": "it lacks observe_step, observe_request, budget, which a Controller has",
    "Broken": "; Broken.__init__ raised RuntimeError: no model (test_own_controller.py:",
    "Silent": "failed: TypeError: Silent.decide returned None; it must return a Proposal",
    "Endless": "failed: TypeError: Endless.decide returned evidence that is no JSON: Out of range float values",
    "Mixed": "failed: TypeError: Mixed.decide returned evidence that is no JSON: '<' not supported between",
    "Wordless": "failed: TypeError: Wordless.decide returned a Proposal whose cause is None; it must be text",
    "Leaving": "failed: Leaving.observe_step raised SystemExit: had enough (test_own_controller.py:",
    "LeavingLater": "failed: LeavingLater.observe_request raised SystemExit: 0 (test_own_controller.py:",
    "LeavingAtOnce": "; LeavingAtOnce.__init__ raised SystemExit: 0 (test_own_controller.py:",
    "LeavingAStep": "failed: LeavingAStep.budget raised SystemExit: 0 (test_own_controller.py:",
    "Unsaid": "failed: TypeError: Unsaid.budget returned None; it must return a whole number of tokens",
    "Deaf": "the deaf controller failed: Deaf.set_slos raised KeyError: 'chat' (test_own_controller.py:",
    "Nameless": "Nameless.name is None; it must be text that is not empty",
    "Wrong": "failed: Wrong.decide raised LookupError: no idea (test_own_controller.py:",
    "Beyond": "whole number between 1 and 1048576 tokens (test_own_controller.py:",
}


def simulated_with(controller: str) -> list[str]:
    words = ["simulate", "mine.yaml", "--seeds", "1", "--requests", "60", "--controller"]
    return [*words, f"tests.unit.test_own_controller:{controller}"]


@pytest.mark.parametrize(("controller", "says"), WRONG.items())
def test_one_that_is_wrong_is_no_figure_but_a_line(
    folder: Path, capsys: pytest.CaptureFixture[str], controller: str, says: str
) -> None:
    save_profile(profiled(), folder / "mine.yaml")
    assert run(simulated_with(controller)) == 2
    out, error = capsys.readouterr()
    assert says in error and error.startswith("error: ") and error.count("\n") == 1 and "attainment" not in out


@pytest.mark.slow
def test_nothing_of_one_that_is_wrong_is_in_a_log(folder: Path) -> None:
    """In a process of its own, where nobody has told logging to go elsewhere than the terminal."""
    save_profile(profiled(), folder / "mine.yaml")
    commands = [simulated_with(controller) for controller in WRONG]
    code = f"from autotune.cli.main import run; assert [run(one) for one in {commands}] == {[2] * len(commands)}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    for line, says in zip(done.stderr.splitlines(), WRONG.values(), strict=True):
        assert line.startswith("error: ") and says in line


class Needy:
    name = "needy"

    def __init__(self, slo: SLO, moon: int) -> None:
        self.slo = slo


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pid", "controller is 'pid'; it must be one of aimd, .*, static, module:Class .*, or a Controller"),
        ("leaves:Class", "controller is leaves:Class; it cannot be imported: SystemExit: 3"),
        ("sys:exit", "controller is sys:exit; SystemExit"),
        ("nowhere:Class", "controller is nowhere:Class; it cannot be imported: ModuleNotFoundError"),
        ("tests.unit.test_own_controller:CHAT", "it must be a class, not a SLO"),
        ("tests.unit.test_own_controller:Needy", "it needs moon, but a controller is given slo, start, kv_tokens"),
    ],
)
def test_what_is_no_controller_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises((ValueError, InputError), match=says):
        control(SimulatedEngine(slow_cpu), slo=CHAT, controller=name)


def test_a_class_that_lacks_a_method_is_refused() -> None:
    name = "runtime.slo:RequestClass"
    with pytest.raises((ValueError, InputError), match="it needs name"):
        control(SimulatedEngine(slow_cpu), slo=CHAT, controller=name)


def test_a_registered_one_is_given_what_it_takes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CONTROLLERS, "static")
    assert register(StaticController) is StaticController
    made = CONTROLLERS["static"](CHAT, Knobs(3), 1000, 16)
    assert isinstance(made, StaticController) and made.start == Knobs(3)
    assert find("static") is CONTROLLERS["static"]
    with pytest.raises(ValueError, match="'static'; it must be text without a colon that no other has"):
        register(StaticController)
    assert "static" not in OF_BATCHERS


@pytest.mark.slow
def test_one_that_cannot_be_made_ends_serve_before_it_serves(folder: Path) -> None:
    words = (
        "serve",
        "nano",
        "--port",
        "0",
        "--slo",
        "ttft=1s",
        "--controller",
        "tests.unit.test_own_controller:Broken",
    )
    done = subprocess.run(
        [sys.executable, "-m", "autotune.cli.main", *words],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "serving" not in done.stdout
    assert re.fullmatch(
        r".* loading nano …\nerror: controller is \S+; Broken\.__init__ raised RuntimeError: no model \(\S+\)\n",
        done.stderr,
    )
