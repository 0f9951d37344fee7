"""A server in a process of its own, for as long as a load needs it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
_URL = re.compile(r"http://[\w.\[\]:]+:\d+")


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@contextmanager
def serving(command: Sequence[str], log: Path, *, url: str | None = None, patience_s: float = 240.0) -> Iterator[str]:
    """Start ``command``, wait until ``/health`` answers, yield its address, and end it. ``url`` None: the first that it prints.

    Raises ``RuntimeError``, with the end of its output, if it does not begin to answer.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        give_up = time.monotonic() + patience_s
        found = url
        while True:
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the server did not begin to answer: {log.read_text(errors='replace')[-1500:]}")
            if found is None and (match := _URL.search(log.read_text(errors="replace"))):
                found = match[0]
            if found is not None and _answers(found):
                break
            time.sleep(0.2)
        yield found
    finally:
        _end(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """What it has started is in the group of the part's process, which is ended with the part."""
    process.terminate()
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10.0)
