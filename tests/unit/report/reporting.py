"""What tests of the report look at it with."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from autotune.profile import Profile
from autotune.report import Evidence, Report
from autotune.report.section import Section

VOID = {"meta", "link", "img", "br", "hr", "input"}
TRIALS = 24
SECTIONS = ["pareto", "sensitivity", "capacity", "latency", "paired", "steps", "history", "provenance", "points"]


class Page(HTMLParser):
    """Every element with its attributes; fails on one that is closed wrongly. ``scripts``: text by what is written in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    def all(self, attribute: str) -> list[str]:
        return [value for _, attrs in self.elements if (value := attrs.get(attribute)) is not None]


def section(made: Report, key: str) -> Section:
    return next(s for s in made.sections if s.key == key)


def changed(evidence: Evidence, **changes: Any) -> Profile:
    profile = evidence.profile
    return Profile(**{name: getattr(profile, name) for name in Profile.model_fields} | changes)
