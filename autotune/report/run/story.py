"""What there is to tell of a run: its decisions, and the records of its requests where they were kept."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from autotune.control.decision_log import Decision, read_decisions, stated_slos
from runtime.errors import InputError
from runtime.records import RequestRecord
from runtime.serving.record_log import read_with_boots
from runtime.slo import SLO, Attainment, attainment

_OUT_OF_ORDER_S = 10.0
"""By how much a record may have ended before the one written ahead of it."""


class SLOsFrom(NamedTuple):
    """The SLO of each class from ``at`` (engine's clock, s) on; ``default`` is for classes not named."""

    at: float
    slos: Mapping[str, SLO]


@dataclass(frozen=True)
class Run:
    """``decisions`` from one ``attach`` on; ``records`` of requests that came since then, up to its ``detach`` if there is one;
    ``slo_periods``: the SLOs and from when they held, oldest first (empty if the log lacks them); ``unrecorded``: why there are
    no records, in a sentence; ``lacking``: all that is missing, in sentences."""

    name: str
    decisions: tuple[Decision, ...]
    records: tuple[RequestRecord, ...]
    slo_periods: tuple[SLOsFrom, ...]
    lacking: tuple[str, ...]
    unrecorded: str = ""

    @property
    def start(self) -> float:
        """On the engine's clock, s."""
        return self.decisions[0].at

    @cached_property
    def end(self) -> float:
        """Of what is known of it, on the engine's clock."""
        return max(self.decisions[-1].at, max((r.finished for r in self.records), default=self.start))

    @property
    def slo(self) -> SLO | None:
        """The one SLO there was; None if there were several, or none is known."""
        every = {slo for period in self.slo_periods for slo in period.slos.values()}
        return every.pop() if len(every) == 1 else None

    @cached_property
    def classes(self) -> list[str]:
        """Those with an SLO of their own that sent requests, by name."""
        return sorted({self.class_of(record) for record in self.records})

    @cached_property
    def slo_starts(self) -> list[float]:
        """When each of ``slo_periods`` began."""
        return [period.at for period in self.slo_periods]

    def class_of(self, record: RequestRecord) -> str:
        """The name under which the SLO to ``record`` goes."""
        return record.request_class if record.request_class in self._slos_at(record.arrival) else "default"

    def slo_of(self, name: str, at: float) -> SLO | None:
        """What requests of the class ``name`` that come at ``at`` (engine's clock) must meet."""
        return self._slos_at(at).get(name)

    def judged(self, records: Iterable[RequestRecord]) -> Attainment:
        """Of ``records``, each by the SLO of its class when it came."""
        by_period: dict[int, list[RequestRecord]] = {}
        for record in records:
            by_period.setdefault(self._period(record.arrival), []).append(record)
        parts = [attainment(some, self.slo_periods[i].slos) for i, some in by_period.items()]
        violations = sum((Counter(part.violations) for part in parts), Counter[str]())
        return Attainment(
            sum(p.met for p in parts), sum(p.offered for p in parts), sum(p.cancelled for p in parts), violations
        )

    def _slos_at(self, at: float) -> Mapping[str, SLO]:
        return self.slo_periods[self._period(at)].slos if self.slo_periods else {}

    def _period(self, at: float) -> int:
        return max(0, bisect_right(self.slo_starts, at) - 1)

    @property
    def day(self) -> str:
        wall = self.decisions[0].local_time
        return "" if wall is None else f"{wall:%Y-%m-%d %H:%M}"


def read_run(log: Path, records: Path | None = None, *, decisions: Iterable[Decision] | None = None) -> Run:
    """The last run of a decision log; ``records`` is what ``autotune serve --records`` wrote meanwhile. ``decisions``: those of
    the log, where it has been read.

    Raises :class:`InputError` for files that cannot be read or hold no run.
    """
    every = list(read_decisions(log) if decisions is None else decisions)
    if not every:
        raise InputError(f"{log}: holds no decision")
    first = max((i for i, d in enumerate(every) if d.action == "attach"), default=0)
    last = tuple(every[first:])
    lacking = (
        [] if first == 0 else [f"The log holds earlier runs as well; this is the last, from decision {first + 1} on."]
    )
    slo_periods = tuple(SLOsFrom(_since(d, log), slos) for d in last if (slos := _slos(d, log)))
    kept: tuple[RequestRecord, ...] = ()
    unrecorded = "Without --records only decisions are known, and not how the requests fared."
    if records is not None:
        same = _of_last_boot(_read(records), last[0].evidence.get("boot"))
        ended = last[-1].at if last[-1].action == "detach" else math.inf
        kept = tuple(r for r in same if last[0].at <= r.arrival <= ended)
        unrecorded = "" if kept else f"{records.name} holds no request that came while the controller was attached."
    if unrecorded:
        lacking.append(unrecorded)
    if not slo_periods:
        lacking.append("The log does not state the SLO of this run.")
    return Run(log.name, last, kept, slo_periods, tuple(lacking), unrecorded)


def _of_last_boot(marked: Sequence[tuple[RequestRecord, str]], boot: object) -> Sequence[RequestRecord]:
    """Those since the clock of the machine last began anew: of ``boot``, which the log names, else of that of the last record.
    Both files go on behind a reboot, and the clock does not. Without the name of a boot, times that fall back tell."""
    last = boot or (marked[-1][1] if marked else "")
    records = [record for record, its in marked if not (its and last) or its == last]
    begins = (
        i for i in range(len(records) - 1, 0, -1) if records[i].finished < records[i - 1].finished - _OUT_OF_ORDER_S
    )
    return records[next(begins, 0) :]


def _slos(decision: Decision, log: Path) -> dict[str, SLO]:
    """The SLOs that a decision states, by class; empty if of none."""
    try:
        found = stated_slos(decision)
    except InputError as error:
        raise InputError(f"{log}: {error}") from None
    if found and "default" not in found:
        raise InputError(f"{log}: the SLOs of the {decision.action} at {decision.at:g} s: there is none of default")
    return found


def _since(decision: Decision, log: Path) -> float:
    """From when on the SLOs that a decision states were in force: where it does not say, as in older logs, from itself."""
    since = decision.evidence.get("since", decision.at)
    if not isinstance(since, int | float):
        raise InputError(
            f"{log}: the SLOs of the {decision.action} at {decision.at:g} s: since is {since!r:.40}; it must be a number"
        )
    return float(since)


def _read(path: Path) -> list[tuple[RequestRecord, str]]:
    try:
        return read_with_boots(path)
    except OSError as error:
        raise InputError(f"--records: {path} cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise InputError(
            f"--records: {path} is no file of records ({error}); autotune serve --records writes one"
        ) from None
