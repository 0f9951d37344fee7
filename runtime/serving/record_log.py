"""Every request that ended, one JSON line each: raw times, from which every latency can be derived again, and the boot of the
machine that its clock began with."""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, get_type_hints

from runtime.clock import boot
from runtime.errors import InputError
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.shared.json_lines import append, drop_cut_line, holds_something_else, lock, unlock, whole_lines

log = logging.getLogger(__name__)


class RecordLog:
    """Appends records to ``path``. As a listener it only queues them; :meth:`flush` writes, from one thread at a time.

    Raises :class:`InputError` for a file that cannot be written, that holds something else, or that another server writes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: deque[RequestRecord] = deque()
        if holds_something_else(path, "token_times"):
            raise InputError(f"--records: {path} exists and holds no records of requests; name another file")
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise InputError(f"--records: {path} cannot be written ({error.strerror or error})") from None
        if not lock(self._file):
            self._file.close()
            raise InputError(f"--records: a server that has not ended writes its records to {path}; name another file")
        drop_cut_line(path)

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        self._queue.append(record)

    def flush(self) -> None:
        """Write what is queued. Raises ``OSError`` where that cannot be written, because the disk is full: then it is lost."""
        mark = {"boot": boot()} if boot() else {}
        lines = [json.dumps(self._queue.popleft()._asdict() | mark) + "\n" for _ in range(len(self._queue))]
        if not lines:
            return
        try:
            append(self._file, "".join(lines))
        except OSError as error:
            lost = f"{len(lines)} records of requests are lost, for they cannot be written: {error.strerror}"
            raise OSError(error.errno, lost, str(self._path)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.flush()
        except OSError as error:
            log.error("--records: %s", error)
        unlock(self._file)
        self._file.close()


def read_records(path: Path) -> list[RequestRecord]:
    """The records of a log, as they were. A line that was cut off is left out. Raises ``ValueError`` for one that is none."""
    return [record for record, _ in read_with_boots(path)]


def read_with_boots(path: Path) -> list[tuple[RequestRecord, str]]:
    """The same, each with the :func:`~runtime.clock.boot` that its times count from; empty where the log does not say."""
    found = []
    for number, line in whole_lines(path.read_text(encoding="utf-8")):
        try:
            fields = json.loads(line)
            its = fields.pop("boot", "")
            record = RequestRecord(**fields | {"reason": FinishReason(fields["reason"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(f"line {number} is no record of a request") from None
        for name, fits in _FITS.items():
            if not fits(value := getattr(record, name)):
                raise ValueError(f"line {number}: {name} is {value!r:.40}, which is in no record of a request")
        found.append((record, str(its)))
    return found


_MOST: Final = 1e300  # the difference of two times is a number, too


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST <= value <= _MOST


def _numbers(value: Any) -> bool:
    """As :func:`_number` of each; there may be thousands."""
    if not isinstance(value, list) or not {*map(type, value)} <= {int, float}:
        return False
    return not value or (-_MOST <= min(value) <= max(value) <= _MOST and not math.isnan(sum(value)))


_OF_KIND: dict[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    int: lambda value: isinstance(value, int) and _number(value),
    float: _number,
    float | None: lambda value: value is None or _number(value),
    Sequence[float]: _numbers,
    FinishReason: lambda value: isinstance(value, FinishReason),
}
_FITS = {name: _OF_KIND[kind] for name, kind in get_type_hints(RequestRecord).items()}
