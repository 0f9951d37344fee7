"""One profile, its report and its page, made once for all tests of the report."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autotune.profile import load_profile
from autotune.report import Evidence, Report, compose, gather, html
from tests.report_profile import report_profile
from tests.unit.report.reporting import TRIALS


@contextmanager
def quick() -> Iterator[None]:
    """Fewer requests a simulated setting than for people; nothing here depends on how sharp the picture is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.simulate.sensitivity.REQUESTS", 100)
        yield


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_profile(tmp_path_factory.mktemp("report"), trials=TRIALS, window_s=12.0)


@pytest.fixture(scope="session")
def evidence(path: Path) -> Evidence:
    with quick():
        return gather(load_profile(path), path)


@pytest.fixture(scope="session")
def report(evidence: Evidence) -> Report:
    with quick():
        return compose(evidence)


@pytest.fixture(scope="session")
def text(report: Report) -> str:
    return html(report)


@pytest.fixture
def folder(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in path.parent.iterdir():
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
