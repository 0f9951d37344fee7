"""vLLM as our users run it: profiled, then served by ``vllm serve`` with our scheduler, flooded, made to reject, and let go.

Async scheduling, vLLM's default, is asked for by name, so that vLLM ends where it cannot have it. A dry run goes without, on
vLLM's CPU build, by the Python that ``AUTOTUNE_VLLM_PYTHON`` names.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.client import load, send, summary
from benchmarks.gpu.parts.served import sizes
from benchmarks.gpu.place import Place
from benchmarks.gpu.server import free_port, serving
from benchmarks.gpu.verb import autotune
from benchmarks.gpu.vllm import vllm_python
from benchmarks.vllm.model import model_folder

HURRIED: Final = "hurried"
"""A class of requests that cannot be met: a millisecond until the first token."""
_STARTED: Final = re.compile(r"self-tuning: .*; process (\d+), control socket")
_REFUSED: Final = ("429", "503")


def run(place: Place, model: str) -> None:
    python = vllm_python(place)
    for name in [name for name in os.environ if name.startswith("AUTOTUNE_")]:  # a server would go by them
        del os.environ[name]
    folder, profile = place.folder / f"vllm-{place.model(model)}", place.folder / "tuned-vllm.yaml"
    if not folder.exists():
        model_folder(folder, place.model(model))
    budget = ("--budget", "20s", "--trials", "1", "--sim-trials", "4") if place.dry else ("--budget", "2m")
    eager = ("--engine-arg", "enforce_eager=true") if place.dry else ()
    reported = autotune(
        place, "profile", "--engine", "vllm", "--model", str(folder), "--dtype", place.dtype(), *budget,
        "--engine-arg", "load_format=dummy", *eager, "--out", str(profile), "--fresh", python=python,
    )  # fmt: skip
    found = reported["profile"]
    kept = {name: found[name] for name in ("slo", "knobs", "engine") if name in found}
    place.keep("profile", kept | {"slo_met": reported["slo_met"], "file": profile.name})
    port = free_port()
    log, decisions = place.folder / "tuned-vllm.txt", place.folder / "tuned-vllm.decisions.jsonl"
    decisions.unlink(missing_ok=True)
    os.environ |= {
        "AUTOTUNE_PROFILE": str(profile), "AUTOTUNE_LOG": str(decisions), "AUTOTUNE_REJECT_LATE": "1",
        "AUTOTUNE_CLASSES": f"{HURRIED}:ttft=1ms",
    }  # fmt: skip
    command = [
        python, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port),
        "--load-format", "dummy", "--dtype", place.dtype(), "--enforce-eager" if place.dry else "--async-scheduling",
        "--scheduler-cls", "autotune.engines.vllm.Scheduler", "--middleware", "autotune.engines.vllm.RejectionStatus",
    ]  # fmt: skip
    with serving(command, log, url=f"http://127.0.0.1:{port}", patience_s=300) as url:
        _served(place, python, url, str(folder), log, decisions)


def _served(place: Place, python: str, url: str, model: str, log: Path, decisions: Path) -> None:
    """Fails where the controller is not attached, a request is lost or not refused, or one is refused after the kill."""
    said = log.read_text(encoding="utf-8", errors="replace")
    started = _STARTED.search(said)
    if started is None:
        raise RuntimeError(f"no controller is attached: {said[-1500:]}")
    lost = _flood(place, url, "all at once, tuned", seed=2)
    wrong = [f"{lost} requests were lost"] if lost else []
    status, text = _one(url, model, sizes(place).prompt * 4)
    place.keep("rejection", {"status": status, "answer": text[:300]})
    wrong += [] if str(status) in _REFUSED else [f"a request that could not be met was answered with {status}"]
    autotune(place, "pause", "--kill", started[1], python=python)
    lost = _flood(place, url, "all at once, after the kill", seed=4, refused=())
    wrong += [f"{lost} requests were lost or refused after the kill"] if lost else []
    actions = [json.loads(line).get("action") for line in decisions.read_text(encoding="utf-8").splitlines()]
    place.keep("decisions", {"count": len(actions), "last": actions[-2:]})
    wrong += [] if "kill" in actions else ["the decision log has no kill"]
    if wrong:
        raise RuntimeError("; ".join(wrong))


def _flood(place: Place, url: str, name: str, *, seed: int, refused: tuple[str, ...] = _REFUSED) -> int:
    """All at once; how many were neither answered nor ``refused``."""
    given = sizes(place)
    fields: dict[str, Any] = {"prompt": given.prompt, "output": given.output, "vocabulary": given.vocabulary}
    send(url, load(2, None, seed=1, **fields))  # warms it up
    answers, seconds = send(url, load(given.full, None, seed=seed, **fields))
    rejected = sum(a.error.startswith(_REFUSED) for a in answers)
    place.keep(name, summary(answers, seconds) | {"rejected": rejected})
    return sum(bool(a.error) and not a.error.startswith(refused) for a in answers)


def _one(url: str, model: str, prompt: int) -> tuple[int, str]:
    """The status and text of the answer to a request of class :data:`HURRIED`."""
    body = {"model": model, "prompt": [7] * prompt, "max_tokens": 4, "vllm_xargs": {"request_class": HURRIED}}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")
