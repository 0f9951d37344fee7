"""A PostgreSQL server of one's own, on this machine only, for as long as a test needs it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PASSWORD = "correct-horse"
_USER = "autotune"
_START_S = 60.0


def programs() -> Path:
    """The folder of the server's programs; Debian keeps them off the PATH. Skips where there are none."""
    if (found := shutil.which("initdb")) and (folder := Path(found).resolve().parent / "postgres").exists():
        return folder.parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not installed:
        pytest.skip("needs PostgreSQL's server (initdb, postgres); on Debian: apt-get install postgresql")
    return installed[-1].parent


@contextmanager
def postgres() -> Iterator[str]:
    """The address of an empty database ``studies``. The server ends with the block, by its own process number."""
    import psycopg

    bin_folder, user = programs(), _server_user()
    folder = Path(tempfile.mkdtemp(prefix="at-pg-"))  # not pytest's own folder: another user must get at it
    try:
        if user is not None:
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        subprocess.run(
            [bin_folder / "initdb", "-D", folder / "data", "-U", _USER, "--auth=scram-sha-256", f"--pwfile={secret}",
             "--encoding=UTF8", "--locale=C", "--no-sync"],
            check=True, capture_output=True, user=user, cwd=folder, timeout=120,
        )  # fmt: skip
        port = _free_port()
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [bin_folder / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder,
                 "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off", "-c", "max_connections=40"],
                stdout=log, stderr=log, user=user, cwd=folder,
            )  # fmt: skip
        try:
            plain = f"{_USER}:{PASSWORD}@127.0.0.1:{port}"
            until = time.monotonic() + _START_S
            while True:
                try:
                    with psycopg.connect(f"postgresql://{plain}/postgres", autocommit=True) as connection:
                        connection.execute("CREATE DATABASE studies")
                    break
                except psycopg.OperationalError:
                    if server.poll() is not None or time.monotonic() > until:
                        pytest.fail(f"PostgreSQL does not start: {(folder / 'log').read_text()[-2000:]}")
                    time.sleep(0.1)
            yield f"postgresql+psycopg://{plain}/studies"
        finally:
            server.send_signal(signal.SIGINT)  # "fast": connections are ended
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _server_user() -> str | None:
    """PostgreSQL refuses to run as root: then it runs as a user that owns nothing else."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    pytest.skip("PostgreSQL does not run as root, and there is no user `postgres` or `nobody` to run it as")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
