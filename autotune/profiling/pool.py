"""The KV pool that a study is measured with: one, however often it is gone on with, and on whichever machine."""

from __future__ import annotations

from pathlib import Path

from autotune.engines import Engine
from autotune.engines.named import NamedSource
from autotune.profiling.storage import SharedStorage
from autotune.profiling.study import SweepStudy
from runtime.errors import InputError
from runtime.knobs import KnobLimits

_POOL = "pool"


def started(
    study: SweepStudy, source: NamedSource, place: Path | SharedStorage, limits: KnobLimits, seed: int
) -> Engine:
    """The engine with the KV pool of ``study``, which is the one that it chooses itself if it is the first to be started."""
    tokens = pool_of(study, source, place)
    engine = (source if tokens is None else source.with_kv_tokens(tokens)).start(limits=limits, seed=seed)
    has = engine.facts.kv_tokens
    if tokens is None:
        tokens = int(study.measured(_POOL, lambda: {"kv_tokens": has})["kv_tokens"])
        if has != tokens:  # another machine was first
            engine.close(drain=False)
            return started(study, source, place, limits, seed)
    if has != tokens:
        engine.close(drain=False)
        raise InputError(
            f"{place}: this study was begun with a KV pool of {tokens} tokens, and {source.name} {source.version} has one of "
            f"{has} here; --fresh begins anew with that"
        )
    return engine


def pool_of(study: SweepStudy, source: NamedSource, place: Path | SharedStorage) -> int | None:
    """Tokens of the KV pool that everything in ``study`` was measured with, on whichever machine; now chosen if it is new.
    None if the engine chooses it as it is started.

    How many fit hangs on what memory is free just then, and settings measured with another pool are not to be compared.
    Raises :class:`InputError` where there is no longer, or not here, room for it.
    """
    pool = study.measurements.find(_POOL)
    if pool is None:
        if (chosen := source.default_kv_tokens()) is None:
            return None
        pool = study.measured(_POOL, lambda: {"kv_tokens": chosen})
    tokens = int(pool["kv_tokens"])
    needed, free = tokens * source.model.kv_bytes_per_token, source.free_bytes()
    if free is not None and needed > free:
        raise InputError(
            f"{place}: this study was begun with a KV pool of {tokens} tokens ({needed / 2**30:.2g} GiB), and "
            f"{free / 2**30:.2g} GiB of memory are free here; free some, or --fresh begins anew with a smaller pool"
        )
    return tokens
