"""The page of a run: what it came to at the top, then the sections."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.report.headline import Figure
from autotune.report.page import rendered
from autotune.report.run import service, turning
from autotune.report.run.story import Run
from autotune.report.section import Section
from autotune.report.wording import number
from runtime.knobs import KNOBS


@dataclass(frozen=True)
class Head:
    """The top of the page."""

    title: str
    who: str
    meaning: tuple[str, ...]
    knobs: tuple[Figure, ...]


@dataclass(frozen=True)
class RunReport:
    """What there is to say of a run, before it is a page."""

    run: Run
    head: Head
    sections: tuple[Section, ...]


def compose(run: Run) -> RunReport:
    """Every section in reading order."""
    sections = (
        service.attainment(run),
        turning.knobs(run),
        turning.regimes(run),
        service.latencies(run),
        service.rejected(run),
        turning.decisions(run),
    )
    return RunReport(run, _head(run, sections), sections)


def html(report: RunReport) -> str:
    return rendered("run.html.j2", report.sections, run=report.run, head=report.head)


def _head(run: Run, sections: tuple[Section, ...]) -> Head:
    first, last = run.decisions[0], run.decisions[-1]
    met, knobs, regimes = sections[:3]
    title = met.title if met.absent is None else knobs.title
    seconds = run.end - run.start
    meaning = (
        f"{number(seconds)} s and {len(run.decisions)} decisions. {knobs.title}. {regimes.title}.",
        f"Last said: {last.cause}." if last.cause else "",
    )
    tiles = tuple(
        Figure(s.name, f"{last.new[s.name]:,g}", s.unit, f"from {first.old[s.name]:,g}; {s.doc}") for s in KNOBS
    )
    who = first.cause.partition(",")[0] if first.action == "attach" else "the beginning of the log is missing"
    return Head(title, who, tuple(text for text in meaning if text), tiles)
