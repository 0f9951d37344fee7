"""The documents speak of things that exist: links lead somewhere, examples parse, commands and their options are real."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.knobs import KNOBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("*/README.md")]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors GitHub gives the page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page_id(page)} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page_id(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_parse_and_import_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("runtime", "autotune"):
                module = __import__(str(node.module), fromlist=["_"])
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page_id(page)}: {node.module} has no {alias.name}"


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every command line in the page's console blocks, comments left out."""
    for block in blocks(page, "(?:console|bash|sh)"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


def test_the_two_commands_stand_at_the_top_of_the_readme() -> None:
    first = next(commands(ROOT / "README.md")), list(commands(ROOT / "README.md"))[1]
    assert first == (["make", "run"], ["make", "test"])
    assert README.index("make test") < 300


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page: Path) -> None:
    for target in re.findall(r"`make ([a-z][a-z-]*)", page.read_text(encoding="utf-8")):
        assert target in TARGETS, f"{page_id(page)}: make {target}"
    for words in commands(page):
        if words[0] == "make":
            assert set(words[1:]) <= TARGETS, f"{page_id(page)}: {' '.join(words)}"


def test_every_target_is_declared_phony() -> None:
    declared = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert declared is not None and set(declared[1].split()) == TARGETS


def test_the_readme_names_every_knob_and_is_short() -> None:
    assert [spec.name for spec in KNOBS if f"`{spec.name}`" not in README] == []
    assert len(README.splitlines()) <= 110, "a screen and a half: what is longer belongs into docs/"


def test_every_page_is_reachable_from_the_readme() -> None:
    """By links from page to page."""
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
        ahead += [(page.parent / link).resolve() for link in links if not re.match(r"https?://", link)]
    assert {*(ROOT / "docs").rglob("*.md")} <= seen


def test_generated_pages_are_what_the_code_says() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
    assert {*pages} == {"cli.md", "knobs.md", "profile-fields.md"}
    for name, generated in pages.items():
        written = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert written == generated(), f"docs/reference/{name} is stale: make docs"


def make(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "--no-print-directory", f"VENV={tmp_path}/venv", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env=clean | environment,
    )  # fmt: skip


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_a_python_too_old_is_told_plainly(tmp_path: Path) -> None:
    old = script(tmp_path / "python3", 'if [ "$1" = --version ]; then echo Python 3.9.2; else exit 1; fi')
    done = make(tmp_path, "test", f"PYTHON={old}")
    assert done.returncode == 2
    assert "error: this needs Python 3.11 or newer with its venv module; found: Python 3.9.2." in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_install_is_done_once_and_again_only_when_the_project_file_changes(tmp_path: Path) -> None:
    """With a stand-in for pip that writes down what it is asked: the real one is used by whoever runs this test."""
    calls = tmp_path / "calls"
    script(tmp_path / "venv" / "bin" / "python", f'echo "$@" >> {calls}')
    assert make(tmp_path, "install").returncode == 0
    assert calls.read_text().count("pip install") == 1
    assert "-e .[test]" in calls.read_text()
    assert make(tmp_path, "install").returncode == 0
    assert calls.read_text().count("pip install") == 1
    os.utime(tmp_path / "venv" / ".installed", (1, 1))  # older than pyproject.toml
    assert make(tmp_path, "install").returncode == 0
    assert calls.read_text().count("pip install") == 2


def test_a_failing_install_leaves_no_stamp(tmp_path: Path) -> None:
    script(tmp_path / "venv" / "bin" / "python", '[ "$1" = -c ]')
    assert make(tmp_path, "install").returncode == 2
    assert not (tmp_path / "venv" / ".installed").exists()


def test_check_runs_the_same_tests_as_test_and_fails_with_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script(tmp_path / "venv" / "bin" / "python", f'echo "$@" >> {log}; [ "$2" != "${{FAILS:-}}" ]')
    assert make(tmp_path, "test").returncode == 0
    tests = log.read_text().splitlines()[-1]
    log.unlink()
    assert make(tmp_path, "check").returncode == 0
    ran = log.read_text().splitlines()
    assert ran == ["-m ruff check .", "-m ruff format --check .", "-m mypy", tests]
    for tool in ("ruff", "mypy", "pytest"):
        assert make(tmp_path, "check", FAILS=tool).returncode == 2
