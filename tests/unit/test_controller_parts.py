"""What controllers are made of: searching, targets of several classes, what a window of steps says."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.control.controllers import predictive
from autotune.control.controllers.parts.galloping import largest
from autotune.control.controllers.parts.running_statistics import Recent
from autotune.control.controllers.parts.targets import SLOTargets, Targets
from autotune.control.controllers.rival_parts.step_window import StepWindow
from runtime.slo import SLO
from tests.unit.test_rival_controllers import step


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1)), max_size=80), st.integers(1, 40))
def test_the_latest_values_are_those_told_of_whenever_looked_at(added: list[tuple[int, float]], n: int) -> None:
    recent, values = Recent(n), []
    assert (recent.mean, recent.quantile(0.5), len(recent)) == (0, 0, 0)
    for value, q in added:
        recent.add(value)
        values = [*values, value][-n:]
        if q > 0.3:  # not after every one
            assert recent.quantile(q) == sorted(values)[min(len(values) - 1, int(q * len(values)))]
        assert recent.mean == pytest.approx(sum(values) / len(values)) and len(recent) == len(values)


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(-10, 10_000))
def test_the_largest_that_fits_from_any_guess(fitting: int, top: int, guess: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= fitting

    assert largest(fits, top, guess) == min(fitting, top)
    assert all(1 <= number <= top for number in tried)
    off = abs(min(max(guess, 1), top) - min(fitting, top))
    assert len(tried) <= 2 * math.log2(off + 2) + 3


def test_the_tightest_of_the_classes_that_are_served() -> None:
    chat, code = SLO(ttft_ms=500, tpot_ms=30), SLO(ttft_ms=2000, tpot_ms=100)
    targets = SLOTargets({"default": code, "chat": chat})
    assert (targets.step, targets.first) == (0.03, 0.5), "before any request, all of them"
    for _ in range(300):
        targets.saw("code")  # of no class that is named: default
    assert (targets.step, targets.first) == (0.1, 2.0)
    targets.saw("chat")
    assert targets.step == 0.03, "one is enough to be kept to"
    for _ in range(300):
        targets.saw("code")
    assert targets.step == 0.1
    assert targets.change({"default": chat}) and targets.step == 0.03
    assert not targets.change({"default": chat})
    assert targets.of("anything") == chat


def test_with_many_classes_a_request_makes_no_targets_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each brings one class in and has another count no longer, and the engine waits meanwhile."""
    names = [f"class {i}" for i in range(200)]
    targets = SLOTargets(
        {n: SLO(ttft_ms=500 + i, tpot_ms=30 + i) for i, n in enumerate(names)} | {"default": SLO(e2e_ms=9e3)}
    )
    of = Targets.of
    made: list[SLO] = []
    monkeypatch.setattr(Targets, "of", lambda slo, left_out=(): made.append(slo) or of(slo, left_out))
    for name in 2 * names:
        targets.saw(name)
    assert not made and 60 < len(targets.firsts) < 100 and targets.mean == (30 + 200 - len(targets.firsts)) / 1e3
    assert targets.change({"default": SLO(ttft_ms=1)}) and len(made) == 1


@given(st.data())
def test_the_tightest_are_those_of_the_classes_that_count(data: st.DataObject) -> None:
    ms = st.none() | st.sampled_from([10.0, 20.0, 40.0, 3000.0])
    some = st.builds(lambda *of: Targets(*of), ms, ms, ms, ms).map(
        lambda of: SLO(ttft_ms=of.ttft or (None if any(of) else 10.0), tpot_ms=of.tpot, itl_ms=of.itl, e2e_ms=of.e2e)
    )
    offered = st.dictionaries(st.sampled_from("abcd"), some).flatmap(
        lambda s: some.map(lambda slo: s | {"default": slo})
    )
    targets = SLOTargets(data.draw(offered))
    for _ in range(data.draw(st.integers(0, 12))):
        for name in data.draw(st.lists(st.sampled_from("abcdx"), max_size=3)):
            for _ in range(data.draw(st.sampled_from([1, 80]))):
                targets.saw(name, 10)
        if data.draw(st.booleans()):
            targets.no_step_below(data.draw(st.sampled_from([0.0, 0.015, 0.03])))
        if data.draw(st.booleans()):
            targets.change(data.draw(offered))
        slos = {
            name: slo for name, slo in targets._slos.items() if targets._shares.get(name, 0.0) > 0.005
        } or targets._slos
        counted = {name: Targets.of(slo, targets._too_short(slo)) for name, slo in slos.items()}
        assert targets.step == min(min(t.tpot, t.itl) for t in counted.values()) / 1e3
        assert targets.mean == min(t.tpot for t in counted.values()) / 1e3
        assert targets.gap == min(t.itl for t in counted.values()) / 1e3
        assert list(targets.firsts.items()) == [(name, min(t.ttft, t.e2e) / 1e3) for name, t in counted.items()]
        assert (targets.first, targets.whole) == (
            min(targets.firsts.values()), min(t.e2e for t in counted.values()) / 1e3
        )  # fmt: skip
        assert targets.left_out == any(targets._too_short(slo) for slo in targets._slos.values())
        assert bool(targets.unmet) == any(targets._too_short(slo) for slo in slos.values())


def test_all_four_metrics_say_something_of_a_step() -> None:
    outputs = Recent(10)
    targets = SLOTargets({"default": SLO(itl_ms=40, tpot_ms=50)})
    assert (targets.step, targets.gap, targets.first) == (0.04, 0.04, math.inf)
    targets = SLOTargets({"default": SLO(e2e_ms=6000)})
    assert (targets.step, targets.gap, targets.first) == (math.inf, math.inf, 6.0)
    assert targets.step_time_for_e2e(outputs) == math.inf, "nothing is known of outputs yet"
    for n in (10, 20, 100):
        outputs.add(n)
    assert targets.step_time_for_e2e(outputs) == pytest.approx(6.0 * 2 / 3 / 100)
    both = SLOTargets({"default": SLO(e2e_ms=6000, tpot_ms=50)})
    assert (both.step, both.step_time_for_e2e(outputs)) == (0.05, pytest.approx(0.04)), (
        "kept jointly: the tighter one bounds a step"
    )


def test_a_window_counts_what_can_miss_a_target() -> None:
    window = StepWindow()
    assert (len(window), window.seconds, window.bound, window.tokens) == (0, 0, 0, 0)
    window.add(step(10, decodes=4, prefill=20))
    window.add(step(30, decodes=8))
    window.add(step(500, decodes=0, prefill=900))  # nobody waits for a token of it
    for bad in (math.nan, math.inf, -1.0, 0.0):
        window.add(step(bad))
    window.add(step(10)._replace(failed=1))
    assert (len(window), window.seen) == (2, 3)
    assert (window.seconds, window.decodes, window.tokens) == pytest.approx((0.02, 6, 16))
    assert window.bound == 1
    window.clear()
    assert (len(window), window.seen, window.most_running) == (0, 0, 0)


def figures(path: Path) -> Iterator[str]:
    """Names that a module binds to numbers."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            if all(isinstance(value, ast.Constant) and isinstance(value.value, int | float) for value in values):
                yield from (
                    name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)
                )


def test_the_constants_of_the_predictive_controller_stand_in_one_place_and_say_what_they_were_tuned_on() -> None:
    package = Path(predictive.__path__[0])
    modules = {path.stem: set(figures(path)) for path in package.glob("*.py")}
    known = modules.pop("constants")
    assert len(known) > 40 and not any(modules.values()), modules
    text = (package / "constants.py").read_text(encoding="utf-8")
    tuned = text.partition("# Tuned on M1 to M14")[2].partition("\n# ")[0]
    assert "RATE" in tuned and "WINDOW" not in tuned
    used = "".join(path.read_text(encoding="utf-8") for path in package.glob("*.py") if path.stem != "constants")
    assert known == set(re.findall(r"constants\.([A-Z_]+)", used)), "every one of them is used"
