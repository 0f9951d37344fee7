"""Exported files against what reads them: SGLang's command line, Triton's text format, a deployment of Ray Serve."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autotune.export import TARGETS, Export, export
from autotune.profile.callable import BatcherSetting
from runtime.knobs import Knobs
from tests.callable_profile import DYNAMIC, profile_of
from tests.integration.export_environment import export_python
from tests.integration.export_reads import ITEMS
from tests.sample_profile import sample_profile

pytestmark = [pytest.mark.slow, pytest.mark.beside, pytest.mark.timeout(900)]

READER = Path(__file__).with_name("export_reads.py")
CUT = Knobs(max_batch_size=24, token_budget=192, chunk_size=128)


@pytest.fixture(scope="module")
def python() -> Path:
    return export_python()


def read(python: Path, made: Export, folder: Path) -> dict[str, Any]:
    file = folder / made.target.filename
    made.save(file)
    done = subprocess.run(
        [str(python), str(READER), made.target.name, str(file)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("changes", [{}, {"draft_tokens": 3}, {"chunk_size": 192}], ids=str)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sglangs_command_line_has_what_was_meant(
    python: Path, tmp_path: Path, changes: dict[str, int], prefix_cache: bool
) -> None:
    profile = sample_profile({"balanced": CUT.with_(**changes)}, engine={"prefix_cache": prefix_cache})
    made = export(profile, TARGETS["sglang"], allow_lossy=True)
    found = read(python, made, tmp_path)
    assert {key: found[key.replace("-", "_")] for key in made.written} == made.written


def test_triton_reads_what_was_meant(python: Path, tmp_path: Path) -> None:
    made = export(profile_of(DYNAMIC, replicas=2), TARGETS["triton"])
    assert read(python, made, tmp_path) == {
        "max_batch_size": 8,
        "instance_group": [{"count": 2}],
        "dynamic_batching": {"max_queue_delay_microseconds": "4000"},
    }


def test_a_deployment_of_ray_serve_batches_as_the_file_says(python: Path, tmp_path: Path) -> None:
    patient = BatcherSetting("dynamic", DYNAMIC.knobs.with_(max_wait_ms=5000))  # however slowly they come
    found = read(python, export(profile_of(patient), TARGETS["ray-serve"]), tmp_path)
    assert found == {"sizes": [8] * (ITEMS // 8), "wrong": 0}, (
        "its own sizes are 10, and 5 without max_ongoing_requests"
    )
