"""What ``@batch`` made, profiled: the method of its object, with the decorator's collate, grouping and cost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autotune.profiling.calls import TimedCalls
from autotune.profiling.subject import load_subject
from runtime.errors import InputError

MODULE = """
from runtime import batch

class Model:
    def __init__(self, weight):
        self.weight = weight

    @batch(cost=len, grouping="buckets", collate=tuple)
    def embed(self, texts):
        assert isinstance(texts, tuple)
        return [self.weight * len(text) for text in texts]

model = Model(3)

def twice(text):
    return 2 * len(text)

@batch(cost=lambda text: 1)
def nameless(texts):
    return texts
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "decorated.py").write_text(MODULE)
    (tmp_path / "texts.jsonl").write_text('"a"\n"four"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "decorated", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_method_of_an_object_with_what_the_decorator_was_given(folder: Path) -> None:
    subject = load_subject("decorated:model.embed", folder / "texts.jsonl", None)
    assert subject.function(("a", "four")) == [3, 12]
    assert (subject.cost_name, list(subject.costs), subject.grouping) == ("len", [1, 4], "buckets")
    assert subject.cost_of([0, 1]) == 8  # buckets pad
    calls = TimedCalls(subject, 0, iter(range(1000)).__next__, lambda: False)
    groups = calls.of(2, 1e9)["groups"]
    calls.close()
    assert {cost for _, cost, _ in groups} <= {2, 8}


def test_a_cost_given_by_hand_comes_first_and_one_without_a_name_is_refused(folder: Path) -> None:
    subject = load_subject("decorated:model.embed", folder / "texts.jsonl", "decorated:twice")
    assert subject.cost_name == "decorated:twice" and list(subject.costs) == [2, 8]
    with pytest.raises(InputError, match="which has no name of its own"):
        load_subject("decorated:nameless", folder / "texts.jsonl", None)
