"""The benchmark of orderings: what it counts, what it hides from orderings, and that its command works."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from benchmarks.orderings.__main__ import LOADS, main
from benchmarks.orderings.contenders import CONTENDERS, MAX_TOKENS, NAMES, ORACLE, Unknowing
from benchmarks.orderings.figures import HEAD, Figures, by_class, figures, merged, row, table
from benchmarks.orderings.worlds import MIX, load_of, simulated, workload
from runtime.ordering import ORDERINGS, Fcfs, Queued, ShortestExpected
from runtime.records import FinishReason, RequestRecord
from runtime.request import Request, SamplingParams
from runtime.slo import SLO

SLOS = {"chat": SLO(ttft_ms=500, tpot_ms=150), "batch": SLO(e2e_ms=10_000), "default": SLO(ttft_ms=500)}


def record(
    name: str, arrival: float, scheduled: float | None, times: list[float], reason: FinishReason = FinishReason.LENGTH,
    finished: float | None = None,
) -> RequestRecord:  # fmt: skip
    end = times[-1] if finished is None else finished
    return RequestRecord("r", arrival, scheduled, end, times, 10, len(times), 0, 0, reason, name, name, 0, 0, 0)


def test_figures_of_known_records() -> None:
    good = record("chat", 1.0, 1.1, [1.2, 1.3])
    late = record("chat", 1.0, 2.0, [2.5, 2.6])
    gone = record("chat", 1.0, None, [], FinishReason.REJECTED, 1.4)
    starved = record("batch", 1.0, None, [], FinishReason.TIMEOUT, 31.0)
    found = by_class([good, late, gone, starved], SLOS, 10.0)
    chat, batch, every = found["chat"], found["batch"], found["all"]
    assert (every.goodput, every.attainment) == (0.1, 0.25)
    assert chat.attainment == pytest.approx(1 / 3), "one that was rejected is a miss"
    assert (chat.ttft_p50, chat.ttft_p99) == pytest.approx((0.2, 1.5))
    assert (chat.e2e_mean, chat.e2e_p99, chat.wait) == pytest.approx((0.95, 1.6, 1.0)), "of those not rejected"
    assert (batch.e2e_mean, batch.wait) == (30.0, 30.0), "nobody who starves is forgotten"
    assert math.isnan(batch.ttft_p50)
    assert all(math.isnan(v) for v in figures([], SLOS, 10.0)[1:])


def test_runs_are_averaged_and_the_longest_wait_kept() -> None:
    nan = math.nan
    runs = [{"all": Figures(1.0, 0.5, 2.0, nan, 1.0, 1.0, 3.0)}, {"all": Figures(3.0, 0.7, nan, nan, 2.0, 3.0, 9.0)}]
    found = merged(runs)["all"]
    assert found[:3] == pytest.approx((2.0, 0.6, 2.0)) and math.isnan(found.ttft_p99) and found.wait == 9.0
    cells = row("fcfs", dict.fromkeys(("all", "chat", "batch"), found))
    assert len(cells) == len(HEAD) and cells[1:3] == ("2.00", "60.0%") and "–" in cells
    assert table([cells]).splitlines()[2].startswith("| fcfs | 2.00 | 60.0% |")


def test_orderings_see_no_length_of_an_answer_and_the_oracle_does() -> None:
    seen: list[Queued] = []

    class Looking(Fcfs):
        def key(self, queued: Queued) -> float:
            seen.append(queued)
            return 0.0

    short, long = (Request("r", (1,) * 50, SamplingParams(), output, 0.0, tenant="t") for output in (1, 900))
    hidden = Unknowing(Looking())
    for request in (short, long):
        hidden.key(request)
    assert seen[0] == seen[1] and seen[0].work == 50 + MAX_TOKENS and seen[0].tenant == "t"
    for name in NAMES:
        made = CONTENDERS[name](SLOS)
        assert made.key(short) == made.key(long) or name == "fair", name
    oracle = CONTENDERS[ORACLE](SLOS)
    assert oracle.key(short) < oracle.key(long)


def test_what_is_hidden_is_learned_all_the_same() -> None:
    made = Unknowing(ShortestExpected())
    request = Request("r", (1,) * 50, SamplingParams(), 1, 0.0, request_class="chat")
    before = made.key(request)
    made.on_request(record("chat", 0.0, 0.1, [0.1 * i for i in range(1, 101)]))
    assert made.key(request) == pytest.approx(before + 1.0), "a hundred tokens more"


def test_every_ordering_of_the_engine_takes_part() -> None:
    assert {*NAMES, "priority"} == ORDERINGS.keys(), "without priorities that one is first come first served"


def test_the_mix_is_of_two_tenants() -> None:
    found = list(workload().at_rate(20.0).arrivals(1, limit=2000))
    assert {a.tenant for a in found} == {"chat", "batch"} and all(a.tenant == a.request_class for a in found)
    assert sum(a.tenant == "chat" for a in found) / len(found) == pytest.approx(0.8, abs=0.03) and "@0.8" in MIX


def test_capacity_and_slos_follow_from_the_machine() -> None:
    load = load_of(simulated(), lambda: False)
    chat, batch = load.slos["chat"], load.slos["batch"]
    assert chat.ttft_ms is not None and chat.tpot_ms is not None
    assert (chat.ttft_ms, batch.e2e_ms) == pytest.approx((10 * chat.tpot_ms, 400 * chat.tpot_ms))
    assert 5 < load.capacity < 100


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, dict[str, Any]]:
    code = main(args)
    out = capsys.readouterr().out
    return code, out, json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_the_command_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, said = run(
        capsys, "--seconds", "6", "--seeds", "2", "--load", "1.3", "--ordering", "fcfs", "--ordering", "hybrid"
    )
    assert code == 0 and said["seeds"] == [1, 2] and not said["live"] and not said["stopped"]
    assert [(r["ordering"], r["rejection"]) for r in said["runs"]] == [
        ("fcfs", False), ("hybrid", False), ("fcfs", True), ("hybrid", True),
    ]  # fmt: skip
    assert out.count("| fcfs |") == 2 and "load 1.3, with early rejection" in out
    assert all(0 < r["all"]["attainment"] <= 1 and r["chat"]["e2e_mean"] > 0 for r in said["runs"])
    assert LOADS == (0.7, 1.0, 1.3)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--load", "9"), "argument --load: 9; it must be 0.1 to 3"),
        (("--seeds", "0"), "argument --seeds: 0; it must be a whole number from 1 to 100"),
        (("--ordering", "lifo"), "invalid choice: 'lifo'"),
        pytest.param(
            ("--live", "--model", "huge"), "--model is 'huge'; it must be one of nano", marks=pytest.mark.slow
        ),  # it imports PyTorch
    ],
)
def test_bad_input_is_named(args: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(args)
    assert raised.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_on_the_live_engine(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, said = run(capsys, "--live", "--quick", "--seconds", "2", "--load", "0.7", "--ordering", "least_slack")
    assert code == 0 and said["live"] and [r["ordering"] for r in said["runs"]] == ["least_slack"] * 2
    assert "nano on one CPU thread" in out and all(r["all"]["attainment"] > 0 for r in said["runs"])
