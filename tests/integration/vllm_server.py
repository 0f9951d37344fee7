"""``vllm serve`` in a process of its own, for a test in an environment with vLLM."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.integration.vllm_environment import ENVIRONMENT, vllm_python_with_tests

ROOT = Path(__file__).parents[2]
SMALL = "--load-format dummy --enforce-eager --dtype float32 --max-num-seqs 64 --max-num-batched-tokens 512"
"""For a model without weights on a CPU."""
NO_MODEL = f"{SMALL} --distributed-executor-backend tests.vllm_fakes.ServedExecutor"


def environment(folder: Path, **more: str) -> dict[str, str]:
    """That of commands run in ``folder``: ``autotune`` and ``vllm`` are on the path, sockets lie in the folder."""
    python, bin_folder = vllm_python_with_tests(), folder / "bin"
    if not bin_folder.exists():
        bin_folder.mkdir()
        script = bin_folder / "autotune"
        script.write_text(f'#!/bin/sh\nexec {python} -m autotune.cli.main "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AUTOTUNE_", "VLLM_"))}
    path = os.pathsep.join([str(bin_folder), str(python.parent), os.environ["PATH"]])
    ours = {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "XDG_RUNTIME_DIR": str(folder),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return {**clean, **ENVIRONMENT, "OMP_NUM_THREADS": "1", **ours, **more}


class VllmServer:
    """``command`` (words, of which PORT is the port) on a free port of 127.0.0.1, ready when made."""

    def __init__(self, folder: Path, command: str, **more: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"server-{port}.txt"
        with self._log.open("w") as file:
            self.process = subprocess.Popen(
                shlex.split(command.replace("PORT", str(port))),
                cwd=folder, env=environment(folder, **more), stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        self._all: set[psutil.Process] = set()
        until = time.monotonic() + 240
        while self.health() != 200:
            self._find()
            assert self.process.poll() is None and time.monotonic() < until, self.output[-5000:]
            time.sleep(0.5)
        self._find()

    def _find(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._all.update(psutil.Process(self.process.pid).children(recursive=True))

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def engine_core(self) -> psutil.Process:
        found = []
        for one in self._all:
            with suppress(psutil.NoSuchProcess):
                if "EngineCore" in " ".join(one.cmdline()):
                    found.append(one)
        (core,) = found
        return core

    def health(self) -> int:
        return self.get("/health")[0]

    def get(self, path: str) -> tuple[int, str]:
        return self._ask(urllib.request.Request(self.url + path), 5.0)

    def post(self, path: str, body: bytes, timeout: float = 60.0) -> tuple[int, str]:
        """(status, text); 0 if nobody answers."""
        return self._ask(urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"}), timeout)

    def _ask(self, request: Any, timeout: float) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(errors="replace")
        except OSError:
            return 0, ""

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def end(self) -> None:
        self._find()
        for one in (*self._all, self.process):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
        self.process.wait()


@contextmanager
def serving(folder: Path, command: str, **more: str) -> Iterator[VllmServer]:
    server = VllmServer(folder, command, **more)
    try:
        yield server
    finally:
        server.end()
