"""For tests in an environment with vLLM: an executor without a model, and a model directory without weights."""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from autotune.engines.vllm import VllmEngine
from runtime.knobs import KnobLimits, Knobs
from tests.integration.llama_folder import weightless_folder

BLOCK = 16
POOL_TOKENS = 4096


class CountingExecutor(Executor):
    """Samples, for each request, the number of tokens it has so far. Computes nothing."""

    fail_on = -1
    """A step in which a prompt of so many tokens begins fails."""

    step_s = 0.0
    """Seconds of a step with tokens."""

    def _init_executor(self) -> None:
        self._tokens: dict[str, int] = {}
        self._prompts: dict[str, int] = {}

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any
    ) -> list[Any]:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        answers = {
            "get_kv_cache_spec": {"layer": spec},
            "determine_available_memory": (POOL_TOKENS // BLOCK + 1) * spec.page_size_bytes,
            "get_supported_kv_cache_layouts": ["NHD"],
            "get_supported_tasks": ("generate",),
        }
        return [answers.get(method)] if isinstance(method, str) else [None]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        made = self._run(scheduler_output)
        if not non_block:
            return made
        done: Future[Any] = Future()
        done.set_result(made)
        return done

    def _run(self, output: Any) -> ModelRunnerOutput:
        for new in output.scheduled_new_reqs:
            if len(new.prompt_token_ids) == self.fail_on:
                raise RuntimeError("of the model")
            self._tokens[new.req_id] = new.num_computed_tokens
            self._prompts[new.req_id] = len(new.prompt_token_ids)
        names = list(output.num_scheduled_tokens)
        if not names:
            return EMPTY_MODEL_RUNNER_OUTPUT
        time.sleep(self.step_s)
        sampled: list[list[int]] = []
        for name in names:
            self._tokens[name] += output.num_scheduled_tokens[name]
            done = self._tokens[name]
            sampled.append([done % 200] if done >= self._prompts[name] else [])
        return ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)


class ServedExecutor(CountingExecutor):
    """For a ``vllm serve``, which can only be told by its environment."""

    fail_on = int(os.environ.get("TEST_FAIL_ON", "-1"))
    step_s = float(os.environ.get("TEST_STEP_S", "0"))


def vllm_engine(
    limits: KnobLimits, knobs: Knobs, *, fail_on: int = -1, step_s: float = 0.0, **options: Any
) -> VllmEngine:
    """vLLM's own engine and scheduler over a :class:`CountingExecutor`. Ready in some 10 ms, but for the first."""

    class Executor(CountingExecutor):
        pass

    Executor.fail_on, Executor.step_s = fail_on, step_s
    with tempfile.TemporaryDirectory() as folder:
        stock: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "enforce_eager": True, "block_size": BLOCK}
        return VllmEngine(
            str(weightless_folder(Path(folder) / "model")),
            limits=limits,
            knobs=knobs,
            **{"distributed_executor_backend": Executor, **stock, **options},
        )
