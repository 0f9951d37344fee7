"""What a person at a terminal sees on stderr while something takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def announce(what: str) -> None:
    """A line on stderr, if that is a terminal: a program whose stderr is a log or a pipe gets none."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(what: str, total: int | None, *, show: bool) -> Iterator[Callable[[], None]]:
    """A bar of ``total`` ``what`` (None: nobody knows), and the function that moves it on by one. Without ``show`` nothing."""
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
