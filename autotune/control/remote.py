"""Steering a live controller: a local Unix socket, opened on request, behind ``autotune watch``, ``pause`` and ``set``.

One JSON object a line, each way::

    {"do": "status"}                              {"status": {"regime": …, "knobs": {…}, …}}
    {"do": "pause"}, "resume" or "kill"           the status after it
    {"do": "set", "knobs": {"token_budget": 512}} the status after it; the controller pauses
    {"do": "decisions", "last": 20}               {"decisions": [{…}, …]}, newest last
    anything else                                 {"error": "…"} naming the field, its value, and what is allowed

One thread serves every client and blocks on none: input is bounded, whoever does not read its replies is dropped, and a
client gets one answer a turn, so that a flood of requests leaves the interpreter to the engine. The engine's own
thread is never called, and whatever goes wrong here ends the socket, not the engine.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from autotune.control.decision_log import Decision
from autotune.control.status import Status
from autotune.control.steerable import listen
from runtime.errors import AutotuneError
from runtime.knobs import Knobs

log = logging.getLogger(__name__)

LONGEST_LINE: Final = 16 * 1024  # bytes of a request
MOST_UNREAD: Final = 4 << 20  # bytes of replies that a client may leave lying
MOST_CLIENTS: Final = 16
MOST_DECISIONS: Final = 1024
_BREATH_S = 0.002  # between turns


class Steered(Protocol):
    """What is steered; :class:`autotune.Control` is one."""

    def status(self) -> Status: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def kill(self) -> None: ...
    def set(self, **knobs: float) -> Knobs: ...
    def latest(self, count: int) -> list[Decision]: ...


class SteeringServer:
    """Serves ``control``, driven by the controller named ``controller``, until :meth:`stop`.

    ``path``: where the socket is put, mode 0600; None for a name with the process number in the private folder. Raises
    :class:`InputError` when it cannot be put there.
    """

    def __init__(self, control: Steered, controller: str, path: str | Path | None = None) -> None:
        self._control = control
        self._about = {"pid": os.getpid(), "controller": controller}
        self._clients: dict[socket.socket, _Client] = {}  # the one heard from longest ago first
        self._stopping = threading.Event()
        self.path, self._listener = listen(path)
        self._inode = self.path.lstat().st_ino
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        atexit.register(self._unlink)
        self._thread = threading.Thread(target=self._run, name=f"steering {self.path.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take the socket away and have the thread end. Returns at once; any thread, any number of times."""
        self._stopping.set()
        self._unlink()
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def join(self) -> None:
        """Wait for the thread to end after :meth:`stop`, but never from itself, and never for long."""
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    # -- the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
                self._stopping.wait(_BREATH_S)
        except Exception:
            log.exception("steering over %s ends here; the controller goes on", self.path)
        finally:
            self._unlink()
            atexit.unregister(self._unlink)
            for client in list(self._clients.values()):
                self._send(client)  # the reply to what ended this
                client.socket.close()
            self._selector.close()
            for end in (self._listener, self._waker, self._woken):
                end.close()

    def _turn(self) -> None:
        pending = any(client.waits for client in self._clients.values())
        for key, events in self._selector.select(0 if pending else None):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj in self._clients:  # it may have been dropped for another in this very turn
                if events & selectors.EVENT_READ:
                    self._read(key.data)
                if events & selectors.EVENT_WRITE:
                    self._send(key.data)
        for client in list(self._clients.values()):
            line = client.next_line()
            if line is not None and len(line) > LONGEST_LINE:
                self._say(client, {"error": f"the request is longer than {LONGEST_LINE} bytes"})
            elif line is not None:
                self._say(client, self._reply(line))
            self._look_after(client)

    def _accept(self) -> None:
        for _ in range(MOST_CLIENTS):
            try:
                accepted, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor left: give one back, or wait until the program does
                if self._clients:
                    self._drop(next(iter(self._clients.values())))
                else:
                    self._stopping.wait(0.1)
                return
            if len(self._clients) >= MOST_CLIENTS:
                self._drop(next(iter(self._clients.values())))
            accepted.setblocking(False)
            client = self._clients[accepted] = _Client(accepted)
            self._selector.register(accepted, selectors.EVENT_READ, client)

    def _read(self, client: _Client) -> None:
        try:
            received = client.socket.recv(LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            received = b""
            client.replies.clear()
        self._clients[client.socket] = self._clients.pop(client.socket)  # now the one heard from last
        client.ended |= not received
        if not client.deaf:
            client.requests += received

    def _say(self, client: _Client, reply: dict[str, Any]) -> None:
        client.replies += json.dumps(reply).encode() + b"\n"
        self._send(client)

    def _send(self, client: _Client) -> None:
        if client.replies:
            try:
                del client.replies[: client.socket.send(client.replies)]
            except BlockingIOError:
                pass
            except OSError:
                client.ended = True
                client.requests.clear()
                client.replies.clear()

    def _look_after(self, client: _Client) -> None:
        """Drop it if it is done with or does not read; else listen for what it may do next."""
        if len(client.requests) > LONGEST_LINE and not client.waits:
            client.requests.clear()
            client.deaf = True  # the rest is read and thrown away: closing now would take the reply along
            self._say(client, {"error": f"the request is longer than {LONGEST_LINE} bytes"})
        done = client.ended and not client.replies and not client.waits
        if client.socket not in self._clients or done or len(client.replies) > MOST_UNREAD:
            self._drop(client)
            return
        hear = not client.ended and len(client.requests) <= LONGEST_LINE
        events = selectors.EVENT_READ * hear | selectors.EVENT_WRITE * bool(client.replies)
        registered = client.socket in self._selector.get_map()
        if events and registered:
            self._selector.modify(client.socket, events, client)
        elif events:
            self._selector.register(client.socket, events, client)
        elif registered:
            self._selector.unregister(client.socket)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.socket, None) is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(client.socket)
            client.socket.close()

    # -- what is asked --------------------------------------------------------------------------------------------------

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            return {"error": 'the request is not a JSON object; send a line such as {"do": "status"}'}
        try:
            return self._do(request)
        except (ValueError, AutotuneError) as error:
            return {"error": str(error)}
        except Exception as error:
            log.exception("a steering request failed")
            return {"error": f"it failed: {type(error).__name__}: {error}"}

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        control = self._control
        plain: dict[str, Callable[[], object]] = {
            "status": lambda: None,
            "pause": control.pause,
            "resume": control.resume,
            "kill": control.kill,
        }
        verbs = [*plain, "set", "decisions"]
        verb = request.pop("do", None)
        if verb not in verbs:
            raise ValueError(f"do is {verb!r:.60}; it must be one of {', '.join(verbs)}")
        takes = {"set": "knobs", "decisions": "last"}.get(verb)
        for name in request:
            if name != takes:
                raise ValueError(f"{name!r:.60} is not a field of {verb}" + (f"; {takes} is" if takes else ""))
        if verb == "decisions":
            last = request.get("last", 20)
            if isinstance(last, bool) or not isinstance(last, int) or not 1 <= last <= MOST_DECISIONS:
                raise ValueError(f"last is {last!r:.60}; it must be a whole number between 1 and {MOST_DECISIONS}")
            return {"decisions": [json.loads(decision.as_json()) for decision in control.latest(last)]}
        if verb == "set":
            knobs = request.get("knobs")
            if not isinstance(knobs, dict) or not knobs:
                raise ValueError(f'knobs is {knobs!r:.60}; it must be an object such as {{"token_budget": 512}}')
            control.set(**knobs)
        else:
            plain[verb]()
        status = control.status()
        return {"status": {**self._about, **status.as_dict(), "line": str(status)}}

    def _unlink(self) -> None:
        if os.getpid() == self._about["pid"]:  # a forked child must not take its parent's away
            with contextlib.suppress(OSError):
                if self.path.lstat().st_ino == self._inode:
                    self.path.unlink()


class _Client:
    """One connection: what it has sent and was not yet done, and what it has not yet read."""

    __slots__ = ("deaf", "ended", "replies", "requests", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.requests = bytearray()
        self.replies = bytearray()
        self.ended = False  # it sends nothing more
        self.deaf = False  # nothing that it sends counts any more

    @property
    def waits(self) -> bool:
        return b"\n" in self.requests

    def next_line(self) -> bytes | None:
        """The next request, blank lines left out."""
        while self.waits:
            line, _, self.requests = self.requests.partition(b"\n")
            if line.strip():
                return bytes(line)
        return None


__all__ = ["SteeringServer"]
