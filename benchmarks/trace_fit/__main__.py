"""Fits the presets azure-conv and azure-code to the Azure 2023 traces, and says how well.

    python -m benchmarks.trace_fit CONV.csv CODE.csv [--out autotune/workload/azure2023.json]

The traces (AzureLLMInferenceTrace_conv.csv and _code.csv, Azure/AzurePublicDataset, CC-BY-4.0) are not shipped. Each
figure compares models fitted on one part of a trace with another part: halves of the hour in turn, for lengths also
alternate minutes, since the traffic drifts. The last line is JSON. Takes about a minute of CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from autotune.workload.fitted import Fitted, dumps
from autotune.workload.readers import read_azure
from benchmarks.command import command, exit_code
from benchmarks.trace_fit.fitting import fit_lengths, fit_process
from benchmarks.trace_fit.goodness import WINDOWS, compare_lengths, compare_times

STATES = {"azure-conv": 5, "azure-code": 12}  # chosen by likelihood on the other half of the trace: docs/log/2026-11.md
SOURCE = "Azure LLM inference traces 2023 (Patel et al., Splitwise, ISCA 2024), github.com/Azure/AzurePublicDataset"


def fit(name: str, path: str) -> tuple[Fitted, dict[str, Any]]:
    """The preset fitted to all of the trace, and its goodness of fit on parts left out."""
    rows = read_azure(path)
    times = np.array([row.time for row in rows])
    prompts = np.array([row.prompt_tokens for row in rows])
    outputs = np.array([row.output_tokens for row in rows])
    gaps = np.diff(times)
    provenance: dict[str, str | int | float] = {
        "source": SOURCE,
        "licence": "CC-BY-4.0; fitted parameters only, no rows of the trace",
        "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        "requests": len(rows),
        "seconds": round(float(times[-1] - times[0]), 3),
        "fitted_by": "python -m benchmarks.trace_fit",
    }
    fitted = Fitted(fit_process(gaps, STATES[name]).process, fit_lengths(prompts, outputs), provenance)

    half = len(gaps) // 2
    held_out: dict[str, Any] = {"times": {}, "lengths": {}}
    for label, train, test in (("1st→2nd half", gaps[:half], gaps[half:]), ("2nd→1st half", gaps[half:], gaps[:half])):
        held_out["times"][label] = compare_times(fit_process(train, STATES[name]).process, test, train)
    held_out["times"]["whole, as shipped (seen)"] = compare_times(fitted.process, gaps, gaps)
    first = np.arange(len(rows)) < len(rows) // 2
    even = ((times - times[0]) // 60).astype(int) % 2 == 0
    for label, chosen in (("1st→2nd half", first), ("2nd→1st half", ~first), ("even→odd minutes", even)):
        held_out["lengths"][label] = compare_lengths(
            (prompts[chosen], outputs[chosen]), (prompts[~chosen], outputs[~chosen])
        )
    return fitted, held_out


def show(console: Console, name: str, held_out: dict[str, Any]) -> None:
    times = Table(title=f"{name}: times, fitted on one part, compared with the other", title_justify="left")
    for column in ("figure", *held_out["times"]):
        times.add_column(column)
    compared = list(held_out["times"].values())
    over = [f"nats_per_gap_over_{name}" for name in ("poisson", "gamma", "gamma_by_moments")]
    times.add_row("nats/gap over Poisson, gamma, gamma by moments", *(", ".join(f"{c[name]:+.3f}" for name in over) for c in compared))  # fmt: skip  # noqa: E501
    times.add_row("KS of gaps: fitted (floor, gamma, by moments, Poisson)", *(
        "{fitted:.3f} ({floor:.3f}, {gamma:.3f}, {gamma_by_moments:.3f}, {poisson:.3f})".format(**c["ks"]) for c in compared))  # fmt: skip  # noqa: E501
    times.add_row("CV of gaps: real, fitted", *("{real:.2f}, {fitted:.2f}".format(**c["cv"]) for c in compared))
    for window in WINDOWS:
        cells = []
        for c in compared:
            at = c["dispersion"][f"{window:g}s"]
            low, middle, high = at["fitted"]
            gammas = f"gamma {at['gamma'][1]:.1f}, by moments {at['gamma_by_moments'][1]:.1f}"
            cells.append(f"{at['real']:.1f}, {middle:.1f} in {low:.1f}–{high:.1f} ({gammas})")
        times.add_row(f"dispersion {window:g} s: real, fitted in p5–p95", *cells)
    console.print(times)

    lengths = Table(title=f"{name}: lengths, KS distances and quantile errors", title_justify="left")
    for column in ("split", "model", "prompt", "output", "output in prompt band", "Spearman", "prompt p50 p95 p99", "output p50 p95 p99"):  # noqa: E501  # fmt: skip
        lengths.add_column(column)
    for split, models in held_out["lengths"].items():
        for model, f in models.items():
            errors = [" ".join(f"{100 * e:+.0f}%" for e in f["quantiles"][k]) for k in ("prompt", "output")]
            figures = [f"{f[k]:.3f}" for k in ("prompt", "output", "output_in_band", "spearman")]
            lengths.add_row(split, model, *figures, *errors)
    console.print(lengths)


@exit_code()
def main(argv: Sequence[str] | None = None) -> None:
    parser = command("trace_fit", __doc__)
    parser.add_argument("conv", help="AzureLLMInferenceTrace_conv.csv")
    parser.add_argument("code", help="AzureLLMInferenceTrace_code.csv")
    parser.add_argument("--out", help="write the fitted parameters to this JSON file")
    args = parser.parse_args(argv)
    console = Console(width=150)
    presets: dict[str, Fitted] = {}
    report: dict[str, Any] = {}
    for name, path in (("azure-conv", args.conv), ("azure-code", args.code)):
        presets[name], report[name] = fit(name, path)
        show(console, name, report[name])
    if args.out:
        partial = f"{args.out}.partial"
        Path(partial).write_text(dumps(presets), encoding="utf-8")
        os.replace(partial, args.out)
        console.print(f"wrote {args.out}")
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
