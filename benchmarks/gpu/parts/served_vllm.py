"""The load of ``served`` on vLLM, where it can be imported: the same shape with random weights, the same requests and rate."""

from __future__ import annotations

import importlib.util
import sys

from benchmarks.gpu.parts.served import offered
from benchmarks.gpu.place import LeftOutError, Place
from benchmarks.gpu.server import free_port, serving
from benchmarks.vllm.model import model_folder


def run(place: Place, model: str) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise LeftOutError("vLLM is not installed")
    if place.dry:
        raise LeftOutError("a dry run starts no vLLM")
    folder = place.folder / f"vllm-{model}"
    if not folder.exists():
        model_folder(folder, model)
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port),
        "--load-format", "dummy", "--dtype", "bfloat16",
    ]  # fmt: skip
    with serving(command, place.folder / "vllm.txt", url=f"http://127.0.0.1:{port}", patience_s=400) as url:
        offered(place, url, place.earlier("served", "rate"))
