"""Models by preset name, local directory or hub id, ready to run; and what cannot run is refused by name."""

from __future__ import annotations

import copy
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from huggingface_hub import constants, try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from runtime.errors import InputError, ModelError, UnsupportedModelError
from runtime.request import SamplingParams
from runtime.torch_backend.backends import check_kv_cache_dtype
from runtime.torch_backend.checks import check_config, check_directory, summary
from runtime.torch_backend.contract import KVLayer
from runtime.torch_backend.presets import PRESETS, build_preset
from runtime.torch_backend.probe import probe
from runtime.torch_backend.rope import extended_context, safe_context
from runtime.torch_backend.tokenizer import Tokenizer, byte_tokenizer
from runtime.tunable import ModelInfo

log = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_PROCESSORS: Mapping[str, Any] = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "min_length": 0, "min_new_tokens": 0, "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None, "sequence_bias": None,
    "guidance_scale": 1.0, "num_beams": 1,
}  # fmt: skip
"""Fields of a generation config that change greedy texts, too, and the value of each that changes nothing."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TOKENIZERS = ("tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""Names of files that make a tokenizer."""
_LONGEST = 300  # characters of why it cannot be loaded
UNSTATED_CONTEXT = 4096  # tokens, for a model whose config names no length
_HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run.

    ``model`` is in eval mode, on ``device``, in ``dtype``. It belongs to the engines that run it, which lay it out for
    serving; :func:`from_model` leaves a model of yours as it is. ``tokenizer`` None: prompts are token ids.
    ``tokenizer_error``: why one that comes with the model cannot be loaded, else empty. ``name``: what errors and records
    of measurements call it. ``architecture`` is transformers' model type, ``parameters`` how many there are. ``vocab_size``
    is the width of its logits, ``max_model_len`` the most tokens (prompt + output) of one request, ``eos_token_ids`` what
    ends a text (may be empty). ``kv_bytes_per_token`` counts all ``kv_layers``, kept in ``kv_cache_dtype``. ``layers`` is
    how many the config names. ``sampling_defaults``: what its generation config says of temperature and the like.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer | None
    name: str
    architecture: str
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    kv_layers: tuple[KVLayer, ...]
    parameters: int
    layers: int
    sampling_defaults: Mapping[str, float]
    kv_cache_dtype: str = "auto"
    tokenizer_error: str = ""

    @property
    def info(self) -> ModelInfo:
        """The same as plain data."""
        return ModelInfo(
            name=self.name,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            architecture=self.architecture,
            parameters=self.parameters,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            kv_bytes_per_token=self.kv_bytes_per_token,
            random_weights=self.name in PRESETS,
            kv_cache_dtype=self.kv_cache_dtype,
        )

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<LoadedModel {self.name} {self.architecture} {self.parameters / 1e6:.0f}M {dtype} on {self.device}>"


def load_model(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    tensor_parallel: int = 1,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> LoadedModel:
    """Load ``name``: a preset (see :data:`runtime.torch_backend.presets.PRESETS`), a directory, or a hub id.

    ``dtype`` "auto" is bfloat16 on GPUs and CPUs that multiply it natively, else float16 on a GPU (before compute capability
    8.0) and float32 on a CPU. ``device`` "auto" is CUDA if there is one. ``seed`` is for a preset's random weights.
    ``max_model_len`` (tokens, prompt and output) None takes the model's context, or as much of it as its RoPE allows (see
    :mod:`runtime.torch_backend.rope`). ``kv_cache_dtype`` "auto" keeps keys and values as they are computed, "fp8" in 8 bits
    (e4m3 with a scale of 1, by the Triton kernels, so on CUDA alone): half the memory of bfloat16, and other tokens now and then.
    ``tensor_parallel``: devices that it is split over, 1 so far. ``trust_remote_code``: run Python code that comes with the
    model. ``revision``: a branch, tag or commit on the hub, None for the main one.

    Raises :class:`ModelError` (one line: the path or name, and what is wrong), :class:`UnsupportedModelError` for quantised
    weights, LoRA adapters, tensor parallelism, encoder-decoders, models with recurrent or linear-attention layers and a
    context beyond what RoPE allows, and :class:`InputError` for a bad option. Whether attention can be packed is not
    known yet: :func:`runtime.torch_backend.self_test.self_test` finds out.
    """
    if tensor_parallel != 1:
        raise UnsupportedModelError(
            f"tensor_parallel={tensor_parallel}: tensor parallelism is not supported here, only 1; vLLM has it (--engine vllm)"
        )
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    check_kv_cache_dtype(kv_cache_dtype, place)
    if name in PRESETS:
        model = build_preset(PRESETS[name], device=place, dtype=kind, seed=seed)
        return _ready(model, byte_tokenizer(model.config.vocab_size), name, max_model_len, kv_cache_dtype)
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"model is {name!r}; it must be a preset ({', '.join(PRESETS)}), a directory or a hub id")
    path = Path(name).expanduser()
    local = path.is_dir()
    if local:
        check_directory(path)
    elif path.exists() or name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        what = "not a directory" if path.exists() else "no such directory"
        raise ModelError(f"model {name}: {what}; the presets are {', '.join(PRESETS)}")
    source = str(path) if local else name
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        options["revision"] = revision
    if not local and hub_offline():
        options["local_files_only"] = True
    try:
        config = AutoConfig.from_pretrained(source, **options)
    except Exception as error:
        raise _unreadable(name, local, options, error) from error
    check_config(config, name)
    _context_length(config, name, max_model_len)  # before the weights are read: that may take minutes
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=kind, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        model = model.to(place)
    except Exception as error:
        raise _unreadable(name, local, options, error) from error
    # transformers would leave these at random values
    if absent := sorted(info["missing_keys"]):
        raise ModelError(f"model {name}: its files lack {len(absent)} of its weights, such as {absent[0]}")
    if misfit := sorted(key for key, *_ in info["mismatched_keys"]):
        raise ModelError(
            f"model {name}: {len(misfit)} of its weights in its files have another shape, such as {misfit[0]}"
        )
    tokenizer, why = _tokenizer_of(source, local, options)
    if why:
        log.warning("model %s: its tokenizer cannot be loaded, so prompts must be token ids: %s", name, why)
    return _ready(model, tokenizer, name, max_model_len, kv_cache_dtype, tokenizer_error=why)


def from_model(
    model: PreTrainedModel,
    tokenizer: Tokenizer | PreTrainedTokenizerBase | None = None,
    name: str | None = None,
    *,
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
) -> LoadedModel:
    """A :class:`LoadedModel` of a model that is already in memory, on its device and in its dtype, and stays its owner's.

    The engine gets a copy of the modules and the config in eval mode, over the same weights: it fuses layers and replaces
    attention there. Where it lays weights out anew (merged projections; on a CPU all linear layers) it keeps its own; they double
    in memory unless the owner lets go of the model. Weights must not change while an engine runs.

    Runs one token through the copy, to see what its attention keeps. Raises as :func:`load_model` does, and
    :class:`ModelError` for a model that cannot be copied.
    """
    check_kv_cache_dtype(kv_cache_dtype, model.device)
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    try:
        own = copy.deepcopy(model, shared)
    except Exception as error:  # a module may hold anything, such as a lock
        raise ModelError(f"model {type(model).__name__}: its modules cannot be copied: {summary(error)}") from error
    return _ready(own, tokenizer, name, max_model_len, kv_cache_dtype)


def _ready(
    model: PreTrainedModel,
    tokenizer: Tokenizer | PreTrainedTokenizerBase | None,
    name: str | None,
    max_model_len: int | None,
    kv_cache_dtype: str,
    *,
    tokenizer_error: str = "",
) -> LoadedModel:
    """As :func:`from_model`, of a model that nobody else has."""
    config = model.config
    name = name or config.name_or_path or config.model_type
    check_config(config, name)
    text = config.get_text_config()
    context = _context_length(config, name, max_model_len)
    model.eval()
    for said in unapplied(model.generation_config):
        log.warning("model %s: its generation_config says %s", name, said)
    sampling, wrong = sampling_defaults(model.generation_config)
    for said in wrong:
        log.warning("model %s: its generation_config is wrong, and the field is left out: %s", name, said)
    found = probe(model, context)
    if found.rope_moved:
        raise UnsupportedModelError(
            f"model {config.model_type}: its rotary embedding changed at position {context - 1}: it depends on the longest "
            "sequence in the batch"
        )
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer(tokenizer)
    in_8_bits = sum(layer.numbers for layer in found.kv_layers) if kv_cache_dtype == "fp8" else 0
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        architecture=config.model_type,
        device=model.device,
        dtype=model.dtype,
        vocab_size=found.vocab_size,
        max_model_len=context,
        eos_token_ids=_eos_ids(model, tokenizer),
        kv_bytes_per_token=in_8_bits or found.kv_bytes_per_token,
        kv_layers=found.kv_layers,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=text.num_hidden_layers,
        sampling_defaults=sampling,
        kv_cache_dtype=kv_cache_dtype,
        tokenizer_error=tokenizer_error,
    )


def resolve_device(device: str | torch.device) -> torch.device:
    """The device meant by ``device``; "auto" is CUDA if there is one, else the CPU. Raises :class:`InputError`."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device is {device!r}; it must be auto, cpu, cuda or cuda:<n>") from error
    if place.type not in ("cpu", "cuda"):
        raise InputError(f"device is {device!r}; it must be auto, cpu, cuda or cuda:<n>")
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device is {device!r}, but PyTorch sees no CUDA device (torch {torch.__version__})")
        if (place.index or 0) >= torch.cuda.device_count():
            raise InputError(f"device is {device!r}, but there are {torch.cuda.device_count()} CUDA devices")
    return place


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype meant by ``dtype``; "auto" is the fastest that ``device`` computes natively. Raises :class:`InputError`."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        if device.type != "cuda":
            return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
        from runtime.torch_backend.cuda.tiles import OLDEST, architecture_of

        return torch.bfloat16 if architecture_of(device) >= OLDEST else torch.float16
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}; it must be auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def cpu_has_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether the CPU multiplies bfloat16 natively (AVX-512 BF16, AMX, Arm BF16). False where that cannot be read."""
    try:
        lines = Path(cpuinfo).read_text(errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def _context_length(config: Any, name: str, requested: int | None) -> int:
    """Tokens of context: what was requested, else all that the config and its RoPE allow."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")
    stated = next((value for field in names if isinstance(value := getattr(text, field, None), int)), None)
    if requested is not None and (not isinstance(requested, int) or isinstance(requested, bool) or requested < 1):
        raise InputError(f"max_model_len is {requested!r}; it must be a whole number of at least 1")
    stretched = extended_context(text)
    if stated is not None and stretched is not None:
        stated = max(stated, stretched)
    safe, limited_by = safe_context(text)
    if requested is not None and safe is not None and requested > safe:
        raise UnsupportedModelError(
            f"model {name}: max_model_len is {requested}, but beyond {safe} tokens "
            f"its RoPE ({limited_by}) depends on the longest "
            f"sequence in the batch; it must be at most {safe}"
        )
    if requested is not None and stated is not None and requested > stated:
        raise InputError(f"max_model_len is {requested}; it must be at most {stated}, the context of {name}")
    limits = [limit for limit in (requested, safe, stated) if limit is not None]
    return min(limits) if limits else UNSTATED_CONTEXT


def unapplied(config: Any) -> Iterator[str]:
    """What ``config``, a model's generation config, has ``generate`` do to every text, and this engine does not do by itself."""
    served = sampling_defaults(config)[0]
    for field, neutral in _PROCESSORS.items():
        value = getattr(config, field, None)
        if value is not None and value != neutral and value != []:
            yield f"{field}={value!r}, which " + (
                "a server applies where a request does not say" if field in served else "this engine does not apply"
            )


def sampling_defaults(config: Any) -> tuple[dict[str, float], list[str]]:
    """What ``config``, a model's generation config, says of sampling, as vLLM reads it (``do_sample`` is not looked at); and of
    fields that cannot be what they are, why."""
    found: dict[str, float] = {}
    wrong = []
    for field in _SAMPLING:
        value = getattr(config, field, None)
        if value is None:
            continue
        if field == "top_k" and value == -1:  # all of them, as 0
            value = 0
        try:
            SamplingParams(**{field: value})  # type: ignore[arg-type]  # checked there
        except ValueError as error:
            wrong.append(str(error))
        else:
            found[field] = value
    return found, wrong


def _eos_ids(model: PreTrainedModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends a text: those of the generation config, as for ``generate``, or of the model's config where it names
    none; then the tokenizer's. (transformers fills a config that names none with the default of its class.)"""
    found: dict[int, None] = {}
    generation = model.generation_config
    named = getattr(generation, "eos_token_id", None) not in (None, [], ())
    configs = (generation,) if named else (model.config, model.config.get_text_config())
    for source in (*configs, tokenizer):
        value = getattr(source, "eos_token_id", None)
        for token in value if isinstance(value, list | tuple) else [value]:
            if isinstance(token, int) and token >= 0:
                found[token] = None
    return tuple(found)


def _tokenizer_of(source: str, local: bool, options: Mapping[str, Any]) -> tuple[Tokenizer | None, str]:
    """The tokenizer that comes with the model, or None: it can still be given token ids. And why one that is there cannot be
    loaded: its files are damaged, or a library they need is missing."""
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(source, **options)), ""
    except Exception as error:  # transformers raises anything here, and the like where there are no files of one
        why = " ".join(f"{type(error).__name__}: {error}".split())
    folder = Path(source) if local else _cached(source, options.get("revision"))
    if folder is None or not any(file for pattern in _TOKENIZERS for file in folder.glob(pattern)):
        return None, ""
    return None, why if len(why) <= _LONGEST else why[: _LONGEST - 1] + "…"


def _cached(source: str, revision: str | None) -> Path | None:
    """The folder that holds what has been downloaded of a model on the hub."""
    config = try_to_load_from_cache(source, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _unreadable(name: str, local: bool, options: Mapping[str, Any], error: Exception) -> ModelError:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ModelError(f"model {name}: its weights do not fit in memory: {summary(error)}")
    if local:
        return ModelError(f"model {name}: {summary(error)}")
    where = f"model {name}: neither a preset ({', '.join(PRESETS)}) nor a directory"
    if "local_files_only" in options:
        return ModelError(f"{where}, not in the local cache, and the Hugging Face hub cannot be reached")
    return ModelError(f"{where}, and it cannot be had from the Hugging Face hub: {summary(error)}")


def hub_offline() -> bool:
    """Whether the Hugging Face hub cannot be asked: switched off, or its host cannot be connected to. Known within 5 s.

    The hub's own client tries for half a minute and logs each attempt. Behind a proxy it is left to find out.
    """
    if constants.is_offline_mode():
        return True
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return False
    address = urlsplit(constants.ENDPOINT)
    try:
        with socket.create_connection((address.hostname or "", address.port or 443), timeout=_HUB_TIMEOUT_S):
            return False
    except OSError:
        return True
