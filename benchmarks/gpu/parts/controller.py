"""The controller on the live engine, beside vLLM's defaults, a fixed setting, and both with late requests rejected: ``autotune
bench``, rounds that share their arrivals. Code under a TPOT target that large steps break, so that there is something to gain."""

from __future__ import annotations

from typing import Final

from benchmarks.gpu.place import Place
from benchmarks.gpu.verb import autotune

_WITHIN_S: Final = 440.0
"""Less than the part has, by what a turn takes to end and the engine to close: five contenders take some 15 s of each round."""


def run(place: Place, model: str) -> None:
    """``model``: a preset of some 8B parameters; the load is about what one H100 can serve of it. What takes too long is stopped,
    and the turns that are done are kept."""
    options = [
        "--model", place.model(model), "--cpu" if place.dry else "--gpu", "--workload", "azure-code:length=1/2",
        "--slo", "ttft=1s,tpot=25ms", "--rate", "9", "--fixed", "token_budget=768,chunk_size=768", "--reject-late",
        *(("--duration", "1s", "--rounds", "1") if place.dry else ("--duration", "12s", "--rounds", "4")),
    ]  # fmt: skip
    for name, found in autotune(place, "bench", *options, within_s=_WITHIN_S).items():
        place.keep(name, found)
