"""Every request that ended, one JSON line each: raw times, from which every latency can be derived again."""

from __future__ import annotations

import json
from collections import deque
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Self

from runtime.errors import InputError
from runtime.records import FinishReason, RequestRecord, StepRecord
from runtime.shared.json_lines import holds_something_else


class RecordLog:
    """Appends records to ``path``. As a listener it only queues them; :meth:`flush` writes, from one thread at a time.

    Raises :class:`InputError` for a file that cannot be written, or that holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._queue: deque[RequestRecord] = deque()
        try:
            self._file: TextIOWrapper = path.open("a", encoding="utf-8")
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
        lines = [json.dumps(self._queue.popleft()._asdict()) for _ in range(len(self._queue))]
        if lines:
            self._file.write("\n".join(lines) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.flush()
        self._file.close()


def read_records(path: Path) -> list[RequestRecord]:
    """The records of a log, as they were."""
    found = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            fields = json.loads(line)
            found.append(RequestRecord(**fields | {"reason": FinishReason(fields["reason"])}))
    return found
