"""The process: a socket, an event loop, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn

from runtime.errors import DeviceError, InputError
from runtime.llm.engine import Engine
from runtime.serving.app import Api, create_app
from runtime.shared.at_exit import end_process

log = logging.getLogger(__name__)

DONE: Final = 0
CUT_SHORT: Final = 1
SETTLE_S: Final = 5  # for connections to close once their answers are sent
KEEP_ALIVE_S: Final = 75  # beyond the idle time after which clients' connection pools give up theirs


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening: a port in use is found out before a model is loaded, and nobody connects earlier.
    No other process can bind to it meanwhile; :func:`serve_until_stopped` lets it listen.

    Raises :class:`InputError`.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"--host is {host}: {getattr(error, 'strerror', None) or error}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        try:
            bound.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _bind_again(bound, address)
    except OSError as error:
        bound.close()
        wrong = f"--host is {host}" if error.errno == errno.EADDRNOTAVAIL else f"--port is {port}"
        raise InputError(f"{wrong}: {host}:{port} cannot be bound ({error.strerror or error})") from None
    return bound


def _bind_again(bound: socket.socket, address: Any) -> None:
    """Where connections of a server that has ended may still hold the port. Not at first: with this option two that are loading
    could both bind to it."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(address)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def warm_up(engine: Engine) -> None:
    """Answer one prompt before the first client's: the first step touches all of a large KV pool, which takes seconds."""
    engine.submit([0], max_tokens=2, ignore_eos=True).result()


def serve_until_stopped(
    api: Api, bound: socket.socket, *, grace_s: float = 30.0, ready: Callable[[], None] = lambda: None
) -> int:
    """Serve until SIGTERM or SIGINT; ``ready`` is called when requests can come. Returns the exit code.

    The first signal drains: /health and every new request answer 503, answers under way are finished for up to ``grace_s``
    seconds, then cut. The code is 0 if none was cut, else 1. A second signal ends the process at once, with 128 + its
    number. Call it from the main thread; the engine is closed when it returns.
    """
    server = Server(
        uvicorn.Config(
            create_app(api),
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SETTLE_S,
        ),
        ready,
    )
    try:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            return runner.run(_until_stopped(api, server, bound, grace_s))
    finally:
        api.engine.close(drain=False)


def end_if_lost(engine: Engine) -> None:
    """End the process if ``engine`` has lost its device, with a line on stderr and exit code 1; call it last.

    The interpreter's own end would abort there: see :func:`~runtime.shared.at_exit.end_process`.
    """
    if isinstance(engine.error, DeviceError):
        print(f"error: {engine.error}", file=sys.stderr)
        end_process(CUT_SHORT)


class Server(uvicorn.Server):
    """uvicorn without its own idea of signals: it would stop listening at once, and end the process by the signal."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._ready()


async def _until_stopped(api: Api, server: Server, bound: socket.socket, grace_s: float) -> int:
    requested = asyncio.Event()

    def stop(number: int) -> None:
        if requested.is_set():
            os._exit(128 + number)  # without unwinding: the engine's thread may be deep in a step
        left = _requests(api.lifecycle.active)
        name = signal.Signals(number).name
        log.warning("%s: draining %s for at most %g s; a second signal ends at once", name, left, grace_s)
        api.lifecycle.drain()
        requested.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    bound.setsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    )  # connections inherit it, and a restart need not wait for them
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    stopping = asyncio.create_task(requested.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    code = DONE
    if requested.is_set() and api.lifecycle.active:  # without, a grace of 0 s would be over before anybody looks
        try:
            await asyncio.wait_for(api.lifecycle.idle(), grace_s)
        except TimeoutError:
            log.warning("cutting %s after %g s of grace", _requests(api.lifecycle.active), grace_s)
            code = CUT_SHORT
            await asyncio.to_thread(api.engine.close, False)  # each of them gets an error
    server.should_exit = True
    await serving
    return code


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
