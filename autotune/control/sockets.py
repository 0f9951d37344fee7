"""Where the sockets of live controllers lie: made, found, and chosen from.

In ``$XDG_RUNTIME_DIR/autotune``, or in ``autotune-UID`` in the temporary directory: a folder of mode 0700 that must belong to the
user, so that nobody else can listen in or pose as an engine. What is said over them: :mod:`autotune.control.remote`.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import stat
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import psutil

from runtime.errors import InputError

_LONGEST_PATH = 100  # bytes; the system's own bound is 104 to 108
_NAME = re.compile(r"^autotune-(\d+)(?:-\d+)?\.sock(~?)$")
_naming = threading.Lock()


class SteerableProcess(NamedTuple):
    """A process that can be watched and steered."""

    pid: int
    path: Path


def socket_folder(*, create: bool = False) -> Path:
    """Where the sockets of this user lie. Raises :class:`InputError` if another could read or write there."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    private = Path(tempfile.gettempdir(), f"autotune-{os.getuid()}")
    folder = Path(runtime_dir, "autotune") if runtime_dir and os.access(runtime_dir, os.W_OK | os.X_OK) else private
    try:
        if create:
            folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except FileNotFoundError:
        if create:
            raise InputError(f"steer: {folder} cannot be made: there is no directory {folder.parent}") from None
        return folder
    except OSError as error:
        raise InputError(f"steer: {folder} cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise InputError(f"steer: {folder} must be a directory of yours with mode 0700; remove it")
    return folder


def steerable() -> list[SteerableProcess]:
    """The processes that can be steered, by number. Sockets that dead processes left are removed on the way."""
    found = []
    folder = socket_folder()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (name := _NAME.match(path.name)) is None:
            continue
        pid, unfinished = int(name[1]), bool(name[2])
        if not (psutil.pid_exists(pid) if unfinished else _answers(path)):
            path.unlink(missing_ok=True)
        elif not unfinished:
            found.append(SteerableProcess(pid, path))
    return sorted(found)


def choose(target: str | None) -> Path:
    """The socket that ``target`` names: a process number, a path, or None for the only process there is.

    Raises :class:`InputError` when there is no such process, or more than one.
    """
    if target is not None and not target.isdecimal():
        return Path(target)
    found = [process for process in steerable() if target is None or process.pid == int(target)]
    if len(found) == 1:
        return found[0].path
    if found:
        listed = ", ".join(f"{process.pid} ({process.path})" for process in found)
        raise InputError(f"{len(found)} engines can be steered; name one by its number or socket: {listed}")
    if target is None:
        opens = "one opens its socket with autotune serve --slo, or autotune.control(..., steer=True)"
        raise InputError(f"no process can be steered; {opens}")
    raise InputError(f"process {target} cannot be steered; it must have opened its socket with steer=True")


def listen(path: str | Path | None) -> tuple[Path, socket.socket]:
    """A listening socket and where it lies. It appears there only when it listens, and with mode 0600."""
    if not hasattr(socket, "AF_UNIX"):
        raise InputError("steer: this system has no Unix sockets")
    with _naming:
        if path is None:
            folder = socket_folder(create=True)
            steerable()  # clears what dead processes left
            names = (f"autotune-{os.getpid()}{'' if n == 1 else f'-{n}'}.sock" for n in itertools.count(1))
            place = next(folder / name for name in names if not (folder / name).exists())
        else:
            place = Path(path).absolute()
            if place.exists() and not place.is_socket():
                raise InputError(f"steer: {place} exists and is not a socket")
            if place.exists() and _answers(place):
                raise InputError(f"steer: {place} is in use by another controller")
        if len(os.fsencode(place)) > _LONGEST_PATH:
            raise InputError(f"steer: {place} is too long for a socket; it may have {_LONGEST_PATH} bytes")
        made, listener = place.with_name(f"{place.name}~"), socket.socket(socket.AF_UNIX)
        try:
            made.unlink(missing_ok=True)
            listener.bind(os.fspath(made))
            made.chmod(0o600)
            listener.listen(128)
            made.rename(place)
        except OSError as error:
            listener.close()
            raise InputError(f"steer: {place} cannot be made: {error.strerror}") from None
        return place, listener


def _answers(path: Path) -> bool:
    """Whether someone listens at ``path``. A process that is stopped does: only a refusal means that nobody will again."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


__all__ = ["SteerableProcess", "choose", "listen", "socket_folder", "steerable"]
