"""Ctrl-C in ``autotune simulate`` and ``capacity``: what was found by then is shown."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.main import run
from autotune.profile import save_profile
from autotune.simulate.scenario import Scenario
from runtime.knobs import Knobs
from tests.unit.simulate_command import QUICK
from tests.unit.simulated_profile import EVEN, profiled


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_profile(profiled(), tmp_path / "h200.yaml")
    return str(tmp_path / "h200.yaml")


@pytest.fixture
def stopped(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Callable[[Knobs], bool]], tuple[dict[str, Any], str]]:
    """``stopped(verb, at)``: what a verb says, and what on stderr, after Ctrl-C at the first setting that ``at`` says."""
    measure = Scenario.measure

    def stopped(verb: str, at: Callable[[Knobs], bool]) -> tuple[dict[str, Any], str]:
        signals: list[Knobs] = []

        def interrupted(self: Scenario, knobs: Knobs, *rest: Any, **options: Any) -> Any:
            if not signals and at(knobs):  # a second would end the process
                signals.append(knobs)
                os.kill(os.getpid(), signal.SIGINT)
            return measure(self, knobs, *rest, **options)

        monkeypatch.setattr(Scenario, "measure", interrupted)
        where = ["simulate", "--rate", "5", "--profile", path] if verb == "simulate" else ["capacity", path]
        assert run([*where, "--workload", EVEN, *QUICK, "--price", "1/h", "--json"]) == 130
        captured = capsys.readouterr()
        return json.loads(captured.out), captured.err

    return stopped


@pytest.mark.parametrize("verb", ["simulate", "capacity"])
def test_what_was_found_before_a_stop_is_shown(stopped: Any, verb: str) -> None:
    """Ctrl-C comes once the second setting is under way."""
    interactive = profiled().settings["interactive"].knobs
    found, told = stopped(verb, lambda knobs: knobs != interactive)
    assert [one["label"] for one in found["settings"]] == ["interactive"] and found["stopped"]
    priced = verb == "capacity"  # simulate has looked at no capacity by then
    assert (found["cheapest"] is not None) == priced
    cheapest = "settings not tried may be cheaper" if priced else "the cheapest is not known"
    assert told.splitlines()[-1] == f"stopped: 1 of 3 settings are done; {cheapest}"


def test_simulate_stopped_at_the_capacity_of_the_second_setting_knows_that_of_the_first(stopped: Any) -> None:
    interactive, seen = profiled().settings["interactive"].knobs, []

    def again(knobs: Knobs) -> bool:
        """The table took a simulation of each setting for each of two seeds; then come their capacities, in order."""
        seen.append(knobs)
        return sum(one != interactive for one in seen) > 2 * 2

    found, told = stopped("simulate", again)
    assert len(found["settings"]) == 3 and Knobs(**found["cheapest"]["knobs"]) == interactive
    assert (found["cheapest"]["tried"], found["cheapest"]["whole"]) == (1, False)
    assert told.splitlines()[-1] == "stopped: all settings are done; settings not tried may be cheaper"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["simulate", "capacity"])
def test_the_cheapest_before_a_stop_is_shown(stopped: Any, verb: str) -> None:
    """Ctrl-C comes at the first setting that is asked for no other reason than the price."""
    known = {s.knobs for s in profiled().settings.values()}
    found, told = stopped(verb, lambda knobs: knobs not in known)
    assert len(found["settings"]) == 3 and found["stopped"]
    assert Knobs(**found["cheapest"]["knobs"]) in known and found["cheapest"]["price_per_million"] > 0
    assert (found["cheapest"]["tried"], found["cheapest"]["whole"]) == (len(known), False)
    assert f"cheapest of {len(known)} settings tried before the stop that meets" in told
    assert told.splitlines()[-1] == "stopped: all settings are done; settings not tried may be cheaper"


def test_ctrl_c_in_a_verb_that_does_not_wait_for_it(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as while its modules load."""

    def interrupted(file: Path) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return file

    monkeypatch.setattr("autotune.profile.find_profile", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert run(["simulate", "--profile", path]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "stopped\n"
