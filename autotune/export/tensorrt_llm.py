"""TensorRT-LLM, with its PyTorch backend: a YAML for ``trtllm-serve MODEL --extra_llm_api_options``.

Newer versions also call the option ``--config``. Keys and rules are read from its source: ``llmapi/llm_args.py``,
``commands/serve.py`` and ``_torch/pyexecutor``. Its ``batch_wait_timeout_ms`` looks like ``max_wait_ms`` and is another: the
loop that runs the steps sleeps before *every* step until ``max_batch_size`` new requests are there or the time is up, and
sequences that decode wait with it.
"""

from __future__ import annotations

import shlex

from autotune.export.files import yaml_file
from autotune.export.rows import (
    drafts_that_fit,
    facts_under,
    fewer_drafts,
    known_dtype,
    kv_cache_in,
    no_chunk_needed,
    no_draft_fits,
    no_drafts,
    no_wait,
    same,
    sequences,
)
from autotune.export.source import ProfiledEngine
from autotune.export.target import ExportTarget, Fit, Row, Written
from runtime.llm.drafts import LONGEST

_BLOCK = 32
"""Tokens in a block of its KV cache, by default."""
_SEQUENCES = sequences("max_batch_size")


def _slots(source: ProfiledEngine) -> Written:
    written = _SEQUENCES.write(source)
    return {
        **written,
        "cuda_graph_config.max_batch_size": written["max_batch_size"],  # it has graphs up to 128 by default
        "cuda_graph_config.enable_padding": True,  # or steps of sizes between two graphs have none
    }


def _no_block_fits(source: ProfiledEngine) -> str:
    if source.knobs.token_budget >= _BLOCK:
        return ""
    return f"TensorRT-LLM cuts prompts at whole blocks of {_BLOCK} tokens, and would never compute a longer one"


def _drafts(source: ProfiledEngine) -> Written:
    if not source.knobs.draft_tokens:
        return {}
    return {
        "speculative_config.decoding_type": "NGram",
        "speculative_config.max_draft_len": drafts_that_fit(source),
        "speculative_config.max_matching_ngram_size": LONGEST,
        "speculative_config.is_public_pool": False,  # each sequence from its own text, as here
        "disable_overlap_scheduler": True,  # n-grams are looked up on the host, between steps
    }


TENSORRT_LLM = ExportTarget(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    version="1.3",
    filename="tensorrt-llm.yaml",
    suffixes=(".yaml", ".yml"),
    knobs={
        "max_batch_size": Row(
            Fit.EXACT,
            ("max_batch_size", "cuda_graph_config.max_batch_size", "cuda_graph_config.enable_padding"),
            _slots,
            about=_SEQUENCES.about,
        ),
        "max_wait_ms": Row(
            Fit.UNSUPPORTED,
            said="TensorRT-LLM's batch_wait_timeout_ms delays every step, decodes too, until max_batch_size requests came",
            harmless=no_wait,
        ),
        "token_budget": Row(
            Fit.APPROXIMATE,
            ("max_num_tokens",),
            lambda s: {"max_num_tokens": s.knobs.token_budget},
            said=f"TensorRT-LLM cuts prompts at whole blocks of its KV cache ({_BLOCK} tokens by default): less than a block of "
            "a step stays empty, and prompts wait while decodes leave no more than that",
            unsupported=_no_block_fits,
        ),
        "chunk_size": Row(
            Fit.APPROXIMATE,
            ("enable_chunked_prefill",),
            lambda s: {"enable_chunked_prefill": True},
            said="TensorRT-LLM cuts a prompt where the step's tokens end, and has no bound below that",
            harmless=no_chunk_needed,
        ),
        "draft_tokens": Row(
            Fit.APPROXIMATE,
            (
                "speculative_config.decoding_type",
                "speculative_config.max_draft_len",
                "speculative_config.max_matching_ngram_size",
                "speculative_config.is_public_pool",
                "disable_overlap_scheduler",
            ),
            _drafts,
            said="TensorRT-LLM drafts for every sequence, and cannot overlap steps meanwhile",
            harmless=no_drafts,
            about=fewer_drafts("TensorRT-LLM"),
            unsupported=no_draft_fits("TensorRT-LLM"),
        ),
    },
    facts=facts_under(
        model="model",
        max_model_len="max_seq_len",
        kv_cache_dtype=kv_cache_in("kv_cache_config.dtype", "TensorRT-LLM", fp8="fp8", fp8_e4m3="fp8"),
        kv_pool="kv_cache_config.max_tokens",
        fewer="TensorRT-LLM takes fewer where its share of free memory (free_gpu_memory_fraction) holds no more",
        prefix_cache=same("kv_cache_config.enable_block_reuse", lambda s: s.profile.engine.prefix_cache),
        parallelism="tensor_parallel_size",
    ),
    constraints=(known_dtype,),
    render=yaml_file,
    command=lambda model, path: (
        f"trtllm-serve {'MODEL' if model is None else shlex.quote(model)} --extra_llm_api_options {shlex.quote(path)}"
    ),
)
