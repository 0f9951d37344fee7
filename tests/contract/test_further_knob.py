"""What a further knob takes: :mod:`tests.contract.further_knob` puts one into ``runtime/knobs.py``, and tells nothing else of it.

Command line (options of ``serve``, ``set``, ``--fixed``, ``--pin``, ``--range``), search space, profile (form, schema, files from
before), tables, report, metrics, decision log, guardrails, controllers, simulator and batcher handle it as they are
(:mod:`tests.contract.further_knob_cases`); the exporters refuse it by name. Six files are written for a real one, each but the
first because a test fails until it is:

1. ``runtime/knobs.py``: the field, with all there is to say of it, and its ceiling
2. ``runtime/llm/scheduler.py``: what it does
3. ``tests/contract/test_every_knob.py``: a value that binds, and what a step then says of itself
4. ``autotune/export``: a row in each target's table, where it goes or why it goes nowhere
5. ``README.md``: its row in the table of knobs
6. the page with the table of knobs that ``tests/unit/test_glossary.py`` reads

The JSON schema of profiles and the reference pages that follow from the code are made again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITTEN = {
    "tests/contract/test_every_knob.py::test_the_scheduler_obeys_it": "runtime/llm/scheduler.py",
    "tests/contract/test_every_knob.py::test_nothing_handles_a_knob_that_is_none": "tests/contract/test_every_knob.py",
    "tests/contract/test_exporters.py::test_it_handles_every_knob_and_every_fact": "autotune/export",
    "tests/unit/test_docs.py::test_the_readme_names_every_knob": "README.md",
    "tests/unit/test_glossary.py::test_every_knob_is_described_as_it_is": "the table of knobs",
    "tests/unit/test_glossary.py::test_there_is_no_other_knob": "the table of knobs",
}
"""The tests that fail until somebody has told what no table can know, and the file that each is about."""

GENERATED = {
    "tests/unit/test_profile_versions.py::test_the_schema_in_the_repository_is_that_of_the_models",
    "tests/unit/test_docs.py::test_generated_pages_are_what_the_code_says",
}
"""Those that fail until a command has been run."""

TESTS = (
    "tests/contract/test_every_knob.py",
    "tests/contract/test_batching_knobs.py",
    "tests/unit/test_knobs.py",
    "tests/unit/test_profile.py",
)


CASES = "tests/contract/further_knob_cases.py"


@pytest.fixture(scope="module")
def named() -> dict[str, str]:
    """The tests that fail, in full."""
    return {name: there for name in (*WRITTEN, *GENERATED) if (there := in_full(name))}


@pytest.fixture(scope="module")
def said(named: dict[str, str]) -> str:
    """What pytest says in a process of its own, where there is one knob more."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.contract.further_knob", "-p", "no:cacheprovider"]
    tests = [CASES, *TESTS, *(there for there in named.values() if not there.startswith(TESTS))]
    return subprocess.run(
        [*command, "-q", "-rfEp", "-n", "0", *tests], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True, encoding="utf-8", timeout=280,
    ).stdout  # fmt: skip


def outcomes(said: str, *kinds: str) -> list[str]:
    return re.findall(rf"^(?:{'|'.join(kinds)}) ([\w/.]+::\w+)", said, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.beside
def test_whatever_handles_knobs_handles_a_further_one_or_refuses_it_by_name(said: str) -> None:
    assert not [name for name in outcomes(said, "FAILED", "ERROR") if name.startswith(CASES)], said
    assert 20 <= len([name for name in outcomes(said, "PASSED") if name.startswith(CASES)]) < 30, said


@pytest.mark.slow
@pytest.mark.beside
def test_six_files_are_written_for_a_real_one(said: str, named: dict[str, str]) -> None:
    """Of all tests of knobs those fail, and no others, that say what is left to decide."""
    assert WRITTEN.keys() <= named.keys()
    failed = {name for name in outcomes(said, "FAILED", "ERROR") if not name.startswith(CASES)}
    assert failed == {*named.values()}, said
    assert len({"runtime/knobs.py", *WRITTEN.values()}) == 6


def in_full(name: str) -> str:
    """The test whose name begins so; empty where there is none."""
    path, _, test = name.partition("::")
    found = re.search(rf"^def ({test}\w*)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    return f"{path}::{found[1]}" if found else ""
