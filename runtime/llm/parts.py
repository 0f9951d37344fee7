"""The model, its executor and its KV pool, for an engine that was given a name. Torch is imported here, when called."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from runtime.clock import Clock
from runtime.errors import ModelError
from runtime.knobs import KnobLimits, Knobs
from runtime.llm.intake import ServedModel
from runtime.llm.plan import Executor
from runtime.shared.progress import announce
from runtime.slo import RequestClass
from runtime.tunable import ModelInfo

if TYPE_CHECKING:
    from runtime.torch_backend.loading import LoadedModel

MAX_KV_TOKENS = 1 << 31  # beyond it the list of blocks alone would take gigabytes
_SEEDS = 1 << 63


class Parts(NamedTuple):
    """What an engine is put together from."""

    model: ServedModel
    info: ModelInfo
    executor: Executor
    kv_blocks: int


def parts_of(
    model: str | LoadedModel | ServedModel,
    executor: Executor | None,
    *,
    dtype: str,
    device: str,
    kv_cache_dtype: str,
    kv_tokens: int | None,
    block_size: int,
    max_model_len: int | None,
    seed: int,
    threads: int | None,
    clock: Clock,
    limits: KnobLimits,
) -> Parts:
    """Load ``model`` if it is a name, prove that it can be served, and size its pool.

    With an ``executor`` nothing of torch is touched: ``model`` then only says what prompts may be. ``kv_tokens`` None
    takes the memory that is left, by the rule of :func:`runtime.torch_backend.pool_size.pool_blocks`. ``limits``: up to its
    ``max_batch_size`` a GPU's decode steps are recorded.
    """
    if executor is not None:
        if isinstance(model, str):
            raise ValueError(f"model is {model!r}; with an executor of your own it must be an object, not a name")
        if kv_tokens is None:
            raise ValueError(
                "kv_tokens is None; with an executor of your own it must be the size of its KV pool, in tokens"
            )
        return Parts(model, _said(model), executor, kv_tokens // block_size)
    if isinstance(model, str):
        announce(f"loading {model} …")  # importing PyTorch alone takes seconds

    import torch

    from runtime.torch_backend.executor import TorchExecutor
    from runtime.torch_backend.kv_pool import check_pool
    from runtime.torch_backend.loading import LoadedModel, load_model
    from runtime.torch_backend.pool_size import pool_blocks
    from runtime.torch_backend.self_test import self_test

    if threads is not None:
        torch.set_num_threads(threads)
    if isinstance(model, str):
        loaded = load_model(
            model, dtype=dtype, device=device, seed=seed, max_model_len=max_model_len, kv_cache_dtype=kv_cache_dtype
        )
    elif isinstance(model, LoadedModel):
        loaded = model
        if kv_cache_dtype not in ("auto", loaded.kv_cache_dtype):
            raise ValueError(
                f"kv_cache_dtype is {kv_cache_dtype!r}; it must be {loaded.kv_cache_dtype!r}, as the model was loaded"
            )
    else:
        raise ModelError(f"model is a {type(model).__name__}; it must be a name or what load_model returned")
    if kv_tokens is not None:
        check_pool(loaded, kv_tokens, block_size)
    self_test(loaded)
    kv_blocks = pool_blocks(loaded, limits, block_size, kv_tokens)
    return Parts(
        loaded,
        loaded.info,
        TorchExecutor(
            loaded,
            kv_blocks=kv_blocks,
            block_size=block_size,
            seed=seed,
            clock=clock,
            max_batch_size=limits.max_batch_size,
            token_budget=limits.token_budget,
        ),
        kv_blocks,
    )


def _said(model: ServedModel) -> ModelInfo:
    """As much as prompts need to know."""
    return ModelInfo(model.name, model.vocab_size, model.max_model_len)


def check_types(
    *, knobs: Knobs | None, limits: KnobLimits | None, seed: int, classes: tuple[RequestClass, ...]
) -> None:
    """Raise ``ValueError`` naming the first of these that is something else than the engine takes."""
    if knobs is not None and not isinstance(knobs, Knobs):
        raise ValueError(f"knobs is {knobs!r}; it must be Knobs(max_batch_size=…, token_budget=…, …)")
    if limits is not None and not isinstance(limits, KnobLimits):
        raise ValueError(f"limits is {limits!r}; it must be KnobLimits(max_batch_size=…, token_budget=…, …)")
    if isinstance(seed, bool) or not isinstance(seed, int) or not -_SEEDS <= seed < _SEEDS:
        raise ValueError(f"seed is {seed!r}; it must be a whole number of 64 bits, such as 0")
    for one in classes:
        if not isinstance(one, RequestClass):
            raise ValueError(f"classes holds {one!r}; each must be a RequestClass(name, slo, …)")
