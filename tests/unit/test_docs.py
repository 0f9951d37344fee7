"""The documents speak of things that exist: links lead somewhere, examples parse, commands and their options are real."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from autotune.cli.main import UsageError, app
from autotune.cli.options import request_classes, seconds
from autotune.engines.named import _ENGINES
from autotune.export import TARGETS as TARGETS_OF_EXPORT
from autotune.profile import PURPOSES
from runtime.knobs import KNOBS
from runtime.ordering import ORDERINGS
from runtime.slo import SLO

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("*/README.md")]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
COMMAND_PAGES = [
    ROOT / "README.md",
    *(
        page
        for folder in ("", "how-to", "concepts", "benchmarks")
        for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
]
COMMAND_PAGES.remove(ROOT / "docs" / "log.md")
"""Pages whose `autotune` commands are those of today."""
COMMAND: Any = typer.main.get_command(app)
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


def autotune_commands(text: str) -> Iterator[list[str]]:
    """The arguments of every `autotune` command in the fenced shell blocks of a page.

    A block of bash or sh may leave the prompt out. Of a pipeline this is the first command; variables set before it are left out.
    """
    for language, block in re.findall(r"^```(console|bash|sh)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n(?:> )?", " ", block).splitlines():
            if line.startswith("$ ") or language != "console":
                yield from _arguments(line.removeprefix("$ "))


def mentioned_commands(text: str) -> Iterator[list[str]]:
    """The arguments of every `autotune` command between backticks in the prose of a page; few of these are whole."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for inline in re.findall(r"(?<!`)`(autotune [^`\n]+)`(?!`)", prose):
        yield from _arguments(inline)


def _arguments(line: str) -> Iterator[list[str]]:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    if words[:1] == ["autotune"]:
        ends = [n for n, word in enumerate(words) if word in ("|", ">", ">>", "2>", "&&", "&", ";")]
        yield words[1 : min(ends, default=len(words))]


def wrong_with(words: list[str], *, whole: bool = True) -> str | None:
    """What the command line finds wrong with ``words`` before it runs anything; None where it takes them.

    A placeholder ``…`` or ``...`` stands for any value of the option before it, or for whatever else may follow. Not ``whole``:
    missing arguments and values pass, as in `autotune export --to vllm` between backticks.
    """
    name, words = (words[0] if words else ""), list(words)
    verb = COMMAND if name.startswith("-") else COMMAND.commands.get(name)
    if verb is None:
        return f"no such command: {name}"
    with_value = {option for one in verb.params if not getattr(one, "is_flag", True) for option in one.opts}
    any_value = {n for n, word in enumerate(words) if word in PLACEHOLDERS and words[n - 1] in with_value}
    given = [
        "1" if n in any_value else word for n, word in enumerate(words) if n in any_value or word not in PLACEHOLDERS
    ]
    unchecked = {words[n - 1] for n in any_value}
    try:
        values = verb.make_context(name, given if verb is COMMAND else given[1:]).params
        for one in verb.params:
            option = max(one.opts, key=len)
            if option in VALUES and option not in unchecked and values[one.name] is not None:
                VALUES[option](values[one.name])
    except typer.Exit:  # --help, --version
        return None
    except UsageError as error:
        return error.format_message() if whole or type(error).__name__ not in INCOMPLETE else None
    except ValueError as error:
        return str(error)
    return None


def _one_of(names: Iterable[str]) -> Callable[[str], None]:
    def check(name: str) -> None:
        if name not in names:
            raise ValueError(f"{name} is not one of {', '.join(names)}")

    return check


PLACEHOLDERS = ("…", "...")
INCOMPLETE = ("MissingParameter", "BadOptionUsage")  # the latter: an option without its value
VALUES: dict[str, Callable[[Any], object]] = {
    "--slo": SLO.parse,
    "--class": request_classes,
    "--budget": lambda text: seconds(text, least=1.0),
    "--engine": _one_of(_ENGINES),
    "--ordering": _one_of(ORDERINGS),
    "--to": _one_of(TARGETS_OF_EXPORT),
    "--for": _one_of(PURPOSES),
}
"""What a verb holds values against once it runs, before it looks for a file."""


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=page_id)
def test_commands_and_their_options_are_real(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    wrong = {shlex.join(words): wrong_with(words) for words in autotune_commands(text)}
    wrong |= {shlex.join(words): wrong_with(words, whole=False) for words in mentioned_commands(text)}
    assert {line: what for line, what in wrong.items() if what} == {}


def test_commands_are_found_in_blocks_and_in_prose() -> None:
    page = """
Say `autotune serve MODEL --slo …`.

```console
$ autotune profile --model ./my-model \\
    --class "batch:e2e=120s*0.2"   # two lines
$ AUTOTUNE_LOG=x autotune show mine.yaml --json | head
prints autotune show
$ pip install autotune
```

```bash
autotune watch --once
```
"""
    assert list(autotune_commands(page)) == [
        ["profile", "--model", "./my-model", "--class", "batch:e2e=120s*0.2"],
        ["show", "mine.yaml", "--json"],
        ["watch", "--once"],
    ]
    assert list(mentioned_commands(page)) == [["serve", "MODEL", "--slo", "…"]]


@pytest.mark.parametrize(
    ("line", "whole", "what"),
    [
        ("show mine.yaml --jsno", True, "No such option: --jsno"),
        ("show mine.yaml --jsno", False, "No such option: --jsno"),
        ("prophesy --budget 10m", True, "no such command: prophesy"),
        ("", True, "no such command: "),
        ("--loud show mine.yaml", True, "No such option: --loud"),
        ("show mine.yaml yours.yaml", True, "unexpected extra argument"),
        ("simulate mine.yaml --rate fast", True, "--rate"),
        ("show", True, "Missing"),
        ("simulate mine.yaml --rate", True, "--rate"),
        ("profile --budget 140", True, '"140" is not a time'),
        ("profile --slo ttft=fast", True, "ttft"),
        ("export mine.yaml --to vlmm", True, "vlmm is not one of"),
        ("simulate mine.yaml --rtae …", True, "No such option"),
        ("simulate mine.yaml --rate … --slo ... …", True, None),
        ("show", False, None),
        ("simulate mine.yaml --rate", False, None),
        ("simulate no-such-file.yaml --rate 12 --token-budget 512", True, None),
        ("--version", True, None),
        ("show --help", True, None),
    ],
)
def test_a_command_that_is_not_real_is_found(line: str, whole: bool, what: str | None) -> None:
    found = wrong_with(line.split(), whole=whole)
    assert found is None if what is None else found is not None and what in found, found


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


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_a_page_that_asks_for_a_compiler_says_for_which_machines(page: str) -> None:
    """Those that :func:`runtime.torch_backend.cpu.compiled.library` compiles for."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert "On Linux on an x86 CPU with AVX" in text


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
    assert {*pages} == {"cli.md", "knobs.md", "profile-fields.md", "python.md"}
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
