"""What the verbs ask of a live controller in another process (:mod:`autotune.control.remote`), and their losses as one line."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.errors import InputError

TARGET_HELP = "Process id, or control socket.  (default: the only process that has a controller)"
CODES = "Exit codes: 0 done; 2 no such process, more than one to choose from, or a value that the process refuses."
ENDED = "it has ended, or its controller has been detached"
_TIMEOUT_S = 5.0  # what does not answer for so long hangs


def choose(target: str | None) -> Path:
    """The socket that ``target`` names: a process number, a path, or None for the only process there is.

    Raises :class:`InputError` when there is no such process, or more than one, and where the system has no Unix sockets.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise InputError("a controller in another process is reached by a Unix socket, which this system does not have")
    from autotune.control.remote import socket_folder, steerable

    if target is not None and not target.isdecimal():
        return Path(target)
    found = {path: pid for path, pid in steerable().items() if target is None or pid == int(target)}
    if len(found) == 1:
        return next(iter(found))
    if found:
        listed = ", ".join(f"{pid} ({path})" for path, pid in found.items())
        raise InputError(f"{len(found)} engines can be controlled; name one by its number or socket: {listed}")
    opens = "one opens its socket with autotune serve --slo, or autotune.control(..., steer=True)"
    if target is None:
        raise InputError(f"no process can be controlled: {socket_folder()} holds no socket; {opens}")
    nothing = f"process {target} cannot be controlled: {socket_folder()} holds no socket of it"
    raise InputError(f"{nothing}; {opens}, and closes it when its controller ends")


def ask(path: str | Path, do: str, **fields: Any) -> dict[str, Any]:
    """What the controller whose socket is ``path`` replies to one request.

    Raises :class:`InputError` with its own words if it refuses, and ``ConnectionError`` if none listens, answers, or is left.
    """
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as replies:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(os.fspath(path))
            connection.sendall(json.dumps({"do": do, **fields}).encode() + b"\n")
            line = replies.readline()
        except TimeoutError:
            raise ConnectionError(f"{path}: it has not answered for {_TIMEOUT_S:g} s") from None
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        except OSError as error:
            why = "nobody listens there" if isinstance(error, ConnectionRefusedError) else error.strerror or error
            raise ConnectionError(f"{path}: cannot be controlled: {why}") from None
    if not line:
        raise ConnectionError(f"{path}: {ENDED}")
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if not isinstance(reply, dict):
        raise ConnectionError(f"{path}: what answers there is no controller")
    if "error" in reply:
        raise InputError(str(reply["error"]))
    return reply


def tell(target: str | None, do: str, *, as_json: bool, **fields: Any) -> None:
    """Ask for one thing and print the status after it."""
    path = choose(target)
    try:
        with understood(path):
            status = ask(path, do, **fields)["status"]
            said = json.dumps(status) if as_json else f"process {status['pid']}: {status['line']}"
    except ConnectionError as error:
        raise InputError(str(error)) from None
    print(said)


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Reads what ``path`` replied. Raises :class:`InputError` of one line where that is not what this version replies."""
    try:
        yield
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        logging.getLogger(__name__).debug("a reply that cannot be read", exc_info=error)
        raise InputError(f"{path}: speaks another version; use the autotune it was started with") from error
