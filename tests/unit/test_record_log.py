"""The log of requests: what a full disk and a run that was cut off cost."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import pytest

from runtime.errors import InputError
from runtime.records import FinishReason, RequestRecord
from runtime.serving.record_log import RecordLog, read_records, read_with_boots
from runtime.shared import json_lines
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


def test_a_file_that_another_server_writes_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "_LOCK_TIMEOUT_S", 0.0)
    path = tmp_path / "records.jsonl"
    with RecordLog(path) as log:
        log.on_request(record("a"))
        log.flush()
        with path.open("ab") as half:  # of a line that the first is writing
            half.write(b'{"id": "b')
        with pytest.raises(InputError, match=r"that has not ended writes its records to .*; name another file"):
            RecordLog(path)
        assert path.read_bytes().endswith(b'{"id": "b')
    with RecordLog(path) as log:
        log.on_request(record("c"))
    assert [r.id for r in read_records(path)] == ["a", "c"]
    with RecordLog(Path("/dev/null")), RecordLog(Path("/dev/null")):
        pass


@pytest.mark.parametrize("text", ["5", "null", '"x"', "[]", "[" * 100_000, '{"reason": [1]}', '{"id": "a"}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record("a")._asdict()) + f"\n{text}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"^line 2 is no record of a request$"):
        read_records(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("arrival", "x"), ("arrival", None), ("arrival", math.nan), ("arrival", True), ("arrival", 10**400),
        ("finished", math.inf), ("scheduled", "x"), ("token_times", 5), ("token_times", None), ("token_times", ["a"]),
        ("token_times", [1.0, math.nan, 2.0]), ("token_times", [10**400]), ("token_times", [True]),
        ("prompt_tokens", 1.5), ("request_class", [1]), ("request_class", 5), ("cause", None), ("relegated", 1),
    ],
)  # fmt: skip
def test_a_field_that_no_record_has_is_named(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record("a")._asdict() | {name: value}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"^line 1: {name} is .*, which is in no record of a request$"):
        read_records(path)


def test_whole_numbers_and_no_token_are_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    whole = record("a")._replace(arrival=1, scheduled=None, token_times=[], retry_after_s=2)
    path.write_text(json.dumps(whole._asdict()) + "\n", encoding="utf-8")
    assert read_records(path) == [whole]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("hello\n")
    with pytest.raises(InputError, match="holds no records of requests; name another file"):
        RecordLog(tmp_path / "mine.txt")
