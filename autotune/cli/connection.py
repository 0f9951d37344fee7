"""The connection of a verb to a live controller, and its losses as one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runtime.errors import InputError

if TYPE_CHECKING:
    from autotune.control.remote import Steering

TARGET_HELP = "A process number or a socket.  (default: the only process there is)"
CODES = "Exit codes: 0 done; 2 no such process, more than one to choose from, or a value it refuses."


@contextmanager
def connection(target: str | None) -> Iterator[Steering]:
    """A connection to the process that ``target`` names. Its loss is an :class:`InputError` too."""
    from autotune.control.remote import Steering
    from autotune.control.sockets import choose

    path = choose(target)
    with Steering(path) as steering:
        try:
            yield steering
        except ConnectionError as error:
            raise InputError(f"{path}: {error}") from None


def tell(target: str | None, do: str, *, as_json: bool, **fields: Any) -> None:
    """Ask for one thing and print the status after it."""
    with connection(target) as steering:
        status = steering.ask(do, **fields)["status"]
    print(json.dumps(status) if as_json else f"process {status['pid']}: {status['line']}")
