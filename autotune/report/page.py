"""The report as one HTML file: everything it needs is inside it, and nothing is loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from autotune.report.evidence import Evidence
from autotune.report.figure import Plot
from autotune.report.headline import Headline, headline
from autotune.report.panels import capacity, classes, history, latency, paired, pareto, provenance, sensitivity, steps
from autotune.report.section import Section
from autotune.simulate.sensitivity import Sensitivity, one_at_a_time
from runtime.version import __version__

_HERE = Path(__file__).parent / "template"


@dataclass(frozen=True)
class Report:
    """What there is to say, before it is a page or a table."""

    evidence: Evidence
    headline: Headline
    sections: tuple[Section, ...]


def compose(evidence: Evidence, *, advance: Callable[[float], None] | None = None) -> Report:
    """Every section in reading order. ``advance`` gets the share of the simulations that is done."""
    chosen = evidence.recommended
    swept: Sensitivity | None = one_at_a_time(evidence.profile, chosen.knobs, chosen.point.rate, advance=advance)
    sections = (
        *classes.sections(evidence),
        pareto.section(evidence),
        sensitivity.section(evidence, swept),
        capacity.section(evidence),
        latency.section(evidence),
        paired.section(evidence),
        steps.section(evidence),
        history.section(evidence),
        provenance.origins(evidence),
        provenance.everything(evidence),
    )
    return Report(evidence, headline(evidence), sections)


def is_page(begin: bytes) -> bool:
    """Whether a file that begins so is one of these pages."""
    return b'<meta name="generator" content="autotune' in begin


def html(report: Report) -> str:
    """The page. Names that come from the profile are escaped; scripts run only if their hash is the one stated in the head."""
    return rendered(
        "page.html.j2", report.sections, report=report, profile=report.evidence.profile, head=report.headline
    )


def rendered(template: str, sections: Sequence[Section], **what: object) -> str:
    """A page of ``sections`` by one of the templates, with all that it needs inside."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    plots = {plot.key: _plot(plot) for section in sections for plot in section.plots}
    scripts = (get_plotlyjs(), _read("page.js"))
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(
        sections=sections,
        style=_read("page.css"),
        scripts=scripts,
        policy=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
        plots=json.dumps(plots, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        version=__version__,
        **what,
    )


def _plot(plot: Plot) -> dict[str, object]:
    return {"height": plot.height, "views": [asdict(view) for view in plot.views]}


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
