"""Places where writing fails as it does in life: a disk that is full, one that is read-only, a folder of somebody else."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@functools.cache
def may_mount() -> bool:
    """Whether this user may have a mount namespace with a file system of its own in it."""
    try:
        words = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(words, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


def on_small_disk(folder: Path, code: str, *, size: str = "64k", timeout: float = 120) -> Any:
    """Run Python ``code`` where ``folder`` is a disk of that size, which nobody else sees; what it prints last, as JSON.

    The code finds the folder in ``folder`` and may call ``read_only()``, after which the disk is. Skips the test where the
    system does not let an ordinary user mount.
    """
    if not may_mount():
        pytest.skip("this system gives no mount namespaces")
    prelude = (
        "import json, os, subprocess, sys\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n"
        "def read_only():\n    subprocess.run(['mount', '-o', 'remount,ro', str(folder)], check=True)\n"
    )
    mount = f'mount -t tmpfs -o size={size} tmpfs "$1" && exec "$0" -c "$2" "$1"'
    words = ["unshare", "-rm", "sh", "-c", mount, sys.executable, str(folder), prelude + code]
    return _answer(words, timeout)


def without_privileges(code: str, timeout: float = 120) -> Any:
    """Run Python ``code`` as a user to whom permissions apply: ``drop()`` must be called when all is imported.

    What it prints last, as JSON.
    """
    prelude = (
        "import json, os, sys\nfrom pathlib import Path\n"
        "def drop():\n    if os.geteuid() == 0:\n        os.setgroups([])\n        os.setgid(65534)\n        os.setuid(65534)\n"
    )
    return _answer([sys.executable, "-c", prelude + code], timeout)


def _answer(words: list[str], timeout: float) -> Any:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
