"""What was found as Markdown and as a picture: the part of ``docs/when-tuning-pays.md`` between its marks, and what it shows.

Everything follows from what was found, to the last byte: a test makes both anew from the file of kept results.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from autotune.writing import write_together
from benchmarks.when_tuning_pays.cells import SLOS, VARIANTS, WORKLOADS
from benchmarks.when_tuning_pays.picture import drawing
from benchmarks.when_tuning_pays.play import ADMISSION, BOTH, CONTROLLER, DEFAULTS, ORDER, PARTS, SETTING, Found, Served
from runtime.errors import InputError
from runtime.slo import SLO

BEGIN, END = (
    "<!-- Written by `python -m benchmarks.when_tuning_pays --page`; run it instead of editing. -->",
    "<!-- End. -->",
)
IMAGE: Final = "images/when-tuning-pays.svg"
"""Beside the page."""

NOTHING: Final = 2.0
"""Points of 100 within which two are held to be alike: about what three seeds can tell apart."""

_BANDS: Final = (
    ("97% or more", 0.97, 2.0),
    ("90 to 97%", 0.9, 0.97),
    ("50 to 90%", 0.5, 0.9),
    ("less than 50%", 0.0, 0.5),
)

_FEW, _FULL = 0.03, 0.05  # of the requests missed, and of the time with a full KV pool: what is not worth a word

NEEDED: Final[Mapping[str, str]] = {
    DEFAULTS: "nothing", ADMISSION: "admission", SETTING: "a setting", ORDER: "a setting, order",
    BOTH: "a setting, order, admission", CONTROLLER: "the controller",
}  # fmt: skip
"""What to turn on, the least first."""


def near(served: Served, part: str) -> bool:
    """Whether ``part`` comes within :data:`NOTHING` of the best of all."""
    return 100 * (max(map(served.mean, PARTS)) - served.mean(part)) <= NOTHING


def needed(served: Served) -> str:
    """The least that does."""
    return next(part for part in NEEDED if near(served, part))


def bottleneck(served: Served) -> str:
    """What the defaults miss mostly, where they miss more than a few."""
    late = served.missed["left"] + served.missed["ttft"]
    if late + served.missed["tpot"] < _FEW:
        return ""
    if served.missed["tpot"] > late:
        return "TPOT"
    return "TTFT, KV pool full" if served.kv >= _FULL else "TTFT"


def spread(values: Sequence[float]) -> float:
    """Half of the way from the least to the most."""
    return (max(values) - min(values)) / 2


def gain(served: Served, part: str) -> float:
    return statistics.fmean(served.gains(part))


def figures(found: Sequence[Found], commits: Iterable[str]) -> str:
    """The part between the marks, without them."""
    made = ", ".join(f"`{commit}`" for commit in dict.fromkeys(commits))
    blocks = [f"Made with the engine, the controller and the simulator of commit {made}."]
    main = _of(found, "graphs")
    blocks.append(_conclusions(main))
    for load in _loads(main):
        blocks.append(f"### At {load} of capacity\n\n{_table(main, load)}")
    blocks.append(f"### What each carries\n\n{_carries(main)}")
    costly = _of(found, "costly")
    if costly:
        blocks.append("### Where steps with prompts cost more\n\n" + _compared(main, costly))
        blocks += [f"At {load} of capacity:\n\n{_table(costly, load)}" for load in _loads(costly)]
        blocks.append(_carries(costly))
    return "\n\n".join(blocks)


def written(page: Path, found: Sequence[Found], commits: Iterable[str]) -> None:
    """Put the figures between the marks of ``page``, and the picture beside it. Raises :class:`InputError` if it has none."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise InputError(f"--page: {page} must hold the lines {BEGIN} and {END}")
    image = page.parent / IMAGE
    if not image.parent.is_dir():
        raise InputError(f"--page: {image} cannot be written: there is no directory {image.parent}")
    whole = f"{before}{BEGIN}\n\n{figures(found, commits)}\n\n{END}{after}"
    write_together({page: whole, image: drawing(_of(found, "graphs"))})


def summary(found: Sequence[Found]) -> dict[str, object]:
    """The line of JSON: mean gains over the defaults by load, in points; how often there are none; what the defaults carry."""
    line: dict[str, object] = {"cells": len(found)}
    for variant in VARIANTS:
        here = _of(found, variant)
        for load in _loads(here):
            all_served = [one.loads[load] for one in here]
            counts = _counts(all_served)
            line[f"{variant}_{load}"] = {
                **{_key(part): round(statistics.fmean(gain(s, part) for s in all_served), 2) for part in PARTS[1:]},
                "nothing_to_gain": counts[DEFAULTS],
                "controller_ahead_points_mean": round(statistics.fmean(map(_ahead, all_served)), 2),
                "controller_ahead_points_min": round(min(map(_ahead, all_served)), 2),
            }
        if here:
            line[f"{variant}_defaults_carry"] = round(statistics.fmean(map(_share, here)), 3)
    return line


def line_of(one: Found) -> str:
    """A cell in a line, for progress."""
    at = "; ".join(
        f"at {load} " + " ".join(f"{100 * served.mean(part):.0f}" for part in PARTS) + f", {NEEDED[needed(served)]}"
        for load, served in one.loads.items()
    )
    carried = f"{one.carries[DEFAULTS]:g} → {one.carries[SETTING]:g} requests/s ({_setting(one.best)})"
    return f"{one.cell!s:<42}{carried}; {at} ({one.cpu_s:.0f} s)"


def _of(found: Iterable[Found], variant: str) -> list[Found]:
    return [one for one in found if one.cell.variant == variant]


def _loads(found: Sequence[Found]) -> list[str]:
    return list(found[0].loads) if found else []


def _counts(all_served: Sequence[Served]) -> dict[str, int]:
    least = [needed(served) for served in all_served]
    return {part: least.count(part) for part in NEEDED}


def _share(one: Found) -> float:
    """Of what the best setting carries, what the defaults do."""
    return one.carries[DEFAULTS] / one.carries[SETTING]


def _ahead(served: Served) -> float:
    """Points that the controller serves more than the best setting with order and admission."""
    return 100 * (served.mean(CONTROLLER) - served.mean(BOTH))


def _conclusions(found: Sequence[Found]) -> str:
    return "\n\n".join((
        f"Of {len(found)} cells, the least that comes within {NOTHING:g} points of the best of all:", _least(found),
        "Gains over the defaults, points of 100, means over cells:", _means(found),
        "The controller, which starts from the defaults and knows nothing, against the best setting with order and admission, "
        "which somebody has to find first; points of 100:", _against(found),
    ))  # fmt: skip


def _least(found: Sequence[Found]) -> str:
    rows = []
    for load in _loads(found):
        counts = _counts([one.loads[load] for one in found])
        alike = sum(near(one.loads[load], CONTROLLER) for one in found)
        rows.append((load, *(str(counts[part]) for part in NEEDED), f"{alike} of {len(found)}"))
    return _rows(("load", *NEEDED.values(), "the controller comes as near"), rows)


def _means(found: Sequence[Found]) -> str:
    parts = (ADMISSION, SETTING, BOTH, CONTROLLER)
    rows = []
    for load in _loads(found):
        all_served = [(one, one.loads[load]) for one in found]
        groups = {"all": all_served}
        for name, low, high in _BANDS:
            groups[f"defaults serve {name}"] = [(o, s) for o, s in all_served if low <= s.mean(DEFAULTS) < high]
        for name in ("TPOT", "TTFT", "TTFT, KV pool full"):
            groups[f"defaults miss mostly {name}"] = [(o, s) for o, s in all_served if bottleneck(s) == name]
        for name in SLOS:
            groups[f"{name} SLO"] = [(o, s) for o, s in all_served if o.cell.slo_name == name]
        for name in WORKLOADS:
            groups[name] = [(o, s) for o, s in all_served if o.cell.workload == name]
        for start in sorted({_setting(one.defaults) for one in found}):
            groups[f"defaults {start}"] = [(o, s) for o, s in all_served if _setting(o.defaults) == start]
        for name, here in groups.items():
            if here:
                gains = (_signed(statistics.fmean(gain(served, part) for _, served in here)) for part in parts)
                rows.append((load, name, str(len(here)), *gains))
    return _rows(("load", "where", "cells", *parts), rows)


def _against(found: Sequence[Found]) -> str:
    rows = []
    for load in _loads(found):
        ahead = sorted((_ahead(one.loads[load]), _label(one)) for one in found)
        worst, best = (f"{_signed(points)} ({label})" for points, label in (ahead[0], ahead[-1]))
        rows.append((load, _signed(statistics.fmean(points for points, _ in ahead)), worst, best))
    return _rows(("load", "mean", "worst", "best"), rows)


def _label(one: Found) -> str:
    return f"{one.cell.title}, {one.cell.workload}, {one.cell.slo_name}"


def _setting(values: Sequence[int]) -> str:
    return "/".join(map(str, values))


def _slo(text: str) -> str:
    slo = SLO.parse(text)
    return f"{slo.ttft_ms:g}/{slo.tpot_ms:g} ms"


def _key(part: str) -> str:
    return part.replace(" ", "_")


def _signed(points: float, digits: int = 1) -> str:
    """With its sign, and no sign where it is nothing."""
    rounded = round(points, digits)
    return f"{rounded:+.{digits}f}" if rounded else f"{0:.{digits}f}"


def _points(served: Served, part: str) -> str:
    gains = served.gains(part)
    return f"{_signed(statistics.fmean(gains), 0)} ±{spread(gains):.0f}"


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _table(found: Sequence[Found], load: str) -> str:
    head = ("GPU, model", "requests", "SLO", "req/s", "defaults", "+ admission", "best setting", "+ order", "+ order, admission",
            "controller", "goodput, req/s", "least needed")  # fmt: skip
    rows = []
    for one in found:
        served = one.loads[load]
        goodput = " → ".join(f"{served.rate * served.mean(part):.1f}" for part in (DEFAULTS, CONTROLLER))
        rows.append((
            one.cell.title, one.cell.workload, f"{one.cell.slo_name} {_slo(one.slo)}", f"{served.rate:.3g}",
            f"{served.mean(DEFAULTS):.0%} ±{100 * spread(served.met[DEFAULTS]):.0f}", _points(served, ADMISSION),
            f"{_points(served, SETTING)} ({_setting(served.settings[SETTING])})", _points(served, ORDER),
            f"{_points(served, BOTH)} ({_setting(served.settings[BOTH])})", _points(served, CONTROLLER),
            goodput, NEEDED[needed(served)],
        ))  # fmt: skip
    return _rows(head, rows)


def _carries(found: Sequence[Found]) -> str:
    head = (
        "GPU, model",
        "requests",
        "SLO",
        "defaults",
        "carry, req/s",
        "best setting",
        "carries, req/s",
        "×",
        "the defaults miss, at load",
    )
    rows = []
    for one in found:
        own, most = one.carries[DEFAULTS], one.carries[SETTING]
        missed = "; ".join(f"{load}: {_missed(served)}" for load, served in one.loads.items())
        times = f"{most / own:.2f}" if own else "–"
        rows.append((one.cell.title, one.cell.workload, one.cell.slo_name, _setting(one.defaults), f"{own:g}", _setting(one.best),
                     f"{most:g}", times, missed))  # fmt: skip
    return _rows(head, rows)


def _missed(served: Served) -> str:
    late, tpot = served.missed["left"] + served.missed["ttft"], served.missed["tpot"]
    said = [f"{name} {share:.0%}" for name, share in (("TTFT", late), ("TPOT", tpot)) if share >= 0.01]
    if served.kv >= _FULL:
        said.append(f"KV full {served.kv:.0%}")
    return ", ".join(said) or "nothing"


def _compared(main: Sequence[Found], costly: Sequence[Found]) -> str:
    """What the defaults carry, beside the same cells as measured."""
    cells = {one.cell[1:] for one in costly}
    lines = []
    for text, here in (("as measured", [one for one in main if one.cell[1:] in cells]), ("with costly steps", costly)):
        if not here:
            continue
        level = sum(one.carries[DEFAULTS] == one.carries[SETTING] for one in here)
        share = statistics.fmean(map(_share, here))
        lines.append(
            f"- {text}: the defaults carry as much as the best setting in {level} of {len(here)}, and {share:.0%} of it "
            "on average."
        )
    return "\n".join(lines)
