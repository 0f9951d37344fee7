"""Ctrl-C, wherever the main thread is when it comes."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any, NoReturn

import pytest

from autotune.cli.exits import INTERRUPTED
from autotune.cli.interrupt import stop_on_interrupt
from autotune.cli.main import run


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize("at_once", [False, True])
def test_the_first_is_acknowledged(at_once: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with stop_on_interrupt(at_once=at_once):
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == ("" if at_once else "stopping; once more to end at once\n")


@pytest.mark.parametrize(
    "words",
    [
        ["profile", "--model", "nano", "--cpu"],
        ["bench", "--model", "nano", "--cpu"],
        ["check", "cpu-2core-tiny", "--anyway"],
    ],
    ids=lambda words: words[0],
)
def test_one_while_the_model_is_loaded_ends_the_process_at_once(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def leave(code: int) -> NoReturn:
        raise Ended(code)

    def load(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys.modules[f"autotune.cli.{words[0]}"], "load", load)
    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(Ended, match=f"^{INTERRUPTED}$"):
        run(words)
    assert capfd.readouterr().err.splitlines()[-1] == "stopped"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_first_sets_sets_the_event_and_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as requested:
        assert not requested.is_set()
        signal.raise_signal(signal.SIGINT)
        assert requested.is_set()  # at once, whatever thread is to wake those that wait
        assert requested.wait(30)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_within_a_wait_for_the_event_does_not_lock_up() -> None:
    """Event.wait and Event.set take one lock, and a handler runs on the thread that may hold it."""
    script = """
import signal
from autotune.cli.interrupt import stop_on_interrupt
with stop_on_interrupt() as requested:
    with requested._cond:
        signal.raise_signal(signal.SIGINT)
    assert requested.wait(30)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_the_second_ends_the_process_at_once() -> None:
    script = """
import signal, time
from autotune.cli.interrupt import stop_on_interrupt
with stop_on_interrupt():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    time.sleep(60)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == INTERRUPTED
