"""The model, its executor and its KV pool, for an engine that was given a name. Torch is imported here, when called."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from runtime.clock import Clock
from runtime.errors import ModelError
from runtime.knobs import KnobLimits
from runtime.llm.intake import ServedModel
from runtime.llm.plan import Executor

if TYPE_CHECKING:
    from runtime.torch_backend.loading import LoadedModel


class Parts(NamedTuple):
    """What an engine is put together from."""

    model: ServedModel
    executor: Executor
    kv_blocks: int


def parts_of(
    model: str | LoadedModel | ServedModel,
    executor: Executor | None,
    *,
    limits: KnobLimits,
    dtype: str,
    device: str,
    kv_tokens: int | None,
    block_size: int,
    max_model_len: int | None,
    seed: int,
    threads: int | None,
    clock: Clock,
) -> Parts:
    """Load ``model`` if it is a name, prove that it can be served, and size its pool.

    With an ``executor`` nothing of torch is touched: ``model`` then only says what prompts may be. ``kv_tokens`` None
    takes the memory that is left, by the rule of :func:`runtime.torch_backend.kv_pool.default_kv_blocks`.
    """
    if executor is not None:
        if isinstance(model, str) or kv_tokens is None:
            raise ValueError("an executor of your own needs a model that is not a name, and kv_tokens")
        return Parts(model, executor, kv_tokens // block_size)

    import torch

    from runtime.torch_backend.executor import TorchExecutor
    from runtime.torch_backend.kv_pool import default_kv_blocks
    from runtime.torch_backend.loading import LoadedModel, load_model
    from runtime.torch_backend.self_test import self_test

    if threads is not None:
        torch.set_num_threads(threads)
    if isinstance(model, str):
        loaded = load_model(model, dtype=dtype, device=device, seed=seed, max_model_len=max_model_len)
    elif isinstance(model, LoadedModel):
        loaded = model
    else:
        raise ModelError(f"model is a {type(model).__name__}; it must be a name or what load_model returned")
    self_test(loaded)
    kv_blocks = default_kv_blocks(loaded, block_size) if kv_tokens is None else kv_tokens // block_size
    return Parts(
        loaded,
        TorchExecutor(loaded, kv_blocks=kv_blocks, block_size=block_size, limits=limits, seed=seed, clock=clock),
        kv_blocks,
    )
