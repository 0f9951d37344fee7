"""A server on 127.0.0.1 for a test: in a thread of this process, or a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from runtime.llm.engine import Engine
from runtime.serving.app import Api, create_app
from runtime.serving.run import Server, bind, url_of

ROOT = Path(__file__).parents[2]
_SERVES = re.compile(r'(?: at |"url": ")(http://[^\s"]+)')


@contextmanager
def in_thread(engine: Engine) -> Iterator[tuple[Api, str]]:
    """(api, url) of a server of ``engine`` in this process."""
    api, bound, ready = Api(engine), bind("127.0.0.1", 0), threading.Event()
    url = url_of(bound)
    server = Server(uvicorn.Config(create_app(api), lifespan="on", log_config=None, access_log=False), ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()
    try:
        assert ready.wait(30)
        yield api, url
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


class ServerProcess:
    """``autotune serve`` with ``words`` on a free port. Its output goes to a file: a full pipe would stop it."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self._log = folder / "server.txt"
        command = [sys.executable, "-m", "autotune.cli.main", "serve", "--port", "0", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        with self._log.open("w") as file:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
        until = time.monotonic() + 180
        while (found := _SERVES.search(self.output)) is None:
            assert self.process.poll() is None and time.monotonic() < until, self.output
            time.sleep(0.1)
        self.url = found[1]

    @property
    def output(self) -> str:
        return self._log.read_text()

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self, timeout: float = 60) -> int:
        return self.process.wait(timeout)


@contextmanager
def in_process(folder: Path, *words: str) -> Iterator[ServerProcess]:
    server = ServerProcess(folder, *words)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
