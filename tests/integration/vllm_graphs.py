"""Run by the Python of an environment with vLLM: which rows it says a step runs as, and which we say.

Prints a JSON list, of each CUDA graph mode, number of sequences and list of sizes: what we read, and for each number of decodes
up to ``max_num_seqs``, and of tokens with a prompt among them up to the budget, the rows that vLLM's own dispatcher picks and
those that our cost model counts. The configuration is the one that vLLM makes of its arguments, with the mode that it would have
on a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm.config import CompilationMode, CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from autotune.cost.shape import as_run
from autotune.engines.vllm.model import graphs_of
from runtime.step_model import StepFeatures, computed
from tests.integration.llama_folder import weightless_folder

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def cases(model: Path) -> Iterator[dict[str, Any]]:
    def made(**more: Any) -> Any:
        stock: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True}
        return EngineArgs(str(model), **stock, **more).create_engine_config()

    yield {"mode": "on a CPU", "read": astuple(graphs_of(made(max_num_seqs=64)))}
    for eager in (False, True):
        for mode in MODES if not eager else ("FULL_AND_PIECEWISE",):
            for slots, sizes in ((256, None), (50, None), (100, [1, 8, 64, 96]), (100, [64, 2, 128, 512]), (3, [4, 8])):
                config = made(max_num_seqs=slots, max_num_batched_tokens=300 if slots == 3 else 2048)
                yield as_on_a_gpu(config, mode, sizes, eager)


def as_on_a_gpu(config: Any, mode: str, sizes: list[int] | None, eager: bool) -> dict[str, Any]:
    config.device_config.device_type = "cuda"
    config.model_config.enforce_eager = eager
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode["NONE" if eager else mode]  # as it does when it is told of enforce_eager
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.splitting_ops = list(compilation._attention_ops)
    compilation.max_cudagraph_capture_size, compilation.cudagraph_capture_sizes = None, sizes
    config._set_cudagraph_sizes()
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(compilation.cudagraph_mode)
    read, slots = graphs_of(config), config.scheduler_config.max_num_seqs
    decodes = [StepFeatures(n, 100 * n, 0, 0, 0) for n in range(1, slots + 1)]
    tokens = range(2, config.scheduler_config.max_num_batched_tokens + 1)
    mixed = [StepFeatures(1, 100, n - 1, n - 1, n, 1) for n in tokens]
    return {
        "mode": mode, "slots": slots, "sizes": sizes, "eager": eager, "read": astuple(read),
        "theirs": [dispatcher.dispatch(step.decodes, uniform_decode=True)[1].num_tokens for step in decodes],
        "ours": [int(computed(as_run(step, read)[0])) for step in decodes],
        "theirs_mixed": [dispatcher.dispatch(n, uniform_decode=False)[1].num_tokens for n in tokens],
        "ours_mixed": [int(computed(as_run(step, read)[0])) for step in mixed],
        "theirs_eager": [dispatcher.dispatch(n, uniform_decode=False)[0] == CUDAGraphMode.NONE for n in tokens],
        "ours_eager": [bool(as_run(step, read)[1]) for step in mixed],
    }  # fmt: skip


if __name__ == "__main__":
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:  # vLLM logs to stdout
        found = list(cases(weightless_folder(Path(folder) / "model")))
    json.dump(found, out)
