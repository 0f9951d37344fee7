"""Whether the profile of a callable is still true: in virtual time, and the command once for real."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.main import run
from autotune.measure.evaluate import EvaluationError, Interrupted
from autotune.profile.callable import CallableProfile, save_callable_profile
from autotune.profile.fingerprint import machine, software
from autotune.profiling.assemble import assemble, of_callable
from autotune.profiling.batcher_space import AS_IT_COMES
from autotune.profiling.check import Check, check_calls, predicted_s, sizes_of
from autotune.profiling.target import OfferedLoad
from runtime import SLO
from tests.unit.callable_world import Ticking, calibrated, findings, question, simulated, subject

LENGTHS = range(10, 200, 7)


@pytest.fixture(scope="module")
def made() -> CallableProfile:
    """20 ms a call, 2 ms an item and 0.1 ms a character."""
    ticking, slo = Ticking(0.020, 0.002, 0.0001), SLO(e2e_ms=400)
    of = subject(ticking, LENGTHS, by_length=True)
    cost = calibrated(ticking, of)
    runs = [simulated(AS_IT_COMES, cost, of.costs, OfferedLoad(50.0, 1, 2.0, 0.5), slo)]
    found = findings(cost, slo, 50.0, runs, capacity=60.0, capacity_size=12)
    facts: dict[str, Any] = {"name": "embed", "command": "", "machine": machine(), "software": software()}
    return assemble(CallableProfile, found, of_callable(found, question(slo, 50.0, 60.0), of), **facts)


def checked(made: CallableProfile, function: Any, clock: Any, **options: Any) -> Check:
    given: dict[str, Any] = {"budget_s": 20.0, "threshold": 0.1}
    return check_calls(made, subject(function, LENGTHS, by_length=True), clock=clock, **(given | options))


def test_a_function_that_has_not_changed_fits(made: CallableProfile) -> None:
    ticking = Ticking(0.020, 0.002, 0.0001)
    found = checked(made, ticking, ticking.clock)
    assert found.verdict == "fits" and found.rounds >= 6
    assert sizes_of(made) == [1, 8, 32] and set(ticking.sizes) == {1, 8, 32}
    assert "no kind of call differs from the profile by more than" in found.sentence
    assert predicted_s(made, 8, 800) == pytest.approx(0.020 + 0.016 + 0.08, rel=0.03)


def test_one_whose_time_no_formula_fits_is_held_against_calls_of_its_sizes() -> None:
    """Flat up to twelve items, and steep from there on."""

    class Flat(Ticking):
        def __call__(self, items: Sequence[str]) -> list[str]:
            self.now += max(0.010, 0.0008 * len(items))
            return super().__call__(items)

    ticking, slo = Flat(0.0, 0.0), SLO(e2e_ms=400)
    of = subject(ticking, LENGTHS, by_length=True)
    cost = calibrated(ticking, of)
    runs = [simulated(AS_IT_COMES, cost, of.costs, OfferedLoad(50.0, 1, 2.0, 0.5), slo)]
    found = findings(cost, slo, 50.0, runs, capacity=60.0, capacity_size=12)
    facts: dict[str, Any] = {"name": "embed", "command": "", "machine": machine(), "software": software()}
    profile = assemble(CallableProfile, found, of_callable(found, question(slo, 50.0, 60.0), of), **facts)
    again, slower = Flat(0.0, 0.0), Flat(0.0, 0.002)
    assert checked(profile, again, again.clock).verdict == "fits"
    assert checked(profile, slower, slower.clock).verdict == "stale"


def test_one_that_is_slower_for_some_sizes_is_stale(made: CallableProfile) -> None:
    ticking = Ticking(0.020, 0.004, 0.0002)  # twice as long for what grows
    found = checked(made, ticking, ticking.clock)
    assert found.verdict == "stale"
    assert [r.verdict for r in found.regions][-1] == "stale" and found.regions[-1].difference > 0.6
    assert "calls of 32 items" in found.sentence and "slower than the profile" in found.sentence


def test_a_size_of_one_group_is_known_no_better_than_the_formula(made: CallableProfile) -> None:
    """As where the time for calibrating was over: how far that one is off cannot be seen."""
    service = made.service
    once = [group for group in service.groups if group.items == 32][:1]
    groups = (*(group for group in service.groups if group.items != 32), *once)
    profile = made.model_copy(update={"service": service.model_copy(update={"groups": groups, "error": 0.25})})
    ticking = Ticking(0.020, 0.002, 0.0001)

    def steeper(items: Sequence[str]) -> list[str]:
        ticking.now += 0.06 if len(items) == 32 else 0.0  # of about 0.4 s
        return ticking(items)

    found = checked(profile, steeper, ticking.clock)
    assert [region.model for region in found.regions][-1] == 0.25
    assert found.verdict == "fits" and found.sentence.endswith("(of calls of 32 items its cost model knows too little)")
    ticking = Ticking(0.020, 0.006, 0.0003)
    assert checked(profile, ticking, ticking.clock).regions[-1].verdict == "stale", "thrice as long is beyond that"


def test_noise_is_told_from_change(made: CallableProfile) -> None:
    ticking, dice = Ticking(0.020, 0.002, 0.0001), random.Random(4)

    def noisy(items: Sequence[str]) -> list[str]:
        begun = ticking.now
        found = ticking(items)
        ticking.now += (ticking.now - begun) * dice.choice((-0.3, 0.0, 0.6))
        return found

    found = checked(made, noisy, ticking.clock, budget_s=5.0)
    assert found.verdict == "unclear" and "machine too noisy" in found.sentence


def test_other_processes_excuse_what_they_can_explain(made: CallableProfile) -> None:
    for slower, verdict in ((1.5, "unclear"), (4.0, "stale")):
        ticking = Ticking(0.020 * slower, 0.002 * slower, 0.0001 * slower)
        assert checked(made, ticking, ticking.clock, taken=lambda: 1.0).verdict == verdict


def test_memory_and_being_stopped(made: CallableProfile) -> None:
    ticking = Ticking(0.020, 0.002)

    def scarce(items: Sequence[str]) -> list[str]:
        if len(items) > 8:
            raise MemoryError
        return ticking(items)

    with pytest.raises(EvaluationError, match="m:f runs out of memory with 32 items, which it did not"):
        checked(made, scarce, ticking.clock)
    with pytest.raises(Interrupted):
        checked(made, ticking, ticking.clock, stop=lambda: True)


@pytest.mark.slow
def test_the_command(
    made: CallableProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "checked_here.py").write_text(
        "import time\ndef embed(texts):\n    print('called')\n    time.sleep(0.05 + 0.005 * len(texts))\n    return texts\n"
    )
    (tmp_path / "data.jsonl").write_text('"text"\n"longer text"\n')
    save_callable_profile(made.model_copy(update={"function": "checked_here:embed"}), tmp_path / "embed.yaml")
    assert run(["check", "embed.yaml"]) == 2
    told = capsys.readouterr().err
    assert (
        "--inputs is missing; name the file with its inputs, inputs.jsonl at the time" in told and told.count("\n") == 1
    )
    assert run(["check", "embed.yaml", "--inputs", "data.jsonl", "--model", "tiny"]) == 2
    assert "--model is given; it says nothing about a callable" in capsys.readouterr().err
    assert run(["check", "embed.yaml", "--inputs", "data.jsonl", "--budget", "1s", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "stale"  # single items take more than twice as long as it says
    assert [region["steps"] >= 1 for region in found["regions"]] == [True] * 3
