"""Every request that ended, one JSON line each: raw times, from which every latency can be derived again, and the boot of the
machine that its clock began with."""

from __future__ import annotations

import json
import logging
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from runtime.clock import boot
from runtime.errors import InputError
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.shared.json_lines import append, drop_cut_line, holds_something_else, whole_lines

log = logging.getLogger(__name__)


class RecordLog:
    """Appends records to ``path``. As a listener it only queues them; :meth:`flush` writes, from one thread at a time.

    Raises :class:`InputError` for a file that cannot be written, or that holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: deque[RequestRecord] = deque()
        if holds_something_else(path, "token_times"):
            raise InputError(f"--records: {path} exists and holds no records of requests; name another file")
        drop_cut_line(path)
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise InputError(f"--records: {path} cannot be written ({error.strerror or error})") from None

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
        self._file.close()


def read_records(path: Path) -> list[RequestRecord]:
    """The records of a log, as they were. A line that was cut off is left out."""
    return [record for record, _ in read_with_boots(path)]


def read_with_boots(path: Path) -> list[tuple[RequestRecord, str]]:
    """The same, each with the :func:`~runtime.clock.boot` that its times count from; empty where the log does not say."""
    found = []
    for _, line in whole_lines(path.read_text(encoding="utf-8")):
        fields = json.loads(line)
        its = fields.pop("boot", "")
        found.append((RequestRecord(**fields | {"reason": FinishReason(fields["reason"])}), its))
    return found
