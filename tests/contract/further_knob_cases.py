"""What handles a further knob without having been told of it, or refuses it by name.

Run by :mod:`tests.contract.test_further_knob`, in a process where :mod:`tests.contract.further_knob` has put one into
``runtime/knobs.py``.
"""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client import generate_latest
from rich.console import Console

from autotune import control
from autotune.bench.contenders import parse_fixed, short
from autotune.cli.main import run
from autotune.cli.options import checked_knobs
from autotune.cli.serve import _setting
from autotune.cli.set_knobs import parse_settings
from autotune.control.controllers.registry import CONTROLLERS
from autotune.control.decision_log import describe, read_decisions
from autotune.export import TARGETS, export
from autotune.profile import Profile, load_profile, save_profile, shipped_profiles
from autotune.profile.callable import CallableProfile
from autotune.profile.schema import profile_schema
from autotune.profiling.space import make_space, starting_points, whole_space
from autotune.report.evidence import Evidence
from autotune.report.headline import headline
from autotune.report.panels.provenance import everything, origins
from autotune.report.profile_table import table
from runtime.batching.options import first_knobs
from runtime.batching.strategies import Adaptive
from runtime.errors import InputError
from runtime.knobs import KNOBS, KnobLimits, Knobs
from runtime.serving.metrics import ServingMetrics
from runtime.slo import SLO
from tests.contract.further_knob import CEILING, NAME, USUAL
from tests.engines import bench
from tests.sample_profile import sample_cost_model, sample_profile
from tests.unit.control_world import SimulatedEngine, h200, poisson

DATA = Path(__file__).parents[1] / "replay" / "data"
KNOWN = Knobs(max_batch_size=64, max_wait_ms=0, token_budget=8192, chunk_size=8192)
KNOWN_AS_SAID = {"max_batch_size": 64, "max_wait_ms": 0, "token_budget": 8192, "chunk_size": 8192}
WITH_IT = KNOWN.with_(**{NAME: 8})


def test_there_is_one_more() -> None:
    assert [spec.name for spec in KNOBS][5:] == [NAME]
    assert (getattr(Knobs(), NAME), getattr(KnobLimits(), NAME)) == (USUAL, CEILING)
    with pytest.raises(ValueError, match=f"{NAME} is 0; it must be a whole number between 1 and 65536 sequences"):
        KNOWN.with_(**{NAME: 0})


# -- the command line ------------------------------------------------------------------------------------------------------


def test_serve_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    assert "--max-prompts" in capsys.readouterr().out
    knobs, limits = _setting(None, "balanced", {NAME: 8})
    assert getattr(knobs, NAME) == 8 and getattr(limits, NAME) == CEILING
    with pytest.raises(InputError, match="--max-prompts is 0"):
        checked_knobs({NAME: 0})


def test_it_is_set_by_hand() -> None:
    assert parse_settings([f"{NAME}=8"]) == {NAME: 8}
    with pytest.raises(InputError, match=f"{NAME} is 0; it must be"):
        parse_settings([f"{NAME}=0"])
    engine = SimulatedEngine(h200, knobs=KNOWN)
    with control(engine, slo="ttft=500ms,tpot=30ms") as attached:
        attached.set(**{NAME: 8})
        assert getattr(engine.knobs, NAME) == 8 and engine.knobs == WITH_IT
        assert "new 8" in str(attached.status())
        assert attached.status().as_dict()["knobs"][NAME] == 8


def test_a_setting_to_compare_names_it() -> None:
    made = parse_fixed(f"token_budget=512,{NAME}=8", KnobLimits())
    assert getattr(made.knobs, NAME) == 8
    assert "new 8" in short(made.knobs) and "new" not in short(KNOWN)


# -- the search ------------------------------------------------------------------------------------------------------------


def test_it_is_searched_pinned_and_bounded() -> None:
    space = make_space(KnobLimits())
    assert space.ranges[NAME] == (1, 64) and NAME in space.distributions()
    assert getattr(space.knobs({**KNOWN.as_dict(), NAME: 5}), NAME) == 5
    assert getattr(space.knobs(KNOWN_AS_SAID), NAME) == USUAL, "a trial from before it says nothing of it"
    assert make_space(KnobLimits(), pins=[f"{NAME}=8"]).pinned[NAME] == 8
    assert make_space(KnobLimits(), ranges=[f"{NAME}=4:9"]).ranges[NAME] == (4, 9)
    assert NAME in whole_space(KnobLimits()).ranges
    assert space.narrowed(WITH_IT).ranges[NAME] == (1, 64)
    labels = dict(starting_points(space, WITH_IT))
    assert getattr(labels["vLLM defaults"], NAME) == USUAL, "another engine's default has no such bound"
    assert getattr(labels["fitted"], NAME) == 8
    with pytest.raises(InputError, match=NAME):
        make_space(KnobLimits(), pins=[f"{NAME}=-1"])


# -- profiles --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_profile_from_before_loads_and_does_what_it_did(name: str) -> None:
    path = shipped_profiles()[name]
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert NAME not in data["knobs"]
    profile = load_profile(path)
    assert getattr(profile.knobs, NAME) == USUAL and getattr(profile.engine.limits, NAME) == CEILING
    jsonschema.Draft202012Validator(profile_schema()).validate(data)


def test_one_of_the_first_version_loads() -> None:
    path = DATA.parents[1] / "unit" / "data" / "profile-version-1.yaml"
    assert getattr(load_profile(path).knobs, NAME) == USUAL


def profile_with_it() -> Profile:
    return sample_profile({"balanced": WITH_IT, "interactive": KNOWN}, cost_model=sample_cost_model())


def test_a_profile_holds_it(tmp_path: Path) -> None:
    made = profile_with_it()
    save_profile(made, tmp_path / "p.yaml")
    data = yaml.safe_load((tmp_path / "p.yaml").read_text(encoding="utf-8"))
    assert data["knobs"][NAME] == 8 and data["engine"]["limits"][NAME] == CEILING
    assert load_profile(tmp_path / "p.yaml") == made
    validator: Any = jsonschema.Draft202012Validator(profile_schema())
    validator.validate(data)
    data["knobs"][NAME] = 0
    assert not validator.is_valid(data)
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(InputError, match=rf"knobs\.{NAME} is 0; it must be a whole number between 1 and 65536"):
        load_profile(tmp_path / "p.yaml")
    data["knobs"] = {NAME: 8}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(InputError, match=r"knobs\.max_batch_size is missing"):
        load_profile(tmp_path / "p.yaml")


def test_it_is_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(profile_with_it(), tmp_path / "p.yaml")
    assert run(["show", str(tmp_path / "p.yaml")]) == 0
    shown = capsys.readouterr().out
    assert shown.count("new 8") >= 1 and "…" not in shown
    evidence = Evidence(profile_with_it(), "p.yaml")
    assert [(f.name, f.value) for f in headline(evidence).knobs][5:] == [(NAME, "8")]
    assert NAME in headline(evidence).purposes.columns
    assert any(f"{NAME} {CEILING:,}" in cell for row in origins(evidence).tables[0].rows for cell in row)
    assert NAME in everything(evidence).tables[0].columns


@pytest.mark.parametrize("name", TARGETS)
def test_an_exporter_that_has_no_row_for_it_refuses_it_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"the knobs differ in {NAME}"):
        export(profile_with_it(), TARGETS[name], model="Qwen/Qwen3-8B")


# -- what runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_controller_leaves_it_alone(name: str, tmp_path: Path) -> None:
    engine = SimulatedEngine(h200, knobs=WITH_IT)
    load = poisson(20, 12, 3000, 200, seed=8)
    with control(engine, slo=SLO(ttft_ms=2000, tpot_ms=15), controller=name, log=tmp_path / "log") as attached:
        assert len(engine.play(load)) == len(load)
        assert getattr(engine.knobs, NAME) == 8
        assert all(decision.new[NAME] == 8 for decision in attached.decisions)
        assert not attached.status().ended
    assert {n for d in read_decisions(tmp_path / "log") for n, _, _ in d.changes} <= set(KNOWN_AS_SAID)


def test_a_bound_and_a_pin_hold_it() -> None:
    engine = SimulatedEngine(h200, knobs=WITH_IT)
    with control(engine, slo="tpot=30ms", pinned={NAME: 4}):
        engine.play(poisson(20, 4, 500, 50, seed=8))
        assert getattr(engine.knobs, NAME) == 4
    with pytest.raises(ValueError, match=NAME):
        control(engine, slo="tpot=30ms", bounds={NAME: (0, 4)})


def test_a_decision_log_from_before_is_read() -> None:
    read = list(read_decisions(DATA / "cpu-growing.decisions.jsonl"))
    lines = [json.loads(line) for line in (DATA / "cpu-growing.decisions.jsonl").read_text().splitlines()]
    assert len(read) == len(lines) > 3 and NAME not in lines[0]["new"]
    for decision, line in zip(read, lines, strict=True):
        assert decision.new == {**line["new"], "draft_tokens": 0, NAME: USUAL}
        assert NAME not in dict((name, old) for name, old, _ in decision.changes)
    turned = read[-1]._replace(old=KNOWN.as_dict(), new=WITH_IT.as_dict())
    assert describe(turned)[0].endswith(f"new {USUAL} → 8")


def test_a_change_of_it_is_a_new_epoch_and_a_metric() -> None:
    with bench() as b:
        before = b.engine.epoch
        b.engine.set_knobs(b.engine.knobs.with_(**{NAME: 8}))
        assert b.engine.epoch == before + 1
        exposed = generate_latest(ServingMetrics(b.engine).registry).decode()
    assert f"knob_{NAME} 8.0" in exposed and f"knob_limit_{NAME} {CEILING}" in exposed


def test_a_batcher_is_not_bothered_with_it() -> None:
    assert getattr(first_knobs({}, KnobLimits(), Adaptive()), NAME) == CEILING
    made = CallableProfile.model_construct(slo=SLO(e2e_ms=200), strategy="dynamic", knobs=WITH_IT, replicas=1)
    assert NAME not in made.options and made.options["token_budget"] == 8192


def test_a_table_has_room_for_it() -> None:
    for width in (80, 120, 200):
        drawn = table(profile_with_it(), width)
        console = Console(width=width, file=StringIO(), record=True)
        console.print(drawn, soft_wrap=True)
        text = console.export_text()
        assert "…" not in text and "new 8" in text
