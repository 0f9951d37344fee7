"""Recorded steps with prompts are a fact of engine and profile: dummies are counted, and what runs launch by launch is a term."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from autotune import control
from autotune.control.controllers.parts.tiles import whole_tiles
from autotune.control.controllers.predictive import PredictiveController
from autotune.cost.facts import StepPoint
from autotune.cost.model import CostModel, features_of, fit_cost_model, undetermined_terms
from autotune.cost.shape import as_run
from autotune.profile import Profile, load_profile, save_profile, serving
from autotune.profile.parts import ModelFacts
from autotune.profiling.refit import cost_name, merged
from autotune.profiling.space import round_number
from autotune.profiling.steps import measure_steps, served_points
from autotune.simulate import SimulatedEngine
from autotune.simulate.scenario import Scenario
from runtime.errors import InputError
from runtime.llm.plan import Chunk, DecodeSet, StepPlan
from runtime.records import LimitedBy, StepRecord
from runtime.step_model import NO_GRAPHS, StepFeatures, StepGraphs, StepLearner, computed
from runtime.torch_backend.recorded_steps import RecordedSteps, prompt_ladder
from runtime.torch_backend.resident import batch_ladder
from tests.building import step_points
from tests.fakes import Records
from tests.sample_profile import full_profile, sample_cost_model

DECODES = StepGraphs(batch_ladder(256))
LADDER = StepGraphs(batch_ladder(256), prompt_ladder(8192, 7_000_000_000), 128)
EAGER_S = 6e-3
assert LADDER.prompts[-1] == 512


def hardware(step: StepFeatures) -> float:
    """Rows are computed whether or not they are somebody's; launching kernel by kernel takes the host longer."""
    tokens = step.decodes + step.prefill_tokens + step.drafted
    sizes = LADDER.prompts if step.prefill_tokens else LADDER.decodes
    whole = next((size for size in sizes if size >= tokens), 0)
    if step.drafted or (step.prefill_tokens and step.decodes + step.chunks > LADDER.sequences):
        whole = 0
    eager = EAGER_S if not whole and tokens > step.decodes else 0.0
    return 2e-3 + eager + 1e-4 * (whole or tokens) + 2e-8 * (step.decode_context + step.prefill_context)


def steps(count: int, seed: int) -> list[StepFeatures]:
    """Prompts beside decodes in two of three; some are longer than what is recorded, or hold more sequences, or drafts."""
    rng, made = random.Random(seed), []
    for i in range(count):
        decodes, tokens = rng.randint(1, 200 if i % 7 == 0 else 100), rng.randint(1, 700) if i % 3 else 0
        pairs = tokens * (tokens + 1) // 2
        drafted = 2 * decodes if i % 10 == 0 else 0
        made.append(StepFeatures(decodes, decodes * rng.randint(20, 800), tokens, tokens, pairs, tokens > 0, drafted))
    return made


def points() -> list[StepPoint]:
    return step_points(hardware, steps(200, seed=4))


@cache
def fitted(graphs: StepGraphs) -> CostModel:
    return fit_cost_model(points(), graphs=graphs)


def off(predict: Callable[[StepFeatures], float]) -> float:
    """The 90th percentile of the relative error on steps with prompts that nobody has seen."""
    mixed = [step for step in steps(400, seed=9) if step.chunks]
    return statistics.quantiles([abs(predict(step) / hardware(step) - 1) for step in mixed], n=10)[-1]


# -- which step is recorded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "rows"),
    [
        (StepFeatures(10, 900, 100, 100, 5050, 1), 112),
        (StepFeatures(12, 900, 100, 100, 5050, 1), 112),
        (StepFeatures(0, 0, 1, 1, 1, 1), 16),
        (StepFeatures(12, 900, 500, 500, 5050, 2), 512),
        (StepFeatures(13, 900, 500, 500, 5050, 2), 0),  # more tokens than any holds
        (StepFeatures(127, 900, 100, 100, 5050, 1), 256),
        (StepFeatures(127, 900, 100, 100, 5050, 2), 0),  # more sequences
        (StepFeatures(10, 900, 100, 100, 5050, 1, drafted=2), 0),
        (StepFeatures(10, 900, 0, 0, 0, 0, drafted=2), 0),
        (StepFeatures(65, 900, 0, 0, 0), 80),
        (StepFeatures(257, 900, 0, 0, 0), 0),
    ],
)
def test_how_many_rows_a_step_computes(step: StepFeatures, rows: int) -> None:
    assert LADDER.rows_of(step) == rows
    run, eager = as_run(step, LADDER)
    assert (computed(run), eager) == (rows or computed(step), not rows)
    assert run._replace(decodes=step.decodes) == step, "dummies are rows, and nothing else"


def test_of_arrays_the_same() -> None:
    every = steps(300, seed=1)
    run, eager = as_run(StepFeatures(*np.array(every, dtype=float).T), LADDER)
    assert [LADDER.rows_of(step) for step in every] == np.where(eager, 0, computed(run)).tolist()
    assert all(NO_GRAPHS.rows_of(step) == 0 for step in every) and not NO_GRAPHS
    nothing, _ = as_run(StepFeatures(0, 0, 0, 0, 0), LADDER)
    assert computed(nothing) == 0


def test_it_is_what_the_executor_replays() -> None:
    """A batch fits a recording if its counts do: :mod:`tests.unit.test_decode_graphs` has whole runs of it."""
    attention = SimpleNamespace(fixed_step=lambda table, tokens: None)
    recorded = RecordedSteps(
        LADDER.prompts, LADDER.sequences, 100, block_size=16, pad_block=0, scratch_slot=0,
        forward=lambda *inputs: torch.zeros(1, 1), attention=cast(Any, attention), record=cast(Any, lambda step: None),
        device=torch.device("cpu"),
    )  # fmt: skip
    rng = random.Random(5)
    fitting = 0
    for number in range(400):
        rows, chunks = rng.randint(0, 140), rng.randint(0, 8)
        counts = [rng.randint(1, 120) for _ in range(chunks)]
        drafts = [(7, 7)] * (number % 10 == 0)
        made = [Chunk(cast(Any, None), 3, count, True) for count in counts]
        made += [Chunk(cast(Any, None), 9, 1 + len(draft), True, draft) for draft in drafts]
        batch: Any = SimpleNamespace(
            rows=SimpleNamespace(sequences=[None] * rows, positions=np.full(rows, 40)), chunks=made
        )
        plan = DecodeSet()
        plan.members = dict.fromkeys(cast(Any, range(rows)))
        step = StepFeatures.of_plan(
            StepPlan(
                0,
                rows,
                40 * rows,
                tuple(made[:chunks]),
                plan,
                0,
                1,
                0.0,
                0,
                0,
                LimitedBy.BUDGET,
                0,
                tuple(made[chunks:]),
            )
        )
        assert recorded.fits(batch) == (bool(LADDER.rows_of(step)) and bool(step.prefill_tokens))
        fitting += recorded.fits(batch)
    assert 50 < fitting < 350


# -- fit, prediction, learner ----------------------------------------------------------------------------------------------


def test_a_fit_that_knows_which_steps_are_recorded_knows_what_dummies_and_launches_cost() -> None:
    knows, blind = fitted(LADDER), fitted(DECODES)
    assert off(knows.predict) < 0.01 < 0.05 < off(blind.predict)
    assert knows.facts.coefficients["eager_s"] == pytest.approx(EAGER_S, rel=0.05)
    assert "eager_s" not in blind.facts.coefficients, (
        "where no step with prompts is recorded, prompt_s is what they cost"
    )
    assert knows.facts.graphs == LADDER and undetermined_terms(points()) == []


def test_a_step_takes_as_long_as_the_next_size_and_longer_beyond_the_last() -> None:
    model = fitted(LADDER)

    def seconds(tokens: int, decodes: int = 20) -> float:
        return model.predict(StepFeatures(decodes, 9000, tokens - decodes, 400, 400, 1))

    assert seconds(129) == pytest.approx(seconds(160)) and seconds(161) > 1.1 * seconds(160)
    assert seconds(513) > seconds(512) + 0.9 * EAGER_S
    assert seconds(320, 128) - seconds(320, 127) > 0.9 * EAGER_S, "129 sequences"
    assert model.scaled(overhead=2.0).facts.coefficients["eager_s"] == model.facts.coefficients["eager_s"] / 2


def learned(learner: StepLearner) -> StepLearner:
    for step in steps(900, seed=6):
        if not step.drafted:
            learner.observe(step, hardware(step) - EAGER_S * (LADDER.rows_of(step) == 0 < step.prefill_tokens))
    return learner


def test_the_online_learner_counts_dummies_of_prompts() -> None:
    """It has no input for what launching takes; so nothing of it is in these times."""
    mixed = [step for step in steps(400, seed=9) if step.chunks and LADDER.rows_of(step)]

    def wrong(learner: StepLearner) -> float:
        return statistics.quantiles([abs(learner.predict(s) / hardware(s) - 1) for s in mixed], n=10)[-1]

    knows, blind = learned(StepLearner(graphs=LADDER)), learned(StepLearner(graphs=DECODES))
    assert wrong(knows) < 0.01 < 0.05 < wrong(blind)
    beside = StepFeatures(40, 9000, 100, 100, 5050, 1)
    assert knows.predict(beside) == pytest.approx(knows.predict(beside._replace(prefill_tokens=120)))


@pytest.mark.parametrize("searched", [False, True])
@pytest.mark.parametrize("decodes", [0, 40])
def test_a_budget_fills_a_recorded_step(monkeypatch: pytest.MonkeyPatch, searched: bool, decodes: int) -> None:
    learner = learned(StepLearner(graphs=LADDER))
    if searched:  # as with a term more than those that are written out
        monkeypatch.setattr(StepLearner, "most_prefill", StepLearner._searched)
    context = 200 * decodes
    for size in LADDER.prompts[LADDER.prompts.index(112) :]:
        tokens = size - decodes
        takes = learner.predict(StepFeatures(decodes, context, tokens, tokens, tokens * (tokens + 1) // 2, 1))
        for more in (1.0001, 1.02) if size < LADDER.prompts[-1] else (1.0001,):
            assert learner.most_prefill(decodes, context, more * takes, ()) == tokens
    beyond = {learner.most_prefill(decodes, context, (3 + n / 500) * takes, ()) for n in range(20)}
    assert len(beyond) == 20, "beyond the last size any number does"
    if decodes:
        none = learner.predict(StepFeatures(decodes, context, 1, 1, 1, 1))
        assert learner.most_prefill(decodes, context, 0.999 * none, ()) == 0, "one token is padded to 48"


def test_a_step_of_many_prompts_in_progress_is_not_recorded() -> None:
    learner = learned(StepLearner(graphs=LADDER))
    takes = learner.predict(StepFeatures(100, 9000, 156, 156, 500, 1))
    few, many = ([(0, 3)] * prompts for prompts in (10, 40))
    assert learner.most_prefill(100, 9000, 1.02 * takes, few) == 156
    assert learner.most_prefill(100, 9000, 1.02 * takes, many) % 1, "with a sequence more than 128 nothing is padded"


def test_whole_tiles_are_recorded_sizes() -> None:
    """Of steps that hold prompts for the larger part: what a controller rounds to leaves no dummies. Nor do the budgets that a
    search tries."""
    sizes = StepGraphs(prompts=prompt_ladder(8192, 1), sequences=256)
    assert {round_number(n) for n in range(62, 2049)} <= set(sizes.prompts)
    for tokens in range(128, 2049):
        for decodes in range(0, min(tokens // 2, 256), 5):
            whole = whole_tiles(tokens, decodes)
            assert sizes.rows_of(StepFeatures(decodes, 0, whole - decodes, 0, 0, 1)) == whole


# -- calibration -----------------------------------------------------------------------------------------------------------


class Hardware:
    def predict(self, step: StepFeatures) -> float:
        return hardware(step)


MODEL = ModelFacts(
    name="8b", architecture="llama", parameters=8_000_000_000, dtype="bfloat16", random_weights=True, seed=0,
    max_model_len=8192, vocab_size=1000, kv_bytes_per_token=131072,
)  # fmt: skip


def calibrated(graphs: StepGraphs) -> CostModel:
    engine = SimulatedEngine(Hardware(), kv_tokens=200_000, graphs=graphs)
    return measure_steps(engine, MODEL, budget_s=40.0, seed=3).cost(40.0)


@pytest.mark.slow
def test_a_calibration_of_an_engine_that_tells_what_it_records_is_right() -> None:
    knows, blind = calibrated(LADDER), calibrated(DECODES)
    mixed = [step for step in steps(400, seed=9) if step.chunks and not step.drafted]

    def wrong(model: CostModel) -> float:
        return statistics.quantiles([abs(model.predict(s) / hardware(s) - 1) for s in mixed], n=10)[-1]

    assert knows.facts.graphs == LADDER
    assert knows.facts.coefficients["eager_s"] == pytest.approx(EAGER_S, rel=0.1)
    assert wrong(knows) < 0.02 < 0.06 < wrong(blind)
    assert knows.facts.error < blind.facts.error


def record(decodes: int, tokens: int, start: float) -> StepRecord:
    took = hardware(StepFeatures(decodes, 50 * decodes, tokens, tokens, tokens * (tokens + 1) // 2, 1))
    return StepRecord(
        start, start + took, 1, decodes, 50 * decodes, 1, tokens, tokens, tokens * (tokens + 1) // 2, decodes, decodes, 0, 0, 1,
        0, 0, 8192, LimitedBy.BUDGET,
    )  # fmt: skip


def test_served_steps_that_are_padded_alike_make_a_point() -> None:
    """490 to 525 tokens are about as many, but some run as 512 rows and some launch by launch."""
    records: list[StepRecord] = []
    for i in range(108):
        records.append(record(40, 450 + i % 36, records[-1].end if records else 0.0))
    found = served_points(records, LADDER)
    assert sorted(LADDER.rows_of(features_of(p)) for p in found) == [0, 512]
    assert all(p.seconds == pytest.approx(hardware(features_of(p)), rel=1e-3) for p in found)
    [one] = served_points(records, DECODES)
    assert one.seconds != pytest.approx(hardware(features_of(one)), rel=0.03)
    assert len(merged([*found, *found], LADDER)) == 2 and len(merged(found, DECODES)) == 1


# -- engine, profile, controller -------------------------------------------------------------------------------------------


def test_the_simulator_pads_prompts() -> None:
    model = fitted(LADDER)
    engine = SimulatedEngine(model, kv_tokens=1 << 16, graphs=LADDER)
    assert engine.facts.graphs == LADDER
    heard = Records()
    engine.subscribe(heard)
    engine.submit(range(100))
    engine.submit(range(1000, 1029))
    engine.run()
    first = StepFeatures.of(heard.steps[0])
    assert first.prefill_tokens == 129 and LADDER.rows_of(first) == 160
    assert heard.steps[0].duration == pytest.approx(hardware(first), rel=0.02)


def test_a_profile_keeps_it_and_one_from_before_reads_as_it_did(tmp_path: Path) -> None:
    model = fitted(LADDER)
    save_profile(full_profile(cost_model=model.facts), tmp_path / "p.yaml")
    read = load_profile(tmp_path / "p.yaml")
    assert read.cost_model == model.facts and read.cost_model.graphs == LADDER
    assert Scenario.of(read).start().facts.graphs == LADDER
    step = StepFeatures(20, 9000, 120, 120, 500, 1)
    assert serving.serving_cost(read).predict(step) == model.serving().predict(step)
    before = fitted(DECODES)
    save_profile(full_profile(cost_model=before.facts), tmp_path / "before.yaml")
    text = (tmp_path / "before.yaml").read_text()
    assert not any(word in text for word in ("prompt_sizes", "prompt_sequences", "eager_s"))
    old = load_profile(tmp_path / "before.yaml")
    assert old.cost_model is not None and old.cost_model.graphs == DECODES
    assert CostModel(old.cost_model).predict(step) == before.predict(step)
    assert len({cost_name(one) for one in (model, before, fitted(NO_GRAPHS))}) == 3


def test_a_controller_is_given_it(tmp_path: Path) -> None:
    model = fitted(LADDER)
    profile: Profile = full_profile(cost_model=model.facts)
    for given in (None, profile):
        engine: Any = SimulatedEngine(model, kv_tokens=1 << 16, graphs=LADDER)
        with control(engine, slo="tpot=50ms", profile=given) as attached:
            made = attached.controller
            assert isinstance(made, PredictiveController) and made.model.graphs == LADDER


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("prompt_sizes: [9, 8]\n  prompt_sequences: 8", "cost_model.prompt_sizes are 9, 8; each must be above the one before"),
        ("prompt_sizes: [16]", "cost_model.prompt_sequences is 0 with 1 prompt_sizes; there must be both or neither"),
        ("prompt_sequences: 8", "cost_model.prompt_sequences is 8 with 0 prompt_sizes; there must be both or neither"),
        ("prompt_sizes: [0]", "cost_model.prompt_sizes.0 is 0; it must be at least 1"),
    ],
)  # fmt: skip
def test_what_is_no_ladder_is_refused_by_name(tmp_path: Path, written: str, said: str) -> None:
    path = tmp_path / "p.yaml"
    save_profile(full_profile(), path)
    path.write_text(path.read_text().replace("\ncost_model:\n", f"\ncost_model:\n  {written}\n"))
    with pytest.raises(InputError) as refused:
        load_profile(path)
    assert said in str(refused.value)


def test_planned_steps_are_of_the_same_engine() -> None:
    with pytest.raises(ValueError, match=r"\.planned\.prompt_sizes must be those of the cost model"):
        sample_cost_model(graphs=LADDER, planned=sample_cost_model(graphs=DECODES))
