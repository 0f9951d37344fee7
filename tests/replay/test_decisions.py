"""The same records give the same decisions, to the byte: in this process, in another, and since the files were committed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from autotune.control.controllers.registry import CONTROLLERS
from autotune.control.decision_log import read_decisions
from runtime.slo import SLO
from runtime.step_model import NO_GRAPHS
from tests.engines import bench
from tests.replay.record import DATA, GRAPHS, SCENARIOS, record
from tests.replay.recording import Recording, attach, lines_of, replay

ROOT = Path(__file__).parents[2]


class Elsewhere:
    """Another process that replays one recording after the other, each with a controller of its own."""

    def __init__(self, hash_seed: str, errors: Path) -> None:
        self._errors = errors
        with errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.replay.recording"], cwd=ROOT, encoding="utf-8", stderr=stderr,
                env=os.environ | {"PYTHONHASHSEED": hash_seed}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip

    def replay(self, recording: Path, controller: str = "predictive") -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(recording), controller]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self._errors.read_text()
        lines: str = json.loads(answer)
        return lines


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Elsewhere]]:
    """Processes that order sets in other ways than this one."""
    folder = tmp_path_factory.mktemp("elsewhere")
    with ExitStack() as stack:
        found = []
        for hash_seed in ("12345", "random"):
            found.append(Elsewhere(hash_seed, folder / hash_seed))
            stack.enter_context(found[-1].process)  # which closes its input and waits
        yield found


@pytest.mark.parametrize("name", SCENARIOS)
def test_recorded_records_give_the_committed_decisions(name: str, elsewhere: list[Elsewhere]) -> None:
    """After a change of the algorithm on purpose: python -m tests.replay.record, and look at what it changes."""
    path, golden = DATA / f"{name}.jsonl.gz", DATA / f"{name}.decisions.jsonl"
    assert replay(Recording.load(path)).encode() == golden.read_bytes()
    for other in elsewhere:
        assert other.replay(path).encode() == golden.read_bytes()


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
def test_a_live_run_replays_in_another_process(
    tmp_path: Path, name: str, controller: str, elsewhere: list[Elsewhere]
) -> None:
    made, live = record(SCENARIOS[name], controller=controller)
    made.save(tmp_path / "run.gz")
    acts = controller == "predictive" or (controller in ("aimd", "bisection") and name == "cpu-growing")
    assert live.count('"action":"set"') >= (3 if acts else 0)
    assert live.count('"action":"hold"') >= (1 if controller == "static" else 2) or live.count('"action":"set"')
    for other in elsewhere:
        assert other.replay(tmp_path / "run.gz", controller) == live


@pytest.mark.slow
@pytest.mark.beside
def test_a_live_run_of_an_engine_with_graphs_replays_in_another_process(
    tmp_path: Path, elsewhere: list[Elsewhere]
) -> None:
    made, live = record(GRAPHS)
    made.save(tmp_path / "run.gz")
    assert Recording.load(tmp_path / "run.gz") == made and made.graphs == GRAPHS.graphs
    assert live.count('"action":"set"') >= 3
    assert all(other.replay(tmp_path / "run.gz") == live for other in elsewhere)
    made.graphs = NO_GRAPHS
    assert replay(made) != live, "what it knows of dummies shows in what it decides"


def test_a_run_of_the_engine_with_its_thread_replays(tmp_path: Path, elsewhere: list[Elsewhere]) -> None:
    """Real time this time: what was heard is all that counts, whenever it was heard. But for the time of the detach, which the
    clock says, and no recording."""

    def decided(lines: str) -> str:
        *others, detach = lines.splitlines()
        assert '"action":"detach"' in detach
        return "\n".join(others)

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
    assert all(decided(other.replay(tmp_path / "run.gz")) == decided(live) for other in elsewhere)
