"""Environments and server processes of the contenders: ours, Ray Serve, LitServe, BentoML.

Each peer gets an environment of its own in the user's cache, made once and kept. Ours has one too, with uvicorn and nothing
else, and finds this repository on its path.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.batcher.load import Account, Load

ROOT = Path(__file__).parents[2]
HTTP = "uvicorn[standard]==0.54.0"


class Contender(NamedTuple):
    """Who is measured: the module that serves it, what its environment holds, and how it is set."""

    name: str
    module: str
    packages: tuple[str, ...]
    settings: str


OURS = Contender(
    "ours",
    "benchmarks.batcher.serve_ours",
    (HTTP,),
    "`@batch(slo=…)`, at most 32 items; nothing else said",
)
PEERS = (
    Contender(
        "Ray Serve",
        "benchmarks.batcher.serve_ray",
        ("ray[serve]==2.60.0", HTTP),
        "max_batch_size 32, batch_wait_timeout_s 0.084, at most 128 inside (ongoing + queued)",
    ),
    Contender(
        "LitServe",
        "benchmarks.batcher.serve_lit",
        ("litserve==0.2.19", HTTP),
        "max_batch_size 32, batch_timeout 2 ms, timeout 306 ms",
    ),
    Contender(
        "BentoML",
        "benchmarks.batcher.serve_bento",
        ("bentoml==1.4.39", HTTP),
        "max_batch_size 32, max_latency_ms 390",
    ),
)


class Unavailable(RuntimeError):
    """An environment that cannot be had here."""


def environment(contender: Contender) -> Path:
    """The Python of the contender's environment, made if need be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-autotune" / "batcher"
    cache.mkdir(parents=True, exist_ok=True)
    what = "-".join((contender.name.lower().replace(" ", "-"), *(p.partition("==")[2] for p in contender.packages)))
    folder = cache / f"{what}-python{sys.version_info.major}.{sys.version_info.minor}"
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".ready").exists():
            print(f"making an environment for {contender.name}", file=sys.stderr, flush=True)
            python = folder / "bin" / "python"
            for command in (
                [sys.executable, "-m", "venv", "--clear", str(folder)],
                [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *contender.packages],
            ):
                done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
                if done.returncode:
                    reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
                    raise Unavailable(f"no environment for {contender.name}: {reason}")
            (folder / ".ready").touch()
    return folder / "bin" / "python"


class Server:
    """A contender's server process, and what its group has used of the CPU."""

    def __init__(self, contender: Contender, python: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.contender = contender
        self._log = log
        self._process = subprocess.Popen(
            [str(python), "-m", contender.module, str(self.port)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, seconds: float = 120.0) -> None:
        """Until it answers. Raises ``Unavailable`` with the end of its log if it does not."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            try:
                if send(Load(self.port, "/predict", [(0.2, 20.0)], seed=0)).status.count(200):
                    return
            except (OSError, subprocess.CalledProcessError):
                pass
            time.sleep(0.3)
        printed = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        raise Unavailable(f"{self.contender.name} does not answer: " + " / ".join(printed))

    def close(self) -> None:
        """Ends it and whatever it started in its session."""
        for number, patience in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(patience)
                if number is signal.SIGTERM:
                    continue  # and once more, for children that outlived it
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def send(load: Load) -> Account:
    """Have a client process of its own send ``load``."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.batcher.load"],
        input=json.dumps(load._asdict()), cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Account(**json.loads(done.stdout))


@contextmanager
def servers(contenders: Sequence[Contender]) -> Iterator[list[Server]]:
    """All of them, up and answering; ended on the way out."""
    pythons = [environment(contender) for contender in contenders]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = []
        for contender, python in zip(contenders, pythons, strict=True):
            server = Server(contender, python, folder / f"{contender.module}.log")
            stack.callback(server.close)
            server.wait()
            running.append(server)
        yield running
