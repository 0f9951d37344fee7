"""How the benchmarks start vLLM: its CPU build in this process, a model of random weights, and the defaults of its server."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from autotune.engines.vllm import VllmEngine, VllmSource
from benchmarks.command import count
from benchmarks.vllm.model import PRESET, SMALL
from runtime.errors import InputError
from runtime.knobs import KnobLimits, Knobs

DEFAULTS: Final = Knobs(max_batch_size=128, max_wait_ms=0, token_budget=2048, chunk_size=2048)
"""What ``vllm serve`` starts with on a CPU: max-num-seqs 128, max-num-batched-tokens 2048, no limit for long prompts."""
LIMITS: Final = KnobLimits(max_batch_size=128, max_wait_ms=200, token_budget=2048, chunk_size=2048)
OPTIONS: Final[dict[str, Any]] = {
    "load_format": "dummy",
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "enable_prefix_caching": False,
}
"""Of vLLM's EngineArgs. Prompts are random, so that a prefix cache would find nothing."""
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def ready() -> None:
    """Prepare this process for vLLM, before it is imported. Raises :class:`InputError` where there is none."""
    if importlib.util.find_spec("vllm") is None:
        raise InputError(
            "vllm is not installed for this Python; run the benchmark by one that has it, such as that of an environment made "
            "by `make test-integration`"
        )
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def vllm_options(parser: argparse.ArgumentParser) -> None:
    """The options of a benchmark that starts vLLM: which model, and how many threads compute it."""
    parser.add_argument("--small", action="store_true", help="a model of 7M parameters: to try the benchmark out")
    parser.add_argument(
        "--threads",
        type=count,
        default=max(1, (os.cpu_count() or 1) - 1),
        help="of vLLM's computation (default: all cores but one)",
    )


def prepared(args: argparse.Namespace) -> str:
    """Prepare this process as ``args`` say; the preset of the model. Raises as :func:`ready`."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    ready()
    return SMALL if args.small else PRESET


def source(folder: Path) -> VllmSource:
    return VllmSource(str(folder), dict(OPTIONS))


def start(folder: Path, **options: Any) -> VllmEngine:
    """The steered engine, at the defaults of vLLM's server."""
    return VllmEngine(str(folder), knobs=DEFAULTS, limits=LIMITS, **{**OPTIONS, **options})


def start_stock(folder: Path, **options: Any) -> Any:
    """vLLM's own LLMEngine, with its own scheduler unless ``options`` name another."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    given = {"max_num_seqs": LIMITS.max_batch_size, "max_num_batched_tokens": LIMITS.token_budget, **OPTIONS, **options}
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, disable_log_stats=True, async_scheduling=False, **given
    ).create_engine_config()
    return LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)


def apart(module: str, arguments: Sequence[str], *, threads: int) -> dict[str, Any]:
    """Run ``module`` in a process of its own, which may start and end vLLM as it likes: one that ends takes down the others
    of its process. Returns the JSON of its last line. Raises ``RuntimeError`` if it fails, or says nothing."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {done.returncode}")
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        raise RuntimeError(f"the last line of {' '.join(command)} is no JSON") from None
    return found
