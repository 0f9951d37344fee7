"""A ladder of recorded decode steps is a fact of engine and profile, and the cost model counts the dummy rows that it makes."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune import control
from autotune.control.controllers.predictive import PredictiveController
from autotune.control.controllers.predictive.trusted_model import TrustedModel
from autotune.cost.facts import StepPoint
from autotune.cost.model import CostModel, features_of, fit_cost_model
from autotune.profile import load_profile, save_profile
from autotune.profile.serving import serving_cost
from autotune.profiling.refit import cost_name
from autotune.simulate import SimulatedEngine
from autotune.simulate.scenario import Scenario
from runtime.errors import InputError
from runtime.records import LimitedBy, StepRecord
from runtime.request import SamplingParams
from runtime.step_model import NO_GRAPHS, TERMS, Knowledge, StepFeatures, StepGraphs, StepLearner, Term
from runtime.torch_backend.resident import batch_ladder
from tests.building import step_points
from tests.fakes import Records
from tests.sample_profile import full_profile, sample_cost_model

LADDER = StepGraphs(batch_ladder(256))


def padded(decodes: int, ladder: tuple[int, ...] = LADDER.decodes) -> int:
    return next((size for size in ladder if size >= decodes), decodes)


def hardware(step: StepFeatures) -> float:
    """Rows are computed whether or not they are somebody's; a step with prompts runs without a graph, which takes longer."""
    rows = step.decodes + step.prefill_tokens if step.prefill_tokens else padded(step.decodes)
    eager = 3e-3 if step.prefill_tokens else 0.0
    return 2e-3 + eager + 1e-4 * rows + 2e-8 * (step.decode_context + step.prefill_context)


def steps(count: int, seed: int) -> list[StepFeatures]:
    """Decodes of any number, a third of them beside a prompt."""
    rng, made = random.Random(seed), []
    for i in range(count):
        decodes, tokens = round(math.exp(rng.uniform(0, math.log(400)))), rng.randint(1, 2048) if i % 3 == 0 else 0
        pairs = tokens * (tokens + 1) // 2
        made.append(StepFeatures(decodes, decodes * rng.randint(20, 2000), tokens, tokens, pairs, tokens > 0))
    return made


def points() -> list[StepPoint]:
    return step_points(hardware, steps(150, seed=4))


def off(predict: Callable[[StepFeatures], float]) -> float:
    """The 90th percentile of the relative error on decode steps that nobody has seen."""
    decode_steps = [step for step in steps(300, seed=9) if not step.chunks]
    return statistics.quantiles([abs(predict(step) / hardware(step) - 1) for step in decode_steps], n=10)[-1]


def test_a_fit_that_knows_the_ladder_knows_what_padding_and_eager_steps_cost() -> None:
    model = fit_cost_model(points(), graphs=LADDER)
    assert off(model.predict) < 0.01 < 0.05 < off(fit_cost_model(points()).predict)
    found = model.facts.coefficients
    assert found["prompt_s"] + found["chunk_s"] == pytest.approx(3e-3, rel=0.1), "each of these steps has one chunk"
    assert model.facts.graphs == LADDER


def learned(learner: StepLearner) -> StepLearner:
    for step in steps(900, seed=6):
        learner.observe(step, hardware(step))
    return learner


def test_the_online_learner_knows_what_padding_costs_too() -> None:
    blind, knows = learned(StepLearner()), learned(StepLearner(graphs=LADDER))
    assert off(knows.predict) < 0.01 < 0.03 < off(blind.predict)
    context = 65 * 500
    five, eight = StepFeatures(65, context, 0, 0, 0), StepFeatures(80, context, 0, 0, 0)
    assert knows.predict(five) == knows.predict(eight) > blind.predict(five)
    beside = StepFeatures(65, context, 64, 64, 64 * 65 // 2, 1)
    assert knows.predict(beside) == pytest.approx(hardware(beside), rel=0.05), "a step with a prompt is not padded"
    assert knows.most_prefill(65, context, knows.predict(beside)) == pytest.approx(64, abs=8)
    larger = StepFeatures(300, context, 0, 0, 0)
    assert knows.predict(larger) == pytest.approx(hardware(larger), rel=0.05), "nor is one that no graph holds"


def test_a_warm_start_begins_with_it() -> None:
    knowledge = fit_cost_model(points(), graphs=LADDER).facts.learner
    assert knowledge is not None
    known = Knowledge(
        knowledge.unit_s, knowledge.decode, knowledge.decode_covariance, knowledge.mixed, knowledge.mixed_covariance
    )
    assert off(StepLearner.warm_start(known, graphs=LADDER).predict) < 0.01
    assert off(StepLearner.warm_start(known).predict) > 0.03, "on an engine that records none, rows are decodes"


def test_an_input_of_the_learner_that_is_of_computed_tokens_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none yet. One of host work is not padded."""
    tokens = Term("more_tokens", "tokens", TERMS["tokens"].amount, curve="segments", pieces=("decode", "mixed"))
    host = Term("more_host", "sequences", lambda s: s.decodes, pieces=("decode", "mixed"))
    for term, amount in ((tokens, 80), (host, 65)):
        with monkeypatch.context() as patched:
            patched.setitem(TERMS, term.name, term)
            known = Knowledge(1.0, [0.0, 0.0, 0.0, 1.0], _eye(4), [0.0, 0.0, 0.0, 0.0, 0.0, 1.0], _eye(6))
            learner = StepLearner.warm_start(known, graphs=LADDER)
            assert learner.predict(StepFeatures(65, 900, 0, 0, 0)) == pytest.approx(amount)
            assert learner.predict(StepFeatures(65, 900, 10, 10, 55, 1)) == pytest.approx(65 + 10 * (amount == 80))
            assert learner.most_prefill(70, 900, 69.0) == pytest.approx(-1.0), "beside prompts, seventy are seventy"


def _eye(size: int) -> list[list[float]]:
    return [[0.01 * (i == j) for j in range(size)] for i in range(size)]


def test_a_controller_is_given_the_ladder_of_its_engine(tmp_path: Path) -> None:
    model = fit_cost_model(points(), graphs=LADDER)
    save_profile(full_profile(cost_model=model.facts), tmp_path / "p.yaml")
    for given in (None, load_profile(tmp_path / "p.yaml")):
        engine = SimulatedEngine(model, kv_tokens=1 << 16, graphs=LADDER)
        with control(engine, slo="tpot=50ms", profile=given) as attached:  # type: ignore[arg-type]
            made = attached.controller
            assert isinstance(made, PredictiveController) and made.model.graphs == LADDER


def test_a_learner_that_begins_again_still_knows_the_ladder() -> None:
    made = TrustedModel(StepLearner(graphs=LADDER))
    first, now = made.model, 0.0
    for at, step in enumerate(steps(2000, seed=3)):
        seconds = hardware(step) * (10 if at % 2 else 0.1)  # no model says that
        decodes, context, tokens, prefix, pairs, chunks, _ = step
        made.observe(
            StepRecord(
                now, now + seconds, 1, decodes, context, chunks, tokens, prefix, pairs, decodes, decodes, 0, 0, 1, 0, 0, 8192,
                LimitedBy.BUDGET,
            )
        )  # fmt: skip
        now += seconds
    assert made.model is not first and made.model.graphs == LADDER


def test_a_step_takes_as_long_as_one_of_the_next_size() -> None:
    model = fit_cost_model(points(), graphs=LADDER)

    def seconds(decodes: int, prompt: int = 0) -> float:
        known = model.facts.coefficients["decode_s"] * decodes  # what rows cost the host is not padded
        return model.predict(StepFeatures(decodes, 60_000, prompt, prompt, prompt, prompt > 0)) - known

    assert seconds(65) == pytest.approx(seconds(80)) and seconds(80) > 1.05 * seconds(64)
    assert seconds(1) < seconds(2) < seconds(3) and seconds(3) == pytest.approx(seconds(4))
    assert seconds(80, 16) > 1.01 * seconds(65, 16), "a step with a prompt is not padded"
    assert seconds(300) > 1.05 * seconds(257), "nor is one with more rows than were recorded"


@pytest.mark.parametrize("family", ["sum", "norm2", "norm4", "max"])
@pytest.mark.parametrize("decodes", [1, 9, 65, 256, 257, 2000])
def test_a_run_of_steps_takes_what_its_steps_take(family: str, decodes: int) -> None:
    values = {
        "overhead_s": 1e-3, "decode_s": 1e-5, "chunk_s": 0.0, "weights_s": 1e-5, "decode_kv_s": 1e-9, "prefill_kv_s": 1e-9,
        "token_s@0": 1e-4, "pair_s": 1e-9, "prompt_s": 0.0, "mixed_kv_s": 0.0, "tile128_s": 2e-6, "tile256_s": 0.0,
    }  # fmt: skip
    if family == "sum":
        del values["weights_s"]
    zeros = tuple((0.0,) * len(values) for _ in values)
    facts = sample_cost_model(family=family, coefficients=values, covariance=zeros, graphs=LADDER)
    model = CostModel(facts)
    run = model.predict_run(decodes, 5000, 4)
    assert run == [model.predict(StepFeatures(decodes, 5000 + i * decodes, 0, 0, 0)) for i in range(4)]
    assert model.scaled(compute=2.0).facts.graphs == LADDER == model.serving().facts.graphs
    assert (run == CostModel(facts.model_copy(update={"graph_sizes": ()})).predict_run(decodes, 5000, 4)) == (
        padded(decodes) == decodes
    )


def test_the_simulator_pads() -> None:
    """Five sequences that decode take as long as eight with the same context would."""
    model = fit_cost_model(points(), graphs=LADDER)
    engine = SimulatedEngine(model, kv_tokens=1 << 16, graphs=LADDER)
    heard = Records()
    engine.subscribe(heard)
    for i in range(5):
        engine.submit(range(1000 * i, 1000 * i + 40), SamplingParams(max_tokens=20))
    engine.run()
    alone = [(StepFeatures.of(step), step.duration) for step in heard.steps if step.decodes == 5 and not step.chunks]
    assert len(alone) > 10 and engine.facts.graphs == LADDER
    host = model.facts.coefficients["decode_s"]
    for step, seconds in alone:
        assert seconds == pytest.approx(model.predict(step._replace(decodes=8)) - 3 * host, rel=1e-9)


def test_a_profile_keeps_the_ladder_and_one_without_it_reads_as_before(tmp_path: Path) -> None:
    model = fit_cost_model(points(), graphs=LADDER)
    save_profile(full_profile(cost_model=model.facts), tmp_path / "p.yaml")
    read = load_profile(tmp_path / "p.yaml")
    assert read.cost_model == model.facts
    assert serving_cost(read).predict(StepFeatures(65, 9000, 0, 0, 0)) == model.serving().predict(
        StepFeatures(65, 9000, 0, 0, 0)
    )
    assert Scenario.of(read).start().facts.graphs == LADDER
    save_profile(full_profile(), tmp_path / "old.yaml")
    assert "graph_sizes" not in (tmp_path / "old.yaml").read_text(), "versions that know of none read it"
    old = load_profile(tmp_path / "old.yaml")
    assert old.cost_model is not None and old.cost_model.graphs == NO_GRAPHS
    assert cost_name(model) != cost_name(CostModel(model.facts.model_copy(update={"graph_sizes": ()})))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[4, 2]", "cost_model.graph_sizes are 4, 2; each must be above the one before"),
        ("[0]", "cost_model.graph_sizes.0 is 0; it must be at least 1"),
        ("[99999999]", "cost_model.graph_sizes.0 is 99999999; it must be at most 65536"),
    ],
)
def test_a_ladder_that_is_none_is_refused_by_name(tmp_path: Path, written: str, said: str) -> None:
    path = tmp_path / "p.yaml"
    save_profile(full_profile(), path)
    text = path.read_text()
    path.write_text(text.replace("\ncost_model:\n", f"\ncost_model:\n  graph_sizes: {written}\n"))
    with pytest.raises(InputError) as refused:
        load_profile(path)
    assert said in str(refused.value)


def test_points_are_counted_as_they_were_made() -> None:
    """What is padded is what the model makes of a step, not what was measured of it."""
    assert features_of(points()[1]).decodes == steps(150, seed=4)[1].decodes
