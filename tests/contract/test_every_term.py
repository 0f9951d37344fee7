"""Every term of a step's time is one row of a table: whoever predicts says what it says, and a further row reaches them all.

What runs for every step has today's rows written out; here each is held against its row. And a term that does not exist,
:func:`padding`, goes through fit, learner, simulator, calibration and profile with nothing but its row.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.cost.facts import CostFacts, LearnerFacts, StepPoint
from autotune.cost.model import WRITTEN_OUT, CostModel, fit_cost_model, undetermined_terms
from autotune.cost.shape import EXPERT_TOKENS, Shape
from autotune.profile import dump_profile, load_profile, save_profile
from autotune.profile.serving import serving_cost, serving_knowledge
from autotune.simulate import SimulatedEngine
from runtime.records import StepRecord
from runtime.request import SamplingParams
from runtime.step_model import (
    NO_GRAPHS,
    TERMS,
    Knowledge,
    Piece,
    StepFeatures,
    StepGraphs,
    StepLearner,
    Term,
    learned_terms,
)
from tests.building import step_points
from tests.sample_profile import full_profile, sample_cost_model
from tests.unit.simulated_cases import Everything

ROOT = Path(__file__).parents[2]
PIECES: tuple[Piece, ...] = ("decode", "mixed")
SHAPES = [
    Shape(norm, knots, experts, graphs)
    for norm in (1.0, 2.0, 4.0, math.inf)
    for knots, experts in (((0,), None), ((0, 16, 64), None), ((0,), 8.0))
    for graphs in (
        NO_GRAPHS,
        StepGraphs((1, 2, 4, 30, 100, 150)),
        StepGraphs((1, 2, 4, 30, 100, 150), (16, 128, 1000, 1300), 180),
    )
]


def steps(count: int = 60, seed: int = 1) -> list[StepFeatures]:
    """Decodes of any number, with prompts in every third step, some behind computed tokens, and drafts in every fifth."""
    rng, made = random.Random(seed), []
    for i in range(count):
        decodes, tokens = rng.randint(1, 200), rng.randint(1, 2048) if i % 3 == 0 else 0
        before, chunks = (rng.randint(0, 3000), rng.randint(1, 4)) if tokens else (0, 0)
        pairs = tokens * before + tokens * (tokens + 1) // 2
        context = decodes * rng.randint(20, 2000)
        drafted = decodes * (i % 4) if i % 5 == 0 else 0
        made.append(StepFeatures(decodes, context, tokens, before + tokens, pairs, chunks, drafted))
    return made


def facts(shape: Shape, values: dict[str, float]) -> CostFacts:
    values = {name: 0.0 for name in shape.names} | values
    if shape.experts:
        values[EXPERT_TOKENS] = shape.experts
    return sample_cost_model(
        family=shape.family, coefficients=values, covariance=tuple((0.0,) * len(values) for _ in values),
        graphs=shape.graphs,
    )  # fmt: skip


# -- counts: of a plan, of a record, of a measured point ------------------------------------------------------------------


def test_every_count_is_in_the_record_of_a_step_and_in_a_measured_point() -> None:
    for name in StepFeatures._fields:
        assert name in StepRecord._fields
        assert StepPoint.model_fields[name].description, f"StepPoint.{name} says nothing of what it counts"


class Predictor:
    """Keeps what a simulator has it predict of each step, before it is made."""

    def __init__(self) -> None:
        self.steps: set[StepFeatures] = set()

    def predict(self, step: StepFeatures) -> float:
        self.steps.add(step)
        return 1e-3


def served(cost: Any, *, fast_forward: bool = True) -> Everything:
    """The steps of a few prompts of unlike lengths, in chunks, and of their answers."""
    engine = SimulatedEngine(cost, kv_tokens=1 << 16, fast_forward=fast_forward)
    engine.set_knobs(engine.knobs.with_(token_budget=256, chunk_size=96))
    heard = Everything()
    engine.subscribe(heard)
    for i, length in enumerate((40, 333, 1000, 7, 128)):
        engine.submit(range(1000 * i, 1000 * i + length), SamplingParams(max_tokens=20 + i))
    engine.run()
    return heard


def test_a_plan_and_the_record_of_its_step_are_counted_alike() -> None:
    predictor = Predictor()
    records = served(predictor).steps
    assert any(r.chunks > 1 for r in records) and any(r.prefill_context > r.prefill_tokens for r in records)
    assert {StepFeatures.of(record) for record in records} <= predictor.steps


# -- what is written out says what the table says --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: s.family + "+graphs" * bool(s.graphs) + "+prompts" * bool(s.graphs.prompts)
)
def test_the_cost_model_says_what_the_table_says_row_by_row(shape: Shape) -> None:
    counted = steps()
    columns = shape.columns(np.array(counted, dtype=float))
    size = dict(zip(shape.names, 5e-3 / columns.max(axis=0), strict=True))
    for values in [*({name: each} for name, each in size.items()), size]:
        model = CostModel(facts(shape, values))
        seconds, _ = shape.times(columns, np.array([values.get(name, 0.0) for name in shape.names]))
        assert seconds.max() > 1e-3, "a row that nothing of these steps has"
        assert [model.predict(step) for step in counted] == pytest.approx(seconds.tolist(), rel=1e-12), values


def test_only_rows_that_are_written_out_are_no_straight_lines() -> None:
    assert set(TERMS) >= WRITTEN_OUT
    assert {name for name, term in TERMS.items() if term.curve != "linear"} <= WRITTEN_OUT


@pytest.mark.parametrize("piece", PIECES)
def test_the_learner_says_what_the_table_says_row_by_row(piece: Piece) -> None:
    terms = learned_terms(piece)
    for at, term in enumerate(terms):
        rows = {p: [0.0] * len(learned_terms(p)) for p in PIECES}
        rows[piece][at] = 0.7
        learner = StepLearner.warm_start(knowledge(rows["decode"], rows["mixed"]))
        for step in steps():
            if piece == "mixed" or not step.prefill_tokens:
                wanted = 2.0 * 0.7 * term.amount(step) / term.typical
                assert learner.predict(step) == pytest.approx(wanted, rel=1e-12), term.name


def knowledge(decode: list[float], mixed: list[float]) -> Knowledge:
    return Knowledge(2.0, decode, eye(len(decode)), mixed, eye(len(mixed)))


def eye(size: int) -> list[list[float]]:
    return [[0.01 * (i == j) for j in range(size)] for i in range(size)]


def test_what_every_profile_holds_comes_first() -> None:
    """A row of the learner is read by its place, and what serving adds goes to the first."""
    for piece in PIECES:
        terms = learned_terms(piece)
        assert terms[0].name == "step"
        assert [term.required for term in terms] == sorted((term.required for term in terms), reverse=True)


def test_every_coefficient_is_described() -> None:
    text = (ROOT / "docs" / "concepts" / "cost-model.md").read_text(encoding="utf-8")
    for term in TERMS.values():
        assert term.unit and term.amount(steps(1)[0]) >= 0
        assert f"{term.coefficient}" in text, f"docs/concepts/cost-model.md says nothing of {term.coefficient}"


# -- a term that does not exist --------------------------------------------------------------------------------------------


def padding(step: StepFeatures) -> Any:
    """Rows that a ladder of batch sizes adds: up to the next power of two."""
    rows = np.maximum(step.decodes, 1)
    return 2.0 ** np.ceil(np.log2(rows)) - rows


PADDING = Term("padding", "rows", padding, "padding_s", "compute", most=1.0, pieces=("decode", "mixed"), typical=64)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table with one row more."""
    monkeypatch.setitem(TERMS, PADDING.name, PADDING)


def hardware(step: StepFeatures) -> float:
    """Rows are computed whether or not anybody asked for them."""
    rows = step.decodes + float(padding(step)) * bool(step.decodes) + step.drafted + step.prefill_tokens
    return 2e-3 + 2e-4 * rows + 5e-8 * (step.decode_context + step.prefill_context) + 1e-8 * step.prefill_attention


def points() -> list[StepPoint]:
    return step_points(hardware, steps(150, seed=4))


def off(predict: Callable[[StepFeatures], float]) -> float:
    """The median relative error on steps that nobody has seen."""
    return statistics.median(abs(predict(step) / hardware(step) - 1) for step in steps(200, seed=9))


def learned() -> StepLearner:
    learner = StepLearner()
    for step in steps(900, seed=6):
        learner.observe(step, hardware(step))
    return learner


def test_a_row_more_is_fitted_and_scales_with_its_group(padded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fit_cost_model(points())
    assert model.facts.coefficients["padding_s"] == pytest.approx(2e-4, rel=0.1)
    assert off(model.predict) < 0.01
    fast, step = model.scaled(compute=2.0), StepFeatures(65, 65 * 300, 0, 0, 0)
    assert fast.facts.coefficients["padding_s"] == model.facts.coefficients["padding_s"] / 2
    assert fast.predict(step) < 0.65 * model.predict(step)
    monkeypatch.delitem(TERMS, "padding")
    assert off(fit_cost_model(points()).predict) > 0.02, "without the row it cannot be told"


def test_a_row_more_counts_in_the_steps_in_which_it_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of steps that run launch by launch costs nothing in those that are recorded, for whoever fits and whoever predicts."""
    row = Term("launches", "chunks", lambda s: 1.0 * s.chunks, "launch_s", unrecorded_only=True)
    monkeypatch.setitem(TERMS, row.name, row)
    shape = replace(SHAPES[-1])  # what it keeps of its rows is of those of now
    assert shape.graphs.prompts
    values = {name: 1e-5 for name in shape.names}
    model = CostModel(facts(shape, values))
    counted = [*steps(90, seed=3), StepFeatures(8, 800, 64, 64, 64 * 65 // 2, 1)]
    columns = shape.columns(np.array(counted, dtype=float))
    seconds, _ = shape.times(columns, np.array([values[name] for name in shape.names]))
    assert [model.predict(step) for step in counted] == pytest.approx(list(seconds))
    launched = columns[:, shape.names.index("launch_s")]
    assert (launched > 0).any() and launched[-1] == 0


def test_a_row_more_is_learned_online_and_solved_for(padded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learned()
    assert off(learner.predict) < 0.02
    for decodes in (64, 65):
        step = StepFeatures(decodes, decodes * 300, 500, 500, 500 * 501 // 2, 1)
        assert learner.most_prefill(decodes, decodes * 300, learner.predict(step)) == pytest.approx(500, abs=1)
    in_progress = [(1000, 64), (0, 300)]
    step = StepFeatures(65, 65 * 300, 264, 1064 + 200, 64 * 1000 + 64 * 65 // 2 + 200 * 201 // 2, 2)
    assert learner.most_prefill(65, 65 * 300, learner.predict(step), in_progress) == pytest.approx(264, abs=1)
    assert learner.most_prefill(64, 64 * 300, 1e-4) < 0 and learner.most_prefill(1, 300, 1e9) == math.inf
    monkeypatch.delitem(TERMS, "padding")
    assert off(learned().predict) > 0.05, "without the row it cannot be told"


@pytest.mark.parametrize("family", ["sum", "norm2", "norm4", "max"])
def test_a_row_more_is_simulated_alike_step_by_step_and_at_once(padded: None, family: str) -> None:
    norm = {"sum": 1.0, "max": math.inf}.get(family) or float(family[-1])
    shape = Shape(norm)
    values = {name: 3e-8 for name in shape.names} | {"overhead_s": 1e-3, "token_s@0": 2e-4, "padding_s": 3e-4}
    model = CostModel(facts(shape, values))
    at_once, one_by_one = served(model), served(model, fast_forward=False)
    assert at_once.runs > 0 == one_by_one.runs
    alone = one_by_one.steps
    assert [(r.start, r.end) for r in at_once.steps] == [(r.start, r.end) for r in alone]
    columns = shape.columns(np.array([StepFeatures.of(r) for r in alone], dtype=float))
    seconds, _ = shape.times(columns, np.array([values[name] for name in shape.names]))
    assert [r.duration for r in alone] == pytest.approx(seconds.tolist(), rel=1e-9)
    assert any(r.decodes == 5 for r in alone), "five rows are padded to eight"


def test_a_row_more_is_kept_in_a_profile(padded: None, tmp_path: Path) -> None:
    model = fit_cost_model(points())
    assert model.facts.learner is not None and len(model.facts.learner.decode) == 4
    save_profile(full_profile(cost_model=model.facts), tmp_path / "p.yaml")
    read = load_profile(tmp_path / "p.yaml")
    assert read.cost_model == model.facts
    known = serving_knowledge(read)
    assert known is not None
    again, learner = serving_cost(read), StepLearner.warm_start(known)
    for step in steps():
        assert again.predict(step) == model.predict(step)
    assert off(learner.predict) < 0.03


def test_a_profile_written_before_the_row_is_read_and_says_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.yaml"
    save_profile(full_profile(), path)
    before, known = load_profile(path), serving_knowledge(load_profile(path))
    assert before.cost_model is not None and known is not None
    said = [serving_cost(before).predict(step) for step in steps()]
    warm = [StepLearner.warm_start(known).predict(step) for step in steps()]
    monkeypatch.setitem(TERMS, PADDING.name, PADDING)
    profile = load_profile(path)
    assert dump_profile(profile) == dump_profile(before)
    assert [serving_cost(profile).predict(step) for step in steps()] == said
    known = serving_knowledge(profile)
    assert known is not None
    learner = StepLearner.warm_start(known)
    assert [learner.predict(step) for step in steps()] == pytest.approx(warm, rel=1e-12)
    for step in steps(900, seed=6):
        learner.observe(step, hardware(step))
    assert off(learner.predict) < 0.04, "and it learns the new one"


def test_a_profile_with_a_row_that_this_version_lacks_is_refused_by_name() -> None:
    values = sample_cost_model().coefficients
    with pytest.raises(ValueError, match="has no coefficients padding_s"):
        facts(Shape(1.0), {**values, "padding_s": 1e-4})
    with pytest.raises(ValueError, match="decode has 4 coefficients; this version knows 3"):
        LearnerFacts(
            unit_s=1, decode=(1.0,) * 4, decode_covariance=tuple(map(tuple, eye(4))), mixed=(1.0,) * 5,
            mixed_covariance=tuple(map(tuple, eye(5))),
        )  # fmt: skip


def test_a_row_that_no_measured_step_tells_apart_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibration asks (tests/unit/test_calibration_steps.py), and a profile then says so."""
    assert undetermined_terms(points()) == []
    monkeypatch.setitem(TERMS, PADDING.name, PADDING)
    assert undetermined_terms(points()) == []
    assert undetermined_terms([p for p in points() if p.decodes == points()[0].decodes]) != []
    never = Term("adapters", "adapters", lambda s: 0.0 * s.decodes, "adapter_s")
    monkeypatch.setitem(TERMS, never.name, never)
    assert undetermined_terms(points()) == ["adapters"]
