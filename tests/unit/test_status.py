"""Who asks how a controller stands, a dashboard or a scrape of the metrics, does not hold up the engine."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from autotune import control
from autotune.cli.watch import _table
from autotune.control import attainment
from autotune.control.status import ClassStatus, Status
from runtime import Batcher
from runtime.knobs import Knobs
from runtime.slo import SLO, Attainment
from tests.unit.control_world import SimulatedEngine, h200, poisson

CHAT = SLO(ttft_ms=500, tpot_ms=30)


def test_steps_go_on_while_a_status_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, computing, done = SimulatedEngine(h200), threading.Event(), threading.Event()
    real = attainment.percentile

    def slow(*arguments: object) -> float | None:
        computing.set()
        assert done.wait(60)
        return real(*arguments)  # type: ignore[arg-type]

    with control(engine, slo=CHAT) as attached:
        engine.play(poisson(12, 3, 800, 100, seed=1))
        monkeypatch.setattr(attainment, "percentile", slow)
        found: list[int] = []
        asking = threading.Thread(target=lambda: found.append(attached.status().attainment.offered))
        asking.start()
        assert computing.wait(60)
        before = len(engine.records)
        serving = threading.Thread(target=lambda: engine.play(poisson(12, 3, 800, 100, seed=2, start=engine.now)))
        serving.start()
        serving.join(60)
        finished = not serving.is_alive()
        done.set()
        asking.join(60)
        serving.join(60)
        assert finished, "steps waited for the status"
        assert found == [before] and len(engine.records) > before, "it is as of when it was asked for"


def test_the_regime_takes_no_lock() -> None:
    """It is what every scrape of the metrics asks for."""
    engine = SimulatedEngine(h200)
    with control(engine, slo=CHAT) as attached:
        assert attached.regime == "learning"
        engine.play(poisson(12, 5, 800, 100, seed=1))
        found: list[str] = []
        with attached._lock:  # a step in progress
            asking = threading.Thread(target=lambda: found.append(attached.regime), daemon=True)
            asking.start()
            asking.join(60)
        assert found == [attached.status().regime] != ["learning"]


def test_a_missed_target_is_not_shown_to_be_met() -> None:
    """989 of 999 are 98.999%; with 3999 of 4000 not all were met."""
    for met, offered, said in ((989, 999, "98.999% of the last 999"), (3999, 4000, "99.98% of the last 4000")):
        found = Attainment(met, offered, 0, {})
        one, other = (ClassStatus(SLO(ttft_ms=500, attainment=share), found, {}) for share in (0.99, 0.95))
        for classes in ({"default": one}, {"default": one, "late": other}):
            status = Status(Knobs(), "r", found, one.slo, False, False, False, classes)
            assert ("98.999%" if met == 989 and len(classes) == 1 else "99.0%" if met == 989 else "99.98%") in str(
                status
            )
            console = Console(width=100, file=io.StringIO())
            console.print(_table({"pid": 1, "controller": "p", **status.as_dict()}, []))
            assert isinstance(console.file, io.StringIO)
            shown = console.file.getvalue()
            if len(classes) == 1:
                assert f"{said} (target 99%)" in shown
            else:
                assert f"{said.partition(' ')[0]} of {offered} within ttft=500ms@99%" in shown
                assert f"{'99.0%' if met == 989 else '99.98%'} of {offered} within ttft=500ms@95%" in shown
    assert "attainment 99.98% of the last 4000" in str(status)


def test_a_batcher_is_shown_with_the_knobs_it_has_and_what_is_open() -> None:
    """It has no chunks and drafts nothing; what nobody has set stands at its ceiling, which is no wait of ten seconds."""
    with Batcher(lambda items: items, slo="e2e=1s", max_batch_size=8) as batcher, control(batcher) as attached:
        status = attached.status()
        assert status.without == ("chunk_size", "draft_tokens") and "chunk" not in str(status)
        console = Console(width=100, file=io.StringIO())
        console.print(_table({"pid": 1, "controller": "batching", **status.as_dict()}, []))
    assert isinstance(console.file, io.StringIO)
    shown = {
        line.split()[0]: " ".join(line.split()[1:]) for line in console.file.getvalue().splitlines() if line.strip()
    }
    assert "chunk_size" not in shown and "draft_tokens" not in shown
    assert shown["max_batch_size"] == "8 sequences" and shown["max_wait_ms"] == "10000 ms (the ceiling)"
