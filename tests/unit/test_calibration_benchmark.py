"""The calibration's benchmark: it measures what it says, and a calibration knows a GPU as well as it claims."""

from __future__ import annotations

import json

import pytest

from benchmarks.calibration import LIMITS, REGIONS, Errors, errors, main, off_by, random_steps
from benchmarks.gpu_truth import load

pytestmark = pytest.mark.unit


def test_random_steps_fill_the_pool_and_stay_within_the_ceilings() -> None:
    truth = load("a100-llama3-8b")
    for region in REGIONS:
        steps = random_steps(truth, region, 1)
        assert len(steps) == 500 and steps == random_steps(truth, region, 1) != random_steps(truth, region, 2)
        held = [s.context + sum(map(sum, s.chunks)) for s in steps]
        assert max(held) <= 0.9 * truth.kv_tokens
        assert max(held) > 0.15 * truth.kv_tokens or region == "prefill"
        assert all(s.decodes + len(s.chunks) <= LIMITS.max_batch_size for s in steps)
        assert all(s.features.decodes + s.features.prefill_tokens <= LIMITS.token_budget for s in steps)
        assert {bool(s.decodes) for s in steps} == {region != "prefill"}
        assert {bool(s.chunks) for s in steps} == {region != "decode"}


def test_errors_are_relative_to_the_truth() -> None:
    truth = load("a100-llama3-8b")

    class Half:
        def predict(self, step: object) -> float:
            return truth.predict(step) / 2  # type: ignore[arg-type]

    found = errors(Half(), truth, random_steps(truth, "decode", 1), expected=0.25)
    assert found == (pytest.approx(0.5), pytest.approx(0.5), 0.25)
    assert found.expected_over_true == pytest.approx(0.5) and off_by(found.expected_over_true) == pytest.approx(2)
    assert off_by(Errors(0.0, 0.0, 0.1).expected_over_true) == float("inf")


@pytest.mark.parametrize("variant", [pytest.param("base", marks=pytest.mark.slow), "all"])
@pytest.mark.slow
def test_a_calibration_of_the_default_budget_knows_a_gpu(variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--truth", "h100-llama3-8b", "--variant", variant]) == 0
    out = capsys.readouterr().out.splitlines()
    figures = json.loads(out[-1])
    tail = "" if variant == "base" else f"_{variant}"
    assert figures[f"median_worst_region{tail}"] <= 0.04
    assert figures[f"p90_worst_region{tail}"] <= 0.12
    assert 1 <= figures[f"told_vs_true{tail}"] <= 1.6
    assert figures[f"learner_median{tail}"] <= 0.06 and figures[f"learner_p90{tail}"] <= 0.24
    assert figures[f"calibration_s{tail}"] < 1.2 * 28.8
    assert any(line.startswith("h100-llama3-8b") for line in out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--truth", "h100"], "error: --truth is h100; it must be one of a100-llama2-7b"),
        (["--variant", "some"], "error: --variant is some; it must be one of base, all"),
        (["--budget", "soon"], "error: --budget"),
    ],
)
def test_what_it_is_asked_for_wrongly_is_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
