"""Tiers by folder: every test is marked with the folder it lies in, and those under ``tests/gpu`` need a CUDA device."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Before any test imports transformers: no test may depend on a network. Tokenizers' threads do not survive a fork.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Before any test imports Triton, which decides then: without a GPU its kernels run in NumPy.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts the tests in the background lets them, and every program that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

FOLDERS = ("unit", "contract", "replay", "integration", "gpu")

# No deadline: machines are shared, and a slow one is not a wrong answer. Both tiers draw the same examples every time, so
# that a check that failed fails again; the slow tier draws more (thorough), HYPOTHESIS_PROFILE=explore draws new ones.
_SHARED = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, max_examples=20, **_SHARED)
settings.register_profile("thorough", derandomize=True, max_examples=100, **_SHARED)
settings.register_profile("explore", max_examples=500, **_SHARED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    on_gpu = []
    for item in items:
        folder = item.path.relative_to(here).parts[0]
        if folder not in FOLDERS:
            raise pytest.UsageError(f"{item.path}: tests lie in one of tests/{{{','.join(FOLDERS)}}}")
        item.add_marker(folder)
        if item.get_closest_marker("gpu"):
            on_gpu.append(item)
    if on_gpu and (reason := _no_cuda()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_cuda() -> str | None:
    """Why the GPU tests cannot run here, or None. Imports torch, so it is asked only when there are such tests."""
    import torch

    return None if torch.cuda.is_available() else f"PyTorch sees no CUDA device (torch {torch.__version__})"
