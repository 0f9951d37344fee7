"""How the requests fared over time: attainment, latencies against targets, and what was rejected."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from autotune.report.figure import Label, Plot, Trace, View, axis, layout, line, log_axis, rule
from autotune.report.run.story import Run
from autotune.report.section import Section, Table, absent
from autotune.report.wording import number, percent
from runtime.records import FinishReason, RequestRecord, percentile
from runtime.slo import METRICS

_BINS = 60
_SHORTEST_S = 1.0


def attainment(run: Run) -> Section:
    """Attainment, by when requests came."""
    key, topic = "service", "Attainment"
    if not run.records or not run.slo_periods:
        return absent(key, topic, run.unrecorded or run.lacking[-1])
    whole = run.judged(run.records)
    bins = [(at, found) for at, some in binned(run) if (found := run.judged(some)).offered]
    if not bins:
        return absent(key, topic, "Every request on record was cancelled by its client.")
    x = [at for at, _ in bins]
    data: list[Trace] = [
        _band(x, [100 * f.low for _, f in bins], [100 * f.high for _, f in bins]),
        line(x, [100 * f.share for _, f in bins], colour="@accent"),
    ]
    shares = {100 * slo.attainment for period in run.slo_periods for slo in period.slos.values()}
    met = percent(whole.share, target=None if run.slo is None else run.slo.attainment)
    y = axis("% of requests", range=[-2, 103], ticksuffix="%")
    labels = [Label(x[-1], share, f"target {share:g}%", "@target") for share in sorted(shares)]
    plot = Plot(
        "attainment",
        "Requests within every target, by when they came",
        f"{met} of {whole.offered} requests met the SLO.",
        [View("", data, layout(axis("s"), y, shapes=[rule(y=share) for share in sorted(shares)]), labels)],
    )
    seconds = max(run.end - run.start, 1e-9)
    what = str(run.slo) if run.slo is not None else "the SLO of its class when it came"
    title = f"{met} of {whole.offered} requests within {what}: {number(whole.met / seconds)} a second"
    missed = [[name, str(count)] for name, count in Counter(whole.violations).most_common()]
    tables = (Table(("target missed", "requests"), missed, numeric=frozenset({1})),) if missed else ()
    if run.slo is None:
        tables = (_by_slo(run), *tables)
    return Section(key, topic, title, "The band is the 95% Wilson interval of each stretch of time.", (plot,), tables)


def _by_slo(run: Run) -> Table:
    """A row for each SLO that a class had."""
    rows = []
    starts = run.slo_starts
    some: dict[tuple[str, int], list[RequestRecord]] = {}
    for record in run.records:
        some.setdefault((run.class_of(record), bisect_right(starts, record.arrival) - 1), []).append(record)
    for name in run.classes:
        for index, begin in enumerate(starts):
            if found := run.judged(some[name, index]) if (name, index) in some else None:
                since = number(begin - run.start)
                slo = run.slo_of(name, begin)
                share = percent(found.share, target=None if slo is None else slo.attainment)
                rows.append([name, since, str(slo), str(found.offered), share])
    return Table(("class", "from s", "SLO", "requests", "attainment"), rows, numeric=frozenset({1, 3, 4}))


def latencies(run: Run) -> Section:
    """Median and 99th percentile of each targeted metric of each class, by when requests came."""
    key, topic = "latency", "Latencies"
    classes = run.classes
    served = _served(run)
    plots = [
        made
        for index, name in enumerate(classes)
        for metric in METRICS
        if (made := _latency(run, served, name, metric, None if len(classes) == 1 else index)) is not None
    ]
    if not plots:
        if not run.records or not run.slo_periods:
            return absent(key, topic, run.unrecorded or run.lacking[-1])
        return absent(key, topic, "No request on record has the latencies that the SLO targets.")
    return Section(key, topic, "Latencies against targets", "Of requests that completed.", tuple(plots))


def rejected(run: Run) -> Section:
    """Who was not served, and why."""
    key, topic = "rejected", "Rejected"
    if not run.records:
        return absent(key, topic, run.unrecorded)
    causes = Counter(r.cause or "no cause given" for r in run.records if r.reason is FinishReason.REJECTED)
    late = [r for r in run.records if r.relegated]
    lead = ""
    if late:
        met = run.judged(late).met if run.slo_periods else 0
        lead = (
            f"{len(late)} were relegated: they waited behind all that could still meet their SLO, and {met} of them met theirs "
            "all the same."
        )
    if not causes:
        return Section(key, topic, "Nobody was rejected", lead)
    count, offered = sum(causes.values()), sum(r.offered for r in run.records)
    rows = [[cause, str(n), percent(n / offered)] for cause, n in causes.most_common()]
    stretches = [
        (at, sum(r.reason is FinishReason.REJECTED for r in some), of)
        for at, some in binned(run)
        if (of := sum(r.offered for r in some))
    ]
    data = [line([at for at, _, _ in stretches], [100 * n / of for _, n, of in stretches], colour="@bad")]
    plot = Plot(
        "rejected",
        "Share of requests rejected, by when they came",
        f"{count} of {offered} requests were rejected.",
        [View("", data, layout(axis("s"), axis("% of requests", rangemode="tozero", ticksuffix="%")))],
        240,
    )
    table = Table(("why", "requests", "share"), rows, numeric=frozenset({1, 2}))
    return Section(key, topic, f"{percent(count / offered)} were rejected", lead, (plot,), (table,))


def binned(run: Run) -> Iterator[tuple[float, list[RequestRecord]]]:
    """(middle in seconds since the attachment, requests that came) of each stretch of time."""
    arrivals = [r.arrival - run.start for r in run.records]
    width = max(_SHORTEST_S, max(arrivals, default=0.0) / _BINS)
    bins: dict[int, list[RequestRecord]] = {}
    for at, record in zip(arrivals, run.records, strict=True):
        index = int(at / width)
        if (
            width > _SHORTEST_S
        ):  # the last one came at the very end of the last stretch, which is not the begin of another
            index = min(index, _BINS - 1)
        bins.setdefault(index, []).append(record)
    for index in sorted(bins):
        yield (index + 0.5) * width, bins[index]


_Stretches = Mapping[str, Mapping[float, Sequence[RequestRecord]]]
"""By class and the middle of each stretch of time."""


def _served(run: Run) -> _Stretches:
    """The requests that completed."""
    found: dict[str, dict[float, list[RequestRecord]]] = {name: {} for name in run.classes}
    for at, some in binned(run):
        for record in some:
            if record.completed:
                found[run.class_of(record)].setdefault(at, []).append(record)
    return found


def _latency(run: Run, served: _Stretches, request_class: str, name: str, index: int | None) -> Plot | None:
    """``index``: of the class among several; None if it is alone."""
    target = _target(run, request_class, name)
    bounds = [ms for _, ms in target if ms is not None]
    if not bounds:
        return None
    x: list[float] = []
    middle: list[float] = []
    high: list[float] = []
    for at, mine in served[request_class].items():
        values = [1e3 * v for r in mine if (v := _value(r, name)) is not None]
        low_, high_ = percentile(values, 50), percentile(values, 99)
        if low_ is not None and high_ is not None and low_ > 0:
            x.append(at)
            middle.append(low_)
            high.append(high_)
    if not x:
        return None
    data = [line(x, middle, colour="@accent"), line(x, high, colour="@faint")]
    data.append(
        line([at for at, _ in target], [ms for _, ms in target], colour="@target", width=1.5, line={"dash": "dot"})
    )
    labels = [
        Label(x[-1], middle[-1], "median", "@accent"),
        Label(x[-1], high[-1], "p99", "@muted"),
        Label(x[0], bounds[0], f"target {bounds[0]:g} ms", "@target"),
    ]
    y = log_axis(f"{name} (ms)", [*middle, *high, *bounds])
    ends = f"median {number(middle[-1])} ms and p99 {number(high[-1])} ms at the end, target {bounds[-1]:g} ms."
    title = name.upper() if index is None else f"{name.upper()} of class {request_class}"
    key = f"over-{name}" if index is None else f"over-{name}-{index}"
    return Plot(key, title, f"{title}: {ends}", [View("", data, layout(axis("s"), y), labels)])


def _target(run: Run, request_class: str, name: str) -> list[tuple[float, float | None]]:
    """The line of a target over time: (seconds since the attachment, ms), None where there was none."""
    points: list[tuple[float, float | None]] = []
    for begin, end in pairwise([*run.slo_starts, run.end]):
        slo = run.slo_of(request_class, begin)
        ms = None if slo is None else slo.targets_ms[name]
        points += [(begin - run.start, ms), (end - run.start, ms)]
    return points


def _value(record: RequestRecord, name: str) -> float | None:
    value: float | None = getattr(record, "itl_p99" if name == "itl" else name)
    return value


def _band(x: Sequence[float], low: Sequence[float], high: Sequence[float]) -> Trace:
    edge = line([*x, *reversed(x)], [*low, *reversed(high)], colour="@accent", width=0)
    return {**edge, "fill": "toself", "fillcolor": "@accent", "opacity": 0.18}
