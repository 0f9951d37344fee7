"""The benchmark of the Batcher judges fairly: its virtual service, the rules it compares with, and its HTTP client."""

from __future__ import annotations

import asyncio
import importlib
import json
import selectors
import socket
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from benchmarks.batcher import __main__ as command
from benchmarks.batcher.__main__ import judge, summary
from benchmarks.batcher.cases import Burst, base, flooded, measure, own, recovery
from benchmarks.batcher.load import Account, Client, Load, OnTime
from benchmarks.batcher.peers import PEERS, Unavailable
from benchmarks.batcher.rules import Aimd, Bento, Clipper, Line, SizeOrWait, WhenFree
from benchmarks.batcher.service import BASE_S, CAPACITY, HTTP_S, ITEM_S, LARGEST, SLO_S, Refused, application, service_s
from benchmarks.batcher.world import Choice, Item, OwnDevices, Rule, SharedDevice, play, poisson


def at(*arrivals: float, slo_s: float = SLO_S) -> list[Item]:
    return [Item(t, t + slo_s) for t in arrivals]


def test_the_service_is_the_one_described() -> None:
    assert service_s(1) == pytest.approx(0.022) and service_s(LARGEST) == pytest.approx(0.084)
    assert pytest.approx(380.95, abs=0.01) == CAPACITY
    assert flooded(OwnDevices(own), 1, lambda _: 1.0) == pytest.approx(CAPACITY, rel=0.01)
    with pytest.raises(ValueError, match="33 items; it must have 1 to 32"):
        service_s(33)


def test_every_server_that_is_told_the_slo_has_the_same_margin_for_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them up to where it would serve."""
    told: dict[str, object] = {}

    class Ended(Exception):
        """In the place of a server's life."""

    def taking(name: str) -> Callable[..., object]:
        def made(*_: object, **options: object) -> object:
            told[name] = options
            raise Ended

        return made

    marshal = SimpleNamespace(CorkDispatcher=taking("serve_bento"))
    monkeypatch.setitem(sys.modules, "bentoml._internal.marshal.dispatcher", cast(Any, marshal))
    for name in ("bentoml", "bentoml._internal", "bentoml._internal.marshal"):
        monkeypatch.setitem(sys.modules, name, cast(Any, SimpleNamespace()))
    lit = SimpleNamespace(LitAPI=type("LitAPI", (), {"__init__": lambda *_, **__: None}), LitServer=taking("serve_lit"))
    monkeypatch.setitem(sys.modules, "litserve", cast(Any, lit))
    monkeypatch.setattr("runtime.Batcher", taking("serve_ours"))
    for name in ("serve_bento", "serve_lit", "serve_ours"):
        monkeypatch.delitem(sys.modules, f"benchmarks.batcher.{name}", raising=False)
        with pytest.raises(Ended):
            importlib.import_module(f"benchmarks.batcher.{name}").main()
        monkeypatch.delitem(sys.modules, f"benchmarks.batcher.{name}")
    found = {name: cast(dict[str, Any], options) for name, options in told.items()}
    least_ms = 1e3 * (SLO_S - HTTP_S)
    assert found["serve_ours"]["slo"] == f"e2e={least_ms:.0f}ms@99%"
    assert found["serve_bento"]["max_latency_in_ms"] == least_ms
    assert found["serve_lit"]["timeout"] == pytest.approx(least_ms / 1e3 - service_s(LARGEST))
    settings = {peer.name: peer.settings for peer in PEERS}
    assert settings["BentoML"].endswith(f"max_latency_ms {least_ms:.0f}")
    assert settings["LitServe"].endswith(f"timeout {least_ms - 1e3 * service_s(LARGEST):.0f} ms")


def test_size_or_wait_to_the_millisecond() -> None:
    """Two fill a call; the third waits for its time, and then for the worker."""
    played = play(SizeOrWait(2, 0.1), at(0.0, 0.01, 0.015), OwnDevices(own))
    assert [(round(t, 6), n) for t, n, _ in played.calls] == [(0.01, 2), (0.115, 1)]
    assert [round(item.end, 6) for item in played.items] == [0.034, 0.034, 0.137]
    assert played.attainment() == 1.0 and played.latency(0.5) == pytest.approx(0.034)


def test_a_shared_device_is_shared_equally() -> None:
    """Two calls of one item a tenth of a second apart: alone 0.2 + 1; together each goes at half speed while both work."""
    played = play(SizeOrWait(1, 0.0), at(0.0, 0.1, slo_s=inf), SharedDevice(0.2, 1.0), workers=2)
    # first: works 0.2–0.3 alone (0.1 done), then with the second until its other 0.9 are done at 0.3 + 1.8
    assert [round(item.end, 6) for item in played.items] == [2.1, 2.2]
    lone = play(SizeOrWait(1, 0.0), at(0.0, slo_s=inf), SharedDevice(0.2, 1.0), workers=2)
    assert lone.items[0].end == pytest.approx(1.2)


def test_three_replicas_on_one_device_do_what_the_device_does() -> None:
    assert flooded(SharedDevice(BASE_S, ITEM_S), 3, lambda _: 1.0) == pytest.approx(1 / ITEM_S, rel=0.02)
    assert flooded(SharedDevice(BASE_S, ITEM_S), 1, lambda _: 1.0) == pytest.approx(CAPACITY, rel=0.02)


class Greedy:
    """Calls although no worker is free, or asks to be woken in the past."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def offer(self, item: Item, now: float) -> None:
        pass

    def choose(self, now: float, free: int, running: int) -> Choice:
        return self._choice

    def finished(self, batch: Sequence[Item], began: float, now: float) -> None:
        pass


@pytest.mark.parametrize("choice", [Choice(at(0.0)), Choice(wake_at=-1.0)])
def test_a_rule_cannot_cheat(choice: Choice) -> None:
    with pytest.raises(RuntimeError, match=r"no worker is free|but it is"):
        play(Greedy(choice), at(0.0), OwnDevices(own))


def test_a_line_is_found_and_never_falls() -> None:
    line = Line(kept=8)
    for n in (1, 5, 9, 32):
        line.learn(n, 0.02 + 0.002 * n)
    assert (line.base, line.slope) == (pytest.approx(0.02), pytest.approx(0.002))
    falling = Line()
    falling.learn(1, 2.0)
    falling.learn(2, 1.0)
    assert falling.slope == 0.0 and falling.predict(5) == pytest.approx(1.5)


@pytest.mark.parametrize("make", [lambda: Bento(SLO_S), WhenFree, Aimd, Clipper])
def test_every_rule_meets_its_slo_at_low_load(make: type[Rule]) -> None:
    played = play(make(), poisson([(20.0, 0.3 * CAPACITY)], SLO_S, 9), OwnDevices(own))
    assert played.attainment() == 1.0
    assert max(n for _, n, _ in played.calls) <= LARGEST


def test_past_capacity_only_those_that_give_up_items_meet_any_slo() -> None:
    case = base()
    shares = {name: measure(case, make, 1.3, 6.0, (9,)).attainment for name, make in case.rules.items()}
    assert min(shares["when free + early drop"], shares["BentoML"]) > 0.7
    assert max(shares["AIMD"], shares["Clipper"]) < 0.1


@pytest.mark.slow
def test_ours_beats_or_ties_every_rule() -> None:
    case = base()
    for load in (0.9, 1.3):
        shares = {name: measure(case, make, load, 15.0, (9, 10)).attainment for name, make in case.rules.items()}
        assert shares["ours"] >= max(shares.values()) - 0.005, (load, shares)


def test_recovery_is_when_the_median_is_back() -> None:
    late = [(0.01 * i, 0.4 if i < 130 else 0.022) for i in range(800)]
    assert recovery(0.022, late) == pytest.approx(1.1)  # half of 1.1–1.6 comes after 1.3
    assert recovery(0.022, [(0.01 * i, inf) for i in range(800)]) == inf


def test_the_figures_are_what_they_are_called() -> None:
    kept = {
        "ours": {0.05: 1.0, 0.9: 0.998, 1.3: 0.76},
        "a": {0.05: 1.0, 0.9: 0.9, 1.3: 0.5},
        "b": {0.05: 0.9, 0.9: 0.999, 1.3: 0.7},
    }
    found = summary(kept, 0.0231, {"ours": Burst(0.022, 0.7, 0.3)})
    assert found == {
        "attainment_vs_best_peer_min": pytest.approx(-0.001),
        "attainment_at_0.9": 0.998,
        "overload_vs_ideal_min": pytest.approx(0.988),
        "idle_p50_ratio": pytest.approx(1.05),
        "burst_recovery_s": 0.3,
    }


def test_an_account_is_judged_by_answers_in_time() -> None:
    account = Account([0.5, 3.5, 3.6, 3.7, 3.8], [9.0, 0.1, 0.5, 0.2, 0.3], [200, 200, 200, 503, 0], 0.001, 0.002)
    run = judge(account, 3.0)
    assert (run.attainment, run.p50, run.late_p99) == (0.25, 0.5, 0.001)


def test_what_was_found_stands_where_a_peer_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def over_http(*_: object) -> object:
        raise Unavailable("no environment for LitServe: no network")

    monkeypatch.setattr(command, "virtual", lambda *_: {"virtual_idle_p50_ratio": 1.0, "virtual_burst_recovery_s": inf})
    monkeypatch.setattr(command, "over_http", over_http)
    assert command.main(["--quick"]) == 1
    told = capsys.readouterr()
    assert told.err == "error: no environment for LitServe: no network; --only virtual needs no peers\n"
    assert json.loads(told.out) == {"virtual_idle_p50_ratio": 1.0, "virtual_burst_recovery_s": None}


async def test_the_thin_server_says_what_the_batching_says() -> None:
    async def answer(value: float) -> float:
        if value < 0:
            raise Refused
        return 2 * value

    transport = httpx.ASGITransport(app=application(answer))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        found = [
            await client.post(path, content=body)
            for path, body in (("/predict", "1.5"), ("/predict", "-1"), ("/bare", "x"))
        ]
    assert [(answer.status_code, answer.text) for answer in found] == [(200, "3.0"), (503, "refused"), (200, "1")]


async def test_the_client_counts_from_when_a_request_was_due() -> None:
    """Against a server that answers the first of each connection with 200, the next with 503, and then hangs up."""

    handlers = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        for status in (b"200 OK", b"503 No"):
            try:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(3)
            except asyncio.IncompleteReadError:
                break
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n")
            writer.write(b"ok")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    account = await Client(Load(port, "/", [(0.3, 200.0), (0.1, 100.0)], seed=3)).run()
    server.close()
    await asyncio.gather(*handlers)
    assert len(account.due) == len(account.latency) == len(account.status) > 40
    assert account.due == sorted(account.due) and account.due[-1] < 0.4
    assert {200, 503} <= set(account.status) <= {0, 200, 503}
    assert all(latency > 0 for latency in account.latency) and account.late_p99_s <= account.late_max_s


async def test_the_client_gives_up_on_a_silent_server() -> None:
    handlers = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.current_task())
        await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    account = await Client(Load(port, "/", [(0.05, 200.0)], seed=3, patience_s=0.1)).run()
    server.close()
    await asyncio.gather(*handlers)
    assert account.status and set(account.status) == {0}


@pytest.mark.slow
def test_the_client_can_wait_for_less_than_a_millisecond() -> None:
    selector = OnTime()
    ours, theirs = socket.socketpair()
    selector.register(ours, selectors.EVENT_READ, "heard")
    waits = []
    for _ in range(50):  # the shortest: a busy machine may wake anybody late
        began = time.perf_counter()
        assert selector.select(0.0003) == []
        waits.append(time.perf_counter() - began)
    assert 0.0003 <= min(waits) < 0.001
    theirs.send(b"x")
    assert [key.data for key, _ in selector.select(10)] == ["heard"] == [key.data for key, _ in selector.select()]
    for each in (selector, ours, theirs):
        each.close()
