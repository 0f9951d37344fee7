"""``autotune serve`` on a device that is lost ends with a line and an exit code of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from autotune.cli.exits import FELL_SHORT
from runtime.records import FinishReason
from runtime.serving.record_log import read_records

LOSING = """
import os, sys, torch
from autotune.cli.main import main
from runtime.serving import run
from runtime.torch_backend.executor import TorchExecutor

class Pinned:
    abort = os.abort

    def __del__(self):
        self.abort()

def lost(self, prepared):
    raise torch.AcceleratorError("CUDA error: device-side assert triggered")

def losing(engine):
    if sys.argv[1] == "at a request":
        warm_up(engine)
    TorchExecutor._forward = lost
    if sys.argv[1] != "at a request":
        warm_up(engine)

pinned = Pinned()
warm_up, run.warm_up = run.warm_up, losing
main(["serve", "nano", "--device", "cpu", "--kv-tokens", "1024", "--port", "0", "--records", "records.jsonl"])
"""
"""Its steps fail as those of a lost GPU do, and the end of the interpreter aborts, as that of tensors in pinned memory does."""


def refused(url: str, body: bytes | None = None) -> int:
    """The status of a GET, or of a POST of ``body``, that fails."""
    headers = {"content-type": "application/json"}
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60)
    raised.value.close()
    return raised.value.code


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at a request", "in the warm-up"])
def test_a_lost_device_ends_serve_with_its_own_code(when: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", LOSING, when],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        if when == "at a request":
            assert process.stdout is not None
            url = process.stdout.readline().split(" at ")[1].split()[0]
            assert refused(f"{url}/v1/completions", b'{"prompt": "a"}') == 503
            assert refused(f"{url}/health") == 503
            process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == FELL_SHORT, said
    wrong = "cpu cannot be used any more: CUDA error: device-side assert triggered; start the process again"
    assert said.splitlines()[-1] == f"error: {wrong}" and "Traceback" not in said
    if when == "at a request":
        assert [record.reason for record in read_records(tmp_path / "records.jsonl")] == [FinishReason.ERROR]
