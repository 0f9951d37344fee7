"""YAML as a profile is written and read."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.profile.text import dump_yaml, read_yaml
from tests.examples import examples

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=examples(1), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=PLAIN)
def test_what_is_dumped_is_read_the_same(data: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "plain.yaml"
    path.write_bytes(dump_yaml(data).encode())
    found = read_yaml(path)
    assert found == data and repr(found) == repr(data)
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == data, "other readers of YAML see the same"
