"""How well a fitted workload resembles requests it has not seen: numbers for times, lengths and their dependence."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
from scipy.special import ndtr
from scipy.stats import ks_2samp, spearmanr

from autotune.workload.lengths import Independent, Ints, LengthModel, QuantileTable
from autotune.workload.processes import ArrivalProcess, Gamma, MarkovModulated, poisson
from autotune.workload.randomness import Floats, Stream, generator
from benchmarks.trace_fit.fitting import fit_gamma, fit_lengths, log_likelihood

WINDOWS = (0.1, 1.0, 10.0, 30.0, 60.0)  # s
SEEDS = 20
DRAWS = 50_000
BANDS = 8


def ks(a: Floats | Ints, b: Floats | Ints) -> float:
    """Kolmogorov-Smirnov distance: the largest gap between two empirical distribution functions, 0 to 1."""
    return float(ks_2samp(a, b, method="asymp").statistic)


def dispersion(gaps: Floats, window: float) -> float:
    """Index of dispersion of counts: variance / mean of arrivals in windows this long (s); Poisson has 1 at all lengths."""
    times = np.cumsum(gaps)
    full = int(times[-1] / window)
    if full < 2:
        raise ValueError(f"window is {window} s; two of them must fit in {times[-1]:.1f} s")
    counts = np.bincount((times / window).astype(np.int64), minlength=full)[:full]
    return float(counts.var() / counts.mean())


def compare_times(process: MarkovModulated, gaps: Floats, fitted_on: Floats) -> dict[str, Any]:
    """A process against ``gaps`` (s) it was not fitted on, beside Poisson and gamma fitted to the same ``fitted_on``.

    ``gamma`` is fitted by likelihood, as the states of ours are; ``gamma_by_moments`` to the mean and the CV, the usual stand-in.
    ``floor`` is the KS distance between the two parts of the trace: what no stationary model can be expected to beat.
    Simulated figures come from runs as long as ``gaps``, one a seed: pooled for KS, medians for the CV; ``dispersion``
    holds p5, median, p95.
    """
    mean, cv = float(fitted_on.mean()), float(fitted_on.std() / fitted_on.mean())
    others = {"gamma": fit_gamma(fitted_on), "gamma_by_moments": Gamma(1 / mean, cv), "poisson": poisson(1 / mean)}
    runs = {"fitted": _runs(process, len(gaps))} | {name: _runs(made, len(gaps)) for name, made in others.items()}
    dispersions = {
        name: {window: np.quantile([dispersion(run, window) for run in made], [0.05, 0.5, 0.95]) for window in WINDOWS}
        for name, made in runs.items()
    }
    likelihood = log_likelihood(process, gaps)
    return {
        "gaps": len(gaps),
        **{
            f"nats_per_gap_over_{name}": (likelihood - log_likelihood(_of_one_state(made), gaps)) / len(gaps)
            for name, made in others.items()
        },
        "ks": {"floor": ks(fitted_on, gaps)} | {name: ks(np.concatenate(made), gaps) for name, made in runs.items()},
        "cv": {"real": float(gaps.std() / gaps.mean())}
        | {name: float(np.median([run.std() / run.mean() for run in made])) for name, made in runs.items()},
        "dispersion": {
            f"{window:g}s": {"real": dispersion(gaps, window)}
            | {name: [float(v) for v in dispersions[name][window]] for name in runs}
            for window in WINDOWS
        },
    }


def compare_lengths(train: tuple[Ints, Ints], test: tuple[Ints, Ints]) -> dict[str, Any]:
    """Length models fitted to ``train`` (prompts, outputs) against ``test``: the banded tables, and the same marginals with
    a Gaussian copula and with none.

    ``output_in_band``: mean KS distance of outputs within eight equal bands of ``test``'s prompts: whether the dependence
    is right. ``quantiles``: value drawn / value in ``test`` − 1.
    """
    banded = fit_lengths(*train)
    outputs = QuantileTable.fit(
        train[1], np.asarray(banded.prompt.levels if isinstance(banded.prompt, QuantileTable) else ())
    )
    models: dict[str, tuple[LengthModel, float]] = {
        "banded": (banded, 0.0),
        "gaussian_copula": (Independent(banded.prompt, outputs), float(spearmanr(*train).statistic)),
        "independent": (Independent(banded.prompt, outputs), 0.0),
    }
    edges = np.quantile(test[0], np.linspace(0, 1, BANDS + 1)[1:-1])
    result: dict[str, Any] = {"floor": _length_figures(train, test, edges)}
    for name, (model, correlation) in models.items():
        result[name] = _length_figures(_draw(model, correlation), test, edges)
    return result


def _length_figures(drawn: tuple[Ints, Ints], test: tuple[Ints, Ints], edges: Floats) -> dict[str, Any]:
    mine, theirs = np.searchsorted(edges, drawn[0]), np.searchsorted(edges, test[0])
    bands = [
        ks(drawn[1][mine == i], test[1][theirs == i]) for i in range(BANDS) if (mine == i).any() and (theirs == i).any()
    ]
    return {
        "prompt": ks(drawn[0], test[0]),
        "output": ks(drawn[1], test[1]),
        "output_in_band": float(np.mean(bands)),
        "spearman": float(spearmanr(*drawn).statistic),
        "quantiles": {
            name: [round(float(np.quantile(drawn[i], q) / np.quantile(test[i], q) - 1), 4) for q in (0.5, 0.95, 0.99)]
            for i, name in enumerate(("prompt", "output"))
        },
    }


def _draw(model: LengthModel, rank_correlation: float) -> tuple[Ints, Ints]:
    """Pairs, their uniforms joined by a Gaussian copula with this Spearman correlation."""
    normal = generator((0,), Stream.LENGTHS).standard_normal((2, DRAWS))
    r = 2 * np.sin(np.pi / 6 * rank_correlation)
    return model.draw(ndtr(normal[0]), ndtr(r * normal[0] + np.sqrt(1 - r * r) * normal[1]))


def _of_one_state(process: Gamma) -> MarkovModulated:
    return MarkovModulated((1 / process.rate,), (process.cv**-2,), ((1.0,),))


def _runs(process: ArrivalProcess, count: int) -> list[Floats]:
    return [np.fromiter(islice(process.gaps(generator((s,), Stream.TIMES)), count), float) for s in range(SEEDS)]
