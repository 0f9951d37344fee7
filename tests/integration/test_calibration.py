"""Calibrating a real model on the live engine: the steps of serving that follow are as the cost model says."""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Sequence

import pytest

from autotune.cost.model import CostModel, fit_cost_model
from autotune.measure.evaluate import Recorder
from autotune.profile.parts import ModelFacts
from autotune.profiling.step_driver import Sample, idle_before, samples
from autotune.profiling.steps import measure_steps
from benchmarks.clocks.undisturbed import UndisturbedClock
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.engine import Engine
from runtime.records import StepRecord
from runtime.request import SamplingParams
from runtime.step_model import StepFeatures
from runtime.torch_backend.loading import LoadedModel
from tests.integration.small_model import CONTEXT, VOCABULARY, small_model

pytestmark = pytest.mark.slow


def serve(engine: Engine, lengths: Sequence[int]) -> list[StepRecord]:
    """The steps of prompts of these lengths, all at once."""
    log, rng = Recorder(), random.Random(9)
    unsubscribe = engine.subscribe(log)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths]
    streams = [engine.submit(p, SamplingParams(max_tokens=4 + i % 9, ignore_eos=True)) for i, p in enumerate(prompts)]
    for stream in streams:
        stream.result(60)
    unsubscribe()
    return log.steps


def calibrated_and_served(loaded: LoadedModel) -> tuple[CostModel, list[Sample]]:
    """The cost model of one calibration of the live engine, and the steps of five bursts of prompts served right after it."""
    limits = KnobLimits(max_batch_size=32, token_budget=256, chunk_size=256)
    facts = ModelFacts(
        name="small", architecture="llama", parameters=1, dtype="float32", random_weights=True, seed=0, max_model_len=CONTEXT,
        vocab_size=VOCABULARY, kv_bytes_per_token=1,
    )  # fmt: skip
    clock, told = UndisturbedClock(), []  # the steps of so small a model are shorter than what other processes take
    known = set(threading.enumerate())
    with Engine(loaded, limits=limits, kv_tokens=8192, threads=1, clock=clock) as engine:
        clock.follow(next(t for t in threading.enumerate() if t.name.startswith("engine ") and t not in known))
        found = measure_steps(engine, facts, budget_s=6.0, seed=1, advance=lambda share, note: told.append(share))
        cost: CostModel = fit_cost_model(found.points, seconds=found.seconds)
        engine.set_knobs(Knobs(24, 0, 128, 64))
        lengths = [random.Random(i).randint(4, 150) for i in range(60)]
        records = [record for _ in range(5) for record in serve(engine, lengths)]
    assert found.seconds < 30 and 0.2 < told[-1] <= 1.0  # it ends sooner when the fit has settled
    assert {p.region for p in found.points} == {"decode", "prefill", "prefix", "mixed", "served"}
    assert max(p.prefill_tokens for p in found.points) <= 256
    assert cost.facts.learner is not None
    return cost, samples(records, idle_before(records))


def test_served_steps_take_what_the_calibrated_model_says() -> None:
    # What else the machine does may change between a calibration and the tenths of a second served after it, so that all of these
    # steps take twice as long as those: one of four pairs must have seen the same machine.
    loaded, seen = small_model().loaded, []
    for _ in range(4):
        cost, served = calibrated_and_served(loaded)
        ratio = statistics.median(cost.predict(StepFeatures.of(s.record)) / s.seconds for s in served)
        seen.append((cost.facts.error, ratio))
        if cost.facts.error < 0.25 and 0.6 < ratio < 1.6:
            break
    else:
        pytest.fail(f"of four calibrations, none tells what steps take: (error told, predicted / measured) {seen}")
    # and it tells small steps from large ones
    ordered = sorted(served, key=lambda s: s.record.tokens)
    few, many = ordered[: len(ordered) // 4], ordered[-len(ordered) // 4 :]
    assert statistics.median(cost.predict(StepFeatures.of(s.record)) for s in few) < statistics.median(
        cost.predict(StepFeatures.of(s.record)) for s in many
    )
