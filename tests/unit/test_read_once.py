"""Profiles and decision logs that come through a pipe, which can be read once: ``autotune show <(…)``."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autotune import control
from autotune.cli.main import run
from autotune.profile import dump_profile
from tests.sample_profile import sample_profile
from tests.unit.control_world import SimulatedEngine, h200, poisson

DATA = Path(__file__).parent / "data"
pytestmark = pytest.mark.skipif(not Path("/dev/fd").exists(), reason="there is no /dev/fd")


@contextmanager
def piped(content: bytes) -> Iterator[str]:
    """The name of a pipe that holds ``content``."""
    reads, writes = os.pipe()

    def write() -> None:
        with open(writes, "wb") as file:
            file.write(content)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield f"/dev/fd/{reads}"
    finally:
        os.close(reads)
        writer.join()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    engine = SimulatedEngine(h200)
    with control(engine, slo="ttft=300ms,tpot=30ms", log=path):
        engine.play(poisson(15, 3, 500, 50, seed=1))
    return path.read_bytes()


@pytest.mark.parametrize("of_a_callable", [False, True])
def test_a_profile_is_shown(of_a_callable: bool, capsys: pytest.CaptureFixture[str]) -> None:
    content = dump_profile(sample_profile()).encode()
    if of_a_callable:
        content = (DATA / "callable-profile-version-1.yaml").read_bytes()
    with piped(content) as pipe:
        assert run(["show", pipe, "--json"]) == 0
    assert ("function" in json.loads(capsys.readouterr().out)) == of_a_callable


def test_a_profile_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with piped(dump_profile(sample_profile()).encode()) as pipe:
        assert run(["report", pipe, "--out", str(page)]) == 0
    assert page.exists()


def test_a_decision_log_is_reported(log: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    with piped(log) as pipe:
        assert run(["report", pipe, "--out", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decisions"] == log.count(b"\n")


def test_a_decision_log_is_explained_with_its_records(
    log: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (records := tmp_path / "records.jsonl").write_text("")
    with piped(log) as pipe:
        assert run(["explain", pipe, "--records", str(records)]) == 0
    assert "the last run has ended" in capsys.readouterr().out
