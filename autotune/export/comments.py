"""The text of a file with comments: where its figures come from, and beside each setting what it was here."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import yaml

from autotune.engines.named import ours
from autotune.export.target import Entry, ExportTarget, Fit, Source
from autotune.profile import Point
from autotune.profile.fingerprint import describe
from autotune.version import __version__

MARK = "written by `autotune export`"
"""In the first line of every file, so that one written by hand is never overwritten."""

_WIDTH = 116


def one_line(text: str) -> str:
    """``text`` as part of a comment: whatever a profile holds, it cannot begin a line of its own."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def header(target: ExportTarget, source: Source, notes: Sequence[str], command: str) -> list[str]:
    """Where the settings come from, as lines without comment signs. The same profile gives the same lines."""
    p, load = source.profile, source.profile.workload
    point = p.settings[source.purpose].point  # type: ignore[index]  # the purpose was looked up there
    weights = ", random weights" if p.model.random_weights else ""
    used = f" ({p.engine.parallelism} used)" if p.machine.gpu and p.machine.gpu.count > p.engine.parallelism else ""
    facts = {
        "profile": f"{source.profile_name}, made by `{p.command}` on {p.created}"
        + ("" if p.status == "complete" else "; that run was stopped before its end"),
        "machine": f"{describe(p.machine)}{used} · {p.machine.cpu} · {p.machine.os}",
        "software": f"autotune {p.software.autotune}, torch {p.software.torch}, transformers {p.software.transformers}",
        "engine": f"{p.engine}"
        + (f", started with {', '.join(f'{k}={v}' for k, v in p.engine.options.items())}" if p.engine.options else ""),
        "model": f"{p.model.name} ({p.model.architecture}, {p.model.parameters / 1e6:.0f}M, {p.model.dtype}{weights})",
        "workload": f"{load.spec}, lengths × {load.length_scale:g}: prompts {load.mean_prompt:.0f}, outputs "
        f"{load.mean_output:.0f} tokens on average, {point.offered_rate:.3g} requests/s",
        "SLO": f"{p.slo} ({p.slo_from})",
        "setting": f"{source.purpose}: {p.settings[source.purpose].why}",  # type: ignore[index]  # as above
        "measured": measured(point),
        "verdict": p.verdict,
    }
    lines = [f"Settings for {target.title} {target.version}, {MARK} {__version__}.", ""]
    lines += _wrapped(origin(target, source))
    lines.append("")
    for name, text in facts.items():
        lines += _wrapped(f"{name:<10}{one_line(text)}", indent=10)
    if notes:
        lines.append("")
    for note in notes:
        lines += _wrapped(f"WARNING: {one_line(note)}")
    return [*lines, "", f"Start it with:  {one_line(command)}"]


def origin(target: ExportTarget, source: Source) -> str:
    """On whose engine the figures were measured, and what follows from that."""
    engine = source.profile.engine
    if source.measured_there:
        return (
            f"The figures below were measured on {target.title} {engine.version}. The settings are those that it had then: "
            "EXACT, but where a note says approximate."
        )
    whose = f"this project's own engine ({engine})" if ours(engine.name) else str(engine)
    return (
        f"The figures below were measured on {whose}, not on {target.title}. The settings are a place to start from there; what "
        "they give there is to be measured there."
    )


def measured(point: Point) -> str:
    """The figures of the exported setting."""
    times = {"TTFT": point.ttft_p99_ms, "TPOT": point.tpot_p99_ms}
    tail = "".join(f", {name} p99 {ms:.0f} ms" for name, ms in times.items() if ms is not None)
    return (
        f"{point.attainment:.1%} of {point.offered} requests met the SLO (95% interval {point.attainment_low:.0%}–"
        f"{point.attainment_high:.0%}), {point.goodput.mean:.3g} requests/s met it{tail}"
    )


def yaml_file(head: list[str], entries: list[Entry]) -> str:
    """A flat YAML: the header, then every entry with its comment, written or not."""
    blocks = ["".join(f"# {line}".rstrip() + "\n" for line in head)]
    for entry in entries:
        label = "approximate: " if entry.lossy and entry.written else ""
        note = f"; {label}{one_line(entry.note)}" if entry.note else ""
        text = f"{one_line(entry.source)}: {entry.doc}{note}"
        comment = "".join(f"# {line}\n" for line in _wrapped(text, indent=2))
        blocks.append(
            comment + yaml.safe_dump(dict(entry.written), sort_keys=False, width=10**6) if entry.written else comment
        )
    return "\n".join(blocks)


def note_of(fit: Fit, said: str, harmless: str, about: str) -> str:
    """What there is to say of a row: nothing for an exact one with nothing ``about`` it."""
    if fit is Fit.EXACT:
        return about
    reason = harmless if fit is Fit.APPROXIMATE and harmless else said + (f" ({harmless})" if harmless else "")
    return "; ".join(part for part in (about, reason) if part)


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
