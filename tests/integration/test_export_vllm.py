"""The exported file against vLLM itself: its own parser reads our values, and a server started from it answers."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.export import export
from autotune.export.vllm import DEFAULT_SHARE, VLLM
from autotune.profile import save_profile
from runtime.knobs import Knobs
from tests.integration.vllm_environment import ENVIRONMENT, VERSION, tiny_model, vllm_python
from tests.sample_profile import sample_model, sample_profile

pytestmark = [pytest.mark.slow, pytest.mark.beside, pytest.mark.timeout(2400)]

READER = Path(__file__).with_name("vllm_reads.py")
READY_S = 300.0
WHOLE = Knobs(max_batch_size=24, token_budget=192, chunk_size=192)
CUT = Knobs(max_batch_size=24, token_budget=192, chunk_size=128)

EXPORTED: dict[str, tuple[Knobs, dict[str, Any]]] = {
    "gpu": (CUT, {"gpu": True}),
    "cpu": (CUT, {"gpu": False}),
    "whole-prompts": (WHOLE, {"gpu": True}),
    "more-slots-than-tokens": (Knobs(max_batch_size=512, token_budget=48, chunk_size=16), {"gpu": True}),
    "no-prefix-cache": (CUT, {"engine": {"prefix_cache": False}}),
    "float32": (CUT, {"dtype": "float32"}),
    "short-pool": (Knobs(max_batch_size=8, token_budget=4096, chunk_size=2048), {"kv_blocks": 64}),
    "drafts": (Knobs(max_batch_size=24, token_budget=192, chunk_size=192, draft_tokens=3), {}),
    "vllm-defaults": (Knobs(max_batch_size=1024, token_budget=8192, chunk_size=8192), {}),
}

REFUSED: dict[str, dict[str, Any]] = {
    "seqs": {"max-num-seqs": 200},
    "unchunked": {"enable-chunked-prefill": None, "no-enable-chunked-prefill": True},
    "threshold": {"long-prefill-token-threshold": 4096},
    "dtype": {"dtype": "int8"},
}


@pytest.fixture(scope="module")
def python() -> Path:
    return vllm_python()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "a tiny one")


def command(python: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    """The command line and environment for ``words`` in the environment of ``python``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    return [str(python.parent / words[0]), *words[1:]], clean | ENVIRONMENT | {"PATH": path}


def reads(python: Path, files: list[Path]) -> dict[str, Any]:
    """What vLLM makes of each file, by its stem."""
    words, environment = command(python, "python", str(READER), *map(str, files))
    environment.pop("VLLM_CPU_KVCACHE_SPACE")  # it would take the place of a KV pool that a file gives in bytes
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return {Path(path).stem: found for path, found in json.loads(done.stdout).items()}


def made(model: Path, name: str) -> Any:
    knobs, changes = EXPORTED[name]
    changes = dict(changes)
    facts = sample_model(
        name=str(model), random_weights=False, max_model_len=2048, dtype=changes.pop("dtype", "bfloat16")
    )
    return export(sample_profile({"balanced": knobs}, model=facts, **changes), VLLM)


@pytest.fixture(scope="module")
def found(python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every file of this module read by one process: importing vLLM takes longer than all of them."""
    folder = tmp_path_factory.mktemp("exported")
    for name in EXPORTED:
        made(model, name).save(folder / f"{name}.yaml")
    base = made(model, "gpu").written
    others: dict[str, dict[str, Any]] = {
        "unknown-key": {"max-wait-ms": 5},
        "no-async-scheduling": {"no-async-scheduling": True},
    }
    for name, changes in {**REFUSED, **others}.items():
        settings = {key: value for key, value in {**base, **changes}.items() if value is not None}
        (folder / f"{name}.yaml").write_text(json.dumps(settings), encoding="utf-8")
    return reads(python, sorted(folder.glob("*.yaml")))


@pytest.mark.parametrize("name", EXPORTED)
def test_vllms_parser_reads_exactly_our_values(found: dict[str, Any], model: Path, name: str) -> None:
    assert "refused" not in found[name], found[name]
    for key, value in made(model, name).written.items():
        field = key.removeprefix("no-").replace("-", "_")
        expected = not value if key.startswith("no-") else json.loads(value) if key == "speculative-config" else value
        for place in ("args", "config"):
            read = found[name][place][field]
            assert read == expected and type(read) is type(expected), f"{place}: {key} is {read!r}, not {expected!r}"


def test_the_table_is_of_the_version_that_reads_it() -> None:
    assert VERSION.startswith(f"{VLLM.version}.")


def test_what_is_left_out_is_as_the_comments_say(found: dict[str, Any]) -> None:
    assert found["cpu"]["config"]["gpu_memory_utilization"] == DEFAULT_SHARE
    assert found["whole-prompts"]["config"]["long_prefill_token_threshold"] == 0
    assert found["no-prefix-cache"]["config"]["enable_prefix_caching"] is False


def test_the_key_that_a_warning_names_switches_async_scheduling_off(found: dict[str, Any]) -> None:
    assert found["no-async-scheduling"]["args"]["async_scheduling"] is False
    assert "async_scheduling" not in found["gpu"]["args"], "or vLLM decides"


@pytest.mark.parametrize("name", REFUSED)
def test_vllm_refuses_what_is_never_written(found: dict[str, Any], name: str) -> None:
    """The tables write no such values for the model that was measured; a dtype comes from the profile, and is checked."""
    assert found[name].get("refused"), f"vLLM takes {REFUSED[name]}"
    assert any(constraint(REFUSED[name]) for constraint in VLLM.constraints) == (name == "dtype")


def test_a_key_it_does_not_know_is_no_silent_success(found: dict[str, Any]) -> None:
    assert "max-wait-ms" in found["unknown-key"]["refused"]


class Server:
    """A vLLM server of our own, from the command that ``autotune export`` printed."""

    def __init__(self, python: Path, printed: str, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        extra = ("--host", "127.0.0.1", "--port", str(self.port), "--load-format", "dummy", "--enforce-eager")
        words, environment = command(python, *shlex.split(printed), *extra)
        self.log = folder / "server.txt"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
            return bytes(answer.read())

    def wait(self) -> None:
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                self.ask("/health")
                return
            time.sleep(0.5)
        raise AssertionError(f"not ready in {READY_S:.0f} s:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        """SIGTERM to the server; whatever of its session is left after a minute is killed."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    facts = sample_model(name=str(model), random_weights=False, max_model_len=1024, kv_bytes_per_token=512)
    save_profile(sample_profile(gpu=False, model=facts), folder / "tiny.yaml")
    words = (sys.executable, "-m", "autotune.cli.main", "export", "tiny.yaml", "--to", "vllm", "--for", "interactive")
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()[-1].partition("start it with:  ")[2]
    started = Server(python, printed, folder)
    try:
        started.wait()
        yield started
    finally:
        started.stop()


def test_a_server_starts_from_it_and_answers(server: Server, model: Path) -> None:
    body = {"model": str(model), "prompt": "one two " * 60, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    answer = json.loads(server.ask("/v1/completions", body))
    assert answer["usage"]["completion_tokens"] == 5 and answer["usage"]["prompt_tokens"] == 480
    assert answer["choices"][0]["finish_reason"] == "length"
    log = server.log.read_text()
    for said in ("'max_num_seqs': 24", "'max_num_batched_tokens': 192", "'long_prefill_token_threshold': 128"):
        assert said in log
    shown = json.loads(server.ask("/v1/models"))["data"][0]
    assert shown["max_model_len"] == 1024
