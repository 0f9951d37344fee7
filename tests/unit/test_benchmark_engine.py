from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from itertools import islice
from statistics import mean
from typing import Any

import pytest

from benchmarks import engine
from benchmarks.engine import (
    BUDGETS,
    CHOSEN_ON,
    KINDS,
    OUTPUT,
    Peer,
    Prompts,
    alternated,
    cases,
    contest,
    continuous_peers,
    make_prompts,
    measure,
    ratio,
    said,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "low", "high", "average"), [("short", 8, 768, 132), ("even", 8, 256, 132), ("long", 256, 768, 512)]
)
def test_prompts_have_the_lengths_that_are_claimed(kind: str, low: int, high: int, average: int) -> None:
    given = make_prompts(3000, kind, 100)
    lengths = [len(p) for p in given]
    assert low <= min(lengths) <= max(lengths) <= high
    assert mean(lengths) == pytest.approx(average, rel=0.05)
    assert given == make_prompts(3000, kind, 100)  # everyone gets the same ones
    assert 0 <= min(map(min, given)) <= max(map(max, given)) < 100


def test_a_peer_that_puts_out_too_little_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match=f"lazy put out 1 tokens, not {2 * OUTPUT}"):
        measure(Peer("lazy", "", lambda prompts: 1), [[1], [2]])


def test_ratios_are_taken_within_a_round() -> None:
    peers = [{"rates": [100.0, 200.0, 900.0]}, {"rates": [50.0, 100.0, 300.0]}]
    assert ratio(peers, 1) == 2.0


def test_the_fast_dtype_has_every_kind_of_prompts_first() -> None:
    assert cases("bfloat16")[:3] == [("bfloat16", 1, kind) for kind in KINDS]
    assert cases("bfloat16")[3:] == [("float32", 1, "short"), ("bfloat16", 2, "short"), ("float32", 2, "short")]
    assert cases("float32") == [*(("float32", 1, kind) for kind in KINDS), ("float32", 2, "short")]


def test_peers_take_turns_in_both_orders() -> None:
    order: list[str] = []

    def peer(name: str) -> Peer:
        def run(prompts: object) -> int:
            order.append(name)
            return 2 * OUTPUT

        return Peer(name, "as it is", run)

    found = alternated([peer("a"), peer("b"), peer("c")], [[1], [2]], 3)
    assert "".join(order) == "abccbaabc"
    assert [one["name"] for one in found] == ["a", "b", "c"] and all(len(one["rates"]) == 3 for one in found)
    rows = list(said([{**found[0], "rates": [8.0, 6.0]}, {**found[1], "rates": [4.0, 2.0]}], "here"))
    assert "ours is" not in rows[0] and "ours is 2.50 times that" in rows[1]


def test_settings_are_chosen_on_other_prompts_than_those_of_the_rounds() -> None:
    served: dict[str, list[Prompts]] = {"a": [], "b": [], "c": []}

    def run(name: str, prompts: Prompts) -> int:
        served[name].append(prompts)
        return OUTPUT * len(prompts)

    peers = {name: Peer(name, "", partial(run, name)) for name in served}
    found = contest([[peers["a"]], [peers["b"], peers["c"]]], "even", 6, 100, 2)
    chosen_on, reported = make_prompts(32, "even", 100, CHOSEN_ON), make_prompts(6, "even", 100)
    assert not any(prompt in reported for prompt in chosen_on)
    assert served["a"] == [chosen_on[:4], chosen_on, reported, reported]
    assert [one["name"] for one in found] in (["a", "b"], ["a", "c"])
    assert sorted(map(len, (served["b"], served["c"]))) == [2, 4]


@pytest.mark.slow
def test_the_continuous_peer_may_have_every_budget_that_ours_has() -> None:
    settings = [peer.settings for peer in continuous_peers(None, "short")]
    assert len(settings) == len(set(settings))
    for budget in (256, *BUDGETS):
        assert f"page 256, budget {budget}" in settings


def run_case(dtype: str, threads: int, kinds: list[str], args: Any) -> Iterator[tuple[str, Any]]:
    for at, kind in enumerate(kinds):
        rates = ([12.0 + at], [4.0], [3.0])
        yield kind, [{"name": name, "settings": "", "rates": r} for name, r in zip("abc", rates, strict=True)]


def test_the_line_of_json_has_every_kind_of_prompts_against_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "run_case", run_case)
    assert engine.main(["--quick"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    del found["dtype"]
    assert found == {
        "vs_transformers_cb": 3.0, "vs_static": 4.0, "even_vs_transformers_cb": 3.25, "even_vs_static": 4.333,
        "long_vs_transformers_cb": 3.5, "long_vs_static": 4.667,
    }  # fmt: skip


def test_what_was_measured_is_said_though_a_process_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(dtype: str, threads: int, kinds: list[str], args: Any) -> Iterator[tuple[str, Any]]:
        yield from islice(run_case(dtype, threads, kinds, args), 1)
        raise subprocess.CalledProcessError(1, "worker")

    python = ["--quick", "--vllm", shutil.which("false") or "false"]
    for case, figures in ((run_case, 6), (failing, 2)):
        monkeypatch.setattr(engine, "run_case", case)
        with pytest.raises(subprocess.CalledProcessError, match="exit status 1"):
            engine.main(python)
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert len(found) == figures + 1 and found["dtype"] in ("bfloat16", "float32")
        assert found["vs_transformers_cb"] == 3.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vllm", "nowhere/python"], "--vllm: nowhere/python is no program"),
        (["--vllm", "tests"], "--vllm: tests is no program"),
        (
            ["--vllm", "true", "--prompts", "128"],
            "--prompts is 128 and --rounds 3; they must be at most 100 with --vllm",
        ),
    ],
)
def test_what_vllm_cannot_be_measured_with_is_said_before_anything_is(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "run_case", None)
    assert engine.main(arguments) == 2
    assert capsys.readouterr().err == f"error: {said}\n"
