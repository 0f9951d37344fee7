"""Steering a live controller from another process: a local Unix socket, behind ``autotune watch``, ``pause`` and ``set``.

One JSON object a line, each way::

    {"do": "status"}                              {"status": {"regime": …, "knobs": {…}, …}}
    {"do": "pause"}, "resume" or "kill"           the status after it
    {"do": "set", "knobs": {"token_budget": 512}} the status after it; the controller pauses
    {"do": "decisions", "last": 20}               {"decisions": [{…}, …], "total": 57}, newest last
    {"do": "decisions", "since": 57}              the same of those after the 57th, as far as they are in memory
    anything else                                 {"error": "…"} naming the field, its value, and what is allowed

Each client has a thread of its own, and the engine's is never called. The client: :func:`autotune.cli.connection.ask`.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import json
import logging
import os
import re
import secrets
import socket
import socketserver
import stat
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.errors import AutotuneError, EngineClosedError, InputError

if TYPE_CHECKING:
    from autotune.control.loop import Control

LONGEST_LINE: Final = 16 * 1024  # bytes of a request
MOST_CLIENTS: Final = 16  # served at once; the next waits for its turn
MOST_DECISIONS: Final = 1024
_BREATH_S = 0.002  # between two answers, so that a flood of requests leaves the interpreter to the engine
_LONGEST_PATH = 100  # bytes; the system's own bound is 104 to 108
_FIELDS: dict[str, tuple[str, ...]] = {
    "status": (),
    "pause": (),
    "resume": (),
    "kill": (),
    "set": ("knobs",),
    "decisions": ("last", "since"),
}
_naming = threading.Lock()


def socket_folder() -> Path:
    """Where this user's sockets lie. Raises :class:`InputError` if others could listen in there or pose as an engine."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        usable = runtime_dir and os.access(runtime_dir, os.W_OK | os.X_OK)
        folder = Path(runtime_dir, "autotune") if usable else Path(tempfile.gettempdir(), f"autotune-{os.getuid()}")
    except OSError as error:
        raise InputError(f"steer: there is no folder for a socket: {error.strerror}") from None
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise InputError(f"steer: {folder} cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise InputError(f"steer: {folder} must be a directory of yours with mode 0700; remove it")
    return folder


def steerable() -> dict[Path, int]:
    """The sockets of live controllers with their process numbers. Removes what dead processes left."""
    found = {}
    for path in sorted(socket_folder().iterdir()):
        if name := re.match(r"autotune-(\d+)(-\d+)?\.sock$", path.name):
            if _answers(path):
                found[path] = int(name[1])
            else:
                path.unlink(missing_ok=True)
    return found


def _answers(path: Path) -> bool:
    """Whether someone listens at ``path``. A process that is stopped does: only a refusal means that nobody will again."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(os.fspath(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _place(path: str | Path | None) -> Path:
    """Where a socket can be put: at ``path``, or under a name of this process in the private folder."""
    if path is None:
        steerable()  # clears what dead processes left
        names = (f"autotune-{os.getpid()}{'' if n == 1 else f'-{n}'}.sock" for n in itertools.count(1))
        place = next(place for name in names if not (place := socket_folder() / name).exists())
    else:
        place = Path(path).absolute()
    if len(os.fsencode(place)) > _LONGEST_PATH:
        raise InputError(f"steer: {place} is too long for a socket; it may have {_LONGEST_PATH} bytes")
    if place.exists() and (not place.is_socket() or _answers(place)):
        why = "is in use by another controller" if place.is_socket() else "exists and is not a socket"
        raise InputError(f"steer: {place} {why}")
    return place


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


class SteeringServer(socketserver.ThreadingUnixStreamServer):
    """Serves ``control``, driven by the controller named ``controller``, at ``path`` (None: in the private folder) until
    :meth:`stop`, or until nobody has the engine any more. Raises :class:`InputError` when no socket can be put there."""

    daemon_threads = True
    request_queue_size = 128
    timeout = 0.1  # seconds between two looks whether it is over

    def __init__(self, control: Control, controller: str, path: str | Path | None = None) -> None:
        self._control_ref, self._about = weakref.ref(control), {"pid": os.getpid(), "controller": controller}
        self.over, self.free, self._turn = threading.Event(), threading.Semaphore(MOST_CLIENTS), threading.Lock()
        with _naming:
            self.path = _place(path)
            # a name that nobody has, or binding fails; short, for a path has its bound
            unfinished = self.path.with_name(f".{secrets.token_urlsafe(3)[:3]}")
            super().__init__(os.fspath(unfinished), _Client, bind_and_activate=False)
            bound = False
            try:
                self.server_bind()
                bound = True
                unfinished.chmod(0o600)
                self._file = _identity(unfinished)
                self.server_activate()
                unfinished.rename(self.path)  # only now, as it listens, is it seen
            except OSError as error:
                self.server_close()
                if bound:
                    unfinished.unlink(missing_ok=True)
                raise InputError(f"steer: {self.path} cannot be made: {error.strerror}") from None
        atexit.register(self.stop)
        self._thread = threading.Thread(target=self._run, name=f"steering {self.path.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self:
            while not self.over.is_set() and self._control_ref() is not None:
                with self.free:
                    self.handle_request()
                time.sleep(_BREATH_S)
        self.stop()

    @property
    def _control(self) -> Control:
        if (control := self._control_ref()) is None:
            raise EngineClosedError("nobody has the engine any more")
        return control

    def stop(self) -> None:
        """Take the socket away and have the threads end. Returns at once; any thread, any number of times."""
        atexit.unregister(self.stop)
        if not self.over.is_set() and os.getpid() == self._about["pid"]:  # a forked child leaves its parent's alone
            self.over.set()
            with suppress(OSError):
                if _identity(self.path) == self._file:  # or it is another's, who came when this one had been removed
                    self.path.unlink()

    def join(self) -> None:
        """Wait for the listening to end after :meth:`stop`, but never for long."""
        self._thread.join(1.0)

    def reply(self, line: bytes) -> bytes:
        try:
            with self._turn:  # many clients take no more of the interpreter than one
                message = self._do(line)
        except (ValueError, AutotuneError) as error:
            message = {"error": str(error)}
        except Exception as error:
            logging.getLogger(__name__).exception("a steering request failed")
            message = {"error": f"it failed: {type(error).__name__}: {error}"}
        return json.dumps(message).encode() + b"\n"

    def _do(self, line: bytes) -> dict[str, Any]:
        if not line.endswith(b"\n"):
            raise ValueError(f"the request is longer than {LONGEST_LINE} bytes")
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            raise ValueError('the request is not a JSON object; send a line such as {"do": "status"}')
        verb = request.pop("do", None)
        if not isinstance(verb, str) or verb not in _FIELDS:
            raise ValueError(f"do is {verb!r:.60}; it must be one of {', '.join(_FIELDS)}")
        fields = _FIELDS[verb]
        for name in request.keys() - {*fields}:
            known = f"; {' and '.join(fields)} {'is' if len(fields) == 1 else 'are'}" if fields else ""
            raise ValueError(f"{name!r:.60} is not a field of {verb}{known}")
        if verb == "decisions":
            return self._decisions(**request)
        if verb == "set":
            knobs = request.get("knobs")
            if not isinstance(knobs, dict) or not knobs:
                raise ValueError(f'knobs is {knobs!r:.60}; it must be an object such as {{"token_budget": 512}}')
            self._control.set(**knobs)
        elif verb != "status":
            getattr(self._control, verb)()
        status = self._control.status()
        return {"status": {**self._about, **status.as_dict(), "line": str(status)}}

    def _decisions(self, last: Any = None, since: Any = None) -> dict[str, Any]:
        if since is None:
            last = 20 if last is None else last
            if isinstance(last, bool) or not isinstance(last, int) or not 1 <= last <= MOST_DECISIONS:
                raise ValueError(f"last is {last!r:.60}; it must be a whole number between 1 and {MOST_DECISIONS}")
        elif last is not None:
            raise ValueError("last and since are both given; decisions takes one of them")
        elif isinstance(since, bool) or not isinstance(since, int) or since < 0:
            raise ValueError(f"since is {since!r:.60}; it must be a whole number of at least 0")
        found, total = self._control.since(since or 0)
        if last is not None:
            found = found[-last:]
        return {"decisions": [json.loads(decision.as_json()) for decision in found], "total": total}


class _Client(socketserver.StreamRequestHandler):
    server: SteeringServer
    timeout = 3.0  # who sends nothing, or reads nothing, for so long is dropped

    def handle(self) -> None:
        with self.server.free, suppress(OSError):  # it has gone, or hangs
            while not self.server.over.is_set() and (line := self.rfile.readline(LONGEST_LINE + 1)).endswith(b"\n"):
                if line.strip():
                    self.wfile.write(self.server.reply(line))
                time.sleep(_BREATH_S)
            if not self.server.over.is_set() and len(line) > LONGEST_LINE:
                self.wfile.write(self.server.reply(line))
                while not self.server.over.is_set() and self.rfile.read1(LONGEST_LINE):  # or its sending would fail
                    time.sleep(_BREATH_S)
