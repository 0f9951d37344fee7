"""``autotune profile`` of one model, as a person would start it; the profile is kept beside the results."""

from __future__ import annotations

from typing import Final

from benchmarks.gpu.place import Place
from benchmarks.gpu.verb import autotune

_KEPT: Final = (
    "verdict", "slo", "slo_from", "knobs", "settings", "baseline", "gain", "capacity", "calibration", "cost_model", "model",
    "engine", "workload",
)  # fmt: skip


def run(place: Place, model: str) -> None:
    out = place.folder / f"{model}-{'dry' if place.dry else 'gpu'}.yaml"
    options = ["--model", place.model(model), "--out", str(out), "--fresh"]
    if place.dry:
        options += ["--cpu", "--budget", "10s", "--trials", "1", "--sim-trials", "4"]
    else:
        options += ["--gpu", "--budget", "4m"]
    reported = autotune(place, "profile", *options)
    place.keep("slo_met", reported["slo_met"])
    for name in _KEPT:
        if name in reported["profile"]:
            place.keep(name, reported["profile"][name])
    place.keep("file", out.name)
