"""The same records give the same decisions, to the byte: in this process, in another, and since the files were committed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.control.controllers.registry import CONTROLLERS
from autotune.control.decision_log import read_decisions
from runtime.slo import SLO
from tests.engines import bench
from tests.replay.record import DATA, GRAPHS, SCENARIOS, record
from tests.replay.recording import Recording, attach, lines_of, replay

ROOT = Path(__file__).parents[2]


def in_another_process(recording: Path, controller: str = "predictive", *, hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.replay.recording", str(recording), controller],
        cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, encoding="utf-8", timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SCENARIOS)
def test_recorded_records_give_the_committed_decisions(name: str) -> None:
    """After a change of the algorithm on purpose: python -m tests.replay.record, and look at what it changes."""
    path, golden = DATA / f"{name}.jsonl.gz", DATA / f"{name}.decisions.jsonl"
    assert replay(Recording.load(path)).encode() == golden.read_bytes()
    assert in_another_process(path, hash_seed="12345").encode() == golden.read_bytes()


def test_the_committed_decisions_are_worth_comparing() -> None:
    """They turn knobs, in more than one regime, for the reasons they say."""
    regimes, changed = set(), set()
    for name in SCENARIOS:
        decisions = list(read_decisions(DATA / f"{name}.decisions.jsonl"))
        regimes |= {d.regime for d in decisions}
        changed |= {knob for d in decisions for knob, _, _ in d.changes}
        assert sum(bool(d.changes) for d in decisions) >= 4
    assert {"learning", "compute-limited", "demand-limited", "kv-limited"} <= regimes
    assert {"max_batch_size", "token_budget", "chunk_size"} <= changed
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 200_000


def test_other_records_give_other_decisions() -> None:
    """So that an empty comparison cannot pass: steps a third slower must show."""
    recording = Recording.load(DATA / "cpu-growing.jsonl.gz")
    before = replay(recording)
    slower = [e._replace(start=e.end - 1.3 * (e.end - e.start)) if hasattr(e, "steps") else e for e in recording.events]
    recording.events = slower
    assert replay(recording) != before


def test_a_recording_is_read_back_as_it_was_heard(tmp_path: Path) -> None:
    made, _ = record(SCENARIOS["small-pool"])
    made.save(tmp_path / "a.gz")
    again = Recording.load(tmp_path / "a.gz")
    assert again == made
    assert all(type(b) is type(a) for a, b in zip(made.events, again.events, strict=True))
    again.save(tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


@pytest.mark.parametrize(
    ("name", "controller"),
    [
        pytest.param(
            name, who, marks=() if number == 0 or who == "predictive" else (pytest.mark.slow, pytest.mark.beside)
        )
        for number, name in enumerate(SCENARIOS)
        for who in CONTROLLERS
    ],
)
def test_a_live_run_replays_in_a_fresh_process(tmp_path: Path, name: str, controller: str) -> None:
    made, live = record(SCENARIOS[name], controller=controller)
    made.save(tmp_path / "run.gz")
    acts = controller == "predictive" or (controller in ("aimd", "bisection") and name == "cpu-growing")
    assert live.count('"action":"set"') >= (3 if acts else 0)
    assert live.count('"action":"hold"') >= (1 if controller == "static" else 2) or live.count('"action":"set"')
    for hash_seed in ("0", "random"):
        assert in_another_process(tmp_path / "run.gz", controller, hash_seed=hash_seed) == live


def test_a_live_run_of_an_engine_with_graphs_replays_in_a_fresh_process(tmp_path: Path) -> None:
    made, live = record(GRAPHS)
    made.save(tmp_path / "run.gz")
    assert Recording.load(tmp_path / "run.gz") == made and made.graph_sizes == (16, 64)
    assert live.count('"action":"set"') >= 3
    assert in_another_process(tmp_path / "run.gz", hash_seed="random") == live
    made.graph_sizes = ()
    assert replay(made) != live, "what it knows of dummies shows in what it decides"


def test_a_run_of_the_engine_with_its_thread_replays(tmp_path: Path) -> None:
    """Real time this time: what was heard is all that counts, whenever it was heard."""
    with bench(max_queue=128) as world:
        recording = Recording.of(world.engine, SLO(ttft_ms=500, tpot_ms=50), interval_s=0.005)
        with attach(world.engine, recording, "predictive") as control:
            recording.now = control.decisions[0].at  # the engine's clock has gone on since the recording began
            for _ in range(6):
                world.engine.generate([[1, 2, 3]] * 40, max_tokens=30)
            world.engine.view()  # between two steps: all that has been told so far has been heard by both
        live = lines_of(control)
    recording.save(tmp_path / "run.gz")
    assert live.count("\n") > 3
    assert in_another_process(tmp_path / "run.gz", hash_seed="random") == live
