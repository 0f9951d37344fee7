"""A profile as the profiler writes one, with the parts a test cares about replaced."""

from __future__ import annotations

from typing import Any

from autotune.profile import (
    Calibration,
    Capacity,
    Confidence,
    CostFacts,
    EngineFacts,
    Gain,
    GpuInfo,
    KvPool,
    LoadFacts,
    Machine,
    ModelFacts,
    Point,
    Profile,
    Setting,
    SimulationFacts,
    Software,
    Spread,
)
from autotune.profile.parts import LearnerFacts, RegionError
from runtime.knobs import KnobLimits, Knobs
from runtime.slo import SLO
from runtime.step_model import NO_GRAPHS, StepGraphs

H200 = GpuInfo(name="NVIDIA H200", count=8, memory_gib=139.8, capability="9.0", cuda="13.0")
SETTINGS = {
    "interactive": Knobs(max_batch_size=24, max_wait_ms=0, token_budget=192, chunk_size=128),
    "balanced": Knobs(max_batch_size=32, max_wait_ms=0, token_budget=256, chunk_size=256),
    "throughput": Knobs(max_batch_size=64, max_wait_ms=5, token_budget=768, chunk_size=512),
}


def sample_model(**changes: Any) -> ModelFacts:
    """Llama-3.1-8B by its preset, in bfloat16."""
    facts: dict[str, Any] = {
        "name": "llama-3.1-8b",
        "architecture": "llama",
        "parameters": 8_030_261_248,
        "dtype": "bfloat16",
        "random_weights": True,
        "seed": 0,
        "max_model_len": 131072,
        "vocab_size": 128256,
        "kv_bytes_per_token": 131072,
    }
    return ModelFacts(**facts | changes)


def sample_point(knobs: Knobs, label: str) -> Point:
    return Point(
        knobs=knobs,
        stage="validation",
        label=label,
        rate=12.0,
        offered_rate=11.8,
        seeds=(1, 2),
        offered=1200,
        met=1193,
        attainment=1193 / 1200,
        attainment_low=0.988,
        attainment_high=0.997,
        goodput=Spread(mean=11.7, low=11.2, high=12.1, runs=(11.5, 11.9)),
        throughput=Spread(mean=2400.0, low=2300.0, high=2500.0, runs=(2380.0, 2420.0)),
        ttft_p50_ms=80.0,
        ttft_p99_ms=212.0,
        tpot_p50_ms=20.0,
        tpot_p99_ms=31.0,
        e2e_p99_ms=7000.0,
        preemptions=0,
        lateness_p99_ms=1.0,
    )


def sample_profile(
    settings: dict[str, Knobs] | None = None,
    *,
    gpu: bool = True,
    model: ModelFacts | None = None,
    kv_blocks: int = 54000,
    engine: dict[str, Any] | None = None,
    **changes: Any,
) -> Profile:
    """Measured on one of a machine's eight H200, or with ``gpu=False`` on its CPU. Knobs may go to their own bounds."""
    settings = settings or SETTINGS
    facts: dict[str, Any] = {
        "name": "autotune-runtime",
        "version": "0.1.0",
        "kv_pool": KvPool(block_size=16, blocks=kv_blocks),
        "limits": KnobLimits(max_batch_size=65536, max_wait_ms=60000, token_budget=1048576, chunk_size=1048576),
        "prefix_cache": True,
    }
    fields: dict[str, Any] = {
        "schema_version": 3,
        "name": "h200-llama8b",
        "created": "2026-03-01T12:00:00+00:00",
        "command": "autotune profile --gpu --model llama-3.1-8b",
        "status": "complete",
        "machine": Machine(
            kind="gpu" if gpu else "cpu",
            cpu="Intel Xeon 8480",
            cores=16,
            flags=("avx2", "avx512f"),
            memory_gib=128.0,
            threads=16,
            gpu=H200 if gpu else None,
            os="Linux 6.8 x86_64",
        ),
        "software": Software(autotune="0.1.0", torch="2.13.0", transformers="5.23.0", python="3.11.9"),
        "engine": EngineFacts(**facts | (engine or {})),
        "model": model or sample_model(),
        "workload": LoadFacts(
            spec="azure-conv",
            description="conversations of Azure 2023",
            length_scale=1.0,
            cap_prompt=None,
            cap_output=None,
            mean_prompt=1155.0,
            mean_output=211.0,
            rate=12.0,
            offered_rate=11.8,
            rate_from="calibration",
            window_s=30.0,
            warmup_s=5.0,
            search_seed=0,
            validation_seeds=(1, 2),
        ),
        "slo": SLO(ttft_ms=500, tpot_ms=50),
        "slo_from": "given",
        "calibration": Calibration(
            alone_ttft_ms=20.0,
            alone_tpot_ms=8.0,
            saturated_rate=14.0,
            saturated_tokens_per_s=19000.0,
            step_base_ms=7.0,
            step_per_prompt_token_ms=0.02,
            step_per_decode_ms=0.05,
        ),
        "knobs": settings.get("balanced", next(iter(settings.values()))),
        "settings": {
            name: Setting(knobs=knobs, why="lowest p99 near the best goodput", point=sample_point(knobs, name))
            for name, knobs in settings.items()
        },
        "baseline": None,
        "capacity": None,
        "verdict": "balanced serves 99% within the SLO up to about 11.8 req/s",
        "slo_met": True,
        "seed": 0,
        "points": tuple(sample_point(knobs, name) for name, knobs in settings.items()),
        "points_file": "h200-llama8b.points.jsonl",
    }
    return Profile(**fields | changes)


def sample_cost_model(*, graphs: StepGraphs = NO_GRAPHS, **changes: Any) -> CostFacts:
    """Of the simplest family; the learner's coefficients are as many as it has."""
    values = {"overhead_s": 7e-3, "decode_s": 1e-5, "chunk_s": 0.0, "decode_kv_s": 3e-8, "prefill_kv_s": 4e-8}
    values |= {"token_s@0": 2e-5, "pair_s": 8e-10}
    size = len(values)
    fields: dict[str, Any] = {
        "family": "sum",
        "coefficients": values,
        "covariance": tuple(tuple(1e-12 * (i == j) for j in range(size)) for i in range(size)),
        "points": 38,
        "seconds": 12.0,
        "error": 0.021,
        "regions": (
            RegionError(region="decode", points=14, median=0.015, p90=0.04),
            RegionError(region="prefill", points=12, median=0.02, p90=0.05),
            RegionError(region="mixed", points=12, median=0.03, p90=0.08),
        ),
        "learner": LearnerFacts(
            unit_s=0.01,
            decode=(0.7, 0.3, 0.2),
            decode_covariance=tuple(tuple(0.01 * (i == j) for j in range(3)) for i in range(3)),
            mixed=(0.7, 0.5, 0.3, 0.1, 0.1),
            mixed_covariance=tuple(tuple(0.01 * (i == j) for j in range(5)) for i in range(5)),
        ),
        "graph_sizes": graphs.decodes,
        "prompt_sizes": graphs.prompts,
        "prompt_sequences": graphs.sequences,
    }
    return CostFacts(**fields | changes)


def full_profile(**changes: Any) -> Profile:
    """A profile in which no field is empty."""
    points = tuple(sample_point(knobs, name) for name, knobs in SETTINGS.items())
    fields: dict[str, Any] = {
        "baseline": points[-1],
        "capacity": Capacity(knobs=SETTINGS["balanced"], rate=12.0, tried=points[1:2]),
        "cost_model": sample_cost_model(),
        "simulation": SimulationFacts(trials=240, cpu_seconds=19.0, pareto=3, goodput_error=0.04),
        "simulated": tuple(p.model_copy(update={"stage": "simulation"}) for p in points),
        "confidence": Confidence(noise=0.03, best=0.8, regret=0.01, sentence="balanced is the best of 3 with 80%"),
        "gain": Gain(ratio=1.31, low=1.18, high=1.44, requests=412, paired=True, block_s=4.0),
        "price_per_hour": 2.5,
    }
    return sample_profile(**fields | changes)
