"""vLLM: a flat YAML for ``vllm serve --config``.

Keys and rules are read from vLLM's own ``config/scheduler.py``, ``config/cache.py`` and ``v1/core/sched/scheduler.py``; the
integration test runs them on its 0.32.
"""

from __future__ import annotations

import json
import math
import shlex
from typing import NamedTuple

from autotune.engines.named import DTYPE_BYTES
from autotune.export.files import yaml_file
from autotune.export.rows import known_dtype, no_chunk_needed, no_drafts, no_wait, of_model, same, sequences
from autotune.export.source import ProfiledEngine
from autotune.export.target import ExportTarget, Fit, Row, Written
from runtime.llm.drafts import LONGEST, SHORTEST

DEFAULT_SHARE = 0.92
LARGEST_SHARE = 0.95  # vLLM refuses to start unless its share of the device is free, and its CUDA context takes some
GIB = 2**30
_NGRAM = {"method": "ngram", "prompt_lookup_min": SHORTEST, "prompt_lookup_max": LONGEST}


def _chunks(source: ProfiledEngine) -> Written:
    written: dict[str, bool | int] = {"enable-chunked-prefill": True}
    if not no_chunk_needed(source):
        written["long-prefill-token-threshold"] = source.knobs.chunk_size
    return written


def _about_chunk(source: ProfiledEngine) -> str:
    if source.longest is not None or no_chunk_needed(source):
        return ""
    return "vLLM does not start if the threshold is longer than the model's context, which is not known here: delete it then"


def _drafts(source: ProfiledEngine) -> Written:
    count = source.knobs.draft_tokens
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
    return source.profile.engine.kv_pool.tokens * source.profile.model.kv_bytes_per_token / GIB


def _on_vllm(source: ProfiledEngine) -> bool:
    """Whether the pool is one of vLLM's own, measured with this model."""
    return source.measured_there and not source.another_model


def _blocks_known(source: ProfiledEngine) -> bool:
    """Whether it is known, of a pool of vLLM's own, how many blocks vLLM must be told."""
    return _on_vllm(source) and source.profile.engine.kv_blocks is not None


def _share(source: ProfiledEngine) -> Written:
    if _on_vllm(source):
        engine, model = source.profile.engine, source.profile.model
        counted, size = engine.kv_blocks, engine.kv_pool.block_size
        written = {"block-size": size}
        blocks = (counted or engine.kv_pool.blocks) + 1  # one of them stands for no block
        if counted is not None:
            written["num-gpu-blocks-override"] = blocks
        held = blocks * size * model.kv_bytes_per_token // engine.parallelism  # of each device
        on_cpu = source.profile.machine.kind == "cpu"  # where it would have 92% of all memory free
        if held and (on_cpu or counted is None):
            written["kv-cache-memory-bytes"] = held
        return written
    memory = _memory(source)
    return {} if memory is None else {"gpu-memory-utilization": memory.share}


def _other_blocks(source: ProfiledEngine) -> str:
    """What a pool of vLLM's own may differ by."""
    if not _on_vllm(source):
        return ""
    unknown = "the profile does not say how many blocks vLLM's pool had, which is more than its tokens fill where layers take "
    if source.profile.model.kv_bytes_per_token:
        return f"{unknown}blocks in several groups; of so many bytes such a model makes a pool of another size than was measured"
    return f"{unknown}blocks in several groups, nor what a token takes: vLLM makes a pool of the size that its default gives"


def _about_share(source: ProfiledEngine) -> str:
    memory = _memory(source)
    if memory is None or _on_vllm(source):
        return ""
    cut = f", cut to the {LARGEST_SHARE} that vLLM can surely have" if memory.share == LARGEST_SHARE else ""
    return f"weights {memory.weights:.1f} + KV cache {memory.pool:.1f} of {memory.devices:.1f} GiB{cut}"


def _default_share(source: ProfiledEngine) -> str:
    """Why the share is left to vLLM."""
    if _memory(source) is not None:
        return ""
    if source.profile.machine.kind == "gpu":
        measured = source.profile.model.name
        return (
            f"left at vLLM's default ({DEFAULT_SHARE}): the pool was measured beside {measured}, not beside this model"
        )
    return (
        f"left at vLLM's default ({DEFAULT_SHARE}): the pool was measured in a CPU's memory, which says nothing about a GPU's. "
        f"On a CPU, VLLM_CPU_KVCACHE_SPACE={math.ceil(_pool_gib(source))} in the environment gives vLLM as many GiB"
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
            exact=lambda s: s.measured_there and bool(no_drafts(s)),
        ),
    },
    facts={
        "model": Row(
            Fit.EXACT, ("model",), lambda s: {} if s.model is None else {"model": s.model}, about=_about_model
        ),
        "max_model_len": of_model("max-model-len", lambda s: s.max_model_len, _about_length),
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
            differs=_other_blocks,
            exact=_blocks_known,
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
