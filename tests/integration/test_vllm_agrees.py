"""vLLM's own scheduler, steered, makes the steps that the simulated engine makes: what is simulated is what is served.
Behind the seam it keeps the contract of every engine.

The scheduler needs vLLM's Python alone, so each version in ``AUTOTUNE_VLLM_VERSIONS`` is tested in a small environment of its
own: `make test-vllm-versions`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autotune.engines.vllm.scheduler import VERSIONS
from tests.integration.vllm_environment import ENVIRONMENT, TOO_OLD, scheduler_python, scheduler_versions

pytestmark = [pytest.mark.slow, pytest.mark.beside, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
LOADS, WHOLE = 80, 40


def ran(python: Path, *arguments: str, timeout_s: float = 580) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    command = [str(python), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    return done


def compared(version: str, *arguments: str) -> list[dict[str, Any]]:
    """What :mod:`tests.integration.vllm_agrees` finds in one version."""
    program = str(Path(__file__).with_name("vllm_agrees.py"))
    return list(json.loads(ran(scheduler_python(version), program, *arguments).stdout))


@pytest.fixture(scope="module", params=scheduler_versions())
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return compared(request.param, str(LOADS), "7")


def found_a_block(one: dict[str, Any]) -> bool:
    """Whether the first step that differs is one in which a prompt goes on behind another that begins. vLLM computes it first, so
    that the other may find a block of it; we plan it last."""
    fields = {part.partition(" ")[0] for part in one["differs"].partition(" s: ")[2].split(", ")}
    filled = "by view" in one["load"] and "prefix_cache=True" in one["load"]
    return filled and fields <= {"end", "prefill_context", "prefill_tokens", "prefill_attention", "kv_free_blocks"}


def test_every_step_and_request_is_equal(found: list[dict[str, Any]]) -> None:
    different = [one for one in found if one["differs"]]
    assert len(different) <= 4
    unnamed = [f"{one['load']}: {one['differs']}" for one in different if not found_a_block(one)]
    assert not unnamed, "\n".join(unnamed)
    assert all(one["requests"] == 120 and one["blocks_left"] == 0 for one in found), "none is lost, and no block"


@pytest.mark.parametrize("version", scheduler_versions())
def test_where_prompts_are_one_chunk_the_same_prefixes_are_shared_and_evicted(version: str) -> None:
    whole = compared(version, str(WHOLE), "7", "whole")
    different = [f"{one['load']}: {one['differs']}" for one in whole if one["differs"]]
    assert not different, "\n".join(different)
    for kind, least in (("full", 10), ("evicted", 30), ("shared", 12)):
        assert sum(one[kind] > 0 for one in whole) >= least, kind


def test_the_loads_are_of_every_kind(found: list[dict[str, Any]]) -> None:
    """Else their agreement says little."""
    assert sum(one["rejected"] > 0 for one in found) >= 5
    for kind in ("relegated", "preempted", "evicted", "shared"):
        assert sum(one[kind] > 0 for one in found) >= 5, kind
    for kind in ("by view", "turns=3", "mixed=True", "cancels=True", "prefix_cache=True", "ordering=deadline"):
        assert sum(kind in one["load"] for one in found) >= 5, kind
    assert sum("max_wait_ms=0" not in one["load"] for one in found) >= 10
    assert all(any(reason in one["reasons"] for one in found) for reason in ("cancelled", "timeout", "rejected"))


@pytest.mark.parametrize("version", scheduler_versions())
def test_it_keeps_the_contract_of_engines(version: str) -> None:
    """In vLLM's own engine, with an executor that computes nothing: no torch operator of vLLM's is called. Three do: the engine
    in this process, the part that lives in the scheduler of a server, and what is attached to an engine of somebody else's."""
    words = ("-q", "-p", "no:cacheprovider", "-W", "default", "-k", "vllm", "tests/contract/test_engines.py")
    done = ran(scheduler_python(version), "-m", "pytest", *words)
    said = re.search(r"(\d+) passed", done.stdout)
    assert said is not None and int(said[1]) > 100, done.stdout[-2000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("module", ["vllm_faults", "vllm_pools"])
@pytest.mark.parametrize("version", scheduler_versions())
def test_faults_are_contained_and_pools_are_counted(version: str, module: str) -> None:
    """A fault of this project's code leaves stock vLLM; KV pools of several kinds of layers."""
    words = ("-q", "-p", "no:cacheprovider", "-W", "default", "--show-capture=no", "--tb=short")
    done = ran(scheduler_python(version), "-m", "pytest", *words, f"tests/integration/{module}.py", timeout_s=880)
    said = re.search(r"(\d+) passed", done.stdout)
    assert said is not None and int(said[1]) > 25, done.stdout[-2000:]


@pytest.mark.parametrize("version", scheduler_versions())
def test_steps_are_padded_as_vllm_dispatches_them(version: str) -> None:
    """To the sizes of its CUDA graphs, in every mode."""
    program = str(Path(__file__).with_name("vllm_graphs.py"))
    on_cpu, *cases = json.loads(ran(scheduler_python(version), program).stdout)
    nothing = [[], [], 0]
    assert on_cpu["read"] == nothing
    for case in cases:
        for ours in ("ours", "ours_mixed", "ours_eager"):
            assert case[ours] == case[ours.replace("ours", "theirs")], case
        assert case["read"] == nothing or not (case["eager"] or case["mode"] == "NONE"), case
    assert sum(case["theirs"] != list(range(1, case["slots"] + 1)) for case in cases) >= 12, "most are padded"
    assert sum(case["ours_mixed"] != list(range(2, 2 + len(case["ours_mixed"]))) for case in cases) >= 9


def test_a_version_that_cannot_be_steered_is_refused_by_name() -> None:
    """It lacks max_num_active_reqs. vLLM schedules as it would without this, and one line says why."""
    assert VERSIONS[0] > (0, 30)
    program = (
        "import sys, tempfile, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "import vllm_agrees\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    stock = vllm_agrees.Stock(pathlib.Path(folder) / 'model')\n"
        "    made = stock.scheduler(300, False, refusing=True)\n"
        "print(type(made).__name__)\n"
    )
    done = ran(scheduler_python(TOO_OLD), "-c", program, str(Path(__file__).parent))
    assert done.stdout.strip().splitlines()[-1] == "Scheduler"
    said = done.stdout + done.stderr
    assert said.count(" not tuned: it is version 0.30.0, and this was made for 0.31 to 0.33") == 1, said[-2000:]
