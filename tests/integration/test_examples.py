"""The examples run as a reader would run them, on small settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``python words`` in ``folder``; warnings are errors there too."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def example(name: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run("-W", "error", str(ROOT / "examples" / name), *words, folder=folder)


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for path in (ROOT / "examples").glob("*.py"):
        assert f'example("{path.name}"' in text


def test_embed_engine(tmp_path: Path) -> None:
    done = example("embed_engine.py", "--tokens", "4", "--kv-tokens", "2048", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^one, as it comes: \S+", done.stdout, re.MULTILINE)
    assert len(re.findall(r"^length     4 tokens  TTFT \d+ ms, TPOT \d+ ms$", done.stdout, re.MULTILINE)) == 8
    assert "knobs max_batch_size=2 max_wait_ms=0 token_budget=256 chunk_size=2048: 4 of 4 began" in done.stdout
    assert "refused: prompt is empty" in done.stdout
    assert re.search(r"^refused: .*closed", done.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of one trial: too few to trust, enough to start an engine with."""
    folder = tmp_path_factory.mktemp("profile")
    words = ("-m", "autotune.cli.main", "profile", "--cpu", "--slo", "ttft=60s,tpot=10s@50%", "--budget", "10s")
    done = run(*words, "--trials", "1", "--out", "mine.yaml", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "mine.yaml"


def test_profile_then_use(profile: Path, tmp_path: Path) -> None:
    words = (str(profile), "--requests", "3", "--tokens", "4")
    done = example("profile_then_use.py", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mine.yaml: measured on" in done.stdout and "promise ttft=60000ms,tpot=10000ms@50%" in done.stdout
    assert "3 of 3 requests in time" in done.stdout

    done = example("profile_then_use.py", *words, "--for", "fun", folder=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"error: --for is fun; \S+mine.yaml holds [a-z, ]+\n", done.stderr)
