"""The tree speaks the field's words: what other names stood for the same things once does not come back.

What was then is in the changelog, the log and tests of how old files are read; these are not looked at.
Three words of that time are not looked for, because they are also ordinary English, or the field's: a wheel (of timers, of
Python), a gate (of an MLP, of a thread) and room (for another block).
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
_SLO = r"(?:SLOs?|targets?|deadlines?)"


class Word(NamedTuple):
    """``stems``: one of them is in every line that ``pattern`` matches. Both are in any case, and ``PacedClock`` is looked at as
    ``Paced_Clock``. ``instead``: what the field says. ``within``: the folders and files that are looked at."""

    stems: str  # with | between
    pattern: str
    instead: str
    within: tuple[str, ...] = ("",)


WORDS = {
    "promise": Word("promis", r"promis(?:e|es|ed|ing)\b", "SLO"),
    "kept": Word(
        "kept",
        r"\bkept\b[^\n]{0,40}\battainment|\battainment[^\n]{0,40}\bkept\b|\bkept (?:\d[\d.]*%|[\d.]+ of\b)"
        rf"|{_SLO} (?:(?:is|are|was|were|be) )?(?:not )?kept\b|\bkept: float\b|\bkept_(?:range|share)\b",
        "met, attainment",
    ),
    "keep": Word(
        "keep",
        rf"\bkeep(?:s|ing|s_)? ?(?:(?:the|its|their|an|every|all|any|our|your) )?(?:{_SLO}\b|\d[\d.]*(?: to \d+)?%)"
        r"|\bkeeps? (?:more|less|fewer)\b|\bkeeps? \{[^}\n]*%\}|\bkeeps_\d",
        "meet, attainment",
    ),
    "broken": Word(
        "broke|break",
        rf"{_SLO} (?:(?:is|are|was|were|be) )?(?:not )?broken\b|\b(?:breaks?|broke|broken) (?:the|its|an?|their) {_SLO}\b",
        "violated",
    ),
    "share in SLO": Word(
        "are in |ares in |in_slo|in slo|(in time)",
        r"\bshares? in (?:time|SLO)\b|\bin_slo\b|(?-i:\bin SLO\b)|\(in time\)",
        "attainment",
    ),
    "pace": Word(
        "pac",
        r"(?<!sets the )\bpaces?\b|_paces?\b|\bpaced(?:_|\b)|\bpacing\b",
        "step-time target; speed, rate, slowdown",
    ),
    "lump": Word("lump", r"\blumps?\b", "prefill quantum"),
    "trim": Word("trim", r"(?<![.\w])trims?\b(?!_)", "feedback gain"),
    "twin": Word("twin", r"\btwins?\b", "paired simulation"),
    "yardstick": Word("yardstick", r"yardsticks?\b", "baseline"),
    "finalist": Word("finalist", r"finalists?\b", "candidate"),
    "race": Word("race", r"\braces?\b(?! condition)", "validation"),
    "belief": Word("belief", r"beliefs?\b", "posterior"),
    "anchor": Word("anchor", r"(?<![-a-z])anchors?\b", "reference step"),
    "spells": Word(
        "spell", r"\b(?:a|the|such|bad|slow|quiet|busy|each) spells?\b|\bspells of\b", "autocorrelated noise"
    ),
    "excess": Word("excess", r"\bexcess\b", "serving overhead"),
    "doubts": Word("doubt", r"\bdoubts?\b", "warnings"),
    "told": Word(
        "told", r"_told\b|_told_|\btold_|\btold(?: = |\[|, \w+ = )|\b(?:than|as) told\b", "predicted, reported"
    ),
    "asked": Word(
        "asked",
        r"_asked\b|_asked_|\basked_|\basked(?: = |\[)|[\"']asked[\"']"
        r"|\b(?:rate|setting|attainment|seed|range|target)s?(?: (?:that )?(?:are|was|were|nobody))? asked for\b"
        r"|\b(?:those|unless|what was) asked for\b",
        "requested",
    ),
    "silence": Word("silence", r"\bsilence\b", "watchdog", ("autotune/control/", "autotune/engines/", "runtime/")),
    "settle": Word("settl", r"\bsettl", "rate search", ("autotune/profiling/stages/rate.py", "autotune/simulate/")),
    "panel": Word("panel", r"\bpanels?\b", "rate search", ("autotune/profiling/", "autotune/simulate/")),
    "knee": Word("knee", r"\bknees?\b", "rate search"),
    "climb": Word("climb", r"\bclimb(?:s|ed|ing)?\b", "rate search"),
    "turned away": Word("away", r"\bturn(?:s|ed|ing)?[ _]away\b", "rejected"),
    "going on": Word(
        "going", r"\bgoing_on\b|\b(?:prompts|requests|sequences|decodes|prefills|those) going on\b", "in progress"
    ),
}
"""The words of DESIGN that are not to come back."""

ALLOWED = {
    # files that are read: old ones, and what YAML has
    ("autotune/profile/versions.py", "doubts"),
    ("autotune/profile/versions.py", "twin"),
    ("docs/reference/profile-file.md", "version 2 called `warnings` `doubts`"),
    ("docs/reference/profile-file.md", "anchors, aliases, tags"),
    ("autotune/profile/text.py", "anchors, aliases, tags"),
    ("autotune/profile/text.py", "event.anchor"),
    # keys of the JSON line, what random numbers follow from
    ("benchmarks/calibration.py", "told_vs_true"),
    ("autotune/profiling/step_plan.py", '{self._seed} climbs"'),
    # ordinary English, and HTML's
    ("autotune/report/section.py", "its anchor"),
    ("docs/concepts/gpu-kernels.md", "two that race"),
}
"""A file, and what stands in the line there: the word means something else, or cannot be changed."""


def matches(word: Word, text: str) -> list[tuple[int, str]]:
    """The lines of ``text`` in which ``word`` stands, with their numbers."""
    lowered, hits, pattern = text.lower(), {}, re.compile(word.pattern, re.IGNORECASE)
    for stem in word.stems.split("|"):
        at = -1
        while (at := lowered.find(stem, at + 1)) >= 0:
            begin, end = lowered.rfind("\n", 0, at) + 1, lowered.find("\n", at)
            line = text[begin : end if end >= 0 else None]
            if pattern.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", line)):
                hits[text.count("\n", 0, begin) + 1] = line
            at = max(at, begin + len(line) - 1)
    return sorted(hits.items())


def files() -> list[Path]:
    kinds = {".py", ".md", ".html", ".js", ".css", ".toml", ".yaml"}
    log = ROOT / "docs" / "log"
    pages = (
        path
        for name in ("autotune", "runtime", "benchmarks", "examples", "docs")
        for path in sorted((ROOT / name).rglob("*"))
    )
    return [
        ROOT / "README.md",
        *(p for p in pages if p.suffix in kinds and p != log.with_suffix(".md") and log not in p.parents),
    ]


@functools.cache
def found() -> dict[str, list[tuple[str, int, str]]]:
    """By word, where it stands: file, number of the line (0 for the file's own name), line."""
    hits: dict[str, list[tuple[str, int, str]]] = {name: [] for name in WORDS}
    for path in files():
        where, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        for name, word in WORDS.items():
            if where.startswith(word.within):
                for number, line in matches(word, f"{where}\n{text}"):
                    hits[name].append((where, number - 1, line))
    return hits


def allowed(where: str, line: str) -> set[tuple[str, str]]:
    return {(file, part) for file, part in ALLOWED if file == where and part in line}


@pytest.mark.parametrize("name", WORDS)
def test_no_word_that_only_this_project_used(name: str) -> None:
    left = [f"{where}:{number}: {line.strip()}" for where, number, line in found()[name] if not allowed(where, line)]
    assert left == [], f"say {WORDS[name].instead}"


def test_what_is_allowed_is_still_there() -> None:
    used = {one for hits in found().values() for where, _, line in hits for one in allowed(where, line)}
    assert used == ALLOWED


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("promise", "A promise of 55 ms"),
        ("kept", "kept = [run.attainment for run in runs]"),
        ("kept", "whether its SLO is kept"),
        ("keep", "who keeps the deadline"),
        ("keep", "fixed settings keep more here"),
        ("keep", 'f"  keeps {case.share:.1%} in the long run"'),
        ("broken", "how often a target was broken"),
        ("share in SLO", "share in SLO, p50 / p99"),
        ("pace", "class PacedClock:"),
        ("pace", "a machine of that pace"),
        ("anchor", "class _LoneAnchor(ReferenceStep):"),
        ("spells", "noise that comes in slow spells"),
        ("told", "told_, true = of(model), of(truth)"),
        ("told", "def _told_apart(run):"),
        ("asked", "one near the rate asked for"),
        ("going on", "view.going_on"),
        ("turned away", "counted as turned away"),
    ],
)
def test_the_patterns_find_what_they_should(name: str, text: str) -> None:
    assert matches(WORDS[name], f"first\n{text}\nlast") == [(2, text)]


@pytest.mark.parametrize(
    "text",
    [
        "the file is kept, whatever ends the run",
        "all candidates are kept in the study",
        "the engine keeps 20 blocks for growth",
        "a broken file is an error",
        "a label that is broken into lines",
        "for ms in slo.targets_ms",
        "answered in time",
        "the fullest expert sets the pace",
        'legend = {"yanchor": "bottom"}; text-anchor="end"; fig(xanchor="left")',
        "as the option spells it",
        "everybody is told why; who cannot be told apart",
        "the plan is asked for rows",
        "a trace condition, and a race condition",
        "trim_blocks=True, text.trim()",
        "going on with it would measure nothing",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert [name for name, word in WORDS.items() if matches(word, text)] == []
