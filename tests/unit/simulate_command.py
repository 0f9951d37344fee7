"""``autotune simulate`` and ``capacity`` with few requests: what they say, and how they refuse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from autotune.cli.main import run

QUICK = ("--requests", "100", "--seeds", "2")


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run([*arguments, *QUICK, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def flat(text: str) -> str:
    """As one line: where prose is folded is no matter."""
    return " ".join(text.split())


def refused(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    return captured.err.removeprefix("error: ").rstrip("\n")
