"""docs/how-to/classes.md as a reader runs it: every command and every program on the page, in the order of the page."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from autotune.profile import load_profile
from tests.integration.live_server import ServerProcess
from tests.integration.llama_folder import llama_folder
from tests.integration.test_quickstart import run

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "classes.md").read_text(encoding="utf-8")
pytestmark = [pytest.mark.slow, pytest.mark.beside]


def commands(verb: str) -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [found for line in lines if (found := line[2:].partition("  # ")[0].strip()).startswith(verb)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    llama_folder(folder / "my-model", context=8192)
    (profile,) = commands("autotune profile")
    run(profile.replace("--budget 10m", "--budget 20s --cpu"), folder)
    return folder


def test_the_profile_keeps_its_classes(folder: Path) -> None:
    made = load_profile(folder / "two.yaml")
    assert [str(one) for one in made.classes] == ["chat:ttft=500ms,tpot=50ms@95%", "batch:e2e=60000ms@99%*0.2"]


@pytest.mark.parametrize("verb", ["show", "report", "simulate", "capacity", "bench"])
def test_whatever_reads_the_profile_goes_by_its_classes(folder: Path, verb: str) -> None:
    for command in commands(f"autotune {verb} "):
        quick = {
            "bench": " --cpu --duration 3s --rate 2 --json",  # or what is unfinished is waited for, a minute a turn
            "simulate": " --requests 200 --json",
            "capacity": " --requests 200 --json",
        }
        out = run(command.replace("--rounds 2", "--rounds 1") + quick.get(verb, ""), folder)
        if verb in quick:
            assert [one.partition(":")[0] for one in json.loads(out)["classes"]] == ["chat", "batch"], command
        elif verb == "show":
            assert re.search(r"chat +\d+\.\d% +95%", out) and re.search(r"batch +\d+\.\d% +99%", out), out
    assert commands(f"autotune {verb} ")


def test_the_server_and_where_goodput_went(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    (serve,), (curl,) = commands("autotune serve"), commands("curl")
    server = ServerProcess(folder, *shlex.split(serve)[2:], "--device", "cpu")
    batch = curl.replace("http://127.0.0.1:8000", server.url).replace('"Hello"', "[1, 2, 3]")  # it has no tokenizer
    try:
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        for command in (batch, batch.replace('"batch"', '"chat"')):
            assert '"text_completion"' in run(command, folder)
        metrics = run(f"curl -s {server.url}/metrics", folder)
        assert 'autotune_requests_relegated_total{class="batch"} 0.0' in metrics
    finally:
        server.signal()
        assert server.ended() == 0, server.output
    for explain in commands("autotune explain"):
        out = run(explain, folder)
        assert "attach" in out and "requests  " in out and " of 2 met their SLO" in out, out


@pytest.mark.parametrize("program", re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
def test_the_programs(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    assert run(f"{sys.executable} -W error program.py", tmp_path).strip()
    assert "batch " in run("autotune explain program.jsonl", tmp_path)
