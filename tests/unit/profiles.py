"""Scores, runs and profiles made from a few numbers, for tests of what is done with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.measure.score import Latency, Score, StepStats
from autotune.profile import Calibration, EngineFacts, KvPool, Machine, ModelFacts, Profile, Software
from autotune.profiling.assemble import assemble, of_engine
from autotune.profiling.findings import Findings, Question
from autotune.profiling.points import Run, Stage
from autotune.profiling.setup import Setup
from autotune.profiling.space import make_space
from autotune.workload import parse_workload
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO, wilson_interval

TARGETS = SLO(ttft_ms=500, tpot_ms=50)
VLLM = KnobLimits().clamp(Knobs(1024, 0, 8192, 8192))
SMALL = Knobs(16, 0, 128, 128)
LARGE = Knobs(64, 0, 1024, 1024)


def score(knobs: Knobs = SMALL, met: int = 40, offered: int = 40, **changes: Any) -> Score:
    low, high = wilson_interval(met, offered)
    blocks = [(offered // 4, met // 4)] * 3
    blocks.append((offered - 3 * (offered // 4), met - 3 * (met // 4)))
    values: dict[str, Any] = {
        "setting": knobs.as_dict(), "epoch": 1, "seed": 0, "rate": 10.0, "offered_rate": offered / 4, "window_s": 4.0,
        "offered": offered, "met": met, "attainment": met / offered, "attainment_low": low, "attainment_high": high,
        "goodput": met / 4, "completed_rate": offered / 4, "throughput": 200.0, "ttft_ms": Latency(p50=100, p99=300),
        "tpot_ms": Latency(p50=10, p99=30), "e2e_ms": Latency(p50=300, p99=900), "violations": {}, "unfinished": 0,
        "blocks": blocks, "lateness_p99_ms": 1.0, "sender_busy": 0.01, "wall_s": 5.0,
        "steps": StepStats(
            steps=100, mean_ms=10, p99_ms=20, mean_running=4, max_running=9, mean_tokens=30, preemptions=0, limited_by={}
        ),
    }  # fmt: skip
    return Score(**(values | changes))


def run(knobs: Knobs = SMALL, met: int = 40, stage: Stage = "validation", **changes: Any) -> Run:
    return Run(stage=stage, label="candidate", trial=-1, score=score(knobs, met, **changes))


def setup(**changes: Any) -> Setup:
    values: dict[str, Any] = {
        "length_scale": 0.125, "cap_prompt": 6144, "cap_output": 2048, "mean_prompt": 144.0, "mean_output": 26.0,
        "rate": 10.0, "most_rate": 300.0, "rate_from": "calibration", "slo": TARGETS, "slo_from": "default",
        "fitted": SMALL, "window_s": 4.0, "warmup_s": 1.0, "calibration": calibration(),
    }  # fmt: skip
    return Setup(**(values | changes))


def calibration() -> Calibration:
    return Calibration(
        alone_ttft_ms=50, alone_tpot_ms=8, saturated_rate=9, saturated_tokens_per_s=1500, step_base_ms=8,
        step_per_prompt_token_ms=0.3, step_per_decode_ms=0.4,
    )  # fmt: skip


def findings(*runs: Run, **changes: Any) -> Findings:
    simulated = [run for run in runs if run.stage == "simulation"]
    measured = {str(n): run for n, run in enumerate(runs) if run.stage != "simulation"}
    values: dict[str, Any] = {"space": question().space, "setup": setup(), "simulated": simulated, "measured": measured}
    return Findings(**(values | changes))


def question(**changes: Any) -> Question:
    values: dict[str, Any] = {
        "workload": parse_workload("azure-conv"), "slo": None, "rate": None, "seed": 0, "trials": None, "budget_s": 60.0,
        "space": make_space(KnobLimits()),
    }  # fmt: skip
    return Question(**(values | changes))


def profile(
    found: Findings | None = None, requested: Question | None = None, *, price: float | None = None, **changes: Any
) -> Profile:
    found = found or findings(run(SMALL, 40), run(LARGE, 30), run(VLLM, 20))
    parts = of_engine(
        found,
        requested or question(),
        spec="azure-conv",
        engine=EngineFacts(
            name="autotune-runtime", version="0.1.0", kv_pool=KvPool(block_size=16, blocks=64), limits=KnobLimits(),
            prefix_cache=True,
        ),
        model=ModelFacts(
            name="tiny", architecture="qwen3", parameters=57_000_000, dtype="bfloat16", random_weights=True, seed=0,
            max_model_len=8192, vocab_size=32000, kv_bytes_per_token=4096,
        ),
        baseline=VLLM,
        points_file=Path("tiny-cpu.points.jsonl"),
        price_per_hour=price,
    )  # fmt: skip
    made = assemble(
        Profile,
        found,
        parts,
        name="tiny-cpu",
        command="autotune profile",
        machine=machine(),
        software=Software(autotune="0.1.0", torch="2.13.0", transformers="5.23.0", python="3.11.7"),
    )
    return made.model_copy(update=changes)


def machine(**changes: Any) -> Machine:
    values: dict[str, Any] = {
        "kind": "cpu", "cpu": "A CPU", "cores": 2, "flags": ("avx2",), "memory_gib": 16.0, "threads": 2, "gpu": None,
        "os": "Linux",
    }  # fmt: skip
    return Machine(**(values | changes))
