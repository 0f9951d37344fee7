"""The KV pool on a CUDA device: sized by what is free behind the largest step, with room for that step."""

from __future__ import annotations

import torch

from runtime.knobs import KnobLimits
from runtime.llm.engine import Engine
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.loading import load_model
from runtime.torch_backend.pool_size import largest_step

LIMITS = KnobLimits(max_batch_size=64, token_budget=4096, chunk_size=4096)


def test_the_largest_step_fits_beside_the_pool() -> None:
    """Of a model whose pool is held down to a fraction of the device by what somebody else has taken."""
    loaded = load_model("qwen3-0.6b", device="cuda")
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(max(0, free - (6 << 30)), dtype=torch.uint8, device="cuda")
    with Engine(loaded, limits=LIMITS) as engine:
        executor = engine.executor
        assert isinstance(executor, TorchExecutor) and len(executor.graphs.decodes) == 11
        pool = executor.pool.bytes
        assert (3 << 30) < pool < (6 << 30)
        plan = largest_step(LIMITS, loaded.max_model_len, 16, executor.pool.block_count)
        for _ in range(2):
            assert not executor.execute(plan, 0.0, 0.0).oom
        assert executor.pool.bytes == pool
    del taken
