"""Profiles changed at random: they load and can be used, or are refused in one line."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from autotune.profile import Profile, dump_profile, load_profile, save_profile
from autotune.profile.serving import serving_knowledge
from autotune.report.profile_table import show
from autotune.simulate.scenario import Scenario
from runtime.errors import InputError
from runtime.step_model import StepFeatures
from tests.examples import examples
from tests.sample_profile import full_profile

VALID: dict[str, Any] = yaml.safe_load(dump_profile(full_profile()))


def places(data: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*at, key))


PLACES = list(places(VALID))
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["", "1e-5", "1e999", "no", "12:30", "2026-01-01", "null", "0x10", "tpot=5ms", "ttft=1s@100%", 10**400]),
    st.recursive(st.integers(0, 2), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)),
    st.sampled_from([VALID[name] for name in ("knobs", "settings", "points", "machine", "cost_model")]),
)  # fmt: skip


@st.composite
def mutations(draw: st.DrawFn) -> dict[str, Any]:
    data = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(PLACES))
        at: Any = data
        try:
            for key in place[:-1]:
                at = at[key]
            action = draw(st.sampled_from(["set", "drop", "add"]))
            if action == "set":
                at[place[-1]] = draw(ODD)
            elif action == "drop":
                del at[place[-1]]
            elif isinstance(at, list):
                at.append(draw(ODD))
            else:
                at[draw(st.text(min_size=1, max_size=8))] = draw(ODD)
        except (KeyError, IndexError, TypeError):  # an earlier change took the place away
            continue
    return data


def attempt(path: Path) -> Profile | None:
    """What loading gives; None for one line that begins with the file. Any other exception is the test's failure."""
    try:
        return load_profile(path)
    except InputError as error:
        text = str(error)
        assert text.startswith(f"{path}: ") and len(text.splitlines()) == 1 and len(text) < 2000, text
        return None


@settings(max_examples=examples(1), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=mutations())
def test_a_changed_profile_loads_or_is_told_in_one_line(
    data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True, sort_keys=False), encoding="utf-8", errors="replace")
    found = attempt(path)
    if found is None:
        return
    save_profile(found, path)  # whatever is accepted is written and read back the same
    assert load_profile(path) == found
    show(found, Console(file=io.StringIO(), width=120))  # and can be used
    serving_knowledge(found)
    try:
        world = Scenario.of(found, str(path), workload="poisson:prompt=100,output=10")
    except InputError as error:
        assert str(error).startswith((f"{path} holds no cost model", "--kv-tokens"))
    else:
        assert 0 <= world.cost.predict(StepFeatures(1, 100, 100, 100, 5000, 1)) < math.inf


@settings(max_examples=examples(1), deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.floats(0, 1), drop=st.integers(0, 40), insert=st.binary(max_size=12) | st.text(max_size=8))
def test_a_profile_with_damaged_bytes_loads_or_is_told_in_one_line(
    at: float, drop: int, insert: bytes | str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = dump_profile(full_profile()).encode()
    place = int(at * len(content))
    inserted = insert.encode("utf-8", "surrogatepass") if isinstance(insert, str) else insert
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_bytes(content[:place] + inserted + content[place + drop :])
    attempt(path)
