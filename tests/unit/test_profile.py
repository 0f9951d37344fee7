"""The profile file: round trip, errors that name the fault, and writes that are whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.profile import Profile, load_profile, save_profile, shipped_profiles
from autotune.writing import write_whole
from runtime.errors import InputError
from runtime.knobs import KNOBS, KnobLimits
from tests.unit.profiles import SMALL, machine, profile


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-cpu.yaml"
    save_profile(profile(), path)
    return path


def change(path: Path, *keys: str | int, to: Any) -> None:
    data = yaml.safe_load(path.read_text())
    at = data
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = to
    path.write_text(yaml.safe_dump(data))


def complaint(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_profile(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    return text.removeprefix(str(path))


def test_what_is_saved_is_what_is_loaded(saved: Path) -> None:
    assert load_profile(saved) == profile(created=load_profile(saved).created)
    assert [p.name for p in saved.parent.iterdir()] == ["tiny-cpu.yaml"]


def test_it_reads_like_something_people_wrote(saved: Path) -> None:
    data = yaml.safe_load(saved.read_text())
    assert data["knobs"] == {"max_batch_size": 16, "max_wait_ms": 0.0, "token_budget": 128, "chunk_size": 128}
    assert isinstance(data["knobs"]["token_budget"], int)
    assert data["slo"] == "ttft=500ms,tpot=50ms@99%"
    assert data["cost_model"] is None


@pytest.mark.parametrize("spec", KNOBS, ids=lambda spec: spec.name)
def test_a_knob_above_the_ceiling_of_its_engine(saved: Path, spec: Any) -> None:
    top = getattr(KnobLimits(), spec.name)
    change(saved, "knobs", spec.name, to=top + 1)
    text = complaint(saved)
    assert text.startswith(f": knobs.{spec.name} is {top + 1}; it must be ")
    assert text.endswith(f"{top:g} {spec.unit} (the engine's ceiling)")


def test_a_knob_below_its_bound_is_told_the_ceiling_too(saved: Path) -> None:
    change(saved, "knobs", "token_budget", to=0)
    assert complaint(saved) == (
        ": knobs.token_budget is 0; it must be a whole number between 1 and 8192 tokens (the engine's ceiling)"
    )
    change(saved, "knobs", "token_budget", to=128)
    change(saved, "settings", "throughput", "knobs", "chunk_size", to="many")
    assert complaint(saved).startswith(": settings.throughput.knobs.chunk_size is 'many'; it must be a whole number")


@pytest.mark.parametrize(
    ("keys", "value", "text"),
    [
        (("knobs", "swap"), 1, ": knobs.swap is not a knob; the knobs are max_batch_size, max_wait_ms, token_budget, chunk_size"),
        (("knobs",), {"token_budget": 1}, ": knobs.max_batch_size is missing; "),
        (("knobs",), 7, ": knobs is 7; it must hold max_batch_size"),
        (("mood",), "good", ": mood is not a field of a profile"),
        (("machine", "cores"), "two", ": machine.cores is 'two'; "),
        (("slo",), "tpot=50", ': slo: "tpot=50" has no unit; write tpot=50ms or tpot=0.05s'),
        (("slo",), 50, ": slo is 50; write ttft=500ms,tpot=50ms@99%"),
        (("status",), "half", ": status is 'half'; "),
        (("settings",), {}, ": settings is {}; "),
        (("schema_version",), 4, ": schema_version is 4: made by a newer autotune (this one reads 1 to 3); upgrade autotune"),
        (("points", 0, "rate"), None, ": points.0.rate is None; "),
    ],
)  # fmt: skip
def test_one_line_names_field_value_and_what_is_allowed(saved: Path, keys: Any, value: Any, text: str) -> None:
    change(saved, *keys, to=value)
    assert complaint(saved).startswith(text)


def test_a_missing_field(saved: Path) -> None:
    data = yaml.safe_load(saved.read_text())
    del data["verdict"]
    saved.write_text(yaml.safe_dump(data))
    assert complaint(saved) == ": verdict is missing"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a: [1,", ": not valid YAML: line 2, column 1: "),
        (b"", ": is not a profile"),
        (b"- 1\n", ": is not a profile"),
        (b"\xff\xfe\x00", ": "),
        (b"!!python/object:os.system {}", ": line 1: tag:yaml.org,2002:python/object:os.system is a tag; "),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    assert complaint(path).startswith(text)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert complaint(tmp_path / "none.yaml") == ": cannot be read (No such file or directory)"
    assert complaint(tmp_path) == ": cannot be read (Is a directory)"
    with pytest.raises(InputError, match="cannot be written"):
        save_profile(profile(), tmp_path / "nowhere" / "x.yaml")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.yaml"
    write_whole(path, "old")

    def no_space(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(InputError, match=r"x\.yaml: cannot be written \(No space left on device\)"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_shipped_profiles_are_valid() -> None:
    for path in shipped_profiles().values():
        assert isinstance(load_profile(path), Profile)


def test_what_makes_a_profile_unreliable_elsewhere() -> None:
    assert machine().differences(machine(memory_gib=8.0)) == []
    assert machine().differences(machine(cpu="B", cores=8)) == ["B instead of A CPU", "8 cores instead of 2"]


def test_the_recommended_knobs_are_the_balanced_ones() -> None:
    made = profile()
    assert made.knobs == made.settings["balanced"].knobs == SMALL
