"""Standard output and error of the command: a reader that has gone ends no work, and a disk that is full is one line.

Click and Rich each have an end of their own for a closed pipe, in the middle of whatever the command does.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast

from runtime.errors import InputError


class Output:
    """``stream``, behind which the reader may go: what nobody reads is dropped from then on, and ``closed_by_reader`` says so.

    Raises :class:`InputError` for any other failure, such as a full disk, unless it is ``dispensable``.
    """

    def __init__(self, stream: TextIO, *, dispensable: bool = False) -> None:
        self._stream, self._dispensable = stream, dispensable
        self.closed_by_reader = False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BrokenPipeError:
            self.closed_by_reader = True
            self._drop()
        except OSError as error:
            self._drop()
            if self._dispensable:
                return
            raise InputError(f"stdout cannot be written ({error.strerror or error})") from None

    def _drop(self) -> None:
        """Have the stream write to nowhere: it keeps what it could not write, and would fail once more as Python ends."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """``sys.stdout`` and ``sys.stderr`` are an :class:`Output` each meanwhile. All of stdout is written in the end, what it
    cannot encode as escapes; stderr is for people, and what it does not take is dropped."""
    out, err = sys.stdout, sys.stderr  # None: closed when the process began; print() writes nothing then
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors="backslashreplace")
    if out is not None:
        sys.stdout = cast(TextIO, Output(out))
    if err is not None:
        sys.stderr = cast(TextIO, Output(err, dispensable=True))
    try:
        yield
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Output):
                stream.flush()
    finally:
        sys.stdout, sys.stderr = out, err


@contextmanager
def stdout_alone(as_json: bool) -> Iterator[TextIO]:
    """Stdout, for what the command itself prints. With ``as_json``, what others print meanwhile, such as a function that is
    profiled, goes to stderr."""
    out = sys.stdout
    if not as_json:
        yield out
        return
    with redirect_stdout(sys.stderr):
        yield out


def reader_has_gone() -> bool:
    """Whether nobody will read what is printed, as after ``| head -1``."""
    return isinstance(sys.stdout, Output) and sys.stdout.closed_by_reader
