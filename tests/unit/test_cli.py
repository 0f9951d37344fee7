"""The command line: exit codes, one line for each wrong input, help with examples, and a quick start."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from autotune import __version__
from autotune.cli.display import Display, duration
from autotune.cli.main import app, run
from autotune.cli.options import seconds
from autotune.cli.profile_output import Files, activation, engine_facts, longer, next_steps
from autotune.cli.profile_study import stem
from autotune.engines.own import default_model
from autotune.measure.evaluate import EvaluationError
from autotune.profile import save_profile
from autotune.profile.schema import profiles_folder
from autotune.profile.text import is_profile
from autotune.profiling.assemble import sidecar
from autotune.report.profile_table import rows, show, table
from autotune.report.tables import turned
from runtime.errors import AutotuneError, EngineClosedError, InputError, RejectedError
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.torch_backend.presets import PRESETS
from tests.sample_profile import full_profile, sample_profile
from tests.unit.paced import paced
from tests.unit.profiles import VLLM, findings, profile, setup
from tests.unit.profiles import run as measured


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that must end with exit code 2 and leave nothing behind."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" or re.fullmatch(r"autotune \S+ · loading \S+ …\n", captured.out)
    assert captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    assert list(Path().iterdir()) == []
    return captured.err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--budget", ""], "--budget is empty; give it a value, or leave it out"),
        (["--out", ""], "--out is empty; give it a value, or leave it out"),
        (["--class="], "--class is empty; give it a value, or leave it out"),
        (["--slo", "tpot=50"], '--slo: "tpot=50" has no unit; write tpot=50ms or tpot=0.05s'),
        (["--slo", "speed=5ms"], '--slo: "speed" is not a metric; the metrics are ttft, tpot, itl, e2e'),
        (["--pin", "budget=5"], "--pin: budget is not a knob; the knobs are max_batch_size, max_wait_ms, "),
        (["--pin", "token_budget=0"], "--pin: token_budget is 0; it must be a whole number between 1 and 8192 tokens"),
        (["--range", "draft_tokens=0:8"], "--range: draft_tokens is searched in simulation, and the workload does not say "),
        (["--range", "token_budget=64:99999"], "--range: token_budget is 99999; it must be a whole number between "),
        (["--workload", "nope"], '--workload: workload "nope": '),
        (["--workload", "azure-conv:missing.csv"], "--workload: "),
        (["--budget", "5"], '--budget: "5" is not a time; write 5s or 5m'),
        (["--budget", "soon"], '--budget: "soon" is not a time, such as 90s, 2m or 1h30m'),
        (["--budget", "3s"], "--budget is 3s; it must be at least 10s"),
        (["--trials", "0"], "--trials is 0; it must be at least 1"),
        (["--rate", "-1"], "--rate is -1; it must be a number from 1e-06 to 1e+06 requests/s"),
        (["--cpu", "--gpu"], "--cpu and --gpu are both given"),
        (["--cpu", "--out", "nowhere/x.yaml"], "--out: nowhere/x.yaml cannot be written: there is no directory nowhere"),
        (["--cpu", "--out", "x.txt"], "--out: x.txt must end in .yaml"),
        (["--cpu", "--out", "a.yaml", "--study", "./a.yaml"], "--study: a.yaml is what --out writes; name another file"),
        (["--cpu", "--study", "/"], "--study: / is a directory; name a file"),
        (["--cpu", "--model", "./no-such-model"], "model ./no-such-model: "),
        (["--cpu", "--dtype", "float7"], "--dtype is float7; it must be one of auto, float32, bfloat16, float16"),
        (["--seed", "x"], "--seed is x; it must be a whole number"),
        (["--nope"], "no such option: --nope"),
        (["--budget"], "option '--budget' requires an argument; see autotune profile --help"),
    ],
)  # fmt: skip
def test_wrong_options_of_profile(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert refused(capsys, "profile", *arguments).startswith(text)


def test_no_gpu_is_one_line_that_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert refused(capsys, "profile", "--gpu") == (
        f"--gpu: PyTorch sees no CUDA device (torch {torch.__version__}). "
        "Install a CUDA build of torch, or drop --gpu to profile the CPU."
    )


CALLABLE = ("--callable", "math:fsum", "--inputs", "mine.txt")


@pytest.mark.parametrize(
    ("name", "more"),
    [("mine.yaml", ()), ("mine.points.jsonl", ()), ("mine.yaml", CALLABLE)],
    ids=["yaml", "points", "callable"],
)
@pytest.mark.parametrize(
    "content", ["services:\n  web: {image: nginx}\n", "schema_version: 1\n", '{"a": 1}\n', "my notes\n", "\xff"]
)
def test_profile_replaces_no_file_of_another_kind(
    capsys: pytest.CaptureFixture[str], name: str, content: str, more: tuple[str, ...]
) -> None:
    Path(name).write_text(content, encoding="latin-1")
    assert run(["profile", "--out", "mine.yaml", *more]) == 2
    says = "is no profile" if name == "mine.yaml" else "holds no runs of a profile"
    error = capsys.readouterr().err
    assert error == f"error: --out: {name} exists and {says}; name another file\n"
    assert Path(name).read_text(encoding="latin-1") == content and len(list(Path().iterdir())) == 1


def test_profiles_of_every_kind_and_version_may_be_replaced(tmp_path: Path) -> None:
    files = [*(Path(__file__).parent / "data").glob("*profile-version-*.yaml"), *profiles_folder().glob("*.yaml")]
    assert len(files) > 5 and all(is_profile(file.read_bytes()[:65536]) for file in files)
    save_profile(sample_profile(), tmp_path / "mine.yaml")
    save_profile(sample_profile(command=f"autotune profile --workload {'x' * 70_000}"), tmp_path / "long.yaml")
    assert is_profile((tmp_path / "long.yaml").read_bytes()[:65536])
    found = full_profile()
    (tmp_path / "mine.points.jsonl").write_text(sidecar(findings()))
    for blank in ("", "\n\n"):
        assert Files.of(tmp_path / "mine.yaml", None).profile == tmp_path / "mine.yaml"
        (tmp_path / "mine.points.jsonl").write_text(blank)
    save_profile(found, tmp_path / "mine.yaml")
    (tmp_path / "mine.points.jsonl").write_text("".join(line + "\n" for line in sidecar(findings()).splitlines()[-1:]))
    assert Files.of(tmp_path / "mine.yaml", None).points == tmp_path / "mine.points.jsonl"


def test_an_unreadable_model_directory(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    empty = tmp_path_factory.mktemp("model")
    assert str(empty) in refused(capsys, "profile", "--cpu", "--model", str(empty))
    (empty / "config.json").write_text("{broken")
    assert str(empty) in refused(capsys, "profile", "--cpu", "--model", str(empty))


def test_a_directory_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    Path("locked").mkdir(mode=0o500)
    assert run(["profile", "--cpu", "--out", "locked/x.yaml"]) == 2
    assert "--out: locked/x.yaml cannot be written (Permission denied)" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["show"])
def test_files_that_are_no_profiles(capsys: pytest.CaptureFixture[str], verb: str, tmp_path: Path) -> None:
    assert refused(capsys, verb, "none.yaml") == (
        "none.yaml: cannot be read (No such file or directory), and is no shipped profile either; `autotune profiles` lists those"
    )
    bad = tmp_path / "bad.yaml"
    bad.write_text("knobs: [1,")
    assert run([verb, "bad.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: bad.yaml: not valid YAML: line ") and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (EvaluationError("request 3 failed:\nno memory"), "nothing could be measured: request 3 failed: no memory"),
        (EngineClosedError("the engine is closed"), "the engine is closed"),
        (RejectedError("the engine is closed", reason="closed"), "the engine is closed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_command_that_cannot_go_on_is_one_line_and_1(
    error: AutotuneError, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise error

    monkeypatch.setattr("autotune.profile.shipped_profiles", fails)
    assert run(["profiles"]) == 1
    assert capsys.readouterr().err == f"error: {says}\n"


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"autotune {__version__}\n"
    for verb in ("profile", "profiles", "show", "check"):
        assert run([verb, "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert text.count(f"autotune {verb}") >= 3  # usage and two examples
    assert run([]) == 2
    assert run(["frobnicate"]) == 2
    assert "no such command 'frobnicate'" in capsys.readouterr().err


def test_the_verbs_fit_one_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    verbs = [info.name for info in app.registered_commands]
    assert len(lines) <= 32 and len(verbs) == len(
        {line[2:].split()[0] for line in lines if line[2:].split()[:1]} & {*verbs}
    )


SHOWS = [
    ["show", "cpu-2core-tiny"],
    ["show", "cpu-2core-tiny", "--json"],
    ["profiles"],
    ["show", "--help"],
    ["--version"],
]


@pytest.mark.parametrize("words", SHOWS, ids=" ".join)
def test_a_reader_that_has_gone_changes_no_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w", encoding="utf-8") as pipe, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", pipe)
        assert run(words) == 0
        assert sys.stdout is pipe
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", SHOWS, ids=" ".join)
def test_a_stdout_on_a_full_disk_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert run(words) == 2
    assert capsys.readouterr().err == "error: stdout cannot be written (No space left on device)\n"


@pytest.mark.parametrize("kind", ["closed", "full"])
def test_a_stderr_that_takes_nothing_costs_no_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Rich would exit with 1, which is "no setting meets the SLO"."""
    if kind == "full" and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as closed, open("/dev/full" if kind == "full" else os.devnull, "w") as full:
        monkeypatch.setattr(sys, "stderr", closed if kind == "closed" else full)
        assert run(["simulate", "cpu-2core-tiny", "--json", "--seeds", "1", "--requests", "20"]) == 0
        monkeypatch.undo()
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_what_stdout_has_no_code_for_is_escaped(encoding: str) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "autotune", "show", "cpu-2core-tiny"],
        env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert (said.returncode, said.stderr) == (0, b"")
    assert b"tpot=50ms" in said.stdout and b"\\u" in said.stdout


def test_the_process_ends_with_the_same_codes() -> None:
    """Python flushes stdout once more as it ends."""
    command = [sys.executable, "-m", "autotune", "show", "cpu-2core-tiny", "--json"]
    reads, writes = os.pipe()
    os.close(reads)
    gone = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writes)
    assert (gone.returncode, gone.stderr) == (0, b"")
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as out:
            full = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, check=False, timeout=60)
        assert full.returncode == 2 and full.stderr.startswith(b"error: stdout cannot be written (")
        assert full.stderr.count(b"\n") == 1


def test_help_starts_without_torch_or_optuna() -> None:
    code = (
        "import sys\nfrom autotune.cli.main import run\nassert run(['--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'optuna', 'scipy'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("of_a_callable", [False, True])
def test_profiling_without_the_locks_of_unix_is_one_line(
    of_a_callable: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.profiling.storage.fcntl", None)
    words = ["--callable", "m:f", "--inputs", "a"] if of_a_callable else ["--model", "nano"]
    assert refused(capsys, "profile", *words).startswith("profiling needs the file locks of Unix, which this system")


def test_the_package_is_the_command() -> None:
    """``python -m autotune``, where ``autotune`` is not on the path."""
    words = [sys.executable, "-m", "autotune", "explain", "nothing-here.jsonl"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: nothing-here.jsonl: cannot be read: No such file or directory\n"


def test_ctrl_c_while_the_command_is_being_imported_is_no_traceback() -> None:
    code = (
        "import os, signal, sys\nfrom autotune.cli.entry import main\n"
        "class AtTyper:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'typer':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, AtTyper())\nmain()"
    )
    stopped = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60)
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "stopped\n")


def test_after_its_import_ctrl_c_is_left_to_the_command() -> None:
    code = (
        "import signal, sys\nfrom autotune.cli.entry import main\nbefore = signal.getsignal(signal.SIGINT)\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "assert signal.getsignal(signal.SIGINT) is before"
    )
    command = [sys.executable, "-c", code, "--version"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert ran.stdout == f"autotune {__version__}\n"


def closed(redirections: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Python with ``words``, begun by a shell with such ``redirections``."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {redirections}', sys.executable, *words], capture_output=True, timeout=60
    )


def test_without_a_stderr_nothing_that_is_for_it_is_on_stdout() -> None:
    done = closed("2>&-", "-m", "autotune", "explain", "nothing-here.jsonl")
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("redirections", ["2>&-", "<&- >&- 2>&-", "<&- >&-"])
def test_no_file_takes_the_place_of_a_closed_standard_stream(redirections: str, tmp_path: Path) -> None:
    """Native code prints to descriptor 2, whatever it is: a journal was written over by it."""
    code = (
        "import os, sys\nimport autotune.cli.main as command\nfrom autotune.cli.entry import main\n"
        "def opens():\n"
        "    with open(sys.argv[1], 'w') as file:\n"
        "        os.write(1, b'native')\n        os.write(2, b'native')\n"
        "        print('said')\n        print('said', file=sys.stderr)\n        assert sys.stdin.read() == ''\n"
        "        file.write('mine')\n"
        "command.main = opens\nmain()"
    )
    done = closed(
        f"{redirections} " if "<" in redirections else f"{redirections} </dev/null", "-c", code, str(tmp_path / "a")
    )
    assert done.returncode == 0 and (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize("wait", [0, 2])
def test_the_next_steps_work_as_they_are_printed(capsys: pytest.CaptureFixture[str], wait: int) -> None:
    """Also where vLLM has nothing for the value of a knob. ``check`` is run elsewhere: it loads a model."""
    knobs = Knobs(16, wait, 128, 128)
    made = profile(findings(measured(knobs, 40), measured(VLLM, 20)))
    file = Path("my nano-cpu.yaml")
    save_profile(made, file)
    steps = [shlex.split(command) for command, _ in next_steps(made, file)]
    assert [words[:2] for words in steps] == [["autotune", verb] for verb in ("report", "export", "check")]
    assert ("--allow-lossy" in steps[1]) == (wait > 0)
    for words in steps[:2]:
        assert run(words[1:]) == 0, capsys.readouterr().err


def test_longer_runs_are_advised_by_what_was_spent() -> None:
    assert longer(20).endswith("--budget 1m.") and longer(210).endswith("--budget 11m.")


def test_who_has_no_autotune_on_the_path_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``make run``, which calls it by its path."""
    scripts = tmp_path / "my work" / ".venv" / "bin"
    scripts.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(scripts.parent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (scripts / "activate").touch()
    assert activation() is None  # run from source: there is none to find
    (scripts / "autotune").touch(mode=0o755)
    assert activation() == "source 'my work/.venv/bin/activate'"
    monkeypatch.chdir(tmp_path / "my work")
    assert activation() == "source .venv/bin/activate"
    monkeypatch.setenv("PATH", str(scripts))
    assert activation() is None


def test_show_prints_the_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(profile(), Path("tiny-cpu.yaml"))
    assert run(["show", "tiny-cpu.yaml"]) == 0
    text = capsys.readouterr().out
    for word in ("every purpose", "vLLM defaults", "← recommended", "TTFT p99"):
        assert word in text
    assert run(["show", "tiny-cpu.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["knobs"]["token_budget"] == 128


def test_show_takes_a_price_for_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(profile(), Path("tiny-cpu.yaml"))
    assert run(["show", "tiny-cpu.yaml"]) == 0
    plain = capsys.readouterr().out
    assert "per M tok" not in plain and "cheapest" not in plain
    assert run(["show", "tiny-cpu.yaml", "--price", "48/day"]) == 0
    priced = capsys.readouterr().out
    assert "per M tok" in priced and "… " not in priced and "TTFT p99" in priced
    assert "2.00 per hour" in priced
    assert run(["show", "tiny-cpu.yaml", "--price", "48/day", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["price_per_hour"] == 2.0
    assert run(["show", "tiny-cpu.yaml", "--price", "2"]) == 2
    assert capsys.readouterr().err == 'error: --price: "2" is not a price for a time; write 2/h\n'


def test_profiles_lists_what_ships(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profiles"]) == 0
    assert capsys.readouterr().out != ""
    assert run(["profiles", "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)
    assert refused(capsys, "profiles", "--json", "--schema").startswith("--json is given with --schema, which is JSON")


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("2m", 120), ("1h30m", 5400), ("2m20s", 140), ("1.5m", 90)])
def test_times(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", " ", "m", "2x", "-2m", "2m1h", "1e3s", "inf"])
def test_no_times(text: str) -> None:
    with pytest.raises(InputError, match="--budget"):
        seconds(text)


def test_a_time_is_a_week_at_most() -> None:
    assert seconds("168h") == 7 * 86400
    for text in ("169h", "9" * 400 + "s"):
        with pytest.raises(InputError, match=f"--duration is {text}; it must be at most 168h"):
            seconds(text, option="--duration")


def test_names_made_from_models() -> None:
    assert [stem(m) for m in ("tiny", "meta-llama/Llama-3.1-8B", "./models/My Model/", "/")] == [
        "tiny", "Llama-3.1-8B", "My-Model", "model"
    ]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_table_is_never_cut(width: int) -> None:
    knobs = Knobs(**{spec.name: getattr(KnobLimits(), spec.name) for spec in KNOBS})
    made = profile(findings(measured(knobs, 40, throughput=12345.0), measured(VLLM, 20)))
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(made, width))
    text = console.export_text()
    console.file.close()
    assert "…" not in text
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    under = sum(len(turned(point.knobs)) for _, point, _ in rows(made))  # knobs that few turn
    assert len(text.strip().splitlines()) == 1 + len(rows(made)) + under
    assert "10.0 ± 0.0" in text and "300 ms" in text


def test_a_verdict_and_a_late_generator_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    made = profile(findings(measured(lateness_p99_ms=120.0), measured(VLLM, 20, lateness_p99_ms=1.0)))
    show(made, Console(width=150))
    text = capsys.readouterr().out
    assert "in one run, 1 in 100 was sent more than 120 ms late" in " ".join(text.split())
    assert made.verdict in " ".join(text.split())


@pytest.mark.parametrize("groups", [1, 3])
def test_a_profile_keeps_how_many_blocks_the_engine_counts(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than its tokens fill where layers take blocks in several groups."""
    with paced() as engine:
        seen = engine.view()
        counted = seen._replace(kv_total_blocks=groups * seen.kv_total_blocks)
        monkeypatch.setattr(engine, "view", lambda: counted)
        found = engine_facts(engine, {"dtype": "half"})
    assert found.kv_blocks == groups * found.kv_pool.blocks > 0 and found.options == {"dtype": "half"}
    assert found.block_size_given == (found.kv_pool.block_size if groups == 1 else None)


def test_a_profile_keeps_the_size_of_block_and_pool_that_the_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with paced() as engine:
        monkeypatch.setattr(type(engine), "facts", replace(engine.facts, kv_block_size=7, kv_bytes=4096))
        found = engine_facts(engine, {})
    assert (found.kv_block_size, found.block_size_given, found.kv_bytes) == (7, 7, 4096)


def test_help_of_profile_has_the_defaults_of_callables_too() -> None:
    group: Any = typer.main.get_command(app)
    said = {option.name: option.help for option in group.commands["profile"].params}
    defaults = {
        "budget": "60s with --callable)",
        "out": "with --callable, FUNCTION.yaml)",
        "slo": "with --callable, e2e of ten times a call of one item, at least 20ms)",
        "rate": "with --callable in items/s, about 0.8 of what calls of half the SLO can serve)",
    }
    assert not {name: said[name] for name, words in defaults.items() if not said[name].endswith(words)}


def test_progress_without_a_terminal_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(Console(width=150), "model tiny")
    display.stage("searching")
    display.progress(0.5, "3 trials", "best 1", 12.0)  # too soon after the first to be worth a line
    display.stage_done("6 trials", "best 2")
    requested = setup(slo_from="default × 2: because")
    display.ready(requested)
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["searching", "6", "trials", "0", "s", "best", "2"]
    assert "lengths × 1/8" in lines[1] and "default × 2: because" in lines[2] and "10 req/s" in lines[3]
    assert not any("\x1b" in line for line in lines)


def test_progress_on_a_terminal_draws_each_stage_once() -> None:
    with open(os.devnull, "w") as sink:
        console = Console(file=sink, force_terminal=True, width=100, record=True)
        display = Display(console, "model tiny")
        for name in ("calibrating", "searching"):
            display.stage(name)
            display.progress(0.5, "1", "half", 3.0)
            display.stage_done("2", "done")
        display.close()
        text = console.export_text()
    assert text.count("calibrating") >= 1 and "searching" in text and "done" in text


def test_durations_for_people() -> None:
    assert [duration(s) for s in (0, 59.4, 60, 125)] == ["0 s", "59 s", "1:00 min", "2:05 min"]


def test_a_verb_says_that_it_loads_before_anything_slow_is_imported(tmp_path: Path) -> None:
    """With PyTorch out of reach, each says so after it has said what it is doing."""
    save_profile(full_profile(gpu=False), tmp_path / "p.yaml")
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ImportError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from autotune.cli.main import run\n"
        "for words in (['profile', '--gpu'], ['bench'], ['serve', 'tiny'], ['check', 'p.yaml', '--anyway']):\n"
        "    try: run(words)\n"
        "    except ImportError: pass\n"
        "    print(words[0], flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    out, error = (
        [line.partition(" · ")[2] for line in text.splitlines() if "loading" in line]
        for text in (done.stdout, done.stderr)
    )
    assert (out, error) == (["loading PyTorch …", "loading PyTorch …", "loading llama-3.1-8b …"], ["loading tiny …"]), (
        done
    )


@pytest.mark.parametrize(
    ("cores", "flags", "kind", "model"),
    [
        (2, ("avx2", "avx512f"), "cpu", "nano"),
        (8, ("avx2", "avx512f"), "cpu", "tiny"),
        (8, ("avx2",), "cpu", "nano"),
        (16, ("avx2",), "cpu", "tiny"),
        (16, ("avx2",), "gpu", "qwen3-0.6b"),
    ],
)
def test_the_default_model_follows_from_the_kind_of_machine(
    cores: int, flags: tuple[str, ...], kind: str, model: str
) -> None:
    here = sample_profile(gpu=kind == "gpu").machine.model_copy(update={"cores": cores, "flags": flags})
    assert default_model(here) == model and model in PRESETS


@pytest.mark.parametrize("verb", ["profile", "report", "bench", "export"])
def test_the_file_to_write_is_given_by_its_usual_letter(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    assert re.search(r"--out\s+-o\s", capsys.readouterr().out)


def test_a_profile_is_exported_to_the_file_of_o(tmp_path: Path) -> None:
    assert run(["export", "cpu-2core-tiny", "--to", "vllm", "-o", str(tmp_path / "mine.yaml"), "--allow-lossy"]) == 0
    assert "max-num-seqs" in (tmp_path / "mine.yaml").read_text(encoding="utf-8")
