"""What an engine refuses, by name: requests that cannot run, and engines that cannot be made."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest

from runtime import Knobs
from runtime.errors import ModelError
from runtime.llm.engine import Engine
from tests.engines import bench
from tests.fakes import FakeExecutor, FakeModel


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([1, 257], {}, "token id 257; fake has a vocabulary of 257"),
        ([1, -1, 2], {}, "token id -1; fake has a vocabulary of 257"),
        ([1.5], {}, "list of token ids"),
        (7, {}, "list of token ids"),
        (
            [1] * 10,
            {"max_tokens": 247},
            r"prompt \(10 tokens\) \+ max_tokens \(247\) is 257; the context of fake is 256",
        ),
        ([1] * 256, {"max_tokens": None}, r"is 257; the context of fake is 256"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"temperature": -1}, "temperature is -1"),
        ("half a character: \ud800", {}, "prompt cannot be tokenised"),
        ([1], {"max_tokens": 10**400}, "the context of fake is 256"),
        ([1], {"priority": 0.5}, "priority is 0.5"),
        ([1], {"priority": 10**400}, "it must be a whole number between -2147483647 and 2147483647"),
        ([1], {"tenant": ["t"]}, r"tenant is \['t'\]; it must be text"),
        ([1], {"tenant": None}, "tenant is None"),
        ([1], {"request_class": ["c"]}, "request_class is"),
        ([1], {"request_id": 7}, "request_id is 7"),
        ([1], {"request_id": "a\ud800"}, r"request_id is 'a\\ud800'; it must be text without half a surrogate pair"),
        ([1], {"tenant": "\udfff"}, r"tenant is '\\udfff'"),
        ([1], {"request_class": "\ud800"}, r"request_class is '\\ud800'"),
        ([1], {"deadline_s": -1}, "deadline_s is -1"),
        ([1], {"timeout_s": 0}, "timeout_s is 0"),
        ([1], {"timeout_s": float("nan")}, "timeout_s is nan"),
        ([1], {"arrival": float("nan")}, "arrival is nan"),
        ([1], {"arrival": float("inf")}, "arrival is inf; it must be a time on the engine's clock"),
        ([1], {"arrival": -(10**400)}, "arrival is -1000"),
        ([1], {"arrival": "now"}, "arrival is 'now'"),
    ],
)
def test_what_cannot_run_is_refused_at_submit(prompt: Any, options: dict[str, Any], message: str) -> None:
    with bench(slo="ttft=500ms", ordering="fair") as b:
        with pytest.raises(ValueError, match=message):
            b.engine.submit(prompt, **options)
        assert b.engine.submit("a", max_tokens=1).result(timeout=30).text == "b"


def test_a_time_beyond_all_bounds_is_no_time() -> None:
    with bench() as b:
        done = b.engine.submit("a", max_tokens=1, deadline_s=10**400, timeout_s=float("inf")).result(timeout=30)
        assert done.text == "b"


def test_longer_than_the_pool_names_both_numbers() -> None:
    with bench(kv_tokens=64) as b:
        with pytest.raises(ValueError, match=r"prompt \(60 tokens\) \+ max_tokens \(5\) is 65; the KV pool holds 64"):
            b.engine.submit([1] * 60, max_tokens=5)
        assert len(b.engine.submit([1] * 60, max_tokens=4).result(timeout=30).token_ids) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_queue": 0}, "max_queue is 0"),
        ({"kv_tokens": 8}, "kv_tokens is 8; it must be a whole number of at least 16"),
        ({"prefix_cache": "all"}, "prefix_cache is 'all'"),
        ({"threads": 1.5}, "threads is 1.5"),
        ({"ordering": "lifo"}, "lifo"),
        ({"ordering": None}, "ordering is None; it must be one of priority, fcfs"),
        ({"slo": "tpot=50"}, "no unit"),
        ({"knobs": Knobs(token_budget=9000)}, "token_budget is 9000"),
        ({"kv_tokens": 10**15}, "kv_tokens is 1000000000000000; it must be at most 2147483648"),
        ({"seed": "a"}, "seed is 'a'; it must be a whole number"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be a whole number of 64 bits"),
        ({"classes": [1]}, "classes holds 1; each must be a RequestClass"),
        ({"limits": Knobs()}, r"limits is Knobs\(.*; it must be KnobLimits"),
        ({"knobs": 5}, "knobs is 5; it must be Knobs"),
        ({"kv_tokens": None}, "kv_tokens is None; with an executor of your own it must be the size of its KV pool"),
        ({"model": "tiny"}, "model is 'tiny'; with an executor of your own it must be an object, not a name"),
    ],
)
def test_what_an_engine_cannot_be_made_of(options: dict[str, Any], message: str) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match=message):
        Engine(**{"model": FakeModel(), "executor": FakeExecutor(), "kv_tokens": 64, **options})
    assert threading.active_count() == before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stderr", "says"), [(Terminal(), "loading ./no-such-model …\n"), (io.StringIO(), "")])
def test_loading_is_said_where_a_person_sees_it(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, says: str
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(ModelError, match="no-such-model"):
        Engine("./no-such-model")
    assert stderr.getvalue() == says
