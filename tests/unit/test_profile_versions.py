"""Profiles of earlier versions still load, those of later ones say so; the JSON schema is what the models give."""

from __future__ import annotations

import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml

from autotune.profile import SCHEMA_VERSION, Profile, dump_profile, load_profile, save_profile, shipped_profiles
from autotune.profile.complaints import names_at
from autotune.profile.schema import SCHEMA_FILE, editor_line, profile_schema, profiles_folder, schema_text
from autotune.profile.versions import STEPS, from_1
from runtime.errors import InputError
from runtime.knobs import KNOBS
from tests.sample_profile import sample_profile

OF_ENGINES = {
    "growth_reserve": 1,
    "kv_allocation": "whole",
    "kv_blocks": None,
    "kv_block_size": None,
    "kv_bytes": None,
    "options": {},
}
LATER = {spec.name for spec in KNOBS if not spec.required} | {*OF_ENGINES}
DATA = Path(__file__).parent / "data"
RENAMED = {"excess_s": "serving_overhead_s"}
ROOT = Path(__file__).parents[2]


def measured(data: Any) -> Any:
    """``data`` under its present names, without labels, and without what came later than it may be."""
    if isinstance(data, dict):
        return {
            RENAMED.get(name, name): measured(value) for name, value in data.items() if name not in LATER | {"label"}
        }
    return [measured(value) for value in data] if isinstance(data, list) else data


@pytest.mark.parametrize("version", sorted(STEPS))
def test_a_real_file_of_every_earlier_version_loads(version: int, tmp_path: Path) -> None:
    path = DATA / f"profile-version-{version}.yaml"
    old = yaml.safe_load(path.read_text())
    assert old["schema_version"] == version
    found = load_profile(path)
    assert found.schema_version == SCHEMA_VERSION
    new = json.loads(found.model_dump_json())
    kept = {name for name in old if name in new} - {"schema_version"}
    assert {name: measured(new[name]) for name in kept} == {name: measured(old[name]) for name in kept}, (
        "nothing measured is changed"
    )
    save_profile(found, tmp_path / "new.yaml")
    assert load_profile(tmp_path / "new.yaml") == found


def test_version_1_loses_only_the_field_that_was_never_filled() -> None:
    old = yaml.safe_load((DATA / "profile-version-1.yaml").read_text())
    assert old["coefficients"] is None
    assert set(old) - set(from_1(dict(old))) == {"coefficients"}
    found = load_profile(DATA / "profile-version-1.yaml")
    assert (found.cost_model, found.simulation, found.simulated, found.confidence) == (None, None, (), None)


def test_version_2_called_warnings_and_paired_simulations_otherwise() -> None:
    old = yaml.safe_load((DATA / "profile-version-2.yaml").read_text())
    found = load_profile(DATA / "profile-version-2.yaml")
    assert found.warnings == tuple(old["doubts"]) != ()
    assert [point["label"] for point in old["simulated"]] == ["twin"]
    assert [point.label for point in found.simulated] == ["paired"]
    assert found.cost_model is not None and found.cost_model.coefficients == old["cost_model"]["coefficients"]
    assert found.cost_model.serving_overhead_s == old["cost_model"]["excess_s"] > 0


def test_what_is_not_known_of_a_pool_is_not_in_the_file() -> None:
    """A version before had no such fields, and takes none that it does not know."""
    known = {"kv_block_size": 16, "kv_bytes": 1 << 30}
    assert not known.keys() & sample_profile().model_dump(mode="json")["engine"].keys()
    assert known.items() <= sample_profile(engine=known).model_dump(mode="json")["engine"].items()


def test_an_engine_of_before_kept_one_block_for_each_decode_handed_out_whole_prompts_and_had_no_options() -> None:
    data = sample_profile().model_dump(mode="json")
    for name in OF_ENGINES:
        data["engine"].pop(name, None)
    found = Profile.model_validate_json(json.dumps(data), strict=True).engine
    assert {name: getattr(found, name) for name in OF_ENGINES} == OF_ENGINES


def test_the_chain_has_no_gap_and_ends_at_the_present() -> None:
    assert sorted(STEPS) == list(range(1, SCHEMA_VERSION))
    assert get_args(Profile.model_fields["schema_version"].annotation) == (SCHEMA_VERSION,)


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (SCHEMA_VERSION + 1, f"schema_version is {SCHEMA_VERSION + 1}: made by a newer autotune (this one reads 1 to "),
        (10**300, "schema_version is 1000"),
        (0, "schema_version is 0; it must be a whole number from 1 to "),
        (-1, "schema_version is -1; it must be "),
        (True, "schema_version is True; it must be "),
        (2.0, "schema_version is 2.0; it must be "),
        ("2", "schema_version is '2'; it must be "),
        (None, "schema_version is None; it must be "),
        ([2], "schema_version is [2]; it must be "),
    ],
)
def test_a_version_that_is_not_known(tmp_path: Path, version: Any, text: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(dump_profile(sample_profile())) | {"schema_version": version}))
    with pytest.raises(InputError) as caught:
        load_profile(path)
    assert str(caught.value).startswith(f"{path}: {text}")
    if not isinstance(version, bool) and isinstance(version, int) and version > SCHEMA_VERSION:
        assert str(caught.value).endswith("upgrade autotune to read it")


def test_a_file_without_a_version(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("name: x\n")
    with pytest.raises(InputError, match="schema_version is missing"):
        load_profile(path)


# -- the JSON schema ------------------------------------------------------------------------------------------------------


def test_the_schema_in_the_repository_is_that_of_the_models() -> None:
    command = "python -c 'from autotune.profile.schema import *; print(schema_text(), end=\"\")' > profiles/profile.schema.json"
    assert (ROOT / "profiles" / SCHEMA_FILE).read_text(encoding="utf-8") == schema_text(), f"make it again: {command}"


@functools.cache
def validator() -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(profile_schema())
    return jsonschema.Draft202012Validator(profile_schema())


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_fit_the_schema(name: str) -> None:
    path = shipped_profiles()[name]
    validator().validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert path.read_text(encoding="utf-8").startswith(editor_line(path)), "save it again with autotune.save_profile"


def test_a_made_profile_fits_the_schema() -> None:
    validator().validate(yaml.safe_load(dump_profile(sample_profile(price_per_hour=2.5))))


@pytest.mark.parametrize("spec", KNOBS, ids=lambda spec: spec.name)
def test_the_schema_knows_the_bounds_of_every_knob(spec: Any) -> None:
    data = yaml.safe_load(dump_profile(sample_profile()))
    for value, fits in (
        (spec.low, True),
        (spec.high, True),
        (spec.low - 1, False),
        (spec.high + 1, False),
        ("1", False),
    ):
        data["settings"]["balanced"]["knobs"][spec.name] = value
        assert validator().is_valid(data) is fits, value
    del data["settings"]["balanced"]["knobs"][spec.name]
    assert validator().is_valid(data) is not spec.required


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("ttft=500ms,tpot=50ms@99%", True), ("e2e=2s", True), (" itl = 20.5ms @0.9", True), ("ttft=1e2ms", True),
        ("ttft=.5s@99.9%", True), ("tpot=50", False), ("speed=5ms", False), ("", False), ("ttft=5ms,", False),
        ("ttft=5ms@", False), (50, False),
    ],
)  # fmt: skip
def test_the_schema_reads_an_slo_as_the_program_does(text: Any, fits: bool) -> None:
    from runtime.slo import SLO

    data = yaml.safe_load(dump_profile(sample_profile())) | {"slo": text}
    assert validator().is_valid(data) is fits
    if isinstance(text, str):
        try:
            SLO.parse(text)
        except ValueError:
            assert not fits
        else:
            assert fits


def test_every_field_is_in_the_schema_under_its_name() -> None:
    schema = profile_schema()
    assert names_at(schema, ()) == list(Profile.model_fields)
    assert names_at(schema, ("settings",)) == ["interactive", "balanced", "throughput"]
    assert names_at(schema, ("settings", "balanced", "knobs")) == [spec.name for spec in KNOBS]
    assert names_at(schema, ("points", 3, "goodput")) == ["mean", "low", "high", "runs"]
    assert names_at(schema, ("cost_model", "learner")) == [
        "unit_s", "decode", "decode_covariance", "mixed", "mixed_covariance",
    ]  # fmt: skip
    assert names_at(schema, ("machine", "cores", "nothing")) == []


def test_saved_profiles_tell_editors_where_the_schema_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    save_profile(sample_profile(), path)
    first = path.read_text().splitlines()[0]
    place = first.removeprefix("# yaml-language-server: $schema=")
    assert first != place and json.loads(Path(place).read_text()) == profile_schema()
    folder = profiles_folder()
    assert editor_line(folder / "mine.yaml") == f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
    assert editor_line(folder / "nvidia-h200" / "m.yaml") == f"# yaml-language-server: $schema=../{SCHEMA_FILE}\n"


def test_docstrings_do_not_speak_of_fields_that_are_gone() -> None:
    """Descriptions stand beside fields; a class's own text is in the schema too."""
    for name, part in profile_schema()["$defs"].items():
        for word in set(re.findall(r"``(\w+)``", part.get("description", ""))):
            assert word in part["properties"], f"{name}: {word}"
    assert inspect.getdoc(Profile)


def test_the_page_describes_every_field() -> None:
    page = (ROOT / "docs" / "reference" / "profile-file.md").read_text(encoding="utf-8")
    table = page.partition("## What is in it")[2].partition("\n## ")[0]
    named = [
        name for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    assert named == list(dict.fromkeys(named)) and set(named) == set(Profile.model_fields)
    assert f"`schema_version` | which shape the file has; {SCHEMA_VERSION} at present" in table
