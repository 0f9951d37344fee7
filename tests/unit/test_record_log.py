"""The log of requests: what a full disk and a run that was cut off cost."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from runtime.errors import InputError
from runtime.records import FinishReason, RequestRecord
from runtime.serving.record_log import RecordLog, read_records, read_with_boots
from runtime.shared.json_lines import drop_cut_line


def record(name: str) -> RequestRecord:
    return RequestRecord(name, 0.0, 0.1, 0.2, (0.2,), 3, 1, 0, 0, FinishReason.STOP, "default", "", 0, 0, 0)


class Full:
    """A disk that takes ``room`` bytes, and then no more until there is some again."""

    def __init__(self, path: Path, room: int) -> None:
        self._file, self.room = path.open("ab", buffering=0), room

    def write(self, data: memoryview) -> int:
        taken = min(len(data), self.room)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= taken
        return self._file.write(data[:taken])

    def fileno(self) -> int:
        return self._file.fileno()

    def truncate(self, size: int) -> int:
        return self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


def test_a_full_disk_costs_what_it_does_not_take_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with RecordLog(path) as log:
        log.on_request(record("a"))
        log.flush()
        log._file.close()
        log._file = disk = Full(path, 20)  # type: ignore[assignment]
        log.on_request(record("b"))
        with pytest.raises(OSError, match=r"1 records of requests are lost, .*No space left on device.*records\.jsonl"):
            log.flush()
        assert path.read_bytes().endswith(b"}\n"), "half a line is no line"
        disk.room = 10**6
        log.on_request(record("c"))
        log.flush()
    assert [r.id for r in read_records(path)] == ["a", "c"]


def test_a_name_that_is_too_long_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / ("r" * 300)
    drop_cut_line(path)
    with pytest.raises(InputError) as caught:
        RecordLog(path)
    assert str(caught.value) == f"--records: {path} cannot be written (File name too long)"


def test_the_end_of_a_full_disk_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "records.jsonl"
    with RecordLog(path) as log:
        log._file.close()
        log._file = Full(path, 0)  # type: ignore[assignment]
        log.on_request(record("a"))
    assert "1 records of requests are lost" in caplog.text and read_records(path) == []


def test_each_record_names_the_boot_that_its_times_count_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    for name in ("0000aaaa", "", "0000bbbb"):
        monkeypatch.setattr("runtime.serving.record_log.boot", lambda name=name: name)
        with RecordLog(path) as log:
            log.on_request(record(name or "of a system that does not say"))
    assert [its for _, its in read_with_boots(path)] == ["0000aaaa", "", "0000bbbb"]
    assert read_records(path)[0] == record("0000aaaa")._replace(token_times=[0.2])  # type: ignore[arg-type]


def test_what_follows_a_run_that_was_cut_off_is_read(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with RecordLog(path) as log:
        log.on_request(record("a"))
        log.on_request(record("b"))
    path.write_bytes(path.read_bytes()[:-30])
    assert [r.id for r in read_records(path)] == ["a"]
    for name in ("c", "d"):
        with RecordLog(path) as log:
            log.on_request(record(name))
    assert [r.id for r in read_records(path)] == ["a", "c", "d"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("hello\n")
    with pytest.raises(InputError, match="holds no records of requests; name another file"):
        RecordLog(tmp_path / "mine.txt")
