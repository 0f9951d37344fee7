"""Reaching a controller from another process: where the sockets lie, which of them are alive, and how to ask.

The sockets lie in ``$XDG_RUNTIME_DIR/autotune``, or in ``autotune-UID`` in the temporary directory: a folder of mode 0700
that must belong to the user, so that nobody else can listen in or pose as an engine. Each is named ``autotune-PID.sock``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

from runtime.errors import InputError

_NAME = re.compile(r"^autotune-(\d+)(?:-\d+)?\.sock(~?)$")
_PATIENCE_S = 5.0  # a controller answers between two switches of the interpreter: this long means that it hangs
_LONGEST_REPLY = 4 << 20
_LONGEST_PATH = 100  # bytes; the system's own bound is 104 to 108

_naming = threading.Lock()


class SteerableProcess(NamedTuple):
    """A process that can be watched and steered."""

    pid: int
    path: Path


def socket_folder(*, create: bool = False) -> Path:
    """Where the sockets of this user lie. Raises :class:`InputError` if another could read or write there."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime_dir and os.access(runtime_dir, os.W_OK | os.X_OK):
        folder = Path(runtime_dir, "autotune")
    else:
        folder = Path(tempfile.gettempdir(), f"autotune-{os.getuid()}")
    try:
        if create:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
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
        name = _NAME.match(path.name)
        if name is None:
            continue
        pid, unfinished = int(name[1]), bool(name[2])
        if not (_alive(pid) if unfinished else _answers(path)):
            with contextlib.suppress(OSError):
                path.unlink()
        elif not unfinished:
            found.append(SteerableProcess(pid, path))
    return sorted(found)


def listen(path: str | Path | None) -> tuple[Path, socket.socket]:
    """A listening socket and where it lies: at ``path``, or under a name of its own in the folder.

    It appears there only when it listens, and with mode 0600. Raises :class:`InputError` when that cannot be.
    """
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
            if place.exists() and not stat.S_ISSOCK(place.stat().st_mode):
                raise InputError(f"steer: {place} exists and is not a socket")
            if place.exists() and _answers(place):
                raise InputError(f"steer: {place} is in use by another controller")
        if len(os.fsencode(place)) > _LONGEST_PATH:
            raise InputError(f"steer: {place} is too long for a socket; it may have {_LONGEST_PATH} bytes")
        made = place.with_name(f"{place.name}~")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                made.unlink()
            listener.bind(os.fspath(made))
            made.chmod(0o600)
            listener.setblocking(False)
            listener.listen(128)
            made.rename(place)
        except OSError as error:
            listener.close()
            raise InputError(f"steer: {place} cannot be made: {error.strerror}") from None
        return place, listener


def choose(target: str | None) -> Path:
    """The socket that ``target`` names: a process number, a path, or None for the only process there is.

    Raises :class:`InputError` when there is no such process, or more than one.
    """
    if target is not None and not target.isdecimal():
        return Path(target)
    found = [process for process in steerable() if target is None or process.pid == int(target)]
    if not found and target is None:
        raise InputError(
            "no process can be steered; one opens its socket with autotune serve --slo, or autotune.control(..., steer=True)"
        )
    if not found:
        raise InputError(f"process {target} cannot be steered; it must have opened its socket with steer=True")
    if len(found) > 1:
        listed = ", ".join(f"{process.pid} ({process.path})" for process in found)
        raise InputError(f"{len(found)} engines can be steered; name one by its number or socket: {listed}")
    return found[0].path


class Steering:
    """A connection to a controller in another process; use as a context manager.

    Raises :class:`InputError` if nobody listens at ``path``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_PATIENCE_S)
        self._rest = b""
        try:
            self._connect()
        except OSError as error:
            self._socket.close()
            why = "nobody listens there" if isinstance(error, ConnectionRefusedError) else error.strerror or error
            raise InputError(f"{path}: cannot be steered: {why}") from None

    def _connect(self) -> None:
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._socket.connect(os.fspath(self.path))
            except BlockingIOError:  # many connect at once
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """The reply to one request. Raises :class:`InputError` with the controller's own words if it refuses,
        ``ConnectionError`` if it has ended or does not answer."""
        try:
            self._socket.sendall(json.dumps({"do": do, **fields}).encode() + b"\n")
            while b"\n" not in self._rest and len(self._rest) <= _LONGEST_REPLY:
                received = self._socket.recv(65536)
                if not received:
                    raise ConnectionError("it has ended, or its controller has been detached")
                self._rest += received
        except TimeoutError:
            raise ConnectionError(f"it has not answered for {_PATIENCE_S:g} s") from None
        except (BrokenPipeError, ConnectionResetError):
            raise ConnectionError("it has ended, or its controller has been detached") from None
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            reply = json.loads(line)
        except ValueError:
            raise ConnectionError("what answers there is no controller") from None
        if not isinstance(reply, dict):
            raise ConnectionError("what answers there is no controller")
        if "error" in reply:
            raise InputError(str(reply["error"]))
        return reply

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _answers(path: Path) -> bool:
    """Whether someone listens at ``path``. A process that is stopped does: only a refusal means that nobody will again."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


__all__ = ["SteerableProcess", "Steering", "choose", "listen", "socket_folder", "steerable"]
