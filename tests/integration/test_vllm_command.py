"""``autotune profile --engine vllm`` and what follows it, on vLLM itself: a small model of random weights on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.profile import Profile, load_profile
from runtime.knobs import KnobLimits
from tests.integration.llama_folder import weightless_folder
from tests.integration.vllm_environment import ENVIRONMENT, VERSION, vllm_python_with_tests

ROOT = Path(__file__).parents[2]
ARGUMENTS = {"load_format": "dummy", "enforce_eager": "true", "block_size": "32"}
WORDS = [
    "--engine", "vllm", "--dtype", "float32", "--workload", "poisson:prompt=40~0.5,output=8~0.5", "--slo", "ttft=3s,tpot=1s@90%",
    *(word for name, value in ARGUMENTS.items() for word in ("--engine-arg", f"{name}={value}")),
]  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.beside, pytest.mark.timeout(900)]


class Autotune:
    """The command in an environment with vLLM."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, weightless_folder(folder / "model")

    def __call__(self, *words: str, codes: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        for name in ("VLLM_CPU_KVCACHE_SPACE", "AUTOTUNE_STORAGE"):
            environment.pop(name, None)
        done = subprocess.run(
            [str(vllm_python_with_tests()), "-m", "autotune.cli.main", *words],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode in codes, done.stdout[-2000:] + done.stderr[-4000:]
        return done

    def json(self, *words: str, codes: tuple[int, ...] = (0,)) -> Any:
        return json.loads(self(*words, "--json", codes=codes).stdout)  # which holds nothing else


@pytest.fixture(scope="module")
def autotune(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Autotune]:
    yield Autotune(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def made(autotune: Autotune) -> Profile:
    """By the command: 1 says that the SLO cannot be met here, which is no failure of it."""
    autotune.json("profile", *WORDS, "--model", str(autotune.model), "--budget", "40s", "--out", "p.yaml", codes=(0, 1))
    return load_profile(autotune.folder / "p.yaml")


def test_the_profile_is_of_vllm(made: Profile, autotune: Autotune) -> None:
    engine = made.engine
    assert str(engine) == f"vllm {VERSION}" and engine.options == ARGUMENTS
    assert engine.kv_pool.block_size == 32 and engine.prefix_cache and engine.growth_reserve == 1
    assert engine.kv_allocation == "chunk"
    assert engine.limits == KnobLimits(draft_tokens=0), "vLLM's own drafts are set when it starts"
    assert (made.model.name, made.model.dtype, made.model.random_weights) == (str(autotune.model), "float32", True)
    assert made.model.parameters == 258 * 128 + 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128) + 128
    assert made.model.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4
    assert made.cost_model is not None and made.cost_model.points > 12
    labels = {point.label: point.knobs for point in made.points}
    stock = labels.get("vLLM defaults")
    assert stock is None or (stock.max_batch_size, stock.token_budget) == (128, 2048), "those of vllm serve on a CPU"


def test_the_same_command_goes_on_with_the_pool_that_the_study_was_begun_with(
    made: Profile, autotune: Autotune
) -> None:
    words = ["profile", *WORDS, "--model", str(autotune.model), "--budget", "44s", "--out", "p.yaml"]
    said = autotune(*words, codes=(0, 1))
    assert "resuming the study" in said.stdout
    again = load_profile(autotune.folder / "p.yaml")
    assert again.engine == made.engine
    assert again.calibration == made.calibration, (
        "calibrated once; the cost model may be refitted on what is measured since"
    )
    other = autotune(*words, "--engine-arg", "max_model_len=1024", codes=(2,))
    assert "another question" in other.stderr or "engine" in other.stderr


def test_it_is_checked_reported_and_exported(made: Profile, autotune: Autotune) -> None:
    found = autotune.json("check", "p.yaml", "--budget", "5s", codes=(0, 1))
    assert found["rounds"] >= 1 and {r["region"] for r in found["regions"]} >= {"decode", "prefill"}
    assert found["software"] == [] and found["elsewhere"] == ""
    autotune("report", "p.yaml", "--out", "p.html")
    assert f"vllm {VERSION}" in (autotune.folder / "p.html").read_text(encoding="utf-8")
    exported = autotune.json("export", "p.yaml", "--to", "vllm", "--allow-lossy", "--out", "v.yaml")
    assert exported["measured_on"] == f"vllm {VERSION}"
    written = yaml.safe_load((autotune.folder / "v.yaml").read_text(encoding="utf-8"))
    pool = made.engine.kv_pool
    assert (written["block-size"], written["num-gpu-blocks-override"]) == (32, pool.blocks + 1)
    fits = {row["name"]: row["fit"] for row in exported["rows"]}
    assert fits["kv_pool"] == fits["max_batch_size"] == fits["token_budget"] == "exact"
    text = (autotune.folder / "v.yaml").read_text(encoding="utf-8")
    assert f"measured on vLLM {VERSION}" in text


def test_contenders_take_turns_on_it(made: Profile, autotune: Autotune) -> None:
    found = autotune.json("bench", "--profile", "p.yaml", "--duration", "2s", "--rounds", "1", "--rate", "4")
    names = [one["contender"] for one in found["turns"]]
    assert sorted(names) == ["control", "control from profile", "defaults", "profile"]
    assert all(one["score"]["offered"] > 0 for one in found["turns"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine-arg", "kv_cache_memory_bytes=1000"], "does not start with"),
        (["--engine-arg", "max_model_len=many"], "max_model_len"),
        (["--engine-arg", "max_num_seqs=64", "--engine-arg", "max_num_batched_tokens=16"], "max_num_seqs"),
        (["--engine-arg", "gpu_memory_utilisation=0.8"], "did you mean gpu_memory_utilization?"),
        (["--gpu"], "--gpu: PyTorch sees no CUDA device"),
    ],
)
def test_what_vllm_refuses_is_one_line(autotune: Autotune, words: list[str], said: str) -> None:
    done = autotune(
        "profile", *WORDS, "--model", str(autotune.model), *words, "--budget", "20s", "--out", "no.yaml", codes=(2,)
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and said in last
    assert not (autotune.folder / "no.yaml").exists()
