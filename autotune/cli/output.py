"""Standard output of the command: a reader that has gone ends no work, and a disk that is full is one line.

Click and Rich each have an end of their own for a closed pipe, in the middle of whatever the command does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from runtime.errors import InputError


class Output:
    """``stream``, behind which the reader may go: what nobody reads is dropped from then on, and ``closed_by_reader`` says so.

    Raises :class:`InputError` for any other failure, such as a full disk.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
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
    """``sys.stdout`` is an :class:`Output` meanwhile, and all of it is written in the end."""
    before = sys.stdout
    if before is None:  # it was closed when the process began; print() writes nothing then
        yield
        return
    output = Output(before)
    sys.stdout = cast(TextIO, output)
    try:
        yield
        output.flush()
    finally:
        sys.stdout = before


def reader_has_gone() -> bool:
    """Whether nobody will read what is printed, as after ``| head -1``."""
    return isinstance(sys.stdout, Output) and sys.stdout.closed_by_reader
