"""Every request that ended, one JSON line each: raw times, from which every latency can be derived again."""

from __future__ import annotations

import json
import logging
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from runtime.errors import InputError
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.shared.json_lines import CUT, cut_off, holds_something_else, whole_lines

log = logging.getLogger(__name__)


_MOST: Final = 100_000  # records that wait to be written; beyond, the oldest go


class RecordLog:
    """Appends records to ``path``. As a listener it only queues them; :meth:`flush` writes, from one thread at a time.

    Raises :class:`InputError` for a file that cannot be written, or that holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._queue: deque[RequestRecord] = deque(maxlen=_MOST)
        self._cut = cut_off(path)
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise InputError(f"--records: {path} cannot be written ({error.strerror or error})") from None
        if holds_something_else(path, "token_times"):
            self._file.close()
            raise InputError(f"--records: {path} exists and holds no records of requests; name another file")

    def on_step(self, record: StepRecord) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        self._queue.append(record)

    def flush(self) -> None:
        """Write what is queued. Raises ``OSError``, and what was queued is lost, where the disk is full."""
        lines = [json.dumps(self._queue.popleft()._asdict()) + "\n" for _ in range(len(self._queue))]
        if not lines:
            return
        left = memoryview("".join([CUT if self._cut else "", *lines]).encode())
        self._cut = True  # until all of it is written
        while left:
            left = left[self._file.write(left) :]
        self._cut = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.flush()
        except OSError as error:
            log.error("--records: the last of them could not be written: %s", error)
        self._file.close()


def read_records(path: Path) -> list[RequestRecord]:
    """The records of a log, as they were. A line that was cut off is left out."""
    found = []
    for _, line in whole_lines(path.read_text(encoding="utf-8")):
        fields = json.loads(line)
        found.append(RequestRecord(**fields | {"reason": FinishReason(fields["reason"])}))
    return found
