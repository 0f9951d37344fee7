"""Workers of benchmarks outlive nobody who started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

STARTS = """
import multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from benchmarks.workers import end_with_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(2, multiprocessing.get_context(sys.argv[1]), end_with_parent)
    print(*{pool.submit(time.sleep, 0.2) and pool.submit(os.getpid).result() for _ in range(20)}, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_idle_workers_end_with_a_parent_that_is_killed(how: str, tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, script, how], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(root)}
    ) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert workers
        os.kill(parent.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(workers, timeout=10)
    for worker in alive:
        worker.kill()
    assert not alive and len(gone) == len(workers)
