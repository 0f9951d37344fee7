"""SGLang: a flat YAML for ``python -m sglang.launch_server --config``.

Keys and rules are read from the source of its 0.5.23: ``srt/arg_groups/fields``, ``srt/managers/scheduler.py`` and
``schedule_policy.py``. With ``enable-mixed-chunk`` it takes the running sequences out of ``chunked-prefill-size`` before prompts
get the rest: that is a token budget. Nothing bounds one prompt's part of it, and nothing waits for more prompts.
"""

from __future__ import annotations

import shlex

from autotune.export.files import yaml_file
from autotune.export.rows import (
    facts_under,
    known_dtype,
    kv_cache_in,
    no_chunk_needed,
    no_drafts,
    no_wait,
    same,
    sequences,
)
from autotune.export.source import ProfiledEngine
from autotune.export.target import ExportTarget, Fit, Row, Written


def _budget(source: ProfiledEngine) -> Written:
    tokens = source.knobs.token_budget
    return {
        "chunked-prefill-size": tokens,
        "max-prefill-tokens": tokens,  # its default of 16,384 would bind below a larger one
        "enable-mixed-chunk": source.knobs.draft_tokens == 0,
    }


def _about_budget(source: ProfiledEngine) -> str:
    if source.knobs.draft_tokens == 0:
        return ""
    return "while SGLang drafts, it runs prompts and decodes in separate steps, and the budget is that of prompts"


def _drafts(source: ProfiledEngine) -> Written:
    if not source.knobs.draft_tokens:
        return {}
    return {
        "speculative-algorithm": "NGRAM",
        "speculative-num-draft-tokens": source.knobs.draft_tokens + 1,  # it counts the token they follow
        "speculative-ngram-max-bfs-breadth": 1,  # one continuation, not a tree of them
    }


SGLANG = ExportTarget(
    name="sglang",
    title="SGLang",
    version="0.5.23",
    filename="sglang.yaml",
    suffixes=(".yaml", ".yml"),
    knobs={
        "max_batch_size": sequences("max-running-requests"),
        "max_wait_ms": Row(Fit.UNSUPPORTED, said="SGLang has no such setting", harmless=no_wait),
        "token_budget": Row(
            Fit.APPROXIMATE,
            ("chunked-prefill-size", "max-prefill-tokens", "enable-mixed-chunk"),
            _budget,
            said="if a page of SGLang's KV cache holds more than one token, this value must be a multiple of the page size; "
            "SGLang does not mix prompts with decodes in a step while a request wants log-probabilities",
            about=_about_budget,
        ),
        "chunk_size": Row(
            Fit.UNSUPPORTED,
            said="SGLang bounds the prompt tokens of a step, not those of one prompt in it",
            harmless=no_chunk_needed,
        ),
        "draft_tokens": Row(
            Fit.APPROXIMATE,
            ("speculative-algorithm", "speculative-num-draft-tokens", "speculative-ngram-max-bfs-breadth"),
            _drafts,
            said="SGLang drafts for every sequence, from the text of all sequences",
            harmless=no_drafts,
        ),
    },
    facts=facts_under(
        model="model-path",
        max_model_len="context-length",
        kv_cache_dtype=kv_cache_in(
            "kv-cache-dtype", "SGLang", fp8="fp8_e4m3", fp8_e4m3="fp8_e4m3", fp8_e5m2="fp8_e5m2", bfloat16="bf16"
        ),
        kv_pool="max-total-tokens",
        fewer="SGLang takes fewer where its share of memory (mem-fraction-static) holds no more",
        prefix_cache=same("disable-radix-cache", lambda s: not s.profile.engine.prefix_cache),
        parallelism="tp-size",
    ),
    constraints=(known_dtype,),
    render=yaml_file,
    command=lambda model, path: (
        f"python -m sglang.launch_server{' --model-path MODEL' if model is None else ''} --config {shlex.quote(path)}"
    ),
)
