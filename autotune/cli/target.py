"""What is to be profiled: the device, the machine around it, and the facts of a loaded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from autotune.engines import Engine
from autotune.engines.named import NamedSource
from autotune.profile import Machine, ModelFacts
from autotune.profile.fingerprint import describe, gpu_available, package_version
from autotune.version import __version__
from runtime.errors import InputError
from runtime.tunable import ModelInfo


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


_CORES_FOR_TINY = 8  # with wide vectors; twice as many without
GPU_MODEL = "qwen3-0.6b"


def default_model(found: Machine) -> str:
    """The preset that fills a minute with hundreds of requests on such a machine: settings are compared by counting them.

    Told by the kind of machine and never by a timing, so that the same command names the same model again.
    """
    if found.kind == "gpu":
        return GPU_MODEL
    wide = {"avx512f", "sve", "sve2"} & {*found.flags}
    return "tiny" if found.cores >= (_CORES_FOR_TINY if wide else 2 * _CORES_FOR_TINY) else "nano"


def model_named(engine: str, model: str | None) -> str | None:
    """``--model`` as it was given; None stands for a preset. Raises :class:`InputError` where ``engine`` has none."""
    if engine != "own" and model is None:
        raise InputError(f"--engine {engine} needs --model: a directory or a hub id")
    return model


def check_dtype(dtype: str) -> None:
    """Raises :class:`InputError`, which names --dtype, for one that no model is loaded in."""
    from autotune.engines.own import dtypes

    if dtype not in dtypes():
        raise InputError(f"--dtype is {dtype}; it must be one of {', '.join(dtypes())}")


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
    )


def loading(name: str, engine: str = "own") -> str:
    """What is said before the seconds that importing PyTorch and making a model take."""
    by = "" if engine == "own" else f" in {engine}"
    return f"autotune {__version__} · loading {name}{by} …"


def engine_lines(source: NamedSource) -> list[str]:
    """What there is to say of an engine that is not our own: its version, and the ceilings that it is started with."""
    if source.name == "autotune-runtime":
        return []
    wide, stock = source.limits, source.stock
    return [
        f"engine {source.name} {source.version} · knobs move below the ceilings it is started with: "
        f"{wide.max_batch_size} sequences, {wide.token_budget} tokens in a step. Its own would be {stock.max_batch_size} and "
        f"{stock.token_budget}: the defaults that settings are compared with"
    ]


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """``engine``, closed at the end: what it has accepted is finished, or cancelled where the block raises."""
    try:
        yield engine
    except BaseException:
        engine.close(drain=False)
        raise
    engine.close()


def heading(found: Machine, *, requested: bool) -> str:
    """The first line: version and machine. ``requested``: --cpu or --gpu was given, so there is nothing to explain."""
    note = "" if requested or found.kind == "gpu" else " · no GPU found, profiling the CPU (use --gpu to insist)"
    return f"autotune {__version__} · {describe(found)}{note}"
