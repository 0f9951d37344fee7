"""What vLLM's KV pool holds, in blocks and in tokens, whatever kinds of layers a model has.

Every group of layers with the same kind of cache (full attention and MLA, sliding windows, chunked local attention, Mamba states)
takes blocks of its own for the tokens of a request, all from one pool. So a request takes the sum over the groups, and a group
whose blocks are freed as the window or the state moves on takes no more than its cap, which is vLLM's own. With one group of full
attention a pool of n blocks holds n times ``block_size`` tokens; with more, fewer.

Where a group is of a kind that is not known here, its blocks are not counted: what needs them is off, and one line of the log
says so. vLLM is not imported: its managers are told by their names, which versions 0.31 to 0.33 have in common.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import takewhile
from typing import Any, Final, NamedTuple

from runtime.llm.prefix import ComingPrefixes

log = logging.getLogger("vllm.autotune")

_WHOLE: Final = ("FullAttentionManager", "SinkFullAttentionManager", "RSWAManager")
"""Managers of groups that hold a block for every ``block_size`` tokens."""
_WINDOWED: Final = ("SlidingWindowManager", "ChunkedLocalAttentionManager")
"""Those of groups that free what has left the window."""
_STATE: Final = "MambaManager"


class _Group(NamedTuple):
    block_size: int  # tokens
    cap: int | None  # the most blocks of one request
    grows: bool  # whether a decode may need another block


class KvPool:
    """The pool of ``scheduler``, one of vLLM's to which nothing has been added.

    ``tokens``: its size; where there are caps, that of as many requests of the greatest length as fit (as vLLM counts it).
    ``block_size``: tokens by which vLLM schedules. ``total_blocks``: without the one that stands for no block. ``grow``: blocks
    that a decode may need at once, 0 where they cannot be counted. ``uncounted``: kinds of groups that are not known here.
    """

    def __init__(self, scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        self.total_blocks: int = pool.num_gpu_blocks - 1
        self.block_size: int = scheduler.block_size
        longest: int = scheduler.max_model_len
        found = [(one, _group(one, pool, longest)) for one in manager.coordinator.single_type_managers]
        self._groups = groups = [group for _, group in found if group is not None]
        self.uncounted = tuple(
            sorted({type(one).__name__.removesuffix("Manager") for one, group in found if group is None})
        )
        self.grow = 0 if self.uncounted else sum(group.grows for group in groups)
        self.tokens: int = self._tokens(scheduler, longest)
        self.bytes: int = _bytes(scheduler)
        """Of the pool in one worker; 0 where that is not known."""
        self.blocks: Callable[[int], int] = self._count()
        self.free: Callable[[], int] = pool.get_num_free_blocks
        """Blocks that nobody holds."""
        self._grow_by = {size: sum(group.grows and group.block_size == size for group in groups) for size, *_ in groups}
        self._computed: Callable[[Any], Any] = manager.get_computed_blocks
        kinds = [type(one).__name__ for one, _ in found]
        hashed = getattr(scheduler, "hash_block_size", self.block_size)
        alike = {*kinds} == {_WHOLE[0]} and {group.block_size for group in groups} == {hashed}
        self._named = hashed if alike else 0
        if self.uncounted:
            log.warning(
                "KV growth reserve and the check that whole prompts fit are off: the model has KV cache groups of kind %s, whose "
                "blocks cannot be counted here; vLLM's own admission decides, and the size of the pool in tokens is vLLM's own",
                ", ".join(self.uncounted),
            )

    def _count(self) -> Callable[[int], int]:
        """What says how many blocks a request of so many tokens takes, as a function that is fast in the usual case."""
        groups = self._groups
        if self.uncounted:
            return lambda tokens: 0
        if len(groups) == 1 and groups[0].cap is None:
            size = groups[0].block_size
            return lambda tokens: -(-tokens // size)
        return lambda tokens: sum(
            [-(-tokens // size) if cap is None else min(-(-tokens // size), cap) for size, cap, _ in groups]
        )

    def _tokens(self, scheduler: Any, longest: int) -> int:
        groups, row = self._groups, self.block_size
        if self.uncounted:
            said = getattr(scheduler.cache_config, "kv_cache_size_tokens", None)
            return max(1, int(said or self.total_blocks * row) // row) * row
        if not groups:  # a model that caches nothing: as many as can be in progress
            return int(scheduler.max_num_running_reqs) * longest
        if all(group.cap is None and group.grows for group in groups):
            return int(self.total_blocks // sum(row // group.block_size for group in groups) * row)
        return int(self.total_blocks * longest // self._count()(longest) // row * row)

    def growing(self, running: list[Any]) -> int:
        """Blocks that these requests, which decode, take in the coming step."""
        return sum(
            [
                count * sum([request.num_computed_tokens % size == 0 for request in running])
                for size, count in self._grow_by.items()
                if count
            ]
        )

    def cached(self, request: Any) -> tuple[int, set[int]]:
        """Tokens of ``request`` in vLLM's prefix cache, and those of their blocks that nobody holds."""
        mode = getattr(request, "kv_cache_report_mode", None)
        if mode == "full":  # vLLM would report each block to whoever routes by them, as if it were about to be used
            request.kv_cache_report_mode = "incremental"
        try:
            found = self._computed(request)
        finally:
            if mode == "full":
                request.kv_cache_report_mode = mode
        cached = int(found[1])
        if not cached or self.uncounted:
            return cached, set()
        return cached, {
            block.block_id for group in found[0].blocks for block in group if block.ref_cnt == 0 and not block.is_null
        }

    def named(self, request: Any, start: int, end: int) -> list[Any]:
        """Hashes of the blocks of ``request`` that are known once its tokens from ``start`` to ``end`` are planned; none where a
        prefix is more than blocks of full attention."""
        size = self._named
        return list(request.block_hashes[start // size : end // size]) if size else []

    def shared(self, request: Any, cached: int, named: set[Any] | ComingPrefixes) -> int:
        """Tokens of ``request`` behind the ``cached`` ones that it shares with blocks ``named``, which others compute."""
        size = self._named
        if not size or not named or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        hashes = request.block_hashes[cached // size : (request.num_tokens - 1) // size]
        return size * len(list(takewhile(named.__contains__, hashes)))


def _group(manager: Any, pool: object, longest: int) -> _Group | None:
    """What ``manager``, of one group, takes from ``pool``; None where that is not known."""
    kind, size = type(manager).__name__, manager.block_size
    if manager.block_pool is not pool:
        return None
    if kind in _WHOLE:
        return _Group(size, None, True)
    if kind in _WINDOWED:
        cap = manager.max_admission_blocks_per_request
        return None if cap is None else _Group(size, cap, True)
    if kind == _STATE:
        spec = manager.kv_cache_spec
        if spec.mamba_cache_mode == "align":  # two states while one moves on, and one at the end of the prompt
            return _Group(size, 2 + spec.num_prefill_checkpoint_blocks, True)
        return _Group(size, 1, False) if size >= longest else None
    return None


def _bytes(scheduler: Any) -> int:
    """Tensors of the pool lie in one allocation, and each knows its size."""
    tensors = getattr(scheduler.kv_cache_config, "kv_cache_tensors", ())
    return max([int(tensor.size) for tensor in tensors if not getattr(tensor, "host_resident", False)], default=0)
