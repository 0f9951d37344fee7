"""A study in a database, shared by several machines: heartbeats say who is alive, and the dead's trials go to others."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
from optuna.exceptions import OptunaError
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.study import Study
from optuna.trial import TrialState

from autotune.profiling.slots import Retry
from autotune.profiling.trials import fail_and_retry, quiet
from runtime.errors import InputError

HEARTBEAT_S = 10
_GRACE = 3  # heartbeats that may be missed: a machine under load is not dead
_DIALECTS = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}  # the driver we install
_ALLOWED = ("postgresql+psycopg", "sqlite")
_SECRETS = ((re.compile(r"(://[^:/@\s]*:)\S*@"), r"\1***@"), (re.compile(r"([?&](?:ssl)?password=)[^\s&]*"), r"\1***"))
_WORKER = "worker"
_GONE = "Record does not exist."  # Optuna's words
_TRIES = 6
_CLASH = ("already exists", "duplicate key", "UNIQUE constraint", "is locked")  # two are making the tables at once


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
        except sqlalchemy.exc.ArgumentError:
            raise InputError(
                "--storage: that is not the address of a database; "
                "write postgresql+psycopg://USER@HOST/DATABASE or sqlite:///FILE"
            ) from None
        parsed = parsed.set(drivername=_DIALECTS.get(parsed.drivername, parsed.drivername))
        if parsed.drivername not in _ALLOWED:
            raise InputError(
                f"--storage: {hidden(url)}: {parsed.drivername} is not supported; use {' or '.join(_ALLOWED)}"
            )
        if not parsed.database:
            raise InputError(f"--storage: {hidden(url)} names no database; write {parsed.drivername}://…/DATABASE")
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


def connect(shared: SharedStorage) -> RDBStorage:
    """Open the database, and make its tables if it has none. Raises :class:`InputError`."""
    import sqlalchemy

    for attempt in range(_TRIES):
        try:
            with quiet():
                return RDBStorage(
                    shared.url,
                    engine_kwargs={
                        "connect_args": {"timeout": 30} if shared.url.startswith("sqlite") else {"connect_timeout": 10},
                        "pool_pre_ping": True,  # a database that was restarted meanwhile is connected to again
                    },
                    heartbeat_interval=shared.heartbeat_s,
                    grace_period=_GRACE * shared.heartbeat_s,
                    heartbeat_stale_trial_callback=Retry(),
                )
        except ImportError:
            raise InputError(
                f"--storage: {hidden(shared.url)} needs psycopg: pip install 'gpu-autotune[postgres]'"
            ) from None
        except (sqlalchemy.exc.SQLAlchemyError, OptunaError, RuntimeError) as error:
            if attempt == _TRIES - 1 or not any(word in str(error) for word in _CLASH):
                raise broken(shared, error) from None
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError


@contextlib.contextmanager
def storage_errors(shared: SharedStorage) -> Iterator[None]:
    """A database that fails is an :class:`InputError` of one line, without its password."""
    import sqlalchemy

    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, OptunaError) as error:
        raise broken(shared, error) from None
    except KeyError as error:
        if error.args != (_GONE,):
            raise
        raise InputError(f"--storage: {shared} has been discarded, by --fresh on another machine") from None


def broken(shared: SharedStorage, error: BaseException) -> InputError:
    """The innermost cause, in one line."""
    import sqlalchemy

    while (inner := error.__cause__ or getattr(error, "orig", None)) is not None and inner is not error:
        error = inner
    text = " ".join(str(error).split()) or type(error).__name__
    password = sqlalchemy.make_url(shared.url).password
    if password:
        text = text.replace(str(password), "***")
    return InputError(f"--storage: {hidden(shared.url)} cannot be used: {text}")


class Heartbeats:
    """Signs of life of the trials this process runs, and the burial of those whose process gives none."""

    several = True

    def __init__(self, storage: RDBStorage, interval_s: float) -> None:
        self._storage, self._interval = storage, interval_s
        self._lock = threading.Lock()
        self._mine: set[int] = set()
        self._silent: set[int] = set()
        self._looked = -1e9
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._thread.start()

    def began(self, study: Study, trial_id: int) -> None:
        self._storage.record_heartbeat(trial_id)
        with self._lock:
            self._mine.add(trial_id)
        study._storage.set_trial_user_attr(trial_id, _WORKER, this_process())

    def ended(self, trial_id: int) -> None:
        with self._lock:
            self._mine.discard(trial_id)

    def bury(self, study: Study, *, now: bool = False) -> int:
        if not now and time.monotonic() - self._looked < self._interval / 2:
            return 0
        self._looked = time.monotonic()
        before = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        buried = 0
        for trial in before:
            if trial._trial_id not in self._mine and died_here(trial.user_attrs.get(_WORKER)):
                fail_and_retry(study, trial)
                buried += 1
        with quiet():
            fail_stale_trials(study)
        left = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        for trial in left:
            # One that never gave a sign is not looked at by Optuna. Its time runs from the first time somebody sees it.
            if trial._trial_id not in self._mine | self._silent and _WORKER not in trial.user_attrs:
                self._silent.add(trial._trial_id)
                self._storage.record_heartbeat(trial._trial_id)
        return max(buried, len(before) - len(left))

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._closing.wait(self._interval):
            with self._lock:
                mine = list(self._mine)
            for trial_id in mine:
                with contextlib.suppress(
                    Exception
                ):  # the database is away: the next beat, or the main thread, will tell
                    self._storage.record_heartbeat(trial_id)


@cache
def this_machine() -> str:
    """Name, boot and process namespace: where a process number means one and the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    parts = [platform.node(), boot.read_text().strip() if boot.is_file() else f"{psutil.boot_time():.0f}"]
    if space.exists():
        parts.append(os.readlink(space))
    return " ".join(parts)


def this_process() -> dict[str, object]:
    return {"machine": this_machine(), "pid": os.getpid(), "since": psutil.Process().create_time()}


def died_here(worker: dict[str, object] | None) -> bool:
    """Whether ``worker`` was a process of this machine and is no more: no need to wait for its heartbeat to go stale."""
    if worker is None or worker["machine"] != this_machine():
        return False
    try:
        process = psutil.Process(int(str(worker["pid"])))
        return abs(process.create_time() - float(str(worker["since"]))) > 1 or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
