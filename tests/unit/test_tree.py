"""The tree stays one that people can find their way in."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.environments import BUILD

ROOT = Path(__file__).parents[2]
VAGUE = {"utils", "util", "helpers", "helper", "manager", "managers", "common", "misc"}

# Pieced together, or this file would find itself.
FOREIGN = {
    "a path of one machine": rf"(?<![\w.])/(?:{'wo' + 'rk'}|{'ro' + 'ot'}|{'ho' + 'me'}/\w+|{'Us' + 'ers'}/\w+|{'tm' + 'p'}/\w)",
    "a host to install from": "|".join(("py" + r"pi\.org", "python" + r"hosted\.org", "download" + r"\.pytorch\.org")),
    "a number in a tracker": r"(?i)\bissue" + r"s? #?\d",
}


def sources() -> list[Path]:
    return [path for room in ("autotune", "runtime") for path in sorted((ROOT / room).rglob("*.py"))]


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_module_says_what_it_is_and_no_name_is_vague() -> None:
    for path in sources():
        assert path.read_text(encoding="utf-8").lstrip().startswith('"""'), f"{path} has no docstring"
    for path in [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        names = {path.stem, *path.relative_to(ROOT).parent.parts}
        assert not names & VAGUE, f"{path.relative_to(ROOT)}: say what it holds"


@pytest.mark.parametrize("what", FOREIGN)
def test_nothing_tracked_speaks_of_one_machine(what: str) -> None:
    pattern = re.compile(FOREIGN[what])
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a path of one machine", "cd /" + "work/main"),
        ("a path of one machine", "see '/" + "home/me/x'"),
        ("a host to install from", "--index-url https://" + "py" + "pi.org/simple"),
        ("a number in a tracker", "fixed in " + "issue " + "#12"),
    ],
)
def test_the_patterns_find_what_they_should(what: str, text: str) -> None:
    assert re.search(FOREIGN[what], text)


def test_ordinary_text_is_left_alone() -> None:
    for text in (
        "the work/rest ratio",
        "autotune/profile/document.py",
        "a/tmp/b",
        "an issue with 2 parts",
        "${HOME}/models",
    ):
        assert not any(re.search(pattern, text) for pattern in FOREIGN.values()), text


def test_the_integration_tier_has_the_environments_it_needs_built() -> None:
    """Without the variable, the tests against vLLM itself skip."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    printed = subprocess.run(
        ["make", "--dry-run", "--print-data-base", "test-integration"],
        cwd=ROOT, env=clean, capture_output=True, text=True,
    ).stdout  # fmt: skip
    rule = printed.partition("\ntest-integration:")[2].partition("\n\n")[0]
    assert f"{BUILD} := 1" in rule, rule
