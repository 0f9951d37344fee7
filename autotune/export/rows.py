"""Rows of several targets, and what rows say of a value: why it loses nothing although it has no counterpart."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.engines.named import DTYPE_BYTES
from autotune.export.source import ProfiledCallable, ProfiledEngine, Source, without_bound
from autotune.export.target import FACT_ROWS, Fit, Row, Value, Written


def no_chunk_needed(source: ProfiledEngine) -> str:
    """Why no prompt would be cut by ``chunk_size``, or ""."""
    chunk, budget, longest = source.knobs.chunk_size, source.knobs.token_budget, source.longest
    if chunk >= budget:
        return f"it is not below token_budget {budget}, so it cuts nothing"
    if longest is not None and chunk >= longest:
        return f"no prompt is longer than {longest} tokens, so it cuts nothing"
    return ""


def sequences(key: str) -> Row[ProfiledEngine]:
    """Most sequences of a step, which holds at least one token of each."""

    def cut(source: ProfiledEngine) -> str:
        knobs = source.knobs
        if knobs.max_batch_size <= knobs.token_budget:
            return ""
        return f"a step holds at least one token of each sequence, so token_budget {knobs.token_budget} is the bound"

    def write(source: ProfiledEngine) -> Written:
        return {key: min(source.knobs.max_batch_size, source.knobs.token_budget)}

    return Row(Fit.EXACT, (key,), write, about=cut)


def no_wait(source: Source) -> str:
    return "value 0 loses nothing" if source.knobs.max_wait_ms == 0 else ""


def no_drafts(source: Source) -> str:
    return "value 0 loses nothing" if source.knobs.draft_tokens == 0 else ""


def drafts_that_fit(source: ProfiledEngine) -> int:
    """Tokens to draft for each sequence, where sequences take theirs in turns until a step is full: of those that came last none
    would get a token for as long as the first ones run. At most as many as leave every sequence a token."""
    knobs = source.knobs
    return min(knobs.draft_tokens, knobs.token_budget // min(knobs.max_batch_size, knobs.token_budget) - 1)


def fewer_drafts(title: str) -> Callable[[ProfiledEngine], str]:
    """What to say where fewer are written."""

    def about(source: ProfiledEngine) -> str:
        knobs, fit = source.knobs, drafts_that_fit(source)
        if not 0 < fit < knobs.draft_tokens:
            return ""
        return f"{fit} in place of {knobs.draft_tokens}: {_in_turns(title, source)}"

    return about


def no_draft_fits(title: str) -> Callable[[ProfiledEngine], str]:
    """Why none may be drafted, or ""."""

    def unsupported(source: ProfiledEngine) -> str:
        return _in_turns(title, source) if source.knobs.draft_tokens and not drafts_that_fit(source) else ""

    return unsupported


def _in_turns(title: str, source: ProfiledEngine) -> str:
    knobs = source.knobs
    served = knobs.token_budget // (1 + knobs.draft_tokens)
    return (
        f"{title} gives one sequence after the other its token and all its drafts until the step is full, so with "
        f"{knobs.draft_tokens} of them only {served} of {min(knobs.max_batch_size, knobs.token_budget)} sequences would go on"
    )


def no_cost(source: ProfiledCallable) -> str:
    """Why a bound on the cost of a call never bound, or ""."""
    return without_bound(source.profile, source.knobs)


def _pool_elsewhere(source: ProfiledEngine) -> str:
    """Why the size of the KV cache is left to the target, or ""."""
    if source.profile.machine.kind != "gpu":
        return "left to its default: the pool was measured in a CPU's memory, which says nothing about a GPU's"
    if source.another_model:
        return f"left to its default: the pool was measured beside {source.profile.model.name}, not beside this model"
    return ""


def same(key: str, value: Callable[[ProfiledEngine], Value | None]) -> Row[ProfiledEngine]:
    """``value`` under another name; nothing is written of one that is None."""

    def write(source: ProfiledEngine) -> Written:
        found = value(source)
        return {} if found is None else {key: found}

    return Row(Fit.EXACT, (key,), write)


def _left_to_model(source: ProfiledEngine) -> str:
    return "left to the model" if source.another_model else ""


def _measured_with(source: ProfiledEngine) -> str:
    return f"what was measured is that of {source.profile.model.name}" if source.another_model else ""


def of_model(
    key: str, value: Callable[[ProfiledEngine], Value], about: Callable[[ProfiledEngine], str] = lambda source: ""
) -> Row[ProfiledEngine]:
    """``value``, which belongs to the model that was measured, under another name; another model has its own."""
    return Row(
        Fit.EXACT,
        (key,),
        lambda source: {key: value(source)},
        harmless=_measured_with,
        about=about,
        unsupported=_left_to_model,
    )


def kv_cache_in(key: str, title: str, **named: str) -> Row[ProfiledEngine]:
    """What the KV cache is kept in, by its name there; auto is auto, and ``title`` takes no other."""
    names = {"auto": "auto", **named}

    def unsupported(source: ProfiledEngine) -> str:
        return "" if source.profile.model.kv_cache_dtype in names else f"{title} keeps its KV cache in no such type"

    return Row(Fit.EXACT, (key,), lambda s: {key: names[s.profile.model.kv_cache_dtype]}, unsupported=unsupported)


def facts_under(
    *,
    model: str,
    max_model_len: str,
    kv_cache_dtype: Row[ProfiledEngine],
    kv_pool: str,
    fewer: str,
    prefix_cache: Row[ProfiledEngine],
    parallelism: str,
) -> Mapping[str, Row[ProfiledEngine]]:
    """The facts of an engine that takes them under these names, its KV pool in tokens. ``fewer``: when it takes fewer."""

    def pool(source: ProfiledEngine) -> Written:
        return {} if _pool_elsewhere(source) else {kv_pool: source.profile.engine.kv_pool.tokens}

    return {
        "model": same(model, lambda s: s.model),
        "max_model_len": of_model(max_model_len, lambda s: s.max_model_len),
        "dtype": of_model("dtype", lambda s: s.profile.model.dtype),
        "kv_cache_dtype": kv_cache_dtype,
        "kv_pool": Row(Fit.APPROXIMATE, (kv_pool,), pool, said=fewer, harmless=_pool_elsewhere),
        "prefix_cache": prefix_cache,
        "parallelism": same(parallelism, lambda s: s.profile.engine.parallelism),
    }


def known_dtype(written: Written) -> str:
    """A constraint: a dtype that all of them take."""
    dtype = written.get("dtype")
    return (
        "" if dtype is None or dtype in DTYPE_BYTES else f"dtype is {dtype}; it must be one of {', '.join(DTYPE_BYTES)}"
    )


FACTS_OF_THE_MODEL: Mapping[str, Row[ProfiledEngine]] = dict.fromkeys(
    FACT_ROWS,
    Row(
        Fit.UNSUPPORTED,
        said="it belongs to the model behind the batcher",
        harmless=lambda source: "nothing to set here",
    ),
)
"""Of a batcher, which has no say in what runs behind it."""


def batches_calls(name: str) -> str:
    return f"a batch of {name}'s runs to its end; where it was measured, sequences join and leave at every step"


def as_calls(batch: Row[Source], wait: Row[Source], name: str) -> Mapping[str, Row[ProfiledEngine]]:
    """The knobs of a language model's profile for a batcher of whole calls, which knows of no tokens."""
    return {
        "max_batch_size": batch,
        "max_wait_ms": wait,
        "token_budget": Row(Fit.UNSUPPORTED, said=f"{name} counts requests, not tokens"),
        "chunk_size": Row(Fit.UNSUPPORTED, said=f"{name} cuts no prompts", harmless=no_chunk_needed),
        "draft_tokens": Row(Fit.UNSUPPORTED, said=f"{name} drafts nothing", harmless=no_drafts),
    }
