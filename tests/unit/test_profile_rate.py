"""``autotune profile``: whose rate settings are compared at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autotune.cli import profile as verb
from autotune.cli import profile_study
from autotune.cli.main import run
from autotune.cli.profile_study import Requested
from autotune.workload import parse_workload
from runtime.knobs import KnobLimits, Knobs
from runtime.tunable import ModelInfo


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Requested]:
    """What comes to be worked on."""
    found: list[Requested] = []
    source = SimpleNamespace(
        model=ModelInfo("nano", 1000, 8192, "llama", 7, "float32", device="cpu"), name="autotune-runtime", version="0.1.0",
        introduction=(), limits=KnobLimits(), stock=Knobs(), arguments={},
    )  # fmt: skip

    def work(requested: Requested, *given: Any, **named: Any) -> int:
        found.append(requested)
        return 0

    monkeypatch.setattr(verb, "load", lambda *given, **named: source)
    monkeypatch.setattr(profile_study, "work", work)
    return found


@pytest.mark.parametrize(
    ("workload", "options", "rate"),
    [("azure-conv:rate=2", (), 2.0),
     ("azure-conv:rate=2", ("--rate", "3"), 3.0),
     ("azure-conv:time=2", (), parse_workload("azure-conv").rate / 2),
     ("azure-conv:length=1/8", (), None),
     ("poisson:rate=4", ("--objective", "mean-e2e"), 4.0),
     ("a=azure-conv@0.5+b=azure-code@0.5", (), None)],
)  # fmt: skip
def test_the_rate_that_a_workload_says_holds_where_no_option_says_another(
    workload: str,
    options: tuple[str, ...],
    rate: float | None,
    asked: list[Requested],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["profile", "--cpu", "--model", "nano", "--workload", workload, *options]) == 0, capsys.readouterr().err
    (requested,) = asked
    assert requested.question.rate == pytest.approx(rate) and requested.identity["rate"] == pytest.approx(rate)
    assert "is not used" not in "".join(capsys.readouterr())


def test_a_rate_that_no_sender_sends_is_refused(asked: list[Requested], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "--cpu", "--model", "nano", "--workload", "azure-conv:rate=1e9"]) == 2 and not asked
    assert capsys.readouterr().err.startswith("error: --workload: rate is 1e+09; it must be a number from ")
