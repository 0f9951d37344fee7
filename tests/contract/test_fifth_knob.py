"""What a fifth knob takes: :mod:`tests.contract.fifth_knob` puts one into ``runtime/knobs.py``, and nothing else is told of it.

Command line (options of ``serve``, ``set``, ``--fixed``, ``--pin``, ``--range``), search space, profile (form, schema, files from
before), tables, report, metrics, decision log, guardrails, controllers, simulator and batcher handle it as they are
(:mod:`tests.contract.fifth_knob_cases`); the exporters refuse it by name. Six files change for a real one, each but the first
and the last because a test fails until it does:

1. ``runtime/knobs.py``: the field, with all there is to say of it, and its ceiling
2. ``runtime/llm/scheduler.py``: what it does
3. ``tests/contract/test_every_knob.py``: a value that binds, and what a step then says of itself
4. ``autotune/export/vllm.py``: where it goes, or why it goes nowhere
5. ``profiles/profile.schema.json``: made again
6. ``docs/reference/metrics.md``: what it is called
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TELLING = {
    "tests/contract/test_every_knob.py::test_the_scheduler_obeys_it": "runtime/llm/scheduler.py",
    "tests/contract/test_every_knob.py::test_nothing_handles_a_knob_that_is_none": "tests/contract/test_every_knob.py",
    "tests/contract/test_exporters.py::test_it_handles_every_knob_and_every_fact": "autotune/export/vllm.py",
    "tests/unit/test_profile_versions.py::test_the_schema_in_the_repository_is_that_of_the_models": (
        "profiles/profile.schema.json"
    ),
}
"""The tests that fail until somebody has told what no table can know, and the file that each is about."""

TESTS = (
    "tests/contract/test_every_knob.py",
    "tests/contract/test_batching_knobs.py",
    "tests/unit/test_knobs.py",
    "tests/unit/test_profile.py",
)


def with_a_fifth_knob(*arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, where there are five knobs."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.contract.fifth_knob",
        "-p",
        "no:cacheprovider",
        "-q",
        "-n",
        "0",
    ]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True, encoding="utf-8", timeout=280,
    )  # fmt: skip


def test_whatever_handles_knobs_handles_a_fifth_one_or_refuses_it_by_name() -> None:
    done = with_a_fifth_knob("tests/contract/fifth_knob_cases.py")
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b2\d passed", done.stdout), done.stdout


def test_six_files_change_for_a_real_one() -> None:
    """Of all tests of knobs those fail, and no others, that say what is left to decide."""
    done = with_a_fifth_knob(*TESTS, *(name for name in TELLING if not name.startswith(TESTS)))
    failed = set(re.findall(r"^(?:FAILED|ERROR) ([\w/.]+::\w+)", done.stdout, re.MULTILINE))
    assert failed == {*TELLING}, done.stdout
    assert len({"runtime/knobs.py", *TELLING.values(), "docs/reference/metrics.md"}) <= 6
    assert all((ROOT / name).is_file() for name in TELLING.values())
