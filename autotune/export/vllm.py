"""vLLM: a flat YAML for ``vllm serve --config``.

Keys and rules are read from vLLM's own ``config/scheduler.py``, ``config/cache.py`` and ``v1/core/sched/scheduler.py``; the
integration test runs them on its 0.32.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from typing import NamedTuple

from autotune.engines.named import DTYPE_BYTES
from autotune.export.files import yaml_file
from autotune.export.rows import (
    drafts_that_fit,
    fewer_drafts,
    known_dtype,
    no_chunk_needed,
    no_draft_fits,
    no_drafts,
    no_wait,
    of_model,
    same,
    sequences,
)
from autotune.export.source import ProfiledEngine
from autotune.export.target import ExportTarget, Fit, Row, Written
from runtime.llm.drafts import LONGEST, SHORTEST

DEFAULT_SHARE = 0.92
LARGEST_SHARE = 0.95  # vLLM refuses to start unless its share of the device is free, and its CUDA context takes some
GIB = 2**30
_BESIDE = 0.1
"""Of the devices' memory, what activations and CUDA graphs hardly exceed; vLLM takes both out of its share."""
_SPARE = 2 * 128
"""Tokens of vLLM's block that stands for no block, and of one that is not full, in blocks of its default on a CPU."""
_NGRAM = {"method": "ngram", "prompt_lookup_min": SHORTEST, "prompt_lookup_max": LONGEST}


def _chunks(source: ProfiledEngine) -> Written:
    written: dict[str, bool | int] = {"enable-chunked-prefill": True}
    if not no_chunk_needed(source) and not (_lowered(source) and source.knobs.chunk_size >= _max_model_len(source)):
        written["long-prefill-token-threshold"] = source.knobs.chunk_size
    return written


def _about_chunk(source: ProfiledEngine) -> str:
    if source.longest is not None or no_chunk_needed(source):
        return ""
    return "vLLM does not start if the threshold is longer than the model's context, which is not known here: delete it then"


def _drafts(source: ProfiledEngine) -> Written:
    count = drafts_that_fit(source)
    return {"speculative-config": json.dumps(_NGRAM | {"num_speculative_tokens": count})} if count else {}


def _about_model(source: ProfiledEngine) -> str:
    if source.model is not None:
        return ""
    shape = source.profile.model.name
    return f"{shape} is a shape with random weights that no published model has; name your model in the command"


def _about_length(source: ProfiledEngine) -> str:
    if not source.another_model and source.max_model_len < source.profile.model.max_model_len:
        return f"the model allows {source.profile.model.max_model_len}; the KV pool that was measured held no more"
    return ""


class Memory(NamedTuple):
    """GiB that the weights and the measured KV pool take, and that the devices have."""

    weights: float
    pool: float
    devices: float

    @property
    def share(self) -> float:
        """What to give vLLM: both of them, rounded up to a percent."""
        return min(LARGEST_SHARE, math.ceil((self.weights + self.pool) / self.devices * 100) / 100)


def _memory(source: ProfiledEngine) -> Memory | None:
    """None when the profile cannot tell: it was made on a CPU, or another model will be served."""
    profile, gpu = source.profile, source.profile.machine.gpu
    if profile.machine.kind != "gpu" or gpu is None or source.another_model:
        return None
    weights = profile.model.parameters * DTYPE_BYTES.get(profile.model.dtype, 4) / GIB
    return Memory(weights, _pool_gib(source), profile.engine.parallelism * gpu.memory_gib)


def _pool_gib(source: ProfiledEngine) -> float:
    return _gib(source, source.profile.engine.kv_pool.tokens)


def _gib(source: ProfiledEngine, tokens: int) -> float:
    return tokens * source.profile.model.kv_bytes_per_token / GIB


def _on_vllm(source: ProfiledEngine) -> bool:
    """Whether the pool is one of vLLM's own, measured with this model."""
    return source.measured_there and not source.another_model


def _blocks(source: ProfiledEngine) -> Written:
    """Blocks of a pool of vLLM's own, as vLLM is told; nothing where the profile does not say all of it."""
    engine = source.profile.engine
    size, count = engine.block_size_given, engine.kv_blocks
    if not _on_vllm(source) or size is None or count is None:
        return {}
    return {"block-size": size, "num-gpu-blocks-override": count + 1}  # one of them stands for no block


def _pool_bytes(source: ProfiledEngine) -> int:
    """Of a pool of vLLM's own on each device, with the block that stands for no block; 0: not known."""
    engine = source.profile.engine
    blocks = engine.kv_blocks or engine.kv_pool.blocks
    counted = engine.kv_pool.tokens * source.profile.model.kv_bytes_per_token * (blocks + 1) // blocks
    return engine.kv_bytes or counted // engine.parallelism


def _short(source: ProfiledEngine) -> bool:
    """Whether the share that weights and pool take might not leave one request of the greatest length; vLLM does not start
    then."""
    memory = _memory(source)
    if memory is None or _on_vllm(source):
        return False
    left = (memory.share - _BESIDE) * memory.devices - memory.weights
    longest = _gib(source, source.max_model_len)
    return left < longest and longest > 0


def _given_tokens(source: ProfiledEngine) -> int:
    """Tokens of a pool that is given in bytes: as measured, but no more than surely leave room for the rest."""
    memory, wanted = _memory(source), source.profile.engine.kv_pool.tokens + _SPARE
    assert memory is not None
    room = ((1 - _BESIDE) * memory.devices - memory.weights) * GIB / source.profile.model.kv_bytes_per_token
    return min(wanted, int(room)) if room > _SPARE else wanted


def _max_model_len(source: ProfiledEngine) -> int:
    """As measured, unless not even one request of that length has room beside the weights."""
    longest = source.max_model_len
    return min(longest, _given_tokens(source) - _SPARE) if _short(source) else longest


def _lowered(source: ProfiledEngine) -> bool:
    return _max_model_len(source) < source.max_model_len


def _share(source: ProfiledEngine) -> Written:
    profile = source.profile
    if _on_vllm(source):
        written, held = dict(_blocks(source)), _pool_bytes(source)
        if held and (not written or profile.machine.kind == "cpu"):  # where it would have 92% of all memory free
            written["kv-cache-memory-bytes"] = held
        return written
    if _short(source):
        held = _given_tokens(source) * profile.model.kv_bytes_per_token
        return {"kv-cache-memory-bytes": held // profile.engine.parallelism}
    memory = _memory(source)
    return {} if memory is None else {"gpu-memory-utilization": memory.share}


def _another_pool(source: ProfiledEngine) -> str:
    """What a pool differs by that is not given as a share of memory."""
    if _short(source):
        return (
            "vLLM makes a KV cache of so many bytes whatever else takes memory; a share might leave less than one request of "
            "max-model-len takes, and vLLM does not start then. If it runs out of memory, lower both"
        )
    if not _on_vllm(source):
        return ""
    unknown = "the profile does not say how many blocks vLLM's pool had, which is more than its tokens fill where layers take "
    if source.profile.engine.kv_blocks is not None:
        unknown = "the profile does not say how many tokens a block of vLLM's pool had, whose layers take "
    if _pool_bytes(source):
        return f"{unknown}blocks in several groups; of so many bytes such a model makes a pool of another size than was measured"
    return f"{unknown}blocks in several groups, nor what a token takes: vLLM makes a pool of the size that its default gives"


def _about_share(source: ProfiledEngine) -> str:
    memory = _memory(source)
    if memory is None or _on_vllm(source):
        return ""
    at_most = memory.share == LARGEST_SHARE and not _short(source)
    cut = f", cut to the {LARGEST_SHARE} that vLLM can surely have" if at_most else ""
    if _short(source) and (given := _given_tokens(source)) < source.profile.engine.kv_pool.tokens:
        cut = f"; KV cache cut to {_gib(source, given):.1f} GiB, which leave {_BESIDE:.0%} of the memory to activations"
    return f"weights {memory.weights:.1f} + KV cache {memory.pool:.1f} of {memory.devices:.1f} GiB{cut}"


def _default_share(source: ProfiledEngine) -> str:
    """Why the share is left to vLLM."""
    if _memory(source) is not None or _on_vllm(source):
        return ""
    if source.profile.machine.kind == "gpu":
        measured = source.profile.model.name
        return (
            f"left at vLLM's default ({DEFAULT_SHARE}): the pool was measured beside {measured}, not beside this model"
        )
    space = math.ceil(_gib(source, source.profile.engine.kv_pool.tokens + _SPARE))
    return (
        f"left at vLLM's default ({DEFAULT_SHARE}): the pool was measured in a CPU's memory, which says nothing about a GPU's. "
        f"On a CPU, VLLM_CPU_KVCACHE_SPACE={space} in the environment gives vLLM as many GiB"
    )


def _prefixes(source: ProfiledEngine) -> Written:
    # `enable-prefix-caching: false` is dropped without a word by some versions; the negated flag is read by all.
    return {"enable-prefix-caching" if source.profile.engine.prefix_cache else "no-enable-prefix-caching": True}


def _steps_in_turn(source: ProfiledEngine) -> str:
    """A file that switched it off would cost speed, and leave the knobs as they are."""
    if not source.measured_there or source.profile.machine.kind == "cpu":  # where vLLM has none
        return ""
    return (
        "the measurement ran without async scheduling, which vLLM turns on by default on a GPU: for the same, add "
        "`no-async-scheduling: true` to the file or --no-async-scheduling to the command"
    )


VLLM = ExportTarget(
    name="vllm",
    title="vLLM",
    version="0.32",
    filename="vllm.yaml",
    suffixes=(".yaml", ".yml"),
    knobs={
        "max_batch_size": sequences("max-num-seqs"),
        "max_wait_ms": Row(Fit.UNSUPPORTED, said="vLLM has no such setting", harmless=no_wait),
        "token_budget": same("max-num-batched-tokens", lambda s: s.knobs.token_budget),
        "chunk_size": Row(
            Fit.APPROXIMATE,
            ("enable-chunked-prefill", "long-prefill-token-threshold"),
            _chunks,
            said="vLLM lifts the threshold while a request is the only one there, and its prompt then takes the whole budget",
            harmless=no_chunk_needed,
            about=_about_chunk,
            exact=lambda s: s.measured_there and bool(no_chunk_needed(s)),
        ),
        "draft_tokens": Row(
            Fit.APPROXIMATE,
            ("speculative-config",),
            _drafts,
            said="vLLM drafts for every sequence, whatever the step holds; here prompts go before drafts",
            harmless=no_drafts,
            about=fewer_drafts("vLLM"),
            unsupported=no_draft_fits("vLLM"),
            exact=lambda s: s.measured_there and bool(no_drafts(s)),
        ),
    },
    facts={
        "model": Row(
            Fit.EXACT, ("model",), lambda s: {} if s.model is None else {"model": s.model}, about=_about_model
        ),
        "max_model_len": replace(
            of_model("max-model-len", _max_model_len, _about_length),
            fit=Fit.APPROXIMATE,
            said="vLLM does not start unless its KV cache holds one request of this length: no longer one has room beside "
            "weights and activations",
            exact=lambda s: not _lowered(s),
        ),
        "dtype": of_model("dtype", lambda s: s.profile.model.dtype),
        "kv_cache_dtype": same("kv-cache-dtype", lambda s: s.profile.model.kv_cache_dtype),  # in its own words
        "kv_pool": Row(
            Fit.APPROXIMATE,
            ("gpu-memory-utilization", "block-size", "num-gpu-blocks-override", "kv-cache-memory-bytes"),
            _share,
            said="vLLM takes activations and CUDA graphs out of this share too, so its KV cache comes out smaller by those; "
            "its log says how large it is",
            harmless=_default_share,
            about=_about_share,
            differs=_another_pool,
            exact=lambda s: bool(_blocks(s)),
        ),
        "prefix_cache": Row(Fit.EXACT, ("enable-prefix-caching", "no-enable-prefix-caching"), _prefixes),
        "parallelism": same("tensor-parallel-size", lambda s: s.profile.engine.parallelism),
    },
    constraints=(known_dtype,),
    render=yaml_file,
    command=lambda model, path: (
        f"vllm serve {'MODEL' if model is None else shlex.quote(model)} --config {shlex.quote(path)}"
    ),
    warning=_steps_in_turn,
)
