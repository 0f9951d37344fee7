"""Steering a live controller from another process: a local Unix socket, behind ``autotune watch``, ``pause`` and ``set``.

One JSON object a line, each way::

    {"do": "status"}                              {"status": {"regime": …, "knobs": {…}, …}}
    {"do": "pause"}, "resume" or "kill"           the status after it
    {"do": "set", "knobs": {"token_budget": 512}} the status after it; the controller pauses
    {"do": "decisions", "last": 20}               {"decisions": [{…}, …]}, newest last
    anything else                                 {"error": "…"} naming the field, its value, and what is allowed

Where the socket lies: :mod:`autotune.control.sockets`. One thread serves every client and waits for none. The engine's own
thread is never called, and whatever goes wrong here ends the socket, not the engine.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

from autotune.control.sockets import listen
from runtime.errors import AutotuneError, InputError

if TYPE_CHECKING:
    from autotune.control.loop import Control

log = logging.getLogger(__name__)

LONGEST_LINE: Final = 16 * 1024  # bytes of a request
MOST_CLIENTS: Final = 16
MOST_DECISIONS: Final = 1024
_BREATH_S = 0.002  # between two answers to a client, so that a flood of requests leaves the interpreter to the engine
_PATIENCE_S = 5.0  # whoever does not answer, or does not read, for so long hangs
_LONGEST_REPLY = 4 << 20  # bytes


class SteeringServer:
    """Serves ``control``, driven by the controller named ``controller``, until :meth:`stop`.

    ``path``: where the socket is put, mode 0600; None for a name with the process number in the private folder. Raises
    :class:`InputError` when it cannot be put there.
    """

    def __init__(self, control: Control, controller: str, path: str | Path | None = None) -> None:
        self._control = control
        self._about = {"pid": os.getpid(), "controller": controller}
        self.path, self._listener = listen(path)
        self._inode = self.path.lstat().st_ino
        atexit.register(self._unlink)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._clients: dict[asyncio.StreamReader, asyncio.StreamWriter] = {}  # the one heard from longest ago first
        self._thread = threading.Thread(target=self._run, name=f"steering {self.path.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take the socket away and have the thread end. Returns at once; any thread, any number of times."""
        self._unlink()
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._over.set)

    def join(self) -> None:
        """Wait for the thread to end after :meth:`stop`, but never from itself, and never for long."""
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):  # a forked child must not take its parent's away, nor anybody a successor's
            if os.getpid() == self._about["pid"] and self.path.lstat().st_ino == self._inode:
                self.path.unlink()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            log.exception("steering over %s ends here; the controller goes on", self.path)
        finally:
            self._unlink()
            atexit.unregister(self._unlink)
            self._loop.close()
            self._listener.close()

    async def _serve(self) -> None:
        server = await asyncio.start_unix_server(self._client, sock=self._listener, limit=LONGEST_LINE)
        await self._over.wait()
        self._loop.remove_reader(self._listener)  # closing at once would forget connections that are just being made
        for requests, replies in self._clients.items():
            cast(asyncio.Transport, replies.transport).pause_reading()
            requests.feed_eof()
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left)
        server.close()

    async def _client(self, requests: asyncio.StreamReader, replies: asyncio.StreamWriter) -> None:
        if len(self._clients) >= MOST_CLIENTS:
            self._clients.pop(next(iter(self._clients))).transport.abort()
        self._clients[requests] = replies
        try:
            while not self._over.is_set() and (line := await requests.readline()):
                if self._clients.pop(requests, None) is None:  # it was dropped for another
                    break
                self._clients[requests] = replies
                if line.endswith(b"\n") and line.strip():
                    replies.write(_line(self._reply(line)))
                    async with asyncio.timeout(_PATIENCE_S):
                        await replies.drain()
                    await asyncio.sleep(_BREATH_S)
        except ValueError:
            replies.write(_line({"error": f"the request is longer than {LONGEST_LINE} bytes"}))
            while await requests.read(LONGEST_LINE):  # thrown away: closing now would take the reply along
                pass
        except (OSError, TimeoutError):  # it has gone, or does not read
            replies.transport.abort()
        self._clients.pop(requests, None)
        replies.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await replies.wait_closed()
        replies.transport.abort()

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
        control, verb = self._control, request.pop("do", None)
        takes = {"status": None, "pause": None, "resume": None, "kill": None, "set": "knobs", "decisions": "last"}
        if not isinstance(verb, str) or verb not in takes:
            raise ValueError(f"do is {verb!r:.60}; it must be one of {', '.join(takes)}")
        for name in request:
            if name != takes[verb]:
                raise ValueError(
                    f"{name!r:.60} is not a field of {verb}" + (f"; {takes[verb]} is" if takes[verb] else "")
                )
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
        elif verb != "status":
            getattr(control, verb)()
        status = control.status()
        return {"status": {**self._about, **status.as_dict(), "line": str(status)}}


class Steering:
    """A connection to a controller in another process; use as a context manager.

    Raises :class:`InputError` if nobody listens at ``path``.
    """

    def __init__(self, path: str | Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_PATIENCE_S)
        self._replies = self._socket.makefile("rb")
        try:
            self._socket.connect(os.fspath(path))
        except OSError as error:
            self.close()
            why = "nobody listens there" if isinstance(error, ConnectionRefusedError) else error.strerror or error
            raise InputError(f"{path}: cannot be steered: {why}") from None

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """The reply to one request. Raises :class:`InputError` with the controller's own words if it refuses,
        ``ConnectionError`` if it has ended or does not answer."""
        try:
            self._socket.sendall(_line({"do": do, **fields}))
            line = self._replies.readline(_LONGEST_REPLY)
        except TimeoutError:
            raise ConnectionError(f"it has not answered for {_PATIENCE_S:g} s") from None
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line:
            raise ConnectionError("it has ended, or its controller has been detached")
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise ConnectionError("what answers there is no controller")
        if "error" in reply:
            raise InputError(str(reply["error"]))
        return reply

    def close(self) -> None:
        self._replies.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


__all__ = ["Steering", "SteeringServer"]
