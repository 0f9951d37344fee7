"""``autotune export`` as a user and a script meet it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from autotune.cli.export import EXAMPLES
from autotune.cli.main import run
from autotune.profile import save_profile, shipped_profiles
from tests.sample_profile import sample_model, sample_profile


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with profiles: of a GPU, and of `tiny` on a CPU."""
    monkeypatch.chdir(tmp_path)
    save_profile(sample_profile(), tmp_path / "h200-llama8b.yaml")
    tiny = sample_model(name="tiny", max_model_len=8192, kv_bytes_per_token=4096)
    save_profile(sample_profile(gpu=False, model=tiny), tmp_path / "tiny-cpu.yaml")
    return tmp_path


def test_the_example_of_the_help_works_on_a_profile_whose_prompts_wait(folder: Path) -> None:
    (folder / "mine.yaml").write_bytes(shipped_profiles()["cpu-2core-tiny"].read_bytes())
    assert run(["export", "mine.yaml", "--to", "vllm", "--for", "interactive", "--out", "lossless.yaml"]) == 2
    command = re.search(r"autotune (export mine\.yaml [^·]*)", EXAMPLES)
    assert command is not None and run(command[1].split()) == 0
    assert (folder / "vllm.yaml").exists()


def test_it_writes_the_file_and_says_what_was_lost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--for", "interactive", "--out", "mine.yml"]) == 0
    *reports, last = capsys.readouterr().out.splitlines()
    assert last == "wrote mine.yml    start it with:  vllm serve meta-llama/Llama-3.1-8B --config mine.yml"
    assert [line.split()[0].rstrip(":") for line in reports if line[0] != " "] == [
        "kv_pool",
        "chunk_size",
        "max_wait_ms",
    ], "losses first"
    assert "max_wait_ms: vLLM has no such setting (value 0 loses nothing)" in reports
    assert max(map(len, reports)) <= 120
    written = yaml.safe_load((folder / "mine.yml").read_text(encoding="utf-8"))
    assert written["max-num-seqs"] == 24 and written["max-num-batched-tokens"] == 192
    assert [*folder.glob(".*")] == []


def test_balanced_and_the_targets_own_file_name_unless_said(folder: Path) -> None:
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm"]) == 0
    assert yaml.safe_load((folder / "vllm.yaml").read_text(encoding="utf-8"))["max-num-seqs"] == 32


def test_json_is_one_object_and_all_there_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "m").mkdir()
    assert run(["export", "tiny-cpu.yaml", "--to", "vllm", "--model", "./m", "--json"]) == 0
    output = capsys.readouterr()
    made = json.loads(output.out)
    assert output.err == "" and output.out.count("\n") == 1
    assert {key: made[key] for key in ("file", "target", "model", "purpose")} == {
        "file": "vllm.yaml", "target": "vllm", "model": "./m", "purpose": "balanced",
    }  # fmt: skip
    assert made["settings"] == yaml.safe_load((folder / "vllm.yaml").read_text(encoding="utf-8"))
    assert made["command"] == "vllm serve ./m --config vllm.yaml"
    rows = {row["name"]: row for row in made["rows"]}
    assert rows["max_wait_ms"]["fit"] == "unsupported" and not rows["max_wait_ms"]["lossy"]
    assert rows["max_batch_size"]["settings"] == {"max-num-seqs": 32} and rows["max_batch_size"]["value"] == 32
    assert any("measured on a CPU" in line for line in made["reports"])


def test_a_shape_that_nobody_published_is_exported_for_a_model_to_be_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", "tiny-cpu.yaml", "--to", "vllm"]) == 0
    said = capsys.readouterr().out
    assert (
        "measured with tiny, a shape with random weights that no published model has: replace MODEL by your model"
        in said
    )
    assert said.endswith("start it with:  vllm serve MODEL --config vllm.yaml\n")
    written = yaml.safe_load((folder / "vllm.yaml").read_text())
    assert "model" not in written and written["max-num-seqs"] >= 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("h200-llama8b.yaml", "--to", "tgi"), "--to is tgi; it must be one of vllm, sglang, tensorrt-llm, triton, ray-serve"),
        (("h200-llama8b.yaml", "--to", "triton"), "token_budget=256 has no counterpart in Triton's dynamic batcher; "
         "allow_lossy=True (--allow-lossy) drops it"),
        (("h200-llama8b.yaml", "--to", "triton", "--allow-lossy", "--out", "x.yaml"),
         "--out: x.yaml must end in .pbtxt, or Triton's dynamic batcher does not read it"),
        (("h200-llama8b.yaml", "--to", "triton", "--allow-lossy", "--diff", "d.yaml"),
         "--diff: d.yaml cannot be compared; Triton's dynamic batcher reads .pbtxt, and --diff reads YAML"),
        (("h200-llama8b.yaml",), "missing option '--to'; see autotune export --help"),
        (
            ("h200-llama8b.yaml", "--to", "vllm", "--for", "fun"),
            "--for is fun; h200-llama8b.yaml holds interactive, balanced, throughput",
        ),
        (
            ("h200-llama8b.yaml", "--to", "vllm", "--for", "throughput"),
            "max_wait_ms=5 has no counterpart in vLLM; allow_lossy=True (--allow-lossy) drops it",
        ),
        (("h200-llama8b.yaml", "--to", "vllm", "--model", "tiny"),
         "--model: tiny is a shape with random weights that nobody has published; name a directory or hub id"),
        (
            ("nothing", "--to", "vllm"),
            "nothing: cannot be read (No such file or directory), and is no shipped profile either; "
            "`autotune profiles` lists those",
        ),
        (("h200-llama8b.yaml", "--to", "vllm", "--out", "x.json"), 
         "--out: x.json must end in .yaml or .yml, or vLLM does not read it"),
        (("h200-llama8b.yaml", "--to", "vllm", "--out", "no/x.yaml"),
         "--out: no/x.yaml cannot be written: there is no directory no"),
        (("h200-llama8b.yaml", "--to", "vllm", "--out", "d.yaml"), "--out: d.yaml is a directory; name a file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    (folder / "d.yaml").mkdir()
    before = sorted(folder.rglob("*"))
    assert run(["export", *words]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err == f"error: {says}\n"
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["./no-model", "../no-model", "/no/model"])
def test_a_directory_that_is_not_here_is_written_with_a_note(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--model", name]) == 0
    assert capsys.readouterr().err == f"note: --model is {name}; no such directory here\n"
    assert yaml.safe_load((folder / "vllm.yaml").read_text(encoding="utf-8"))["model"] == name
    (folder / "model").mkdir()
    (folder / "model.gguf").touch()
    for there in ("./model", "org/model", str(folder / "model"), "./model.gguf"):
        assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--model", there]) == 0
        assert capsys.readouterr().err == ""


def test_what_is_dropped_is_said_in_the_file_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--for", "throughput", "--allow-lossy"]) == 0
    assert "max_wait_ms 5 ms is dropped: vLLM has no such setting" in capsys.readouterr().out
    assert "max_wait_ms 5 ms" in (folder / "vllm.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["h200-llama8b.yaml", "by-hand.yaml"])
def test_only_an_export_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (folder / "by-hand.yaml").write_text("max-num-seqs: 7\n", encoding="utf-8")
    before = (folder / name).read_bytes()
    words = ["export", "h200-llama8b.yaml", "--to", "vllm", "--out"]
    assert run([*words, name]) == 2
    assert "exists and was not written by `autotune export`; name another file" in capsys.readouterr().err
    assert (folder / name).read_bytes() == before
    assert run([*words, "ours.yaml"]) == 0 and run([*words, "ours.yaml", "--for", "interactive"]) == 0
    assert yaml.safe_load((folder / "ours.yaml").read_text(encoding="utf-8"))["max-num-seqs"] == 24


def test_a_shipped_profile_is_found_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = {"mine": folder / "h200-llama8b.yaml"}
    monkeypatch.setattr("autotune.profile.document.shipped_profiles", lambda: shipped)
    assert run(["export", "mine", "--to", "vllm"]) == 0
    assert "h200-llama8b.yaml, made by" in (folder / "vllm.yaml").read_text(encoding="utf-8")


def test_help_names_every_target_and_gives_examples(capsys: pytest.CaptureFixture[str]) -> None:
    from autotune.cli import export
    from autotune.export import TARGETS

    assert run(["export", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in TARGETS)
    assert export.EXAMPLES.count("autotune export") == 2


def test_diff_says_what_would_change_in_a_file_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = folder / "my-vllm.yaml"
    mine.write_text("model: ./m\nmax_num_seqs: 256\nmax-num-batched-tokens: 256\nport: 8000\n")
    before = sorted(folder.iterdir())
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--diff", "my-vllm.yaml"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "max-num-seqs: 256 → 32" in shown and 'dtype: not set → "bfloat16"' in shown
    assert not any(line.startswith(("model:", "max-num-batched-tokens:", "port:")) for line in shown)
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--diff", "my-vllm.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"]["max-num-seqs"] == [256, 32]
    assert sorted(folder.iterdir()) == before
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm"]) == 0
    capsys.readouterr()
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--diff", "vllm.yaml"]) == 0
    assert capsys.readouterr().out.endswith("vllm.yaml has all of these settings already\n")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("2026-01-01", '"2026-01-01"'),
        ("2026-01-01 10:00:00", '"2026-01-01 10:00:00"'),
        ("[2026-01-01, {2026-01-02: 1}]", '["2026-01-01", {"2026-01-02": 1}]'),
    ],
)
def test_a_date_in_a_file_to_compare_is_text(
    folder: Path, written: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "old.yaml").write_text(f"dtype: {written}\n")
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--diff", "old.yaml"]) == 0
    assert f'dtype: {shown} → "bfloat16"\n' in capsys.readouterr().out


def test_diff_of_a_lossy_setting_says_what_is_dropped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "old.yaml").write_text("max-num-seqs: 256\n", encoding="utf-8")
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--for", "throughput", "--diff", "old.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "max_wait_ms 5 ms is dropped: vLLM has no such setting" in shown and "max-num-seqs: 256 → 64\n" in shown


def test_diff_says_what_would_be_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm"]) == 0
    more = "num_gpu_blocks_override: 64\nlong-prefill-token-threshold: null\nport: 8000\n"
    with (folder / "vllm.yaml").open("a") as file:
        file.write(more)
    capsys.readouterr()
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--diff", "vllm.yaml"]) == 0
    assert capsys.readouterr().out.endswith("num-gpu-blocks-override: 64 → removed\n")
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--diff", "vllm.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == {"num-gpu-blocks-override": [64, None]}


@pytest.mark.parametrize(
    ("content", "words", "says"),
    [
        (None, [], "--diff: old.yaml cannot be read (No such file or directory)"),
        ("a: [\n", [], "--diff: old.yaml is not valid YAML: "),
        ("revision: 2026-02-30\n", [], "--diff: old.yaml is not valid YAML: "),
        ("x: !!timestamp y\n", [], "--diff: old.yaml is not valid YAML: "),
        ("[" * 2000, [], "--diff: old.yaml is not valid YAML: "),
        ("x: !!bool maybe\n", [], "--diff: old.yaml is not valid YAML: "),
        ("x: !!int ''\n", [], "--diff: old.yaml is not valid YAML: "),
        ("dtype: !!binary eA==\n", [], "--diff: old.yaml is not valid YAML: "),
        ("dtype: !!set {a, b}\n", [], "--diff: old.yaml is not valid YAML: "),
        ("dtype: &a [*a]\n", [], "--diff: old.yaml is not valid YAML: "),
        ("- a\n", [], "--diff: old.yaml is no configuration of vLLM: it holds no names and values"),
        ("a: 1\n", ["--out", "b.yaml"], "--out is b.yaml; with --diff nothing is written"),
    ],
)
def test_a_file_that_cannot_be_compared(
    folder: Path, content: str | None, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (folder / "old.yaml").write_text(content)
    assert run(["export", "h200-llama8b.yaml", "--to", "vllm", "--diff", "old.yaml", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {says}")
