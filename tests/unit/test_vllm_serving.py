"""A vllm serve that tunes itself, as far as it goes without vLLM: its options, its command, and the status of a rejection."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from autotune.cli.main import run
from autotune.engines.model_folder import same_model
from autotune.engines.named import ToServe
from autotune.engines.vllm import command, named
from autotune.engines.vllm.command import ServeCommand
from autotune.engines.vllm.families import Families, Place, Refusal, place_of
from autotune.engines.vllm.middleware import RejectionStatus
from autotune.engines.vllm.requests import finish_reason
from autotune.engines.vllm.scheduler import REJECTED, SteeredScheduler, unfit_version
from autotune.engines.vllm.serving import Options
from autotune.engines.vllm.steering import Steering
from autotune.engines.vllm.tuning import TunableScheduler
from autotune.profile import Profile, save_profile
from autotune.profile.serving import prefill_rate
from runtime.clock import VirtualClock
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.admission import Admission, AdmissionPolicy, Verdict
from runtime.llm.slack import SlackTracker
from runtime.records import SLO_REASON, FinishReason
from runtime.request import Request, SamplingParams, Sequence
from runtime.slo import SLO, RequestClass
from tests.unit.profiles import profile
from tests.unit.simulated_profile import TARGET, profiled

# -- options ----------------------------------------------------------------------------------------------------------------


def test_the_command_line_counts_more_than_the_environment() -> None:
    environment = {
        "AUTOTUNE_SLO": "ttft=1s", "AUTOTUNE_LOG": "a.jsonl", "AUTOTUNE_REJECT_LATE": "yes", "AUTOTUNE_VLLM_PYTHON": "x",
        "AUTOTUNE_CLASSES": "chat:ttft=300ms*2 batch:ttft=5s", "AUTOTUNE_CONTROLLER": " ",
    }  # fmt: skip
    section = {"slo": "ttft=500ms", "pinned": {"token_budget": 64}, "profile": None}
    options = Options.read(environment, {"autotune": section, "another_tool": 3})
    assert options == Options(
        slo="ttft=500ms", classes=("chat:ttft=300ms*2", "batch:ttft=5s"), log="a.jsonl", reject_late=True,
        pinned={"token_budget": 64},
    )  # fmt: skip
    assert [(one.name, one.slo.ttft_ms, one.weight) for one in options.request_classes()] == [
        ("chat", 300.0, 2.0), ("batch", 5000.0, 1.0),
    ]  # fmt: skip
    target = options.target()
    assert target is not None and target.ttft_ms == 500
    assert Options.read({}, None) == Options() and Options().target() is None


@pytest.mark.parametrize(
    ("environment", "section", "says"),
    [
        ({}, {"slos": "ttft=1s"}, r"additional_config\.autotune\.slos is not known; there are slo, profile, classes"),
        ({}, "ttft=1s", r"additional_config\.autotune is 'ttft=1s'; it must be an object with slo"),
        ({}, {"slo": 500}, r"additional_config\.autotune\.slo is 500; it must be text"),
        ({"AUTOTUNE_OFF": "perhaps"}, {}, r"AUTOTUNE_OFF is 'perhaps'; it must be one of 1, true, yes, on, 0"),
        ({}, {"reject_late": 7}, r"reject_late is 7; it must be one of"),
        ({}, {"classes": [1]}, r"classes is \[1\]; it must be a list such as"),
        ({}, {"pinned": {"token_budget": "64"}}, r"pinned is .*; it must be an object such as"),
    ],
)
def test_what_cannot_be_read_is_named(environment: dict[str, str], section: object, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Options.read(environment, {"autotune": section})


class Theirs:
    def schedule(self) -> None:
        """Of another tool."""


class Ours(SteeredScheduler, Theirs):
    """Steered."""


def test_wrong_values_are_named() -> None:
    with pytest.raises(InputError, match=r"slo is 'tftt=500ms': .tftt. is not a metric"):
        Options(slo="tftt=500ms").target()
    with pytest.raises(InputError, match="autotune: classes chat: it is given twice"):
        Options(classes=("chat:ttft=1s", "chat:ttft=2s")).request_classes()
    with pytest.raises(InputError, match="autotune: reject_late and relegate_late are both on; it must be one of them"):
        Options(reject_late=True, relegate_late=True).admission()
    for base, why in (
        ("nowhere.Class", "cannot be imported"),
        ("json.dumps", "must be a scheduler class"),
        ("json.JSONDecoder", "must be a scheduler class"),
        ("autotune.engines.vllm.Scheduler", "must be a scheduler class"),
        (f"{__name__}.Ours", "is steered already"),
        ("Class", "imported"),
    ):
        with pytest.raises(InputError, match=f"base is '{base}'.*{why}"):
            Options(base=base).base_class()
    assert Options(base=f"{__name__}.Theirs").base_class() is Theirs


def test_what_is_late_is_computed_rejected_or_relegated() -> None:
    found = [Options.read({}, {"autotune": section}).admission() for section in ({}, {"reject_late": True})]
    assert found == [None, AdmissionPolicy()]
    assert Options.read({"AUTOTUNE_RELEGATE_LATE": "1"}, None).admission() == AdmissionPolicy(late="relegate")
    with pytest.raises(InputError, match="AUTOTUNE_RELEGATE_LATE is 'later'; it must be one of 1, true"):
        Options.read({"AUTOTUNE_RELEGATE_LATE": "later"}, None)


CHAT = RequestClass("chat", SLO(ttft_ms=300), 2.0)


@pytest.fixture
def of_classes(tmp_path: Path) -> str:
    """A profile that was made for request classes."""
    save_profile(profile().model_copy(update={"classes": (CHAT,)}), tmp_path / "p.yaml")
    return str(tmp_path / "p.yaml")


def test_without_an_slo_that_and_the_classes_are_the_profile_s(of_classes: str) -> None:
    found = Options.read({"AUTOTUNE_PROFILE": of_classes}, None).settled()
    assert (found.target(), found.request_classes()) == (profile().slo, [CHAT])
    given = Options(slo="ttft=1s", profile=of_classes)
    assert given.settled() == given, "its classes go with its SLO"
    named = Options(profile=of_classes, classes=("batch:ttft=5s",)).settled()
    assert (named.target(), named.classes) == (profile().slo, ("batch:ttft=5s",))
    shipped = Options(profile="cpu-2core-tiny").settled()
    assert shipped.target() is not None and not shipped.classes
    for path in ("nowhere.yaml", "n" * 300):
        with pytest.raises(InputError, match=f"^autotune: {path}: cannot be read"):
            Options(profile=path).settled()


def test_a_profile_without_an_slo_of_its_own_gives_none(tmp_path: Path) -> None:
    save_profile(profile().model_copy(update={"objective": "mean-e2e"}), tmp_path / "p.yaml")
    assert Options(profile=str(tmp_path / "p.yaml")).settled().target() is None


@pytest.mark.parametrize("late", ["reject_late", "relegate_late"])
def test_nothing_is_late_without_a_target_for_the_first_token(late: str, tmp_path: Path) -> None:
    """As ``autotune serve`` has it; the SLO may be the profile's."""
    save_profile(profile().model_copy(update={"slo": SLO(tpot_ms=50)}), tmp_path / "p.yaml")
    for options in (Options(slo="tpot=50ms"), Options(profile=str(tmp_path / "p.yaml"))):
        assert options.settled().target() == SLO(tpot_ms=50)
        with pytest.raises(InputError) as caught:
            replace(options, **{late: True}).settled()  # type: ignore[arg-type]  # one of two names
        assert str(caught.value) == (
            f"autotune: {late} is on, but nothing is late by slo tpot=50ms@99%; it must have a TTFT or E2E target, as ttft=500ms"
        )
        assert replace(options, slo="e2e=5s,tpot=50ms", **{late: True}).settled()  # type: ignore[arg-type]
        assert replace(options, classes=("chat:ttft=300ms",), **{late: True}).settled()  # type: ignore[arg-type]


# -- the command ------------------------------------------------------------------------------------------------------------


def test_the_command_names_scheduler_middleware_and_ceilings() -> None:
    command = ServeCommand(
        "./model",
        Options(slo="ttft=500ms,tpot=50ms", reject_late=True),
        KnobLimits(max_batch_size=64, token_budget=2048),
        prefill_rate=1000.5,
        flags={"--port": 8000, "--dtype": None},
        more=("--tensor-parallel-size", "2", "--max-num-seqs=32"),
    )
    made = command.arguments()
    assert made[:4] == ["serve", "./model", "--scheduler-cls", "autotune.engines.vllm.Scheduler"]
    environment = command.environment()
    assert {"AUTOTUNE_SLO", "AUTOTUNE_PROFILE"} < set(environment.pop("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY").split(","))
    assert environment == {"AUTOTUNE_SLO": "ttft=500ms,tpot=50ms", "AUTOTUNE_REJECT_LATE": "1"}
    assert "--additional-config" not in made, "by which vLLM's compiled code is stored"
    assert made[made.index("--middleware") + 1] == "autotune.engines.vllm.RejectionStatus"
    assert made[made.index("--max-num-batched-tokens") + 1] == "2048"
    assert made[made.index("--max-num-queued-tokens") + 1] == "501"  # TTFT x prefill rate
    assert "--max-num-seqs" not in made, "the operator's own counts"
    assert "--dtype" not in made and made[-3:] == ["--tensor-parallel-size", "2", "--max-num-seqs=32"]


def test_options_survive_the_environment() -> None:
    made = Options(
        slo="ttft=500ms", classes=("a:ttft=1s, tpot=2 ms *2", "ä;b:tpot=3ms"), log="a b.jsonl", reject_late=True, off=True,
        pinned={"token_budget": 512, "max_wait_ms": 0.00001},
    )  # fmt: skip
    assert Options.read(ServeCommand("m", made).environment(), None) == made
    for wrong in ("token_budget", "token_budget=", "token_budget=x", "{"):
        with pytest.raises(InputError, match=f"AUTOTUNE_PINNED is '{wrong}'; it must be"):
            Options.read({"AUTOTUNE_PINNED": wrong}, None)


def test_variables_written_by_hand_are_read_as_documented() -> None:
    plain = {
        "AUTOTUNE_CLASSES": "chat:ttft=300ms*2;[batch]:ttft=10s  a:ttft=1s",
        "AUTOTUNE_PINNED": "token_budget=512, max_wait_ms=1e-05",
    }
    read = Options.read(plain, None)
    assert read.classes == ("chat:ttft=300ms*2", "[batch]:ttft=10s", "a:ttft=1s")
    assert read.pinned == {"token_budget": 512, "max_wait_ms": 1e-05}
    assert type(read.pinned["token_budget"]) is int
    assert Options.read({"AUTOTUNE_CLASSES": "[batch]:ttft=10s"}, None).classes == ("[batch]:ttft=10s",)
    assert Options.read({"AUTOTUNE_PINNED": '{"token_budget": 512}'}, None).pinned == {"token_budget": 512}


@pytest.mark.parametrize("theirs", ["", "MINE, B", "AUTOTUNE_SLO,MINE", ","])
def test_engine_cores_on_ray_get_the_options(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the operator has vLLM hand to them. vLLM compiles anew for another list: it is that of any options."""
    name = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
    monkeypatch.setenv(name, theirs)
    found = ServeCommand("m", Options()).environment()
    assert list(found) == [name]
    assert ServeCommand("m", Options(slo="ttft=1s", off=True)).environment()[name] == found[name]
    named = found[name].split(",")
    assert len(named) == len(set(named)) and all(named)
    ours = {f"AUTOTUNE_{field.name.upper()}" for field in fields(Options)}
    assert set(named) == ours | {word.strip() for word in theirs.split(",") if word.strip()}


@pytest.mark.parametrize(
    "options",
    [
        Options(slo="ttft=500ms"),  # nothing is to be rejected
        Options(slo="tpot=50ms", reject_late=True),  # nothing is late
        Options(slo="ttft=500ms", reject_late=True, classes=("batch:ttft=60s",)),  # some may wait for longer
    ],
)
def test_no_limit_of_queued_tokens_where_it_would_reject_too_much(options: Options) -> None:
    assert "--max-num-queued-tokens" not in ServeCommand("m", options, prefill_rate=1000.0).arguments()


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ("--data-parallel-size 4", 500),  # as many API servers, each of which counts what it is asked itself
        ("-dp 4 --api-server-count 1", 2000),
        ("--data-parallel-size=4 --api_server_count=2", 1000),
        ("--data_parallel_size 2 --data-parallel-size 3 -asc 1", 1500),
        ("--api-server-count 4", 125),
        ("--api-server-count many", 500),  # of which vLLM will tell
        ("--api-server-count", 500),
        ("--api-server-count 0", 500),
    ],
)
def test_the_limit_of_queued_tokens_is_that_of_one_api_server(more: str, tokens: int) -> None:
    options = Options(slo="ttft=500ms", reject_late=True)
    made = ServeCommand("m", options, prefill_rate=1000.0, more=more.split()).arguments()
    assert made[made.index("--max-num-queued-tokens") + 1] == str(tokens)


def named_on_the_hub(measured: Profile) -> Profile:
    """The same of a model that vLLM can find: it has no presets."""
    return measured.model_copy(update={"model": measured.model.model_copy(update={"name": "me/model"})})


def measured_on(engine: str, version: str) -> Profile:
    return named_on_the_hub(profiled(engine={"name": engine, "version": version}))


@pytest.mark.parametrize(
    ("engine", "model", "rejects", "limited"),
    [
        ("vllm", None, True, True),
        ("vllm", None, False, False),
        ("vllm", "./another", True, False),
        ("autotune-runtime", None, True, False),
    ],
)
def test_a_profile_limits_queued_tokens_of_its_own_model(
    engine: str, model: str | None, rejects: bool, limited: bool, ran: Ran, tmp_path: Path
) -> None:
    """On its own engine: steps of another one say nothing of how fast it is."""
    measured = measured_on(engine, "0.32.1")
    save_profile(measured, tmp_path / "p.yaml")
    words = f"serve --engine vllm --profile {tmp_path / 'p.yaml'} --anyway {model or ''}"
    with pytest.raises(SystemExit):
        run([*words.split(), *(["--reject-late"] if rejects else [])])
    ((_, made, _),) = ran
    assert ("--max-num-queued-tokens" in made) is limited
    if limited:
        rate = prefill_rate(measured)
        assert rate is not None and TARGET.ttft_ms is not None
        assert made[made.index("--max-num-queued-tokens") + 1] == str(math.ceil(rate * TARGET.ttft_ms / 1e3))


@pytest.mark.parametrize("model", [None, "./another"])
@pytest.mark.parametrize(
    ("engine", "version", "other"),
    [("autotune-runtime", "0.1.0", True), ("vllm", "0.31.0", True), ("vllm", "0.32.1+cpu", False)],
)
def test_a_profile_of_another_engine_or_version_is_named(
    engine: str,
    version: str,
    other: bool,
    model: str | None,
    ran: Ran,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever model is served."""
    save_profile(measured_on(engine, version), tmp_path / "p.yaml")
    words = f"serve --engine vllm --profile {tmp_path / 'p.yaml'} --anyway {model or ''}"
    with pytest.raises(SystemExit):
        run(words.split())
    note = f"note: profile was measured on {engine} {version}, not on vllm 0.32.1+cpu"
    assert (note in capsys.readouterr().err.splitlines()) is other


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("0.30.9", "it is version 0.30.9, and this was made for 0.31 to 0.33"),
        ("0.31.0", None),
        ("0.32", None),
        ("0.32.0+cpu", None),
        ("0.33.0rc1", None),
        ("0.33.12", None),
        ("0.34.0.dev1", "it is version 0.34.0.dev1, and this was made for 0.31 to 0.33"),
        ("0.34.0", "it is version 0.34.0, and this was made for 0.31 to 0.33"),
        ("1.32.0", "it is version 1.32.0, and this was made for 0.31 to 0.33"),
        ("dev", "it is version dev, and this was made for 0.31 to 0.33"),
    ],
)
def test_versions_that_cannot_be_steered_are_refused_by_name(version: str, why: str | None) -> None:
    assert unfit_version(version) == why


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("./m", "--engine", "vllm"), "--engine vllm tunes vLLM to an SLO: add --slo"),
        (("./m", "--engine", "vllm", "--slo", "ttft=1s", "--ordering", "shortest"), "--ordering does not go with"),
        (("./m", "--engine", "vllm", "--slo", "ttft=1s", "--threads", "2"), "--threads does not go with --engine vllm"),
        (
            ("./m", "--engine", "vllm", "--slo", "ttft=1s", "--max-queue", "4096"),
            "--max-queue does not go with",
        ),  # its default
        (
            ("./m", "--engine", "vllm", "--slo", "ttft=1s", "--draft-tokens", "3"),
            "--draft-tokens is 3; vLLM has no such knob. An option of its own goes after --, and with it vLLM is not tuned: "
            "-- --speculative-config '{",
        ),
        (
            ("./m", "--engine", "vllm", "--slo", "ttft=1s", "--no-control", "--draft-tokens", "0"),
            "--draft-tokens is 0; vLLM has no such knob",
        ),
        (
            ("./m", "--engine", "vllm", "--slo", "ttft=1s", "--grace", "inf"),
            "--grace is inf; it must be a number from 0 to 86400",
        ),
        (("./m", "--slo", "ttft=1s", "--", "--swap-space", "4"), "--swap-space 4 is of vLLM's options; they go with"),
        (("./m", "--engine", "sglang"), "--engine is sglang; it must be own or vllm"),
        (
            ("tiny", "--engine", "vllm", "--slo", "ttft=1s"),
            "MODEL: tiny is a preset of this project's own engine; vLLM takes a directory or a hub id, or a directory that "
            "holds a config.json alone with --load-format dummy after --",
        ),
        (
            ("--engine", "vllm", "--profile", "cpu-2core-tiny", "--anyway"),
            "MODEL: tiny is a preset of this project's own engine",
        ),
        (
            ("cpu-2core-tiny", "--engine", "vllm", "--slo", "ttft=1s"),
            "MODEL is cpu-2core-tiny, a profile; it must be a directory or a hub id; --profile takes profiles",
        ),
    ],
)
def test_what_cannot_work_is_one_line(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], ran: Ran
) -> None:
    assert run(["serve", *words]) == 2 and not ran
    err = [line for line in capsys.readouterr().err.splitlines(keepends=True) if not line.startswith("note: ")]
    assert len(err) == 1 and err[0].startswith("error: ") and says in err[0]


@pytest.mark.parametrize("engine", ["vllm", "own"])
def test_a_profile_is_no_model(
    engine: str, ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_profile(profile(), tmp_path / "mine.yaml")
    assert run(["serve", "mine.yaml", "--engine", engine, "--slo", "ttft=1s"]) == 2 and not ran
    assert capsys.readouterr().err.startswith("error: MODEL is mine.yaml, a profile; it must be a directory or a hub")


def test_a_directory_may_be_called_as_a_preset_or_a_profile(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "cpu-2core-tiny"):
        (tmp_path / name).mkdir()
        with pytest.raises(SystemExit):
            run(["serve", name, "--engine", "vllm", "--slo", "ttft=1s"])
        _, words, _ = ran.pop()
        assert words[words.index("serve") + 1] == name


def test_without_vllm_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(named, "find_spec", lambda name: None)
    assert run(["serve", "./m", "--engine", "vllm", "--slo", "ttft=1s"]) == 2
    assert "pip install '.[vllm]' in a checkout" in capsys.readouterr().err
    monkeypatch.setattr(named, "find_spec", lambda name: object())
    monkeypatch.setattr(named, "version", lambda name: "0.99.0")
    assert run(["serve", "./m", "--engine", "vllm", "--slo", "ttft=1s"]) == 2
    assert "it is version 0.99.0, and this was made for" in capsys.readouterr().err


Ran = list[tuple[str, list[str], dict[str, str]]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """The programs that this process would have become."""
    found: Ran = []

    def become(program: str, words: list[str], environment: dict[str, str]) -> None:
        found.append(
            (program, words, {name: value for name, value in environment.items() if name.startswith("AUTOTUNE_")})
        )
        raise SystemExit(0)

    monkeypatch.setattr(named, "find_spec", lambda name: object())
    monkeypatch.setattr(named, "version", lambda name: "0.32.1+cpu")
    monkeypatch.setattr(command.os, "execve", become)
    return found


def test_it_becomes_vllm_and_prints_what_it_runs(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "d.jsonl"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run([
            "serve", "./m", "--engine", "vllm", "--slo", "ttft=500ms", "--token-budget", "64", "--port", "9000",
            "--decisions", "d.jsonl", "--grace", "2.5", "--kv-cache-dtype", "fp8",
            "--class", "chat:ttft=300ms, tpot=50ms", "--", "--enforce-eager",
        ])  # fmt: skip
    ((program, words, environment),) = ran
    assert words[0] == program and words[-1] == "--enforce-eager"
    assert environment == {
        "AUTOTUNE_SLO": "ttft=500ms@99%", "AUTOTUNE_CLASSES": '["chat:ttft=300ms, tpot=50ms"]', "AUTOTUNE_LOG": str(log),
        "AUTOTUNE_PINNED": '{"token_budget": 64}',
    }  # fmt: skip
    assert words[words.index("--shutdown-timeout") + 1] == "3" and words[words.index("--port") + 1] == "9000"
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8"
    assert not {"--max-num-seqs", "--max-num-batched-tokens", "--dtype", "--seed"} & {*words}, "left to vLLM"
    printed = capsys.readouterr().err
    assert printed.startswith("AUTOTUNE_SLO=ttft=500ms@99% ") and " vllm serve ./m --scheduler-cls" in printed
    assert printed.endswith("--enforce-eager\n")


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ("--api-key sk-1 sk-2 --port 1", "--api-key *** *** --port 1"),
        ("--hf-token=sk-1 --seed 3", "--hf-token=*** --seed 3"),
        ("--hf_token sk-1", "--hf_token ***"),
        ("--hf-token --api_key=sk-1 sk-2", "--hf-token --api_key=*** ***"),
    ],
)
def test_secrets_are_passed_and_not_printed(
    more: str, shown: str, ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(["serve", "./m", "--engine", "vllm", "--slo", "ttft=500ms", "--", *more.split()])
    ((_, words, _),) = ran
    printed = capsys.readouterr().err.replace("'", "")
    assert words[-len(more.split()) :] == more.split()
    assert printed.endswith(f" {shown}\n") and "sk-" not in printed


@pytest.mark.parametrize("name", ["vllm", "autotune-runtime"])
def test_a_profile_gives_ceilings_and_of_vllm_its_arguments(name: str, ran: Ran, tmp_path: Path) -> None:
    measured = named_on_the_hub(profile())
    options = {"enforce_eager": "true", "enable_prefix_caching": "False", "max_model_len": "512"}
    engine = measured.engine.model_copy(update={"name": name, "options": options})
    save_profile(measured.model_copy(update={"engine": engine}), tmp_path / "p.yaml")
    with pytest.raises(SystemExit):
        run(["serve", "--engine", "vllm", "--profile", str(tmp_path / "p.yaml"), "--anyway"])
    ((_, words, environment),) = ran
    at = words.index("serve")
    assert words[at : at + 2] == ["serve", measured.model.name]
    assert words[words.index("--max-num-batched-tokens") + 1] == str(measured.engine.limits.token_budget)
    assert environment == {"AUTOTUNE_SLO": str(measured.slo), "AUTOTUNE_PROFILE": str((tmp_path / "p.yaml").resolve())}
    assert words[words.index("--dtype") + 1] == measured.model.dtype and "--kv-cache-dtype" not in words
    last = ["--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "512"]
    assert words[-4:] == last if name == "vllm" else not {*words} & {*last}


@pytest.mark.parametrize("text", ["dummy", "'Dummy'"])
@pytest.mark.parametrize("control", [[], ["--no-control"]])
@pytest.mark.parametrize("more", [[], ["--", "--load_format=dummy"]])
def test_random_weights_of_a_profile_are_not_served(
    text: str, control: list[str], more: list[str], ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless they are asked for."""
    with pytest.raises(SystemExit):
        run([*of_vllm(tmp_path, load_format=text, enforce_eager="true"), *control, *more])
    ((_, words, _),) = ran
    assert words[words.index("--enforce-eager") + 1 :] == more[1:] and "dummy" not in words
    printed = capsys.readouterr().err
    note = "was measured with random weights; the server loads the model's own. For random ones: -- --load-format dummy"
    assert (note in printed.splitlines()[-2]) == (not more)


@pytest.mark.parametrize("control", [[], ["--no-control"]])
def test_of_a_profile_of_another_model_only_the_ceilings_are_used(
    control: list[str], ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ceilings = {"max_num_seqs": "256", "max_num_scheduled_tokens": "2048"}
    bound = {"load_format": "dummy", "max_model_len": "512", "quantization": "fp8", "hf_overrides": "{a: 1}"}
    arguments = {**ceilings, **bound, "long_prefill_token_threshold": "512"}
    words = of_vllm(tmp_path, kv_cache_dtype="fp8", **arguments)
    with pytest.raises(SystemExit):
        run([*words[:1], "./another", *words[1:], *control])
    ((_, made, _),) = ran
    assert made[made.index("serve") + 1] == "./another"
    assert not {f"--{name.replace('_', '-')}" for name in ("dtype", "kv_cache_dtype", *bound)} & {*made}
    assert ("--max-num-scheduled-tokens" in made) == (not control), "without a controller the setting takes its place"
    left = [f"{name}={value}" for name, value in bound.items()] + ["long_prefill_token_threshold=512"] * (not control)
    printed = capsys.readouterr().err
    assert f"p.yaml: {', '.join(left)} is left out, as it was measured with another model" in printed
    assert "its dtypes are left out" in printed and "random weights" not in printed


def test_a_directory_is_the_same_model_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    assert same_model("./here", f"{tmp_path}/here/") and same_model("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")
    assert not same_model("./here", "there") and not same_model("here", "Qwen/Qwen3-8B")


@pytest.mark.parametrize(("longest", "cut"), [(96, False), (97, True), (None, True)])
def test_no_prompt_is_cut_above_the_context_of_the_model_that_is_served(
    longest: int | None, cut: bool, ran: Ran, tmp_path: Path
) -> None:
    """vLLM does not start with such a threshold."""
    if longest is not None:
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": longest}))
    with pytest.raises(SystemExit):
        run(f"serve {tmp_path} --engine vllm --no-control --chunk-size 96".split())
    ((_, words, _),) = ran
    assert ("--long-prefill-token-threshold" in words) is cut


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("yes", ["--it"]),
        ("Off", ["--no-it"]),
        ("[1, 2.5, x]", ["--it", "1", "2.5", "x"]),
        ('{"mode": 3, "on": true}', ["--it", '{"mode": 3, "on": true}']),
        ("{mode: [a]}", ["--it", '{"mode": ["a"]}']),
        ("[{a: 1}, true]", ["--it", '{"a": 1}', "true"]),
        ("null", []),
        ("0.80", ["--it", "0.8"]),
        ("'7'", ["--it", "7"]),
        ("2026-01-01", ["--it", "2026-01-01"]),
        ("!!int ''", ["--it", "!!int ''"]),
        ("a b", ["--it", "a b"]),
    ],
)
def test_a_profile_s_argument_is_given_as_it_was_when_it_was_made(text: str, words: list[str]) -> None:
    assert command.as_options({"it": text}) == words


def of_vllm(folder: Path, *, kv_cache_dtype: str = "auto", **options: str) -> list[str]:
    """The words that serve a profile which was made with these arguments, and with a KV cache of that type."""
    measured = named_on_the_hub(profile())
    stored = measured.model.model_copy(update={"kv_cache_dtype": kv_cache_dtype})
    measured = measured.model_copy(update={"model": stored})
    engine = measured.engine.model_copy(update={"name": "vllm", "options": options})
    save_profile(measured.model_copy(update={"engine": engine}), folder / "p.yaml")
    return ["serve", "--engine", "vllm", "--profile", str(folder / "p.yaml"), "--anyway"]


@pytest.mark.parametrize(
    ("option", "knob", "more"),
    [
        ("max_num_batched_tokens", "token-budget", ["--max-num-batched-tokens", "8192"]),
        ("max_num_scheduled_tokens", "chunk-size", ["--max_num_scheduled_tokens=8192"]),
        ("max_num_seqs", "max-batch-size", ["--max-num-seqs=8192"]),
        ("max_num_active_seqs", "max-batch-size", ["--max-num-active-seqs", "8192"]),
    ],
)
def test_a_knob_above_a_ceiling_that_the_profile_brings_is_refused(
    option: str, knob: str, more: list[str], ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before vLLM has loaded the model."""
    words = of_vllm(tmp_path, **{option: "2048"})
    assert run([*words, f"--{knob}", "4096"]) == 2 and not ran
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: --{knob} is 4096; it must be at most 2048: the profile was measured with {option}=2048. "
        f"Another ceiling goes after --, as -- --{option.replace('_', '-')} 4096"
    )
    for allowed in ([f"--{knob}", "2048"], [f"--{knob}", "4096", "--", *more], [f"--{knob}", "4096", "--no-control"]):
        with pytest.raises(SystemExit):
            run([*words, *allowed])
    assert len(ran) == 3


@pytest.mark.parametrize(
    ("knobs", "dropped"),
    [
        (Knobs(max_wait_ms=5, draft_tokens=3), "max_wait_ms=5 and draft_tokens=3 are dropped"),
        (Knobs(max_wait_ms=2.5), "max_wait_ms=2.5 is dropped"),
        (Knobs(), None),
    ],
)
def test_what_a_profile_has_and_vllm_alone_has_not_is_named(
    knobs: Knobs, dropped: str | None, ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (Path("p.yaml"), None):
        requested = ToServe(
            model="./m", slo=None, knobs=knobs, limits=KnobLimits(), max_queue=1, host="127.0.0.1", port=1, grace_s=1.0,
            controlled=False, profile=path,
        )  # fmt: skip
        with pytest.raises(SystemExit):
            command.serve(requested)
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
        assert notes == ([f"note: p.yaml: {dropped}: vLLM has no such thing of its own"] if dropped and path else [])


def test_without_a_controller_no_slo_is_needed(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["serve", "./m", "--engine", "vllm", "--no-control"])
    ((_, _, environment),) = ran
    assert environment == {"AUTOTUNE_OFF": "1"}


def test_the_shell_says_only_what_the_command_line_cannot(
    ran: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SLO", "PROFILE", "CLASSES", "CONTROLLER", "LOG", "REJECT_LATE", "RELEGATE_LATE", "OFF", "PINNED"):
        monkeypatch.setenv(f"AUTOTUNE_{name}", "1")
    monkeypatch.setenv("AUTOTUNE_METRICS", "/a b.prom")
    monkeypatch.setenv("AUTOTUNE_BASE", "")
    monkeypatch.setenv("AUTOTUNE_VLLM_PYTHON", "x")
    with pytest.raises(SystemExit):
        run([*SLO_])
    ((_, _, environment),) = ran
    ours = {"AUTOTUNE_SLO": "ttft=500ms@99%", "AUTOTUNE_METRICS": "/a b.prom"}
    assert environment == ours | {"AUTOTUNE_VLLM_PYTHON": "x"}
    printed = capsys.readouterr().err
    assert "AUTOTUNE_METRICS='/a b.prom'" in printed and printed.count(" AUTOTUNE_") == 1


def test_an_option_takes_the_place_of_a_profile_s_argument(ran: Ran, tmp_path: Path) -> None:
    measured = named_on_the_hub(profile())
    options = {"kv_cache_dtype": "fp8_e5m2", "max_model_len": "512", "dtype": "half"}
    engine = measured.engine.model_copy(update={"name": "vllm", "options": options})
    save_profile(measured.model_copy(update={"engine": engine}), tmp_path / "p.yaml")
    with pytest.raises(SystemExit):
        run([
            "serve", "--engine", "vllm", "--profile", str(tmp_path / "p.yaml"), "--anyway", "--kv-cache-dtype", "fp8",
            "--max-model-len", "256",
        ])  # fmt: skip
    ((_, words, _),) = ran
    given = {
        option: words[i + 1] for i, option in enumerate(words) if option in ("--kv-cache-dtype", "--max-model-len")
    }
    assert given == {"--kv-cache-dtype": "fp8", "--max-model-len": "256"} and words[-2:] == ["--dtype", "half"]


SLO_ = ("serve", "./m", "--engine", "vllm", "--slo", "ttft=500ms")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--token-budget", "16384"], {"--max-num-batched-tokens": "16384"}),  # or vLLM's ceiling would be below it
        (
            ["--max-batch-size", "4096"],
            {"--max-num-batched-tokens": "16384", "--max-num-seqs": "4096"},
        ),  # no free knob is cut
        (["--chunk-size", "1024"], {}),
        (["--chunk-size", "4096"], {"--max-num-batched-tokens": "16384"}),
        (["--no-control"], {}),
        (["--no-control", "--token-budget", "64"], {"--max-num-batched-tokens": "64"}),  # vLLM cuts its slots to them
        (["--no-control", "--max-batch-size", "8"], {"--max-num-seqs": "8"}),
        (["--no-control", "--max-batch-size", "4096"], {"--max-num-batched-tokens": "16384", "--max-num-seqs": "4096"}),
        (
            ["--no-control", "--max-batch-size", "4096", "--token-budget", "64"],
            {"--max-num-batched-tokens": "64", "--max-num-seqs": "64"},
        ),
        (["--no-control", "--chunk-size", "96"], {"--long-prefill-token-threshold": "96"}),
        (["--no-control", "--chunk-size", "96", "--max-model-len", "96"], {}),  # above it vLLM would not start
    ],
)
def test_knobs_given_by_hand_are_in_reach_and_without_a_controller_in_force(
    words: list[str], flags: dict[str, str], ran: Ran
) -> None:
    with pytest.raises(SystemExit):
        run([*SLO_, *words])
    ((_, became, _),) = ran
    known = ("--max-num-seqs", "--max-num-batched-tokens", "--long-prefill-token-threshold")
    assert {word: became[i + 1] for i, word in enumerate(became) if word in known} == flags


def test_without_a_controller_a_profile_s_setting_is_in_force(ran: Ran, tmp_path: Path) -> None:
    """And not the ceilings that vLLM was measured with."""
    measured = named_on_the_hub(profile())
    options = {
        "max_num_batched_tokens": "4096",
        "max_num_seqs": "2000",
        "max_num_active_seqs": "99",
        "enforce_eager": "true",
    }
    engine = measured.engine.model_copy(update={"name": "vllm", "options": options})
    save_profile(measured.model_copy(update={"engine": engine}), tmp_path / "p.yaml")
    with pytest.raises(SystemExit):
        run(["serve", "--engine", "vllm", "--profile", str(tmp_path / "p.yaml"), "--anyway", "--no-control"])
    ((_, words, _),) = ran
    assert words[words.index("--max-num-batched-tokens") + 1] == str(measured.knobs.token_budget)
    assert "--enforce-eager" in words and "--max-num-active-seqs" not in words
    assert words.count("--max-num-seqs") == words.count("--max-num-batched-tokens") == 1
    assert words[words.index("--max-num-seqs") + 1] == str(
        min(measured.knobs.max_batch_size, measured.knobs.token_budget)
    )


@pytest.mark.parametrize("option", [["--reject-late"], ["--relegate-late"], ["--max-wait-ms", "5"]])
def test_what_vllm_alone_does_not_have_is_refused_without_a_controller(
    option: list[str], ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SLO_, "--no-control", *option]) == 2 and not ran
    assert capsys.readouterr().err.startswith(f"error: {option[0]}: vLLM has no such thing of its own")


# -- the status of a rejection ----------------------------------------------------------------------------------------------

WORDS = f"{REJECTED}0.25 s: its first token would come too late"
HEADERS = [(b"x-request-id", b"7"), (b"content-length", b"9")]
WAITS = b": keep-alive\n\n"
WHOLE = ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/messages", "/invocations")


def said(*tokens: int, finish: str | None = None, stop: object = None) -> Any:
    """What vLLM's engine says of a request."""
    one = SimpleNamespace(token_ids=list(tokens), finish_reason=finish, stop_reason=stop)
    return SimpleNamespace(outputs=[one])


REJECTION = said(finish="abort", stop=WORDS)
LAST = said(6, finish="stop")


class FullQueueError(Exception):
    """As vLLM's own ``MaxQueuedTokensError``."""

    http_status = 503


class FakeEngine:
    """Says, for each request in turn, what it was given for it."""

    def __init__(self, *requests: list[Any]) -> None:
        self._requests = iter(requests)
        self.open = 0
        self.given: list[Any] = []

    async def generate(self, prompt: str, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        self.given.append(sampling_params)
        self.open += 1
        try:
            for one in next(self._requests):
                await asyncio.sleep(0)
                if isinstance(one, Exception):
                    raise one
                yield one
        finally:
            self.open -= 1


def params() -> Any:
    return SimpleNamespace(extra_args=None)


async def whole(scope: Any, receive: Any, send: Any) -> None:
    """An endpoint of vLLM's that answers at the end, for two prompts."""
    await receive()
    engine = scope["app"].state.engine_client
    text = b""
    for number in range(scope.get("prompts", 1)):
        async for output in engine.generate("", params(), str(number)):
            text += bytes(output.outputs[0].token_ids)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [*HEADERS, (b"content-type", b"application/json")]}
    )
    await send({"type": "http.response.body", "body": text})


async def streamed(scope: Any, receive: Any, send: Any) -> None:
    """One that streams, whose first event and comments say nothing of what comes, and that has errors in its stream."""
    await receive()
    events = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *events]})
    for first in (b"data: created\n\n", WAITS):
        await send({"type": "http.response.body", "body": first, "more_body": True})
    try:
        async for output in scope["app"].state.engine_client.generate("", params(), "1"):
            text = b"data: " + bytes(output.outputs[0].token_ids) + b"\n\n"
            await send({"type": "http.response.body", "body": text, "more_body": True})
    except FullQueueError:
        await send({"type": "http.response.body", "body": b"data: error\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


class Client:
    """Asks ``app`` behind the middleware and ``engine``."""

    def __init__(self, app: Any, engine: Any, path: str = "/v1/completions", body: bytes = b"{}", **scope: Any) -> None:
        state = SimpleNamespace() if engine is None else SimpleNamespace(engine_client=engine)
        self.scope = {"type": "http", "method": "POST", "path": path, "app": SimpleNamespace(state=state), **scope}
        self._app, self._body = app, body
        self.messages: list[MutableMapping[str, Any]] = []

    async def ask(self, middleware: RejectionStatus | None = None) -> Self:
        await (middleware or RejectionStatus(self._app))(self.scope, self._receive, self._send)
        start, *rest = self.messages
        assert start["type"] == "http.response.start" and not rest[-1].get("more_body", False), "an answer ends"
        self.status, self.headers = start["status"], dict(start["headers"])
        self.text = b"".join(one["body"] for one in rest)
        return self

    async def _receive(self) -> Any:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body}
        await asyncio.sleep(60)

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.messages.append(message)


def answered(app: Any, *requests: list[Any], **more: Any) -> Client:
    return asyncio.run(Client(app, FakeEngine(*requests), **more).ask())


def assert_rejected(found: Client) -> None:
    assert found.status == 429 and found.headers[b"content-type"] == b"application/json"
    assert found.headers[b"retry-after"] == b"1" and found.headers[b"retry-after-ms"] == b"250"
    error = json.loads(found.text)["error"]
    assert (error["message"], error["code"]) == ("its first token would come too late", "slo")
    assert int(found.headers[b"content-length"]) == len(found.text)
    assert len(found.headers) == len(found.messages[0]["headers"]), "each once"


@pytest.mark.parametrize("path", [*WHOLE, "/v1/responses", "/inference/v1/generate", "/of/a/later/version"])
@pytest.mark.parametrize("app", [whole, streamed])
def test_a_rejected_request_is_a_429_with_the_reason_on_each_endpoint(app: Any, path: str) -> None:
    found = answered(app, [REJECTION], path=path)
    assert_rejected(found)
    assert found.headers[b"x-request-id"] == b"7"
    assert (json.loads(found.text).get("type") == "error") == (path == "/v1/messages"), "as Anthropic's clients know it"


@pytest.mark.parametrize(
    "others", [([LAST], [REJECTION]), ([REJECTION], [LAST]), ([said(5), LAST], [said(), REJECTION])]
)
def test_several_prompts_or_answers_are_rejected_as_a_whole(others: tuple[list[Any], list[Any]]) -> None:
    assert_rejected(answered(whole, *others, prompts=2))
    both = SimpleNamespace(outputs=[one for outputs in others for output in outputs for one in output.outputs])
    assert_rejected(answered(whole, [both]))


@pytest.mark.parametrize("middleware", [RejectionStatus(streamed), RejectionStatus(RejectionStatus(streamed))])
def test_a_stream_is_held_back_until_its_first_token(middleware: RejectionStatus) -> None:
    """With the comments that keep its connection open; what follows goes on as it comes."""
    going = asyncio.Event()

    class Slow(FakeEngine):
        async def generate(self, *given: Any) -> AsyncIterator[Any]:
            for one in (said(), said(5)):
                await asyncio.sleep(0.01)
                assert not client.messages
                yield one
            await going.wait()
            yield LAST

    client = Client(streamed, Slow())

    async def ask() -> Client:
        asking = asyncio.ensure_future(client.ask(middleware))
        while not client.messages:
            await asyncio.sleep(0)
        assert len(client.messages) == 5 and client.messages[-1]["body"] == b"data: \x05\n\n"
        going.set()
        return await asking

    found = asyncio.run(ask())
    assert found.status == 200
    assert found.text == b"data: created\n\n" + WAITS + b"data: \n\ndata: \x05\n\ndata: \x06\n\ndata: [DONE]\n\n"


def test_what_is_left_of_them_is_ended() -> None:
    """As soon as one of them is known to be rejected; what the app says of its client's going is of no interest."""
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listens = asyncio.ensure_future(receive())
        async for _ in scope["app"].state.engine_client.generate("", params(), "1"):
            heard.append(await asyncio.wait_for(listens, 5))
        heard.append(await receive())
        if scope["speaks"]:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            heard.append(len(client.messages))
            await send({"type": "http.response.body", "body": b"null"})
            await send({"type": "http.response.body", "body": b"of another"})
        raise OSError("the client has gone")

    for speaks in (False, True):
        heard.clear()
        client = Client(app, FakeEngine([REJECTION]), speaks=speaks)
        assert_rejected(asyncio.run(client.ask()))
        told = [2] if speaks else []  # with the first that the app says
        assert heard == [{"type": "http.disconnect"}] * 2 + told and len(client.messages) == 2


def test_an_error_of_the_app_is_its_own() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        raise OSError("of the app")

    with pytest.raises(OSError, match="of the app"):
        answered(app)


def test_a_stream_that_vllms_own_queue_limit_refuses_is_a_503() -> None:
    """Which vLLM would say in the stream, under status 200."""
    found = answered(streamed, [FullQueueError("the backlog limit")])
    assert found.status == 503 and found.headers[b"retry-after"] == b"1"
    assert json.loads(found.text)["error"]["message"] == "the backlog limit"


@pytest.mark.parametrize("app", [whole, streamed])
@pytest.mark.parametrize(
    "requests",
    [
        [[LAST]],
        [[said(5), said(6), LAST]],
        [[said(finish="abort")]],  # by the client, or a server that stops
        [[said(finish="abort", stop="\n")]],
        [[said(finish="stop", stop=WORDS)]],
        [[]],
    ],
)
def test_all_other_answers_pass_as_they_are(app: Any, requests: list[list[Any]]) -> None:
    found = answered(app, *requests)
    bare = Client(app, FakeEngine(*requests))

    async def without() -> None:
        await app(bare.scope, bare._receive, bare._send)

    asyncio.run(without())
    assert found.messages == bare.messages and found.status == 200


def test_a_rejection_after_the_first_token_was_sent_changes_nothing() -> None:
    found = answered(streamed, [said(5), REJECTION])
    assert found.status == 200 and found.text.endswith(b"data: \x05\n\ndata: \n\ndata: [DONE]\n\n")
    found = answered(streamed, [said(5), FullQueueError()])
    assert found.status == 200 and found.text.endswith(b"data: \x05\n\ndata: error\n\ndata: [DONE]\n\n")


def test_errors_and_what_is_not_generated_pass_at_once() -> None:
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": scope["status"], "headers": HEADERS})
        seen.append(len(client.messages))
        await send({"type": "http.response.body", "body": b"{"})

    for more in ({"status": 503}, {"status": 200, "method": "GET"}):
        client = Client(app, FakeEngine(), **more)
        asyncio.run(client.ask())
    client = Client(app, None, status=200)
    asyncio.run(client.ask())
    assert seen == [1, 1, 1]


def test_requests_hear_only_of_themselves_and_of_each_only_one_hears() -> None:
    """Whatever runs at the same time, and if the middleware is there twice."""
    engine = FakeEngine([said(), LAST], [said(), REJECTION], [said(), said(), LAST])
    middleware = RejectionStatus(RejectionStatus(streamed))

    async def ask() -> list[Client]:
        clients = [Client(streamed, engine) for _ in range(3)]
        return list(await asyncio.gather(*(client.ask(middleware) for client in clients)))

    found = asyncio.run(ask())
    assert [one.status for one in found] == [200, 429, 200] and engine.open == 0
    assert_rejected(found[1])


def test_what_the_app_does_not_read_to_its_end_is_closed() -> None:
    """By which vLLM aborts a request whose client has gone."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        outputs = scope["app"].state.engine_client.generate("", params(), "1")
        await anext(outputs)
        await outputs.aclose()
        assert engine.open == 0
        await whole(scope, receive, send)

    engine = FakeEngine([said(5), said(6)], [LAST])
    assert asyncio.run(Client(app, engine).ask()).text == b"\x06"


@pytest.mark.parametrize(
    ("path", "body", "spared"),
    [
        ("/v1/responses", b'{"input": "x", "background": true}', True),
        ("/v1/responses", b'{"input": "x", "background": false}', False),
        ("/v1/responses", b'{"input": "\\"background\\""}', False),
        ("/v1/responses", b'["background"]', False),
        ("/v1/responses", b'"background" and no JSON', False),
        ("/v1/completions", b'{"prompt": "x", "background": true}', False),
    ],
)
def test_who_asks_for_an_answer_in_the_background_is_never_rejected(path: str, body: bytes, spared: bool) -> None:
    """The answer to the request is there before anything is computed: nobody could be told."""
    engine = FakeEngine([LAST])
    asyncio.run(Client(whole, engine, path, body).ask())
    (given,) = engine.given
    assert given.extra_args == ({"never_rejected": True} if spared else None)
    sequence = Sequence(Request("r", (), SamplingParams(), 1, 0.0))
    sequence.data = SimpleNamespace(request_id="resp_1", sampling_params=given)
    rejects = Admission(AdmissionPolicy(late="reject"), SlackTracker({}))
    assert Steering._relegates(rejects, sequence, Verdict(SLO_REASON, "late", 1.0)) is spared


@pytest.mark.parametrize("stream", [True, False])
def test_once_an_answer_has_begun_what_is_still_to_come_of_it_is_never_rejected(stream: bool) -> None:
    """Clips of a transcription and turns after a tool are requests one after another: a rejection would be a hole in the answer,
    or waste what was computed before. Those of one moment are rejected as ever."""
    kind = b"text/event-stream" if stream else b"application/json"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        given, generate = params(), scope["app"].state.engine_client.generate
        clips = [generate("", given, str(i)) for i in range(3)]  # vLLM makes all of them before it reads one
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for outputs in clips:
            async for one in outputs:
                extra.append(given.extra_args)
                text = bytes(one.outputs[0].token_ids)
                await send({"type": "http.response.body", "body": text, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    extra: list[Any] = []
    found = answered(app, [said(4), LAST], [LAST], [LAST], path="/v1/audio/transcriptions")
    assert found.status == 200 and found.text == b"\x04\x06\x06\x06"
    assert extra == [None, None, *[{"never_rejected": True}] * 2]


def test_a_transcription_has_not_begun_while_its_language_is_looked_for() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        generate, given = scope["app"].state.engine_client.generate, [params() for _ in range(3)]
        requests = [generate("", given[0], "x-lang_detect"), *(generate("", given[at], f"x-{at}") for at in (1, 2))]
        for outputs, one in zip(requests, given, strict=True):
            async for _ in outputs:
                pass
            extra.append(one.extra_args)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    extra: list[Any] = []
    answered(app, [LAST], [LAST], [LAST], path="/v1/audio/transcriptions")
    assert extra == [None, None, {"never_rejected": True}]


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_request_that_comes_in_parts_is_looked_at_once(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bytes] = []

    def look(body: bytes) -> bool:
        looks.append(body)
        return True

    monkeypatch.setattr("autotune.engines.vllm.middleware._in_background", look)
    body = b'{"input": "x", "background": true}'
    parts = [body[at : at + size] for at in range(0, len(body), size)]

    class InParts(Client):
        async def _receive(self) -> Any:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            assert not looks
        for _ in range(2):
            async for _ in scope["app"].state.engine_client.generate("", params(), "1"):
                pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    engine = FakeEngine([LAST], [LAST])
    asyncio.run(InParts(app, engine, "/v1/responses").ask())
    assert looks == [body] and [given.extra_args for given in engine.given] == [{"never_rejected": True}] * 2


@pytest.mark.parametrize("app", [whole, streamed])
def test_outputs_that_are_not_understood_are_vllms_to_answer(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    unknown = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5])])
    with caplog.at_level("ERROR", logger="vllm.autotune"):
        found = answered(app, [unknown, LAST])
    assert found.status == 200 and b"\x05" in found.text and b"\x06" in found.text
    assert "the answer goes on as vLLM makes it" in caplog.text
    assert answered(streamed, [unknown, REJECTION]).status == 200, "its beginning is not held back"


def test_an_engine_that_cannot_be_listened_to_serves_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        __slots__ = ()

        async def generate(self, *given: Any) -> AsyncIterator[Any]:
            yield REJECTION

    middleware = RejectionStatus(whole)
    with caplog.at_level("WARNING", logger="vllm.autotune"):
        for _ in range(2):
            assert asyncio.run(Client(whole, Other()).ask(middleware)).status == 200
    assert caplog.text.count("a rejected request is an answer without text, not status 429") == 1


def test_who_cannot_be_told_of_a_rejection_is_late_instead() -> None:
    """vLLM's API server has no answer without log probabilities for who wants them, and ends at one without an embedding. A beam
    search would end in the middle of its answer."""
    rejects = Admission(AdmissionPolicy(late="reject"), SlackTracker({}))
    verdict = Verdict(SLO_REASON, "late", 1.0)
    kinds = [
        {"sampling_params": SimpleNamespace(prompt_logprobs=None), "pooling_params": None},
        {"sampling_params": SimpleNamespace(prompt_logprobs=1), "pooling_params": None},
        {"sampling_params": None, "pooling_params": object()},
        {"sampling_params": SimpleNamespace(prompt_logprobs=None, logprob_token_ids=[5]), "pooling_params": None},
        {"sampling_params": SimpleNamespace(), "pooling_params": None, "request_id": "cmpl-1-beam-3-0123abcd"},
    ]
    found = []
    for kind in kinds:
        sequence = Sequence(Request("r", (), SamplingParams(), 1, 0.0))
        sequence.data = SimpleNamespace(**{"request_id": "cmpl-1-0-0123abcd", **kind})
        found.append(Steering._relegates(rejects, sequence, verdict))
    assert found == [False, True, True, True, True]


def test_what_vllm_calls_the_end_of_a_request() -> None:
    ends = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.CANCELLED}
    ends |= {"repetition": FinishReason.STOP, "error": FinishReason.ERROR, "anything": FinishReason.ERROR}
    assert {said: finish_reason(said) for said in ends} == ends


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("cmpl-88ad6f58f2d8f3b3-0-1a2b3c4d", ("cmpl-88ad6f58f2d8f3b3", "0", "1a2b3c4d")),
        ("cmpl-88ad6f58f2d8f3b3-12-1a2b3c4d", ("cmpl-88ad6f58f2d8f3b3", "12", "1a2b3c4d")),
        ("3_cmpl-88ad6f58f2d8f3b3-1-1a2b3c4d", ("cmpl-88ad6f58f2d8f3b3", "1", "1a2b3c4d")),
        ("1_chatcmpl-88ad6f58f2d8f3b3-1a2b3c4d", ("chatcmpl-88ad6f58f2d8f3b3-1a2b3c4d",)),
        ("0_cmpl-mine-0-1a2b3c4d", ("cmpl-mine-0-1a2b3c4d",)),
        ("cmpl-mine-0-1a2b3c4d", None),  # a client may give two requests one id
        ("chatcmpl-88ad6f58f2d8f3b3-1a2b3c4d", None),
        ("17", None),
        ("#1", None),
    ],
)
def test_requests_that_one_http_request_stands_for_are_known_by_their_ids(
    name: str, place: tuple[str, ...] | None
) -> None:
    assert place_of(name) == (place and Place(*place))


class Arrivals:
    """Requests under ids of which a client chose the part that looks like one of vLLM's own."""

    def __init__(self) -> None:
        self.families, self.known = Families(), dict[str, Sequence]()

    def join(self, number: str, now: float) -> str:
        """``number``: of the prompt, and what vLLM has drawn for it."""
        answer, underscore, number = number.rpartition("_")
        name = f"{answer}{underscore}cmpl-{'a' * 32}-{number}"
        self.known[name] = Sequence(Request(name, (), SamplingParams(), 1, now))
        self.families.joined(name, self.known[name], now)
        return name

    def refuse(self, name: str, now: float) -> set[str]:
        """Who is doomed by it."""
        self.families.refuse(self.known[name], Refusal("slo", "late", None), now)
        self.families.left(self.known[name])
        return self.doomed()

    def doomed(self) -> set[str]:
        return {sequence.request.id for sequence, _ in self.families.take_doomed()}


def test_an_id_that_is_tried_again_is_another_http_request() -> None:
    """Whatever became of the first; of which all is rejected that comes soon."""
    seen = Arrivals()
    first = seen.join("0-00000001", 0.0)
    assert seen.refuse(first, 0.0) == set()
    assert seen.join("1-00000002", 0.2) in seen.doomed()
    for again in ("0-00000003", "1_0-00000004"):  # at once, and with other parameters
        seen.join(again, 0.3)
        assert seen.doomed() == set()
    seen.join("1-00000005", 0.4)
    assert seen.doomed() == set(), "of the second"


def test_a_refusal_is_forgotten_soon() -> None:
    seen = Arrivals()
    seen.refuse(seen.join("0-00000001", 0.0), 5.0)
    assert seen.join("1-00000002", 5.9) in seen.doomed(), "vLLM was in the middle of a step"
    seen.join("2-00000003", 7.0)
    assert seen.doomed() == set()
    seen.refuse(seen.join("0-00000004", 9.0), 9.0)
    for one in seen.known.values():
        seen.families.left(one)
    assert not seen.families._of and len(seen.families._newest) == 1, "that of now"


def test_of_two_http_requests_with_one_id_the_other_goes_on() -> None:
    """As those of one trace have it: only what came with the rejected one is rejected with it."""
    seen = Arrivals()
    old = [seen.join(number, 0.0) for number in ("0-00000001", "1-00000002", "2-00000003")]
    new = [seen.join(number, 0.5) for number in ("0_0-00000004", "1_0-00000004", "0_1-00000005", "1_1-00000005")]
    assert seen.refuse(new[1], 4.0) == {new[0], new[2], new[3]}
    assert seen.refuse(old[0], 4.1) == {*old[1:]}


def test_another_thread_looks_again_where_something_changed_and_puts_nothing_in_order() -> None:
    looks: list[bool] = []

    class Changing:
        def view(self, now: float, *, elsewhere: bool) -> float:
            looks.append(elsewhere)
            if len(looks) in (2, 3):
                raise (IndexError if len(looks) == 2 else RuntimeError)("changed")
            return now

    engine = object.__new__(TunableScheduler)
    vars(engine).update(_steering=Changing(), _thread=threading.get_ident(), clock=VirtualClock(7.0))
    assert engine.view() == 7.0
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(engine.view).result() == 7.0
    assert looks == [False, True, True, True]
