"""The KV pool is allocated when an engine is made, and one that does not fit beside the weights is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from runtime.llm.engine import Engine
from runtime.torch_backend import kv_pool
from runtime.torch_backend.contract import KVLayer
from runtime.torch_backend.executor import TorchExecutor
from runtime.torch_backend.kv_pool import KVPool, check_pool
from runtime.torch_backend.loading import LoadedModel, from_model
from tests.unit import loading_models


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have so many bytes be available, of a machine that has far more."""

    def now(size: int) -> None:
        monkeypatch.setattr(kv_pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=size, total=1 << 60))

    return now


def loaded_model() -> LoadedModel:
    return from_model(loading_models.tiny())


def test_a_pool_larger_than_what_is_free(free: Callable[[int], None]) -> None:
    loaded = loaded_model()
    free(1000 * loaded.kv_bytes_per_token)
    check_pool(loaded, 1000)
    with pytest.raises(ValueError) as refused:
        Engine(loaded, kv_tokens=1001)
    said = str(refused.value)
    assert said.startswith(
        "kv_tokens is 1001; that KV pool takes 0.000239 GiB, and 0.000238 GiB of cpu are free beside"
    )
    assert said.endswith("it must be at most 992")  # whole blocks of 16


def test_the_pool_is_there_before_the_first_step() -> None:
    loaded = loaded_model()
    executor = TorchExecutor(loaded, kv_blocks=10, block_size=16)
    assert executor.pool.bytes == (10 + 1) * 16 * loaded.kv_bytes_per_token
    with Engine(loaded, kv_tokens=160) as engine:
        assert isinstance(engine.executor, TorchExecutor)
        before = engine.executor.pool.bytes
        engine.generate([[1, 2, 3]], max_tokens=3)
        assert engine.executor.pool.bytes == before == 11 * 16 * loaded.kv_bytes_per_token
        assert len(engine.executor.pool.layers) == loaded.layers


def test_layers_take_the_tensors_of_their_shape_whatever_the_order_of_their_calls() -> None:
    wide, narrow = KVLayer((2, 8), (2, 4), torch.float32), KVLayer((1, 6), (1, 6), torch.bfloat16)
    pool = KVPool(3, 4, [wide, narrow])
    held = pool.bytes
    assert held == 16 * (4 * (16 + 8) + 2 * (6 + 6))
    cpu = torch.device("cpu")
    layer = pool.layer(torch.nn.Identity(), narrow, cpu)
    assert layer.keys.shape == (16, 1, 6) and layer.keys.dtype == torch.bfloat16 and pool.bytes == held
    pool.layer(torch.nn.Identity(), wide, cpu)
    assert pool.bytes == held and pool.kept == (narrow, wide)
    pool.layer(torch.nn.Identity(), narrow, cpu)
    assert pool.bytes > held, "one that the probe has not seen"


def test_memory_that_runs_out_while_the_pool_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free and what can be had in one piece are two things, and others may have taken it since."""
    allocated = []

    def zeros(dtype: torch.dtype, device: torch.device, *shape: int) -> torch.Tensor:
        if len(allocated) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        allocated.append(shape)
        return torch.empty(0)

    monkeypatch.setattr(kv_pool, "_zeros", zeros)
    with pytest.raises(
        ValueError, match=r"kv_tokens is 160; memory of cpu ran out after 3 of 4 layers .* 120 tokens fit"
    ):
        KVPool(10, 16, [KVLayer((2, 8), (2, 8), torch.float32)] * 4)
