"""The load of ``served`` on vLLM, where it can be imported: the same shape with random weights, the same requests and rate. A dry
run goes by the Python that ``AUTOTUNE_VLLM_PYTHON`` names, on vLLM's CPU build."""

from __future__ import annotations

from benchmarks.gpu.parts.served import offered
from benchmarks.gpu.place import Place
from benchmarks.gpu.server import free_port, serving
from benchmarks.gpu.vllm import vllm_python
from benchmarks.vllm.model import model_folder


def run(place: Place, model: str) -> None:
    python = vllm_python(place)
    folder = place.folder / f"vllm-{place.model(model)}"
    if not folder.exists():
        model_folder(folder, place.model(model))
    port = free_port()
    command = [
        python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port),
        "--load-format", "dummy", "--dtype", place.dtype(), *(["--enforce-eager"] if place.dry else []),
    ]  # fmt: skip
    with serving(command, place.folder / "vllm.txt", url=f"http://127.0.0.1:{port}", patience_s=400) as url:
        offered(place, url, place.earlier("served", "rate"))
