"""A load over HTTP on ``autotune serve``: all at once, to see what it can do, and then at seven tenths of that."""

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

from benchmarks.gpu.client import load, send, summary
from benchmarks.gpu.place import Place
from benchmarks.gpu.server import serving

SHARE = 0.7


class Sizes(NamedTuple):
    full: int  # requests at once
    steady: int  # by Poisson
    prompt: int
    output: int
    vocabulary: int


def sizes(place: Place) -> Sizes:
    return Sizes(4, 4, 8, 4, 2000) if place.dry else Sizes(256, 400, 512, 128, 100_000)


def run(place: Place, model: str) -> None:
    importlib.import_module("runtime.serving.run")  # says which package is missing
    command = [
        sys.executable, "-m", "autotune.cli.main", "serve", place.model(model), "--port", "0", "--device", place.device,
        "--dtype", place.dtype(), "--kv-tokens", "4096" if place.dry else "200000",
    ]  # fmt: skip
    with serving(command, place.folder / "server.txt") as url:
        offered(place, url)


def offered(place: Place, url: str, rate: float | None = None) -> None:
    """Both loads on the server at ``url``; ``rate``: of the second, in requests/s, if that is not to follow from the first."""
    given = sizes(place)
    fields: dict[str, Any] = {"prompt": given.prompt, "output": given.output, "vocabulary": given.vocabulary}
    send(url, load(2, None, seed=1, **fields))  # warms it up
    full = summary(*send(url, load(given.full, None, seed=2, **fields)))
    place.keep("all at once", full)
    rate = rate or SHARE * full["requests_per_s"]
    place.keep("rate", rate)
    steady = summary(*send(url, load(given.steady, rate, seed=3, **fields)))
    place.keep("steady", steady)
    if full["failed"] or steady["failed"]:
        raise RuntimeError(f"{full['failed'] + steady['failed']} requests failed: {full['errors'] + steady['errors']}")
