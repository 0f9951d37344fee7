"""Exceptions that are no ``Exception``: what is somebody's fault, as a panic of code in Rust, and what ends the program."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


def ends_program(error: BaseException) -> bool:
    """Whether ``error`` is Ctrl-C, or ``SystemExit`` where a signal handler may have raised it: no doing of the code that it
    came out of. In other threads than the main one it is."""
    return isinstance(error, KeyboardInterrupt | SystemExit) and (threading.current_thread() is threading.main_thread())


@contextmanager
def panics_as_errors(what: str) -> Iterator[None]:
    """Raise a panic of ``what`` as ``RuntimeError``; Ctrl-C and ``SystemExit`` are none."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        raise RuntimeError(f"{what} broke: {panic!r}") from panic
