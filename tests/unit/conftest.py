"""Fixtures that several unit tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune import control
from autotune.control.loop import Control
from autotune.profiling.findings import Findings
from runtime.slo import SLO
from tests.unit.control_world import SimulatedEngine, h200
from tests.unit.profiled_machine import session


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory of one's own with a short name: a socket's path may have some hundred bytes, pytest's are longer."""
    with tempfile.TemporaryDirectory(prefix="at-") as folder:
        yield Path(folder)


@pytest.fixture
def socket_home(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where steering sockets lie during a test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    return short_path / "autotune"


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """A profiling run in virtual time, left in peace, at a rate that was given."""
    return session(tmp_path_factory.mktemp("given") / "a.journal")[0]


@pytest.fixture
def steered_engine() -> SimulatedEngine:
    return SimulatedEngine(h200)


@pytest.fixture
def steered(steered_engine: SimulatedEngine, socket_home: Path) -> Iterator[Control]:
    """A controller that can be controlled through its socket."""
    with control(steered_engine, slo=SLO(ttft_ms=500, tpot_ms=30), steer=True) as attached:
        yield attached


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small model and its tokenizer, to be read only."""
    from runtime.torch_backend.tokenizer import byte_tokenizer  # with torch: most tests here do without
    from tests.unit.loading_models import tiny

    path = tmp_path_factory.mktemp("whole")
    tiny().save_pretrained(path)
    byte_tokenizer(300).tokenizer.save_pretrained(path)
    return path
