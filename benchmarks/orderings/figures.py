"""From the records of one run to its figures, and from those of several to a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from runtime.records import FinishReason, RequestRecord, percentile
from runtime.slo import SLO

CLASSES = ("chat", "batch")


class Figures(NamedTuple):
    """Of the requests of one class, or all, in one run. Times in seconds, NaN where no request has one.

    ``goodput``: requests/s that met their SLO; ``attainment``: as a share of those offered. ``wait``: the longest time from
    arrival to the first step. E2E and wait are those of requests that were not rejected; one that was unfinished when the
    run was over counts with the time it had been there, so that nobody is forgotten who starved."""

    goodput: float
    attainment: float
    ttft_p50: float
    ttft_p99: float
    e2e_mean: float
    e2e_p99: float
    wait: float


def figures(records: Sequence[RequestRecord], slos: Mapping[str, SLO], seconds: float) -> Figures:
    """``records`` of the requests that were due within ``seconds``."""
    met = sum(slos[r.request_class].met(r) for r in records)
    accepted = [r for r in records if r.reason is not FinishReason.REJECTED]
    ttft = [r.ttft for r in accepted if r.ttft is not None]
    e2e = [_there(r) for r in accepted]
    waits = [(r.finished if r.scheduled is None else r.scheduled) - r.arrival for r in accepted]
    return Figures(
        met / seconds, met / len(records) if records else math.nan, _at(ttft, 50), _at(ttft, 99),
        statistics.fmean(e2e) if e2e else math.nan, _at(e2e, 99), max(waits, default=math.nan),
    )  # fmt: skip


def by_class(records: Sequence[RequestRecord], slos: Mapping[str, SLO], seconds: float) -> dict[str, Figures]:
    """Those of ``all``, and of each class."""
    found = {"all": figures(records, slos, seconds)}
    for name in CLASSES:
        found[name] = figures([r for r in records if r.request_class == name], slos, seconds)
    return found


def _there(record: RequestRecord) -> float:
    e2e = record.e2e if record.completed else None
    return record.finished - record.arrival if e2e is None else e2e


def _at(values: Sequence[float], q: float) -> float:
    found = percentile(values, q)
    return math.nan if found is None else found


def merged(runs: Iterable[Mapping[str, Figures]]) -> dict[str, Figures]:
    """The mean over runs, and of waits the longest."""
    every = list(runs)
    return {name: _merged([run[name] for run in every]) for name in every[0]}


def _merged(runs: Sequence[Figures]) -> Figures:
    columns: dict[str, Callable[[list[float]], float]] = dict.fromkeys(Figures._fields, statistics.fmean)
    columns["wait"] = max
    known = {name: [v for run in runs if not math.isnan(v := getattr(run, name))] for name in columns}
    return Figures(**{name: of(known[name]) if known[name] else math.nan for name, of in columns.items()})


HEAD = (
    "ordering", "goodput", "met", "chat met", "batch met", "chat TTFT p50", "p99", "batch TTFT p50", "p99",
    "chat E2E mean", "p99", "batch E2E mean", "p99", "chat waits ≤", "batch waits ≤",
)  # fmt: skip


def row(name: str, found: Mapping[str, Figures]) -> tuple[str, ...]:
    """The cells of ``name`` under :data:`HEAD`."""
    every, chat, batch = (found[kind] for kind in ("all", *CLASSES))
    shares = [_share(kind.attainment) for kind in (every, chat, batch)]
    firsts = [_seconds(t) for kind in (chat, batch) for t in (kind.ttft_p50, kind.ttft_p99)]
    wholes = [_seconds(t) for kind in (chat, batch) for t in (kind.e2e_mean, kind.e2e_p99)]
    return (name, f"{every.goodput:.2f}", *shares, *firsts, *wholes, _seconds(chat.wait), _seconds(batch.wait))


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}"


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def table(rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [HEAD, ("---",) * len(HEAD), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def numbers(found: Mapping[str, Figures]) -> dict[str, dict[str, float | None]]:
    """For JSON."""
    return {
        kind: {name: None if math.isnan(value) else round(value, 4) for name, value in one._asdict().items()}
        for kind, one in found.items()
    }
