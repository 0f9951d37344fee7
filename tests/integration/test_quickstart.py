"""docs/quickstart.md as a reader runs it: every command and every program on the page, in the order of the page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.live_server import ServerProcess
from tests.integration.llama_folder import llama_folder
from tests.integration.pages import commands_on

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
COMMANDS = commands_on(PAGE)
pytestmark = [pytest.mark.slow, pytest.mark.beside]


def run(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(folder)}
    environment = os.environ | ours
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), (command, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, (command, done.stderr)
    return done.stdout


def test_the_commands_about_profiles(tmp_path: Path) -> None:
    llama_folder(tmp_path / "my-model", context=8192)
    rows = "".join(
        f"2023-11-16 18:{n // 600:02d}:{n / 10 % 60:09.6f}0,{100 + n % 50},{5 + n % 9}\n" for n in range(2000)
    )
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    done = 0
    for command in COMMANDS:
        if not command.startswith("autotune ") or command.split()[1] in ("serve", "watch") or "run.jsonl" in command:
            continue
        out = run(command.replace("--budget 10m", "--budget 20s"), tmp_path)
        assert out.strip(), command
        if command.startswith("autotune explain"):
            assert "token_budget 8192 → " in out
        done += 1
    assert done >= 5
    assert (tmp_path / "tiny.html").stat().st_size > 1e5 and (tmp_path / "vllm.yaml").exists()
    assert (tmp_path / "my-model-cpu.yaml").exists()


def test_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (serve,) = (command for command in COMMANDS if command.startswith("autotune serve"))
    server = ServerProcess(tmp_path, *serve.split()[2:])
    try:
        for command in COMMANDS:
            if command.startswith("curl"):
                if shutil.which("curl") is None:
                    pytest.skip("curl is not installed")
                out = run(command.replace("http://127.0.0.1:8000", server.url), tmp_path)
                assert '"text_completion"' in out
            if command.startswith("autotune watch"):
                assert "max_batch" in run(command, tmp_path)
    finally:
        server.signal()
        assert server.ended() == 0, server.output
    (explain,) = (command for command in COMMANDS if command.startswith("autotune explain run.jsonl"))
    assert "attach" in run(explain, tmp_path)


@pytest.mark.parametrize("program", re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
def test_the_programs(program: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(program)
    assert run(f"{sys.executable} -W error {file}", tmp_path).strip()


def test_the_rest_of_the_page_is_made() -> None:
    """What is neither autotune nor curl is make, whose targets the tests of the pages know."""
    assert {command.split()[0] for command in COMMANDS} == {"make", "autotune", "curl"}
