"""What there is to tell of a run: its decisions, and the records of its requests where they were kept."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from autotune.decisions import Decision, read_decisions
from runtime.errors import InputError
from runtime.records import RequestRecord
from runtime.serving.record_log import read_records
from runtime.slo import SLO


@dataclass(frozen=True)
class Run:
    """``decisions`` from one ``attach`` on; ``records`` of requests that came since then; ``slo`` as it was at first;
    ``lacking``:
    what is not here, in sentences."""

    name: str
    decisions: tuple[Decision, ...]
    records: tuple[RequestRecord, ...]
    slo: SLO | None
    lacking: tuple[str, ...]

    @property
    def start(self) -> float:
        """On the engine's clock, s."""
        return self.decisions[0].at

    @property
    def end(self) -> float:
        """Of what is known of it, on the engine's clock."""
        return max(self.decisions[-1].at, max((r.finished for r in self.records), default=self.start))

    @property
    def day(self) -> str:
        wall = self.decisions[0].wall
        return "" if wall is None else f"{datetime.fromtimestamp(wall):%Y-%m-%d %H:%M}"


def read_run(log: Path, records: Path | None = None) -> Run:
    """The last run of a decision log; ``records`` is what ``autotune serve --records`` wrote meanwhile.

    Raises :class:`InputError` for files that cannot be read or hold no run.
    """
    every = list(read_decisions(log))
    if not every:
        raise InputError(f"{log}: holds no decision")
    first = max((i for i, d in enumerate(every) if d.action == "attach"), default=0)
    decisions = tuple(every[first:])
    lacking = (
        [] if first == 0 else [f"The log holds earlier runs as well; this is the last, from decision {first + 1} on."]
    )
    told = decisions[0].evidence.get("slo")
    slo = SLO.parse(told) if isinstance(told, str) else None
    kept: tuple[RequestRecord, ...] = ()
    if records is None:
        lacking.append("Without --records only decisions are known, and not how the requests fared.")
    else:
        kept = tuple(r for r in _read(records) if r.arrival >= decisions[0].at)
        if not kept:
            lacking.append(f"{records.name} holds no request that came after the controller was attached.")
    return Run(log.name, decisions, kept, slo, tuple(lacking))


def _read(path: Path) -> list[RequestRecord]:
    try:
        return read_records(path)
    except OSError as error:
        raise InputError(f"--records: {path} cannot be read ({error.strerror or error})") from None
    except (ValueError, TypeError, KeyError, UnicodeDecodeError):
        raise InputError(f"--records: {path} is no file of records; autotune serve --records writes one") from None
