"""vLLM's engine behind the seam: the contract of engines over it, and a model served by it. In an environment with vLLM."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.vllm_environment import ENVIRONMENT, vllm_python_with_tests

pytestmark = [pytest.mark.slow, pytest.mark.beside, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def passed(*arguments: str) -> str:
    """What pytest says of ``arguments`` there, which must pass."""
    command = [
        str(vllm_python_with_tests()),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        *arguments,
    ]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    return done.stdout


def test_it_keeps_the_contract_of_engines() -> None:
    said = re.search(r"(\d+) passed", passed("tests/contract/test_engines.py", "-k", "vllm"))
    assert said is not None and int(said[1]) > 20


def test_it_serves_a_model_and_is_controlled() -> None:
    assert " passed" in passed("tests/integration/vllm_serves.py")


def test_a_controller_is_attached_to_engines_of_others() -> None:
    assert "5 passed" in passed("tests/integration/vllm_attaches.py")
