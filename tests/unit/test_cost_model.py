"""The cost model: hardware of several families is recovered through noise and stalls, and predictions keep their shape."""

from __future__ import annotations

import math
import pickle
import random
import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from autotune.cost import fit as fitting
from autotune.cost.model import CostModel, fit_cost_model
from autotune.cost.shape import Shape
from autotune.profile.parts import CostFacts, StepPoint
from runtime.step_model import TERMS, StepFeatures
from tests.tiers import slow_but_for

pytestmark = pytest.mark.unit

Hardware = Callable[[StepFeatures], float]


def roofline(step: StepFeatures, combine: Callable[..., float], *, moe: bool) -> float:
    """The simulated GPUs of docs/how-to/control.md: an 8B dense model, or 30B with 8 of 128 experts."""
    tokens = step.decodes + step.prefill_tokens
    weights = 3e9 + 57e9 * (1 - (1 - 8 / 128) ** tokens) if moe else 15e9
    memory = (weights + 131072 * (step.decode_context + step.prefill_context)) / 3.84e12
    compute = ((6.6e9 if moe else 16e9) * tokens + 524288 * (step.decode_context + step.prefill_attention)) / 643e12
    return 0.75e-3 + combine(memory, compute)


def plateaus(step: StepFeatures) -> float:
    """A CPU whose products cost the same for up to 16 rows, half as much a row up to 64, and all of it beyond."""
    tokens = step.decodes + step.prefill_tokens
    rows = 16 + max(0, min(tokens, 64) - 16) / 2 + max(0, tokens - 64)
    return 2e-3 + 4e-4 * rows + 3e-7 * (step.decode_context + step.prefill_context) + 2e-8 * step.prefill_attention


FAMILIES: dict[str, Hardware] = {
    "max": lambda s: roofline(s, max, moe=False),
    "sum": lambda s: roofline(s, lambda m, c: m + c, moe=False),
    "max+experts": lambda s: roofline(s, max, moe=True),
    "sum+experts": lambda s: roofline(s, lambda m, c: m + c, moe=True),
}


def features(decodes: int, context: int, prefill: int, before: int = 0) -> StepFeatures:
    """``context`` of each decode; one chunk behind ``before`` computed tokens."""
    pairs = prefill * before + prefill * (prefill + 1) // 2
    return StepFeatures(
        decodes, decodes * context, prefill, before + prefill if prefill else 0, pairs, int(prefill > 0)
    )


def plan() -> list[tuple[str, StepFeatures]]:
    steps = [("decode", features(d, c, 0)) for d, c in product((1, 2, 4, 8, 16, 32, 64, 128, 256), (64, 512, 2048))]
    for prefill in (16, 64, 128, 256, 512, 1024, 2048, 4096):
        steps += [("prefill", features(0, 0, prefill)), ("prefix", features(0, 0, prefill, 2048))]
        steps += [("mixed", features(d, c, prefill)) for d, c in product((8, 64, 256), (128, 1024))]
    return steps


def measured(hardware: Hardware, seed: int = 0, *, noise: float = 0.03, stalls: float = 0.03) -> list[StepPoint]:
    """Each step of the plan five times, with noise and stalls, summed up as the calibration does."""
    rng = random.Random(seed)
    points = []
    for region, step in plan():
        runs = [hardware(step) * rng.gauss(1, noise) * (5 if rng.random() < stalls else 1) for _ in range(5)]
        low, middle, high = statistics.quantiles(runs, n=4)
        points.append(
            StepPoint(region=region, **step._asdict(), seconds=middle, spread=(high - low) / middle, repeats=5)
        )
    return points


def unseen(count: int = 500) -> list[StepFeatures]:
    """Steps within the plan's range, not of it."""
    rng = random.Random(7)
    steps = []
    while len(steps) < count:
        step = features(rng.randint(0, 256), rng.randint(32, 2500), rng.choice([0, rng.randint(1, 4096)]))
        steps += [step] if step.decodes + step.prefill_tokens else []
    return steps


def worst(model: CostModel, hardware: Hardware) -> tuple[float, float]:
    """(median, 99th percentile) of the relative error on unseen steps, against the hardware without its noise."""
    errors = sorted(abs(model.predict(step) / hardware(step) - 1) for step in unseen())
    return errors[len(errors) // 2], errors[int(0.99 * len(errors))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", slow_but_for((0,), (0, 1)))
def test_the_family_of_the_hardware_is_found_through_noise_and_stalls(family: str, seed: int) -> None:
    hardware = FAMILIES[family]
    model = fit_cost_model(measured(hardware, seed), seconds=12.5)
    assert model.facts.family == family
    middle, tail = worst(model, hardware)
    assert middle < 0.015 and tail < 0.04
    assert model.facts.error < 0.025  # the medians' own noise is in it
    assert model.facts.points == len(plan()) and model.facts.seconds == 12.5
    assert {r.region: r.points for r in model.facts.regions} == {"decode": 27, "prefill": 8, "prefix": 8, "mixed": 48}
    assert all(0 < r.median <= r.p90 for r in model.facts.regions)


@pytest.mark.parametrize("family", ["max", "sum"])
def test_points_that_do_not_belong_do_not_pull(family: str) -> None:
    """Every ninth point took three times as long in all of its repeats, so that its spread does not give it away."""
    hardware = FAMILIES[family]
    points = [
        point.model_copy(update={"seconds": 3 * point.seconds}) if at % 9 == 4 else point
        for at, point in enumerate(measured(hardware, noise=0.002, stalls=0.0))
    ]
    middle, tail = worst(fit_cost_model(points), hardware)
    assert middle < 0.01 and tail < 0.03


@pytest.mark.parametrize("seed", slow_but_for((0, 1), range(4)))
def test_on_hardware_that_adds_up_no_other_shape_wins_by_chance(seed: int) -> None:
    """Of these four seeds one makes experts cross-validate best, by a hair."""
    assert fit_cost_model(measured(FAMILIES["sum"], seed, noise=0.1)).facts.family == "sum"


def test_the_coefficients_are_those_of_the_hardware_within_their_covariance() -> None:
    facts = fit_cost_model(measured(FAMILIES["max"], noise=0.01)).facts
    deviation = dict(
        zip(facts.coefficients, (math.sqrt(row[i]) for i, row in enumerate(facts.covariance)), strict=True)
    )
    truth = {"weights_s": 15e9 / 3.84e12, "token_s@0": 16e9 / 643e12, "decode_kv_s": 131072 / 3.84e12}
    for name, value in truth.items():
        assert abs(facts.coefficients[name] - value) < 4 * deviation[name] + 0.01 * value, name
        assert 0 < deviation[name] < 0.2 * value


def test_steps_with_plateaus_get_segments() -> None:
    model = fit_cost_model(measured(plateaus))
    assert model.facts.family.endswith("+segments")
    middle, tail = worst(model, plateaus)
    assert middle < 0.02 and tail < 0.08
    assert abs(model.predict(features(16, 64, 0)) / model.predict(features(1, 1024, 0)) - 1) < 0.05  # the plateau


@pytest.mark.parametrize("family", [*FAMILIES, "plateaus"])
def test_no_coefficient_is_below_zero_and_more_work_never_takes_less(family: str) -> None:
    model = fit_cost_model(measured(FAMILIES.get(family, plateaus), seed=3, noise=0.1))
    assert min(model.facts.coefficients.values()) >= 0
    for step in unseen(100):
        for name in StepFeatures._fields:
            more = step._replace(**{name: 3 * getattr(step, name) + 5})
            assert model.predict(more) >= model.predict(step), (name, step)


@pytest.mark.parametrize("norm", ["sum", "norm2", "norm4", "max"])
def test_a_run_of_decodes_is_the_same_to_the_bit(norm: str) -> None:
    model = made(norm)
    for decodes, context, count in ((1, 17, 300), (37, 37 * 411, 200), (2000, 2000 * 3, 50)):
        alone = [model.predict(StepFeatures(decodes, context + decodes * i, 0, 0, 0)) for i in range(count)]
        assert model.predict_run(decodes, context, count) == alone
    assert model.predict_run(4, 100, 0) == []
    with pytest.raises(ValueError, match="decodes is 0"):
        model.predict_run(0, 0, 3)


def made(family: str, **changes: float) -> CostModel:
    values = {
        "overhead_s": 1e-3,
        "decode_s": 1e-6,
        "chunk_s": 2e-5,
        "weights_s": 4e-3,
        "decode_kv_s": 3e-8,
        "prefill_kv_s": 4e-8,
    }
    values |= {"token_s@0": 2.5e-5, "pair_s": 8e-10} | changes
    if family.startswith("sum"):
        del values["weights_s"]
    none = tuple(tuple(0.0 for _ in values) for _ in values)
    return CostModel(
        CostFacts(
            family=family,
            coefficients=values,
            covariance=none,
            points=1,
            seconds=1,
            error=0.0,
            regions=(),
            learner=None,
        )
    )


@pytest.mark.parametrize(("norm", "power"), [("sum", 1), ("norm2", 2), ("norm4", 4)])
def test_the_formula_is_the_one_that_is_documented(norm: str, power: int) -> None:
    step = features(40, 300, 200, 100)
    memory = (0 if norm == "sum" else 4e-3) + 3e-8 * step.decode_context + 4e-8 * step.prefill_context
    compute = 2.5e-5 * 240 + 8e-10 * (step.decode_context + step.prefill_attention)
    wanted = 1e-3 + 40e-6 + 2e-5 + (memory**power + compute**power) ** (1 / power)
    assert made(norm).predict(step) == pytest.approx(wanted, rel=1e-12)


def test_scaling_moves_each_group_alone() -> None:
    model = made("max")
    decode, prefill = features(1, 64, 0), features(0, 0, 4096)
    outside = 1e-3 + 1e-6
    slow = model.scaled(bandwidth=0.5)
    assert slow.predict(decode) - outside == pytest.approx(2 * (model.predict(decode) - outside))
    assert slow.predict(prefill) == model.predict(prefill)
    fast = model.scaled(compute=4.0)
    assert fast.predict(decode) == model.predict(decode)
    assert fast.predict(prefill) < model.predict(prefill) / 2
    both = model.scaled(compute=2, bandwidth=2, overhead=2)
    for step in unseen(50):
        assert both.predict(step) == pytest.approx(model.predict(step) / 2)
    for bad in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="bandwidth is"):
            model.scaled(bandwidth=bad)


@pytest.mark.parametrize("family", [*FAMILIES, "plateaus"])
def test_facts_give_back_the_same_model(family: str) -> None:
    model = fit_cost_model(measured(FAMILIES.get(family, plateaus)))
    read = CostModel(CostFacts.model_validate_json(model.facts.model_dump_json()))
    copied = pickle.loads(pickle.dumps(model))
    assert read.facts == copied.facts == model.facts
    for step in unseen(50):
        assert read.predict(step) == copied.predict(step) == model.predict(step)


def test_facts_that_are_none_are_refused() -> None:
    facts = made("max").facts
    for family, coefficients, words in (
        ("cubic", facts.coefficients, "family is 'cubic'"),
        ("norm3", facts.coefficients, "family is 'norm3'"),
        ("max+experts", facts.coefficients, "does not go with"),
        ("max", facts.coefficients | {"pair_s": -1.0}, "cost_model.coefficients.pair_s is -1; it must be"),
        ("max", {k: v for k, v in facts.coefficients.items() if k != "pair_s"}, "coefficients pair_s are missing"),
    ):
        with pytest.raises(ValueError, match=words):
            CostModel(facts.model_copy(update={"family": family, "coefficients": coefficients}))


def graphs(step: StepFeatures) -> float:
    """Decodes run in graphs; steps with prompts do not, and decodes attend there for longer."""
    prompts = step.prefill_tokens > 0
    return roofline(step, lambda m, c: m + c, moe=False) + prompts * (4e-3 + 2e-8 * step.decode_context)


def tiles(step: StepFeatures) -> float:
    """Products are computed by tiles of 128 rows; what is left of a tile costs as much as all of it."""
    rows = -(-(step.decodes + step.prefill_tokens) // 128) * 128
    return 5e-3 + 3e-5 * rows + 3e-8 * (step.decode_context + step.prefill_context) + 1e-9 * step.prefill_attention


def wide_tiles(step: StepFeatures) -> float:
    """Tiles of 256 rows whose empty rows cost more than others: as on an H200 in FP8, 264 tokens take longer than 512."""
    tokens = step.decodes + step.prefill_tokens
    empty = -tokens % 256 if tokens > 256 else 0
    attention = 3e-8 * (step.decode_context + step.prefill_context) + 1e-9 * step.prefill_attention
    return 5e-3 + 1.5e-5 * tokens + 3e-5 * empty + attention


def odd() -> list[StepFeatures]:
    """Steps whose tokens fill no tiles."""
    rng = random.Random(3)
    return [
        features(rng.randint(1, 250), rng.randint(32, 2500), rng.choice([0, rng.randint(1, 900)])) for _ in range(150)
    ]


@pytest.mark.parametrize(
    ("hardware", "named"),
    [
        (graphs, {"prompt_s": 4e-3, "mixed_kv_s": 2e-8}),
        (tiles, {"padding128_s": 3e-5}),
        (wide_tiles, {"padding256_s": 3e-5}),
    ],
    ids=["graphs", "tiles", "wide tiles"],
)
def test_what_graphs_and_tiles_cost_is_told_from_the_rest(
    hardware: Hardware, named: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(2)
    points = [
        StepPoint(
            region="mixed" if s.chunks else "decode", **s._asdict(), seconds=hardware(s) * rng.gauss(1, 0.01), spread=0.02,
            repeats=4,
        )
        for s in odd()
    ]  # fmt: skip
    model = fit_cost_model(points)
    found = dict(model.facts.coefficients)
    found["prompt_s"] += found["chunk_s"]  # the same where no step holds two chunks
    for name, value in named.items():
        assert found[name] == pytest.approx(value, rel=0.15), name
    middle, tail = worst(model, hardware)
    assert middle < 0.015 and tail < 0.06
    for name in ("prompts", "mixed_context", "padding_128", "padding_256"):
        monkeypatch.delitem(TERMS, name)
    assert worst(fit_cost_model(points), hardware)[1] > 2 * tail


def test_terms_of_an_earlier_version_are_read_and_not_fitted() -> None:
    found = fit_cost_model(measured(FAMILIES["sum"])).facts
    assert not {"tile128_s", "tile256_s"} & found.coefficients.keys()
    values = {name: value for name, value in found.coefficients.items() if not name.startswith("padding")}
    zeros = tuple((0.0,) * (len(values) + 2) for _ in range(len(values) + 2))
    update = {"coefficients": values | {"tile128_s": 2e-5, "tile256_s": 1e-5}, "covariance": zeros, "planned": None}
    plain, former = CostModel(found), CostModel(found.model_copy(update=update))
    padded = found.coefficients["padding128_s"], found.coefficients["padding256_s"]
    for tokens in (1, 128, 129, 256, 257, 1000):
        step = features(0, 0, tokens)
        more = 2e-5 * ((tokens - 1) // 128 * 128) + 1e-5 * ((tokens - 1) // 256 * 256)
        less = sum(
            each * (-tokens % tile if tokens > tile else 0) for each, tile in zip(padded, (128, 256), strict=True)
        )
        assert former.predict(step) - plain.predict(step) == pytest.approx(more - less)


def test_a_shape_that_is_wrong_in_one_region_is_not_taken() -> None:
    """Beside a hundred mixed steps ten of decodes count for little in a mean over all."""
    data = fitting.PointArrays(np.ones((110, 7)), np.ones(110), np.ones(110), np.zeros(110))
    regions = ["mixed"] * 100 + ["decode"] * 10
    plain, other = Shape(1.0), Shape(4.0)

    def losses(mixed: float, decode: float) -> Any:
        return np.array([mixed] * 100 + [decode] * 10)

    for mixed, decode, taken in ((0.03, 0.03, other), (0.03, 0.04, other), (0.03, 0.06, plain), (0.049, 0.03, other)):
        found = fitting._chosen({plain: losses(0.05, 0.03), other: losses(mixed, decode)}, data, regions)
        assert found == taken, (mixed, decode)


def test_far_beyond_the_measured_steps_the_uncertainty_grows() -> None:
    points = [p for p in measured(FAMILIES["sum"]) if p.decodes <= 8 and p.prefill_tokens <= 512]
    model = fit_cost_model(points)
    near, far = features(8, 512, 0), features(256, 2048, 0)
    known = model.facts.region_error("decode")
    assert known <= model.uncertainty(near) < 2 * known + 0.01
    assert model.uncertainty(far) > 2 * model.uncertainty(near)
    off = abs(model.predict(far) / FAMILIES["sum"](far) - 1)
    assert off < 4 * model.uncertainty(far)
    prefix, fresh = features(0, 0, 128, 2048), features(0, 0, 128)
    assert model.uncertainty(prefix) >= model.facts.region_error("prefix")
    assert model.uncertainty(fresh) >= model.facts.region_error("prefill")
    assert made("max").uncertainty(near) == 0.0


def test_points_that_tell_nothing_are_refused() -> None:
    points = measured(FAMILIES["max"])
    with pytest.raises(ValueError, match="3 points are too few"):
        fit_cost_model(points[:3])
    with pytest.raises(ValueError, match="it must be above 0"):
        fit_cost_model([*points, points[0].model_copy(update={"seconds": 0.0})])


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_machine_s_coefficients_stay_within_their_bounds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of 0.1 s beside contexts as short as they are: of the points alone, a KV entry takes the time of its token."""
    rng, points = random.Random(seed), list[StepPoint]()
    for _ in range(10):
        decodes = rng.choice([0, 1, 2, 4])
        prefill = rng.choice([0, 0, 8, 48]) if decodes else rng.choice([16, 48, 64])
        step = features(decodes, rng.randint(1, 100), prefill)
        seconds = 0.5 + 0.1 * (decodes + step.prefill_tokens) + 1e-6 * (step.decode_context + step.prefill_context)
        seconds *= rng.lognormvariate(0, 0.1)
        region = "mixed" if decodes and step.prefill_tokens else "decode" if decodes else "prefill"
        points.append(StepPoint(region=region, **step._asdict(), seconds=seconds, spread=0.02, repeats=3))
    found = fit_cost_model(points).facts
    most = Shape.of(found.family, found.coefficients).most
    assert all(0 <= value <= most[name] for name, value in found.coefficients.items() if name in most)
    assert any(value == most[name] for name, value in found.coefficients.items() if name in most)
    assert found.error < 0.2, "the tokens have the time back"

    within = measured(FAMILIES["sum"])
    monkeypatch.setattr(fitting, "lsq_linear", None)
    fitting._fit.cache_clear()
    assert fit_cost_model(within).facts.error < 0.03, "where no bound is met, none is asked for"
