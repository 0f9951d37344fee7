"""The controller on the live engine, beside vLLM's defaults, a fixed setting, and both with late requests rejected: ``autotune
bench``, rounds that share their arrivals. Code under a TPOT target that large steps break, so that there is something to gain."""

from __future__ import annotations

from benchmarks.gpu.place import Place
from benchmarks.gpu.verb import autotune


def run(place: Place, model: str) -> None:
    """``model``: a preset of some 8B parameters; the load is about what one H100 can serve of it."""
    load = ["--workload", "azure-code:length=1/2", "--slo", "ttft=1s,tpot=25ms", "--rate", "9", "--reject-late"]
    fixed = ["--fixed", "token_budget=768,chunk_size=768"]
    options = ["--model", place.model(model), "--gpu", *load, *fixed, "--duration", "12s", "--rounds", "5"]
    if place.dry:
        options = ["--model", place.model(model), "--cpu", "--reject-late", "--duration", "1s", "--rounds", "1"]
    for name, found in autotune(place, "bench", *options).items():
        place.keep(name, found)
