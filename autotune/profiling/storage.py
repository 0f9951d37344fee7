"""Where a study lies: a journal file, which one process at a time has open, or a database that several machines share.

Both are Optuna's own storages. A journal is told apart from a damaged one, and a line that a death or a full disk cut off is
removed: Optuna would choke on it once another follows.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from autotune.measure.evaluate import Interrupted
from runtime.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a system without it: see check_system

HEARTBEAT_S = 10
_GRACE = 3  # heartbeats that may be missed: a machine under load is not dead
_DIALECTS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}  # the driver we install
_ALLOWED = ("postgresql+psycopg", "sqlite")
_SECRETS = ((re.compile(r"(://[^:/@\s]*:)\S*@"), r"\1***@"), (re.compile(r"([?&](?:ssl)?password=)[^\s&]*"), r"\1***"))
_A_PASSWORD = 4  # characters, at the least: a shorter one is within words of any text
_TRIES = 10  # to make the tables
_TABLES_TIMEOUT_S, _TIMEOUT_S = 2.0, 30.0  # for another's lock on a SQLite file, while tables are made and later
_CLASH = ("already exists", "duplicate key", "UNIQUE constraint", "is locked")  # two are making the tables at once
_SUM = "sum"
_BEGINS = f'{{"{_SUM}":'.encode()  # each of our lines
_WAYS_OUT = "--fresh starts a new one, another --out leaves it alone"
_ELSEWHERE = "name another --study, or where none is given another --out"  # --fresh empties nobody else's file


@dataclass(frozen=True)
class SharedStorage:
    """Where a shared study is. Its text never shows the password. ``heartbeat_s``: seconds between signs of life."""

    url: str
    name: str
    heartbeat_s: int = HEARTBEAT_S

    @classmethod
    def of(cls, url: str, name: str, *, heartbeat_s: int = HEARTBEAT_S) -> SharedStorage:
        """From ``--storage``. Raises :class:`InputError` for what is no address of a database that can be used."""
        import sqlalchemy

        if url.partition("?")[0].count("@") > 1:
            raise InputError(f"--storage: {hidden(url)}: write an @ within a password as %40")
        try:
            parsed = sqlalchemy.make_url(url)
        except (sqlalchemy.exc.ArgumentError, ValueError):  # the latter: a port that is no number
            raise InputError(
                "--storage: that is not the address of a database; "
                "write postgresql+psycopg://USER@HOST:PORT/DATABASE or sqlite:///FILE"
            ) from None
        parsed = parsed.set(drivername=_DIALECTS.get(parsed.drivername, parsed.drivername))
        if parsed.drivername not in _ALLOWED:
            raise InputError(
                f"--storage: {hidden(url)}: {parsed.drivername} is not supported; use {' or '.join(_ALLOWED)}"
            )
        if not parsed.database:
            raise InputError(f"--storage: {hidden(url)} names no database; write {parsed.drivername}://…/DATABASE")
        if ":memory:" in parsed.database or "memory" in parsed.query.get("mode", ""):
            raise InputError(
                f"--storage: {hidden(url)} is in memory, which ends with the process; write sqlite:///FILE"
            )
        return cls(parsed.render_as_string(hide_password=False), name, heartbeat_s)

    def __str__(self) -> str:
        return f"study {self.name} in {hidden(self.url)}"

    __repr__ = __str__


def hidden(url: str) -> str:
    """The address without its password, also where it is written wrongly."""
    for pattern, instead in _SECRETS:
        url = pattern.sub(instead, url)
    return url


def without_passwords(arguments: Iterable[str]) -> list[str]:
    """A command line that may be shown and kept: the addresses in it lose their passwords."""
    return [hidden(argument) for argument in arguments]


@contextmanager
def database(shared: SharedStorage, stop: Callable[[], bool] = lambda: False) -> Iterator[RDBStorage]:
    """The database, with its tables. Whatever fails there while it is open is an :class:`InputError` of one line.

    Raises :class:`~autotune.measure.evaluate.Interrupted` when ``stop`` says so while another has it locked.
    """
    import sqlalchemy

    try:
        storage = _connect(shared, stop)
        try:
            yield storage
        finally:
            storage.remove_session()
            storage.engine.dispose()
    except (sqlalchemy.exc.SQLAlchemyError, OptunaError) as error:
        raise _broken(shared, error) from None


def _connect(shared: SharedStorage, stop: Callable[[], bool]) -> RDBStorage:
    import sqlalchemy

    sqlite = shared.url.startswith("sqlite")
    for attempt in range(_TRIES):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)  # of heartbeats
                storage = RDBStorage(
                    shared.url,
                    engine_kwargs={
                        "connect_args": {"timeout": _TABLES_TIMEOUT_S} if sqlite else {"connect_timeout": 10},
                        "pool_pre_ping": True,  # a database that was restarted meanwhile is connected to again
                    },
                    heartbeat_interval=shared.heartbeat_s,
                    grace_period=_GRACE * shared.heartbeat_s,
                )
            if sqlite:
                sqlalchemy.event.listen(storage.engine, "connect", _wait_longer)
                storage.remove_session()
                storage.engine.dispose()  # connections are made anew
            return storage
        except ImportError:
            raise InputError(
                f"--storage: {hidden(shared.url)} needs psycopg: pip install '.[postgres]' in a checkout"
            ) from None
        except (sqlalchemy.exc.SQLAlchemyError, OptunaError, RuntimeError) as error:
            if attempt == _TRIES - 1 or not any(word in str(error) for word in _CLASH):
                raise _broken(shared, error) from None
            if stop():
                raise Interrupted("stopped") from None
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError


def _wait_longer(connection: Any, record: object) -> None:
    """Of a SQLite file whose tables are there: workers that write at the same time wait for each other."""
    connection.execute(f"PRAGMA busy_timeout = {_TIMEOUT_S * 1e3:.0f}")


def _broken(shared: SharedStorage, error: BaseException) -> InputError:
    """The innermost cause, in one line, without the password."""
    import sqlalchemy

    while (inner := error.__cause__ or getattr(error, "orig", None)) is not None and inner is not error:
        error = inner
    text = hidden(" ".join(str(error).split())) or type(error).__name__
    password = sqlalchemy.make_url(shared.url).password
    if password and len(str(password)) >= _A_PASSWORD:
        text = text.replace(str(password), "***")
    return InputError(f"--storage: {hidden(shared.url)} cannot be used: {text}")


@contextmanager
def journal(path: Path, *, fresh: bool = False) -> Iterator[BaseStorage]:
    """The journal file, made if there is none, held by this process alone: the kernel lets go of it however the process ends.

    ``fresh`` empties it if it is a journal of ours. Raises :class:`InputError`, then or while it is open, when another process
    holds it, when it cannot be written, or when it is no journal of ours.
    """
    made = not path.exists()
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise unwritable(path, error) from None
    try:
        if not locked(file, path, "put --out, or --study, on a local disk"):
            raise InputError(f"{path}: another autotune is profiling into it; wait, or use another --out")
        try:
            if not _is_ours(path):
                raise InputError(f"{path}: is no journal that autotune wrote; {_ELSEWHERE}")
            if fresh:
                os.ftruncate(file, 0)
            whole, checksum = _sound(path)
            storage = _opened(path, checksum)
            if whole < os.fstat(file).st_size:
                os.ftruncate(file, whole)
                os.fsync(file)
        except OSError as error:
            raise unwritable(path, error) from None
        yield storage
    finally:
        if made and os.fstat(file).st_size == 0:
            path.unlink(missing_ok=True)  # nothing came of it, as on a full disk
        os.close(file)


def locked(file: int, path: Path, way_out: str) -> bool:
    """Lock the open ``file``, at ``path``: False where another process holds it. Raises :class:`InputError`, with the
    ``way_out``, where it cannot be locked at all."""
    check_system()
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise InputError(f"{path}: this file system has no locks ({error.strerror or error}); {way_out}") from None
    return True


def check_system() -> None:
    """Raises :class:`InputError` where the system has not the file locks of Unix."""
    if fcntl is None:
        raise InputError("profiling needs the file locks of Unix, which this system does not have; on Windows use WSL")


def unwritable(path: str | Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be written ({error.strerror or error})")


class _Held(JournalFileOpenLock):
    """The journal, locked already: :func:`journal` has locked it as long as it is open, and the kernel lets go of it however the
    process ends. Optuna's own lock is a file beside it, which a process that is killed while it writes leaves behind."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


class _Journal(JournalFileBackend):
    """Optuna's file of whole lines: a write that fails leaves none of its line behind. Each begins with a checksum over all so
    far, in a field that Optuna does not look at."""

    def __init__(self, path: Path, checksum: int) -> None:
        super().__init__(str(path), _Held(str(path)))
        self._path, self._checksum = path, checksum

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        checksum, summed = self._checksum, []
        for log in logs:
            checksum = _with(checksum, log)
            summed.append({_SUM: checksum} | log)
        try:
            size = self._path.stat().st_size  # never made anew: whoever removed it meant it
            try:
                super().append_logs(summed)
            except OSError:
                os.truncate(self._path, size)
                raise
        except OSError as error:
            raise unwritable(self._path, error) from None
        self._checksum = checksum


def _with(checksum: int, log: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(log, separators=(",", ":")).encode(), checksum)


def _is_ours(path: Path) -> bool:
    """Whether the file is empty or begins as our journals do, whatever comes then."""
    with path.open("rb") as file:
        first = file.read(len(_BEGINS))
    return _BEGINS.startswith(first)


def _sound(path: Path) -> tuple[int, int]:
    """Bytes of the whole lines, and their checksum; what follows was cut off.

    Raises :class:`InputError` if a line is damaged.
    """
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    checksum = 0
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        try:
            log = dict(json.loads(line))
            recorded = log.pop(_SUM, None)
            checksum = _with(checksum, log)
        except (ValueError, TypeError):
            recorded = None
        if recorded != checksum:
            raise _unreadable(path, f"line {number} is damaged")
    return whole, checksum


def _unreadable(path: Path, what: str) -> InputError:
    return InputError(f"{path}: is not a readable study: {what}; {_WAYS_OUT}")


def _opened(path: Path, checksum: int) -> BaseStorage:
    try:
        return JournalStorage(_Journal(path, checksum))
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        # what Optuna raises for lines that are whole, and make no sense one after the other
        raise _unreadable(path, f"{type(error).__name__}: {error}") from None
