"""What the command line goes by for every engine that ``--engine`` names, and what a new one takes: a module, and a row."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

from autotune.cli.main import app, run
from autotune.engines import named
from autotune.engines.named import (
    DEFAULT,
    REFUSABLE,
    ByCommand,
    InProcess,
    NamedEngine,
    ToServe,
    check_serving,
    engine_identity,
    engine_named,
)
from autotune.engines.own import OwnSource
from autotune.profile import save_profile
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO
from tests.unit.profiles import profile

any_engine = pytest.mark.parametrize("name", [*named._ENGINES])


def options_of(verb: str) -> set[str]:
    """Those that ``verb`` has, as they are written."""
    import typer

    group: Any = typer.main.get_command(app)
    return {option for parameter in group.commands[verb].params for option in parameter.opts}


# -- every engine -----------------------------------------------------------------------------------------------------------


@any_engine
def test_a_row_and_its_module_are_of_one_engine(name: str) -> None:
    engine = engine_named(name)
    assert isinstance(engine, NamedEngine) and engine.name == name
    assert named.named(engine.in_facts) == name
    assert engine.label == ("" if name == DEFAULT else name)
    assert engine.title and named.ours(engine.in_facts) == (name == DEFAULT)


@any_engine
def test_it_takes_the_dtypes_that_the_help_names(name: str) -> None:
    assert [*engine_named(name).dtypes()] == ["auto", "float32", "bfloat16", "float16"]


@any_engine
def test_what_it_refuses_are_options_of_serve(name: str) -> None:
    refuses = engine_named(name).serving.refuses
    assert {*refuses} <= {*REFUSABLE} <= options_of("serve") and all(refuses.values())
    check_serving(engine_named(name), {"--slo"}, ())
    for option in refuses:
        with pytest.raises(InputError, match=f"^{option} does not go with --engine {name}; "):
            check_serving(engine_named(name), {"--slo", option}, ())


def test_only_the_default_engine_has_a_model_where_none_is_named() -> None:
    found = {name: engine_named(name).default_model is not None for name in named._ENGINES}
    assert found == {name: name == DEFAULT for name in named._ENGINES}


def test_no_two_engines_have_one_name() -> None:
    in_facts = [row.in_facts for row in named._ENGINES.values()]
    assert len({*in_facts}) == len(in_facts)


# -- a third --------------------------------------------------------------------------------------------------------------


class Third:
    """A source of it that has been loaded."""

    name, version = "third-engine", "3.1"

    def __init__(self, arguments: Mapping[str, str]) -> None:
        self.arguments = arguments


class Became(BaseException):
    """This process is another now."""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ToServe]]:
    """What the third engine was to serve: its module and its row are all that the command line knows of it."""
    found: list[ToServe] = []

    def become(requested: ToServe) -> NoReturn:
        found.append(requested)
        raise Became

    def load(model: str, *, arguments: Mapping[str, str], **options: Any) -> Any:
        raise InputError(f"third cannot load {model} with {dict(arguments)} in {options['dtype']}")

    module = ModuleType("third_engine")
    module.__dict__["ENGINE"] = NamedEngine(
        name="third",
        title="Third",
        version=lambda: Third.version,
        load=load,
        serving=ByCommand(become, {"--threads": "it has processes"}),
        dtypes=lambda: ("auto", "int4"),
        takes_arguments=True,
    )
    monkeypatch.setitem(sys.modules, "third_engine", module)
    row = named._ENGINES["vllm"]._replace(in_facts="third-engine", about="a third", module="third_engine")
    monkeypatch.setitem(named._ENGINES, "third", row)
    yield found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that the command ends with, beside what it had said before."""
    assert run(words) == 2
    *before, last = capsys.readouterr().err.splitlines()
    assert all(" · loading " in line or line.startswith("note: ") for line in before) and last.startswith("error: ")
    return last.removeprefix("error: ")


def test_it_is_named_wherever_engines_are(served: list[ToServe], capsys: pytest.CaptureFixture[str]) -> None:
    assert named.either() == "own or vllm or third"
    assert named.choices().endswith("; third: a third (needs --model)")
    assert named.choices_briefly().endswith(", or third: a third")
    assert named.named("third-engine") == "third"
    source: Any = Third({"a": "1"})
    assert engine_identity(source) == {
        "engine": {"name": "third-engine", "version": "3.1", "arguments": {"a": "1"}},
    }  # fmt: skip
    assert refused(capsys, "profile", "--engine", "fourth") == "--engine is fourth; it must be own or vllm or third"
    said = refused(capsys, "profile", "--engine-arg", "a=1")
    assert said.startswith(
        "--engine-arg: a is given; it goes with --engine vllm or third: this project's own engine has"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--engine third needs --model: a directory or a hub id"),
        (("--model", "m", "--dtype", "float32"), "--dtype is float32; it must be one of auto, int4"),
        (("--model", "m", "--dtype", "int4", "--engine-arg", "x=1"), "third cannot load m with {'x': '1'} in int4"),
    ],
)
@pytest.mark.parametrize("verb", ["profile", "bench"])
def test_verbs_go_by_what_it_says(
    verb: str, words: tuple[str, ...], said: str, served: list[ToServe], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, verb, "--cpu", "--engine", "third", *words) == said


def test_serve_becomes_its_command_or_refuses(served: list[ToServe], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Became):
        run(["serve", "m", "--engine", "third", "--slo", "ttft=1s", "--token-budget", "64", "--", "--fast"])
    (requested,) = served
    assert (requested.model, requested.slo, requested.more) == ("m", SLO(ttft_ms=1000), ("--fast",))
    assert requested.knobs == KnobLimits().clamp(Knobs()).with_(token_budget=64) and requested.pinned == {
        "token_budget": 64
    }
    assert (
        requested.controlled
        and requested.profile is requested.dtype is requested.prefill_rate is None
        and not requested.arguments
    )
    assert refused(capsys, "serve", "m", "--engine", "third", "--threads", "2") == (
        "--threads does not go with --engine third; it has processes"
    )
    said = refused(capsys, "serve", "m", "--", "--fast")
    assert said == "--fast is of vLLM's or Third's options; they go with --engine vllm or third"


@pytest.mark.parametrize(("name", "options"), [("third-engine", {"a": "1"}), ("autotune-runtime", {})])
def test_a_profile_of_it_brings_its_arguments(
    name: str, options: Mapping[str, str], served: list[ToServe], tmp_path: Path
) -> None:
    measured = profile()
    engine = measured.engine.model_copy(update={"name": name, "options": {"a": "1"}})
    save_profile(measured.model_copy(update={"engine": engine}), tmp_path / "p.yaml")
    with pytest.raises(Became):
        run(["serve", "--engine", "third", "--profile", str(tmp_path / "p.yaml"), "--anyway"])
    (requested,) = served
    assert requested.arguments == options and requested.profile == tmp_path / "p.yaml"
    assert (requested.model, requested.slo, requested.limits) == (
        measured.model.name,
        measured.slo,
        measured.engine.limits,
    )
    assert (requested.kv_tokens, requested.block_size) == (engine.kv_pool.tokens, engine.kv_pool.block_size)
    assert (requested.dtype, requested.threads) == (measured.model.dtype, measured.machine.threads)


# -- served by this process ---------------------------------------------------------------------------------------------------


class Started:
    """Ends the command as soon as it has been asked for."""

    def __init__(self) -> None:
        self.requested: list[ToServe] = []

    def __call__(self, requested: ToServe) -> Any:
        self.requested.append(requested)
        raise InputError("seen")


def test_what_is_served_by_this_process_is_started_with_the_options_and_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, start = engine_named(DEFAULT), Started()
    assert isinstance(own.serving, InProcess)
    module = SimpleNamespace(ENGINE=replace(own, serving=InProcess(start)))
    monkeypatch.setattr(named, "import_module", lambda name: module)
    save_profile(profile(), tmp_path / "p.yaml")
    words = ["--max-queue", "7", "--ordering", "deadline", "--no-control", "--kv-tokens", "64", "--relegate-late"]
    said = refused(capsys, "serve", "--port", "0", "--profile", str(tmp_path / "p.yaml"), "--anyway", *words)
    (requested,) = start.requested
    assert said == "seen" and requested.relegate_late and not requested.controlled
    assert (requested.max_queue, requested.ordering, requested.kv_tokens, requested.block_size) == (
        7,
        "deadline",
        64,
        16,
    )


@pytest.mark.parametrize("model", ["tiny", "nano"])
@pytest.mark.parametrize(
    ("name", "version", "other"),
    [("vllm", "0.32.0", True), (OwnSource.name, "0.0.1", True), (OwnSource.name, OwnSource.version, False)],
)
def test_a_profile_of_another_engine_or_version_is_named(
    name: str, version: str, other: bool, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Whatever model is served: the profile is of tiny."""
    module = SimpleNamespace(ENGINE=replace(engine_named(DEFAULT), serving=InProcess(Started())))
    monkeypatch.setattr(named, "import_module", lambda name: module)
    measured = profile()
    engine = measured.engine.model_copy(update={"name": name, "version": version})
    save_profile(measured.model_copy(update={"engine": engine}), tmp_path / "p.yaml")
    assert run(["serve", model, "--port", "0", "--profile", str(tmp_path / "p.yaml"), "--anyway"]) == 2
    note = f"note: profile was measured on {name} {version}, not on {OwnSource.name} {OwnSource.version}"
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "error: seen" and (note in said) is other
