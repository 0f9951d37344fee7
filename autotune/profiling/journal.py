"""The journal file behind a study on one machine: whole lines or none, whoever is killed and whatever the disk does.

Optuna's file backend keeps it; this one adds what a file that is killed, filled up and damaged needs. One process writes
it (:func:`owned`; worker processes never touch it), so it needs no lock of Optuna's around every line. Every line ends with
a checksum over itself and all before it, in a field that Optuna does not look at.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend

from runtime.errors import InputError

_CREATE_STUDY, _DELETE_STUDY, _STUDY_ATTR, _TRIAL_STATE = (
    0,
    1,
    2,
    6,
)  # Optuna's operation codes, part of its file format
_FINISHED = (1, 2, 3)  # the states COMPLETE, PRUNED and FAIL there
_SUM, _TOLD = b',"sum":', re.compile(rb',"sum":(\d+)}$')
_WAYS_OUT = "--fresh starts a new one, another --out leaves it alone"


class Journal(JournalFileBackend):
    """Optuna's journal backend. Raises :class:`InputError` where the file cannot be written.

    Every line is in the file before the call returns, so a killed process loses none. Only a line that finishes a trial
    or changes the study is forced to the disk (against a power cut), and with it all before it: a sync takes longer than
    everything else in a trial. ``checksum``: of what the file holds, from :func:`check_journal`.
    """

    def __init__(self, path: Path, checksum: int) -> None:
        super().__init__(str(path))
        self._checksum = checksum

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines, checksum = [], self._checksum
        for log in logs:
            body = json.dumps(log, separators=(",", ":")).encode()
            checksum = zlib.crc32(body, checksum)
            lines.append(body[:-1] + _SUM + b"%d}\n" % checksum)
        try:
            file = os.open(self._file_path, os.O_WRONLY | os.O_APPEND)  # never made anew: whoever removed it meant it
            try:
                size = os.fstat(file).st_size
                try:
                    _write(file, b"".join(lines))
                    if any(map(_lasting, logs)):
                        os.fsync(file)
                except OSError:
                    os.ftruncate(file, size)  # half a line would spoil the file for good
                    raise
            finally:
                os.close(file)
        except OSError as error:
            raise unwritable(self._file_path, error) from None
        self._checksum = checksum


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Hold the journal for the whole session; the kernel lets go of it however the process ends.

    Raises :class:`InputError` when another process holds it, or it cannot be written.
    """
    made = not path.exists()
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise unwritable(path, error) from None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{path}: another autotune is profiling into it; wait, or use another --out") from None
        for leftover in path.parent.glob(f"{path.name}.lock*"):  # of Optuna's own lock, which earlier versions used
            leftover.unlink(missing_ok=True)
        yield
    finally:
        if made and os.fstat(file).st_size == 0:
            path.unlink(missing_ok=True)  # nothing came of it, as on a full disk
        os.close(file)


def check_journal(path: Path, ours: str) -> int:
    """The file's checksum. Raises :class:`InputError` unless it is empty or a sound journal that has the study ``ours``.

    A last line without its end was cut off by a death, and is removed: Optuna would choke on it once another follows.
    """
    try:
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole == 0 and data and not b'{"op_code":0,'.startswith(data[:13]):
            raise InputError(f"{path}: is not a readable study: it is no journal at all; {_WAYS_OUT}")
        if whole < len(data):
            with path.open("rb+") as file:
                file.truncate(whole)
                os.fsync(file.fileno())
    except OSError as error:
        raise unwritable(path, error) from None
    studies: set[str] = set()
    checksum, summed = 0, False
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        entry = _entry(line)
        told = _TOLD.search(line)
        checksum = zlib.crc32(line[: told.start()] + b"}" if told else line, checksum)
        summed = summed or told is not None  # the journal of an earlier version begins without checksums
        if entry is None or (summed and (told is None or int(told[1]) != checksum)):
            what = "it is no journal at all" if number == 1 else f"line {number} is damaged"
            raise InputError(f"{path}: is not a readable study: {what}; {_WAYS_OUT}")
        if entry["op_code"] == _CREATE_STUDY:
            studies.add(str(entry.get("study_name")))
    if studies and ours not in studies:
        raise InputError(f"{path}: is another program's journal, of {', '.join(sorted(studies))}; {_WAYS_OUT}")
    return checksum


def unwritable(path: str | Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be written ({error.strerror or error})")


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]  # a nearly full disk takes a part first, and says so at the next


def _lasting(log: Mapping[str, Any]) -> bool:
    code = log["op_code"]
    return code in (_CREATE_STUDY, _DELETE_STUDY, _STUDY_ATTR) or (code == _TRIAL_STATE and log["state"] in _FINISHED)


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(found, dict) and isinstance(found.get("op_code"), int) and "worker_id" in found
    return found if whole else None
