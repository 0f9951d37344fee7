"""The controller on the live engine, beside vLLM's defaults on it: ``autotune bench``, rounds that share their arrivals."""

from __future__ import annotations

from benchmarks.gpu.place import Place
from benchmarks.gpu.verb import autotune


def run(place: Place, model: str) -> None:
    options = ["--model", place.model(model), "--gpu", "--duration", "20s", "--rounds", "4"]
    if place.dry:
        options = ["--model", place.model(model), "--cpu", "--duration", "1s", "--rounds", "1"]
    for name, found in autotune(place, "bench", *options).items():
        place.keep(name, found)
