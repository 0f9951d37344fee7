"""Makes what ``test_decisions.py`` compares with.

    python -m tests.replay.record            the decisions of the recordings there are, after an algorithm was changed on purpose
    python -m tests.replay.record --anew     the recordings too

Look at the difference before committing it: it is what the change does to controllers in service.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from runtime.knobs import KnobLimits
from runtime.slo import SLO
from runtime.step_model import NO_GRAPHS, StepFeatures, StepGraphs
from tests.replay.recording import Recording, attach, lines_of, replay
from tests.unit.control_world import VLLM, Hardware, SimulatedEngine, h200, poisson, slow_cpu

DATA = Path(__file__).parent / "data"


class Scenario(NamedTuple):
    hardware: Hardware
    slo: SLO
    kv_tokens: int
    arrivals: Callable[[], list[tuple[float, int, int]]]
    graphs: StepGraphs = NO_GRAPHS


SCENARIOS = {
    # prompts grow in mid-run, past what the machine can serve
    "cpu-growing": Scenario(
        slow_cpu, SLO(ttft_ms=3000, tpot_ms=60), 60_000,
        lambda: poisson(6, 20, 100, 40, seed=5) + poisson(7, 20, 500, 40, seed=6, start=20),
    ),
    # a pool that preempts, then silence, then little to do
    "small-pool": Scenario(
        h200, SLO(ttft_ms=5000, tpot_ms=25), 9_000,
        lambda: poisson(20, 6, 400, 150, seed=10) + poisson(1, 8, 200, 30, seed=11, start=10),
    ),
}  # fmt: skip


def padded(step: StepFeatures) -> float:
    """An H200 that records decode steps of 16 and of 64 rows, and ones with prompts of four sizes; its dummies cost as much as
    tokens that are somebody's."""
    return h200(step) + 2e-4 * (GRAPHS.graphs.rows_of(step) or step.decodes + step.prefill_tokens)


GRAPHS = Scenario(
    padded,
    SLO(ttft_ms=500, tpot_ms=20),
    60_000,
    lambda: poisson(5, 20, 400, 120, seed=5),
    graphs=StepGraphs((16, 64), (64, 128, 256, 512), 64),
)


def record(scenario: Scenario, *, controller: str = "predictive") -> tuple[Recording, str]:
    """A run of the simulated engine under control: what was heard, and the decisions made live."""
    limits = KnobLimits(512, 1000, 8192, 8192)
    engine = SimulatedEngine(
        scenario.hardware, knobs=limits.clamp(VLLM), limits=limits, kv_tokens=scenario.kv_tokens, noise=0.03, seed=4,
        graphs=scenario.graphs,
    )  # fmt: skip
    made = Recording.of(engine, scenario.slo)
    with attach(engine, made, controller) as control:
        engine.play(scenario.arrivals())
    return made, lines_of(control)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.replay.record")
    parser.add_argument("--anew", action="store_true")
    args = parser.parse_args()
    for name, scenario in SCENARIOS.items():
        path = DATA / f"{name}.jsonl.gz"
        if args.anew:
            record(scenario)[0].save(path)
        lines = replay(Recording.load(path))
        (DATA / f"{name}.decisions.jsonl").write_text(lines, encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size} bytes, {lines.count(chr(10))} decisions")


if __name__ == "__main__":
    main()
