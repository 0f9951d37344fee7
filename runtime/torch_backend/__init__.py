"""The torch backend: the only place that imports torch and transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.torch_backend.executor import TorchExecutor
    from runtime.torch_backend.loading import LoadedModel


def build(
    name: str,
    *,
    kv_blocks: int | None = None,
    block_size: int = 16,
    seed: int = 0,
    **loading: Any,
) -> tuple[LoadedModel, TorchExecutor]:
    """Load the model ``name``, put it through the self-test, and make an executor for it.

    ``kv_blocks`` None takes the memory that is left; ``loading`` goes to :func:`runtime.torch_backend.loading.load_model`.
    """
    from runtime.torch_backend.executor import TorchExecutor
    from runtime.torch_backend.kv_pool import check_pool, default_kv_blocks
    from runtime.torch_backend.loading import load_model
    from runtime.torch_backend.self_test import self_test

    loaded = load_model(name, seed=seed, **loading)
    if kv_blocks is not None:
        check_pool(loaded, kv_blocks * block_size, block_size)
    self_test(loaded)
    blocks = default_kv_blocks(loaded, block_size) if kv_blocks is None else kv_blocks
    return loaded, TorchExecutor(loaded, kv_blocks=blocks, block_size=block_size, seed=seed)
