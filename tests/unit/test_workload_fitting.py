"""The fit recovers what made the data, the presets are what was fitted, and the comparison tells good models from bad ones.

The Azure traces themselves are not in the repository: ``python -m benchmarks.trace_fit`` compares with them.
"""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest
from scipy.stats import spearmanr

from autotune.workload.fitted import Fitted, dumps, from_data, load_fitted
from autotune.workload.processes import Gamma, MarkovModulated
from benchmarks.trace_fit import __main__ as trace_fit
from benchmarks.trace_fit.fitting import fit_gamma, fit_lengths, fit_process, log_likelihood, quantile_levels
from benchmarks.trace_fit.goodness import compare_lengths, compare_times, dispersion

TRUTH = MarkovModulated((0.05, 3.0), (1.0, 0.6), ((0.97, 0.03), (0.5, 0.5)))


def gaps_of(process, n: int, seed: int = 0):
    return np.array(list(islice(process.gaps(np.random.default_rng(seed)), n)))


@pytest.mark.slow
def test_fit_recovers_a_known_process() -> None:
    gaps = gaps_of(TRUTH, 4000)
    fit = fit_process(gaps, 2)
    # 4000 gaps, of which some 230 in the slow state: parameters to about 1/√230 of themselves, times three.
    assert fit.process.means == pytest.approx(TRUTH.means, rel=0.2)
    assert fit.process.shapes == pytest.approx(TRUTH.shapes, rel=0.2)
    assert np.array(fit.process.transition) == pytest.approx(np.array(TRUTH.transition), abs=0.1)
    assert fit.process.rate == pytest.approx(1 / gaps.mean(), rel=0.05)
    assert fit.log_likelihood >= log_likelihood(TRUTH, gaps) - 1  # the likeliest cannot be less likely than the truth


@pytest.mark.slow
def test_more_states_are_never_much_less_likely_and_one_is_the_gamma_fit() -> None:
    gaps = gaps_of(Gamma(2.0, 1.5), 1500)
    one, two = fit_process(gaps, 1), fit_process(gaps, 2)
    assert one.process.means[0] == pytest.approx(gaps.mean())
    assert one.process.shapes[0] == pytest.approx(1 / 1.5**2, rel=0.15)
    assert two.log_likelihood > one.log_likelihood - 1


@pytest.mark.slow
def test_the_fitted_rate_is_the_traces_even_when_load_only_rises() -> None:
    """One slow ramp: a free chain would move up and stay there; the reversible one keeps each level's share."""
    rng = np.random.default_rng(0)
    gaps = rng.exponential(size=3000) / np.linspace(1.0, 4.0, 3000)
    fit = fit_process(gaps, 3)
    assert fit.process.rate == pytest.approx(1 / gaps.mean(), rel=0.05)


def test_too_few_gaps() -> None:
    with pytest.raises(ValueError, match="30 gaps cannot fit 2 states; give at least 40"):
        fit_process(np.ones(30), 2)


def test_ties_do_not_break_the_fit() -> None:
    gaps = np.where(np.arange(600) % 3 == 0, 0.0, gaps_of(Gamma(1.0, 1.0), 600))
    assert np.isfinite(fit_process(gaps, 2).log_likelihood)


def test_quantile_levels_are_finer_at_the_top() -> None:
    levels = quantile_levels(32)
    assert levels[0] == 0 and levels[-1] == 1 and (np.diff(levels) > 0).all()
    assert np.diff(levels)[-1] < 0.1 * np.diff(levels)[0]


def peaked(n: int, seed: int):
    """Lengths like chat traffic: middle prompts have long answers. Rank correlation near 0."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, 3001, n)
    outputs = np.where(abs(prompts - 1500) < 500, rng.integers(300, 500, n), rng.integers(10, 90, n))
    return prompts, outputs


def test_banded_lengths_see_what_a_gaussian_copula_cannot() -> None:
    train, test = peaked(6000, 1), peaked(6000, 2)
    assert abs(spearmanr(*train).statistic) < 0.05
    figures = compare_lengths(train, test)
    assert figures["banded"]["prompt"] < 0.03 and figures["banded"]["output"] < 0.04
    assert figures["banded"]["output_in_band"] < 0.2 < 0.3 < figures["gaussian_copula"]["output_in_band"]
    assert abs(figures["banded"]["quantiles"]["prompt"][0]) < 0.05


def test_times_compared() -> None:
    train, test = gaps_of(TRUTH, 3000, 1), gaps_of(TRUTH, 3000, 2)
    figures = compare_times(TRUTH, test, train)
    assert figures["nats_per_gap_over_poisson"] > 0.5
    assert figures["ks"]["fitted"] < 0.04 < figures["ks"]["poisson"]
    low, middle, high = figures["dispersion"]["10s"]["fitted"]
    assert low < middle < high and low < dispersion(test, 10.0) * 1.3 and high > dispersion(test, 10.0) * 0.7


def test_the_gamma_beside_it_is_fitted_as_its_states_are_and_the_usual_one_is_a_column_of_its_own() -> None:
    train, test = gaps_of(TRUTH, 3000, 1), gaps_of(TRUTH, 3000, 2)
    alone = fit_process(train, 1).process
    gamma = fit_gamma(train)
    assert (1 / gamma.rate, gamma.cv**-2) == pytest.approx((alone.means[0], alone.shapes[0]))
    figures = compare_times(TRUTH, test, train)
    expected = (log_likelihood(TRUTH, test) - log_likelihood(alone, test)) / len(test)
    assert figures["nats_per_gap_over_gamma"] == pytest.approx(expected)
    assert 0 < figures["nats_per_gap_over_gamma"] < figures["nats_per_gap_over_gamma_by_moments"]
    assert figures["ks"]["gamma"] < figures["ks"]["gamma_by_moments"]
    assert figures["cv"]["gamma_by_moments"] == pytest.approx(train.std() / train.mean(), rel=0.1)


@pytest.mark.parametrize(
    ("name", "requests", "seconds", "prompt_p50", "output_p50", "cv"),
    [
        ("azure-conv", 19366, 3501.7, 1020, 129, (1.0, 1.2)),
        ("azure-code", 8819, 3435.9, 1469, 13, (9, 17)),
    ],
)
def test_shipped_presets_are_near_the_trace(name, requests, seconds, prompt_p50, output_p50, cv) -> None:
    """Medians and rates of the published traces, counted from the files themselves."""
    fitted = load_fitted(name)
    assert fitted.provenance["requests"] == requests and "CC-BY-4.0" in str(fitted.provenance["licence"])
    assert fitted.process.rate == pytest.approx(requests / seconds, rel=0.02)
    arrivals = list(islice(fitted.source().generate((0, 0)), 20_000))
    assert np.median([a.prompt_tokens for a in arrivals]) == pytest.approx(prompt_p50, rel=0.05)
    assert np.median([a.output_tokens for a in arrivals]) == pytest.approx(output_p50, rel=0.1)
    gaps = np.diff([a.time for a in arrivals])
    assert cv[0] < gaps.std() / gaps.mean() < cv[1]


def test_a_fit_survives_its_file() -> None:
    prompts, outputs = peaked(500, 0)
    fitted = Fitted(TRUTH, fit_lengths(prompts, outputs, bands=3, levels=5), {"source": "made up", "requests": 500})
    again = from_data(json.loads(dumps({"x": fitted}))["x"])
    assert again.lengths == fitted.lengths and again.provenance == fitted.provenance
    assert np.array(again.process.transition) == pytest.approx(np.array(fitted.process.transition))
    assert dumps({"x": again}) == dumps({"x": fitted})


@pytest.mark.slow
def test_the_bench_runs_on_a_small_trace(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(trace_fit, "STATES", {"azure-conv": 2, "azure-code": 2})
    rng = np.random.default_rng(0)
    for name in ("conv", "code"):
        prompts, outputs = peaked(800, 3)
        times = np.cumsum(rng.exponential(0.5, 800))
        rows = "".join(f"{t:.6f},{p},{o}\n" for t, p, o in zip(times, prompts, outputs, strict=True))
        (tmp_path / name).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    out = tmp_path / "fitted.json"
    assert trace_fit.main([str(tmp_path / "conv"), str(tmp_path / "code"), "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["azure-code"]["lengths"]["even→odd minutes"]["banded"]["prompt"] < 0.15
    assert from_data(json.loads(out.read_text())["azure-conv"]).provenance["requests"] == 800
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []
    assert trace_fit.main([str(tmp_path / "none"), str(tmp_path / "code")]) == 2
    assert "cannot be read" in capsys.readouterr().err
