"""What is to be profiled: the device, the machine around it, and the facts of a loaded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from autotune.engines import Engine
from autotune.engines.named import NamedEngine
from autotune.profile import Machine, ModelFacts
from autotune.profile.fingerprint import describe, gpu_available, package_version
from runtime.errors import InputError
from runtime.tunable import ModelInfo
from runtime.version import __version__


def device_kind(cpu: bool, gpu: bool) -> Literal["cpu", "gpu"]:
    """What --cpu and --gpu ask for; neither: a GPU if PyTorch sees one. Raises :class:`InputError` for one it does not see."""
    if cpu:
        return "cpu"
    found = gpu_available()
    if gpu and not found:
        raise InputError(
            f"--gpu: PyTorch sees no CUDA device (torch {package_version('torch')}). "
            "Install a CUDA build of torch, or drop --gpu to profile the CPU."
        )
    return "gpu" if found else "cpu"


def model_named(engine: NamedEngine, model: str | None) -> str | None:
    """``--model`` as it was given; None stands for a preset. Raises :class:`InputError` where ``engine`` has none."""
    if engine.default_model is None and model is None:
        raise InputError(f"--engine {engine.name} needs --model: a directory or a hub id")
    return model


def model_for(engine: NamedEngine, model: str | None, found: Machine) -> str:
    """``model``, or else the preset of ``engine`` that suits the machine. Raises as :func:`model_named`."""
    chosen = model_named(engine, model)
    if chosen is None:
        assert engine.default_model is not None
        chosen = engine.default_model(found)
    return chosen


def check_dtype(engine: NamedEngine, dtype: str) -> None:
    """Raises :class:`InputError`, which names --dtype, for one that ``engine`` loads no model in."""
    known = engine.dtypes()
    if dtype not in known:
        raise InputError(f"--dtype is {dtype}; it must be one of {', '.join(known)}")


def with_threads(found: Machine) -> Machine:
    """``found`` with the threads torch computes with; ask when the engine is made, which may set them."""
    import torch

    return found.model_copy(update={"threads": torch.get_num_threads()})


def model_facts(model: ModelInfo, seed: int) -> ModelFacts:
    """What the profile says of ``model``; ``seed`` is that of its weights, should they be random."""
    return ModelFacts(
        name=model.name,
        architecture=model.architecture,
        parameters=model.parameters,
        dtype=model.dtype,
        random_weights=model.random_weights,
        seed=seed if model.random_weights else None,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_cache_dtype=model.kv_cache_dtype,
    )


def loading(name: str, label: str = "") -> str:
    """What is said before the seconds that importing PyTorch and making a model take. ``label``: that of the engine."""
    by = f" in {label}" if label else ""
    return f"autotune {__version__} · loading {name}{by} …"


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """``engine``, closed at the end: what it has accepted is finished, or cancelled where the block raises."""
    try:
        yield engine
    except BaseException:
        engine.close(drain=False)
        raise
    engine.close()


def heading(model: str, found: Machine, *, requested: bool) -> str:
    """Version, model and machine. ``requested``: --cpu or --gpu was given, so there is nothing to explain."""
    note = "" if requested or found.kind == "gpu" else " · no GPU found, using the CPU (use --gpu to insist)"
    return f"autotune {__version__} · {model} on {describe(found)}{note}"
